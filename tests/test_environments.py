"""The environments that are made for people: Makefile, Binder, CI agree with the package."""

import json
import os
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.source import REPO, imports, sources

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
TORCH = re.search(r"^TORCH := torch==(\S+)$", (REPO / "Makefile").read_text(), re.MULTILINE).group(1)


def test_what_is_imported_is_what_is_required():
    import sys

    found = {module.partition(".")[0].lower() for source in sources() for module in imports(source)}
    third_party = {
        name.replace("_", "-") for name in found - {m.lower() for m in sys.stdlib_module_names} - {"workbench"}
    }
    by_name_only = {"anywidget", "ipykernel", "ipywidgets", "jupyterlab"}  # loaded by Jupyter, not by an import here
    assert third_party - NEEDED.keys() == set()
    assert NEEDED.keys() - third_party - by_name_only == set()


def test_the_pinned_torch_is_one_that_is_allowed():
    assert NEEDED["torch"].specifier.contains(TORCH)


def test_binder_installs_the_same_torch():
    lines = (REPO / "binder" / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("torch")] == [f"torch=={TORCH}+cpu"]


def test_binder_has_a_python_that_is_allowed():
    minor = int((REPO / "binder" / "runtime.txt").read_text().strip().removeprefix("python-3."))
    assert minor >= int(PROJECT["requires-python"].removeprefix(">=3."))


def test_binder_starts_two_ranks_and_what_it_is_told_to():
    start = REPO / "binder" / "start"
    done = subprocess.run([start, "printenv", "WORKBENCH_RANKS"], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


def test_binder_opens_the_tour():
    (config,) = re.findall(r"'(\{.*\})\\n'", (REPO / "binder" / "postBuild").read_text())
    url = json.loads(config)["ServerApp"]["default_url"]
    assert (REPO / url.removeprefix("/lab/tree/")).exists()


@pytest.mark.parametrize("script", [".ci/run", "binder/postBuild", "binder/start"])
def test_scripts_are_scripts(script):
    assert os.access(REPO / script, os.X_OK)
    subprocess.run(["bash", "-n", REPO / script], check=True)


def test_make_refuses_an_old_python(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.6" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "-f", REPO / "Makefile", "demo", f"PYTHON={old}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"The workbench needs Python 3.11 or newer; {old} is Python 3.9.6." in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_takes_torch_from_the_index_that_is_named(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    command = ["make", "-n", "-f", REPO / "Makefile", "demo", "TORCH_INDEX=https://example.org/whl/cpu"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    installs = [line.partition(" install ")[2].strip() for line in lines if " install " in line]
    assert installs == [f"--index-url https://example.org/whl/cpu torch=={TORCH}", "--editable ."]
