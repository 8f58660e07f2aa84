"""Tools, beside the packages of the environment, that tests need: how each is found, and the command that installs it.

A test names the tools that it needs with ``@pytest.mark.needs("slurm")``, or uses a fixture of a tool's name, such as
``chromium``. If a tool is missing, the test is skipped; the last lines of the run report how many were, and why. With
``CI`` set, such a test fails.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from tests.helpers import browser, network_hosts, ranks_on_hosts, slurm
from tests.helpers.package_source import REPO

NO_BROWSER = "WORKBENCH_NO_BROWSER"
NBGRADER = REPO / ".venv-nbgrader" / "bin" / "nbgrader"
LEFT_OUT = "left out for"
"""Name of the property of a test's report that holds the tool."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool.

    Attributes:
        name: its name within a sentence.
        why_not: returns why this machine cannot use it; empty if it can.
        packages: Debian packages that contain it.
        otherwise: the command that installs it where Debian's packages are not available.
        is_for_root: whether only root can use it.
        is_browser: whether :data:`NO_BROWSER` excludes it.
    """

    name: str
    why_not: Callable[[], str]
    packages: str = ""
    otherwise: str = ""
    is_for_root: bool = False
    is_browser: bool = False

    @property
    def is_unwanted(self) -> bool:
        """Whether the user excludes it."""
        return self.is_browser and bool(os.environ.get(NO_BROWSER))

    def missing(self) -> str:
        """Return why it cannot be used; empty if it can."""
        return f"{NO_BROWSER} is set" if self.is_unwanted else self.why_not()

    def command(self) -> str:
        """Return the command that makes it available; empty if there is none."""
        if self.is_unwanted:
            return f"unset {NO_BROWSER}"
        sudo = "" if os.getuid() == 0 else "sudo "
        has_apt = self.packages and shutil.which("apt-get")
        install = f"{sudo}apt-get install -y {self.packages}" if has_apt else self.otherwise
        return " && ".join(filter(None, [install, "sudo make test" if self.is_for_root and sudo else ""]))


def _no_mpi() -> str:
    if network_hosts.find("mpiexec") is None:
        return "not installed: mpiexec"
    return "" if find_spec("mpi4py") else "not installed: mpi4py, which ipyparallel's engines import"


def _no_nbgrader() -> str:
    return "" if NBGRADER.exists() else "not installed: nbgrader, in an environment of its own"


@functools.cache
def _no_clocks() -> str:
    if shutil.which("unshare") is None:
        return "not installed: unshare"
    tried = subprocess.run([*network_hosts.ahead_by(1), "true"], capture_output=True, text=True, check=False)
    return f"no time namespace can be made here: {tried.stderr.strip()}" if tried.returncode else ""


def _no_browser(find: Callable[[], str | None]) -> str:
    return "" if find() else "none was found"


TOOLS = {
    "chromium": Tool(
        name="Chromium or Chrome",
        why_not=functools.partial(_no_browser, browser.find_chromium),
        packages="chromium-headless-shell fonts-dejavu-core",
        otherwise=".venv/bin/playwright install chromium",
        is_browser=True,
    ),
    "firefox": Tool(
        name="Firefox",
        why_not=functools.partial(_no_browser, browser.find_firefox),
        packages="firefox-esr",
        otherwise="npx @puppeteer/browsers install firefox, with WORKBENCH_FIREFOX as its path",
        is_browser=True,
    ),
    "hosts": Tool(
        name="hosts on a network, with sshd",
        why_not=network_hosts.why_not,
        packages="iproute2 openssh-server openssh-client",
        is_for_root=True,
    ),
    "namespaces": Tool(
        name="hosts on a network",
        why_not=ranks_on_hosts.why_not,
        packages="iproute2",
        is_for_root=True,
    ),
    "clocks": Tool(
        name="clocks of other hosts",
        why_not=_no_clocks,
        packages="util-linux",
        is_for_root=True,
    ),
    "slurm": Tool(
        name="Slurm",
        why_not=slurm.why_not,
        packages="slurm-wlm munge",
        is_for_root=True,
    ),
    "mpi": Tool(
        name="MPI",
        why_not=_no_mpi,
        packages="openmpi-bin",
        otherwise="brew install open-mpi",
    ),
    "nbgrader": Tool(
        name="nbgrader",
        why_not=_no_nbgrader,
        otherwise="make .venv-nbgrader/installed",
    ),
}


def needed(item: pytest.Item) -> list[str]:
    """Return the tools that a test needs."""
    marked = [name for mark in item.iter_markers("needs") for name in mark.args]
    return [*marked, *(name for name in TOOLS if name in item.fixturenames)]


def leave_out(item: pytest.Item) -> None:
    """Skip a test if tools that it needs are missing; with ``CI`` set, fail it."""
    missing = {name: why_not for name in needed(item) if (why_not := TOOLS[name].missing())}
    if "CI" in os.environ:
        for name, why_not in missing.items():
            tool = TOOLS[name]
            if not tool.is_unwanted:
                pytest.fail(f"needs {tool.name}: {why_not}; {tool.command() or 'this machine cannot'}", pytrace=False)
    item.user_properties += [(LEFT_OUT, name) for name in missing]
    if missing:
        pytest.skip("; ".join(f"needs {TOOLS[name].name}: {why_not}" for name, why_not in missing.items()))


def left_out(names: list[str]) -> list[str]:
    """Return lines about skipped tests; ``names`` has the missing tool of each."""
    lines = []
    for name in dict.fromkeys(names):
        tool, number = TOOLS[name], names.count(name)
        are = "1 test needs" if number == 1 else f"{number} tests need"
        lines.append(f"{are} {tool.name}: {tool.missing()}")
        if command := tool.command():
            lines.append(f"    to run {'it' if number == 1 else 'them'}: {command}")
    return lines
