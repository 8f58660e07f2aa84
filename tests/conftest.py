"""Fixtures of all tests: checks for leaks, and paths of the browsers."""

import gc
import os
import signal
from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.helpers import browser, ci_time, leaks, network_hosts, tools
from tests.helpers.cpu_time import CpuTime
from workbench.cluster.zygote_cache import KEEPER

# no deadlines, as machines are shared; CI uses more examples, and is deterministic
IN_CI = "CI" in os.environ
settings.register_profile(
    "laws",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=IN_CI,
    max_examples=50 if IN_CI else 30,
)
settings.register_profile("few", settings.get_profile("laws"), max_examples=5)  # for `make check`
settings.register_profile("unshrunk", settings.get_profile("laws"), phases=[Phase.explicit, Phase.generate])  # mutants
settings.load_profile("laws")

# a collection in a forked rank would copy all of torch's objects: most of the time of a short test
os.register_at_fork(after_in_child=gc.freeze)
leaks.KEPT.append(browser.SHARED)

CPU_SECONDS = "seconds of CPU"
"""Name of the property of a report with the CPU time of a test file."""
USED = CpuTime()


REACHED = None
if os.environ.get("MUTANT_UNDER_TEST") == "stats":  # `make mutants` looks which test reaches which function
    from mutmut.state import state

    from tests.helpers.reached_in_ranks import Reached

    REACHED = Reached(state())


def pytest_configure():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for what it starts with &
        signal.signal(signal.SIGINT, signal.default_int_handler)
    leaks.mark()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    tools.leave_out(item)
    if ci_time.gives_way(item):
        pytest.skip(ci_time.WHY)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    """Add the CPU time of a file to the report of its last test."""
    if REACHED is not None:
        REACHED.take()
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            item.user_properties.append((CPU_SECONDS, USED.since_last()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """At the very end, list the skipped tests and the reasons; in CI, also the time of each file."""
    yield
    reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
    if IN_CI:
        terminalreporter.section("seconds per file")
        terminalreporter.write_line("\n".join(seconds_per_file(reports)))
    properties = (each for report in reports if report.when == "setup" for each in report.user_properties)
    if names := [value for key, value in properties if key == tools.LEFT_OUT]:
        terminalreporter.section("left out")
        terminalreporter.write_line("\n".join(tools.left_out(names)))


def seconds_per_file(reports):
    """Return a line for each test file, the one with the most CPU time first, so that growth is visible."""
    seconds, cpu, number = Counter(), Counter(), Counter()
    for report in reports:
        file = report.nodeid.partition("::")[0]
        seconds[file] += report.duration
        number[file] += report.when == "call"
        if report.when == "teardown":
            cpu[file] += dict(report.user_properties).get(CPU_SECONDS, 0.0)  # 0 for most tests: files have one value
    lines = [(cpu.total(), seconds.total(), number.total(), "all")]
    lines += [(used, seconds[file], number[file], file) for file, used in cpu.most_common()]
    return [f"{used:8.1f} s of CPU, {took:8.1f} s, {tests:4} tests: {file}" for used, took, tests, file in lines]


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        network_hosts.take_away()  # all workers shared it


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exclude everything that tests import from garbage collection, now and while the tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        USED.since_last()  # collecting the tests does not count for any of them


def pytest_collection_modifyitems(items):
    """Put files with clusters and browsers first: one at the very end would leave the other workers idle.

    Among these, spread out those with a network of hosts: only one can exist at a time, and others would wait for it.
    """
    slow = dict.fromkeys(i.path for i in items if any(map(i.get_closest_marker, ("cluster", "browser"))))
    has_hosts = {item.path for item in items if "network" in item.fixturenames}
    others = [path for path in slow if path not in has_hosts]
    with_hosts = [path for path in slow if path in has_hosts]
    place = {path: number for number, path in enumerate(others)}
    place |= {path: number * len(others) / len(with_hosts) - 0.5 for number, path in enumerate(with_hosts)}
    items.sort(key=lambda item: place.get(item.path, len(slow)))


@pytest.fixture(autouse=True, scope="session")
def no_leaks_at_the_end():
    with leaks.guard():
        yield
        for keeper in (KEEPER, *leaks.KEPT):
            keeper.end()


@pytest.fixture(autouse=True, scope="module")
def no_leaks_in_module():
    with leaks.guard():
        yield


@pytest.fixture(autouse=True)
def no_leaks_in_test(request):
    lasts = request.node.get_closest_marker("lasting_browser")
    with nullcontext() if lasts else leaks.guard(with_orphans=False):
        yield


@pytest.fixture(scope="module")
def chromium():
    """Path of the browser; all pages of the module share one process."""
    path = browser.find_chromium()
    browser.SHARED.begin(path)
    yield path
    browser.SHARED.end()


@pytest.fixture(scope="session")
def firefox():
    """Path of Firefox."""
    return browser.find_firefox()
