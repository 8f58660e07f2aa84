"""Fixtures of all tests: no test leaves anything behind; where the browser is."""

import gc
import os
from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import browser, leaks, network_hosts, tools
from tests.helpers.cpu_time import CpuTime
from workbench.cluster.zygote_cache import KEEPER

# time is no law here: machines are shared; CI looks at many examples, and what it says does not depend on chance
IN_CI = "CI" in os.environ
settings.register_profile(
    "laws",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=IN_CI,
    max_examples=100 if IN_CI else 30,
)
settings.register_profile("few", settings.get_profile("laws"), max_examples=5)  # for `make check`
settings.load_profile("laws")

# a collection in a forked rank would look at all that torch ever made, and so copy it: most of what a short test takes
os.register_at_fork(after_in_child=gc.freeze)
leaks.KEPT.append(browser.SHARED)

CPU_SECONDS = "seconds of CPU"
"""The property of a report that has what a file took."""
USED = CpuTime()


def pytest_configure():
    leaks.mark()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    tools.leave_out(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    """The last test of a file says how much CPU time was used until then."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            item.user_properties.append((CPU_SECONDS, USED.since_last()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Last of all: which tests were left out for want of what, and in CI how long each file took."""
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
    """Return a line for each file of tests, that with most CPU time first: that it grows is to be seen."""
    seconds, cpu, number = Counter(), Counter(), Counter()
    for report in reports:
        file = report.nodeid.partition("::")[0]
        seconds[file] += report.duration
        number[file] += report.when == "call"
        if report.when == "teardown":
            cpu[file] += dict(report.user_properties).get(CPU_SECONDS, 0.0)  # 0 of most: it is said of whole files
    lines = [(cpu.total(), seconds.total(), number.total(), "all")]
    lines += [(used, seconds[file], number[file], file) for file, used in cpu.most_common()]
    return [f"{used:8.1f} s of CPU, {took:8.1f} s, {tests:4} tests: {file}" for used, took, tests, file in lines]


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        network_hosts.take_away()  # what all workers had in turn


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What tests import stays: the garbage collector looks at it neither meanwhile nor while they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        USED.since_last()  # what it took to find the tests is none of theirs


def pytest_collection_modifyitems(items):
    """Files with clusters and browsers first: one of them at the very end would leave the other workers idle.

    Among these, those with a network of hosts are spread out: there is one at a time, for which others would wait.
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
    """Path of the browser, of which one runs for all pages of the module."""
    path = browser.find_chromium()
    browser.SHARED.begin(path)
    yield path
    browser.SHARED.end()


@pytest.fixture(scope="session")
def firefox():
    """Path of the other browser."""
    return browser.find_firefox()
