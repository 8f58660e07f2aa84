"""Without a tool its tests are skipped, the last lines report it, and in CI they fail."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers import tools
from tests.helpers.package_source import REPO
from tests.helpers.tools import NO_BROWSER, TOOLS, Tool

FILE = "tests/firefox/test_page.py"
MISSING = {"WORKBENCH_FIREFOX": "/nowhere"}


def run(*flags, **variables):
    """Run the test file that needs Firefox, and return its exit code and output."""
    environment = {name: value for name, value in os.environ.items() if name not in {"CI", NO_BROWSER}}
    command = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", "--color=no", *flags, FILE]
    done = subprocess.run(
        command, cwd=REPO, env=environment | variables, capture_output=True, text=True, check=False, timeout=200
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("flags", [(), ("--numprocesses=1",)], ids=["here", "in a worker"])
def test_skipped_tests_are_summarised_with_count_reason_and_remedy(flags):
    code, text = run(*flags, **MISSING)
    assert code == 0, text
    *lines, last = text.partition("= left out =")[2].splitlines()
    at = lines.index("1 test needs Firefox: none was found")
    assert lines[at + 1] == f"    to run it: {TOOLS['firefox'].command()}"
    assert "1 skipped" in last
    assert "seconds per file" not in text


def test_in_ci_nothing_is_skipped_and_every_file_is_timed():
    code, text = run(**MISSING, CI="true")
    assert code == 1, text
    assert re.search("needs (Firefox|Chromium or Chrome): none was found; ", text)
    assert f" tests: {FILE}" in text.partition("seconds per file")[2]


def test_browsers_may_be_left_out_even_there():
    code, text = run(**{NO_BROWSER: "1"}, CI="true")
    assert code == 0, text
    assert f"1 test needs Chromium or Chrome: {NO_BROWSER} is set" in text


def test_each_tool_is_here_or_says_what_is_missing_and_for_which_line(monkeypatch):
    monkeypatch.delenv(NO_BROWSER, raising=False)
    for name, tool in TOOLS.items():
        assert tool.missing() == tool.why_not(), name
        assert tool.packages in tool.command() or tool.otherwise in tool.command(), name


def test_a_user_without_root_rights_gets_the_command_for_it(monkeypatch):
    tool = Tool(name="a thing", why_not=lambda: "not installed: thing", packages="thing", is_for_root=True)
    monkeypatch.setattr(tools.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert tool.command() == "sudo apt-get install -y thing && sudo make test"
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert tool.command() == "apt-get install -y thing"
