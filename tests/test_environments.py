"""The environments for users: Makefile, Binder and CI agree with the package."""

import json
import os
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.helpers import documents
from tests.helpers.package_source import REPO, imports, sources
from workbench import __version__
from workbench.engine._torch import NEWEST, OLDEST

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
BASE, EXTRAS = PROJECT["dependencies"], PROJECT["optional-dependencies"]
EXTRA = [each for name in ("notebook", "mcp") for each in EXTRAS[name] if not each.startswith(f"{PROJECT['name']}[")]
NEEDED = {r.name: r for r in map(Requirement, [*BASE, *EXTRA])}
MAKEFILE = (REPO / "Makefile").read_text()
DISTRIBUTED_AS = {"zmq": "pyzmq"}
"""Distributions whose name differs from that of the imported package."""

TORCH = re.search(r"^torch==([\d.]+)\+cpu$", (REPO / "binder" / "requirements.txt").read_text(), re.MULTILINE).group(1)
OTHER_TORCH = re.search(r"^OTHER_TORCH := ([\d. ]+)#", MAKEFILE, re.MULTILINE).group(1).split()


def test_imports_match_the_requirements():
    import sys

    found = {module.partition(".")[0].lower() for source in sources() for module in imports(source)}
    third_party = {
        DISTRIBUTED_AS.get(name, name).replace("_", "-")
        for name in found - {m.lower() for m in sys.stdlib_module_names} - {"workbench"}
    }
    by_name_only = {"anywidget", "ipykernel", "ipywidgets", "jupyterlab"}  # loaded by Jupyter, not by an import here
    assert third_party - NEEDED.keys() == set()
    assert NEEDED.keys() - third_party - by_name_only == set()


def test_tests_run_with_every_torch_for_which_there_is_no_warning():
    tested = [numbers(version)[:2] for version in (*OTHER_TORCH, TORCH)]
    assert tested == [(OLDEST[0], minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def test_ci_runs_them():
    assert (REPO / ".ci" / "run").read_text().endswith("exec make test test-torch\n")


def test_the_documents_name_the_versions_that_tests_run_with():
    lines = " ".join(documents.text().split())
    assert f"with torch {TORCH}, those that depend on torch's version with {' and '.join(OTHER_TORCH)} as well" in lines
    assert f"with a torch before {OLDEST[0]}.{OLDEST[1]} or after {NEWEST[0]}.{NEWEST[1]}" in lines


def test_the_pythons_are_those_that_the_readme_names():
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python ::")]
    assert f"with Python {named[0]} to {named[-1]} and make" in documents.text()
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_every_place_names_the_same_version():
    panel, locked = (json.loads((REPO / "extension" / f"package{of}.json").read_text()) for of in ("", "-lock"))
    released = re.findall(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = [PROJECT["version"], panel["version"], locked["version"], locked["packages"][""]["version"], released[0]]
    assert set(named) == {__version__}


def test_a_source_distribution_has_the_readmes_links():
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    linked = {file.partition("/")[0] for file, _ in documents.links(documents.documents()[documents.README]) if file}
    assert {f"/{name}" for name in linked} <= set(included)


def test_make_installs_the_torch_of_binder():
    made = subprocess.run(["make", "-np", "help"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    assert f"\nTORCH := {TORCH}\n" in made


def test_binder_has_a_supported_python():
    minor = int((REPO / "binder" / "runtime.txt").read_text().strip().removeprefix("python-3."))
    assert minor >= int(PROJECT["requires-python"].removeprefix(">=3."))


def test_binder_starts_two_ranks_and_its_command():
    start = REPO / "binder" / "start"
    done = subprocess.run([start, "printenv", "WORKBENCH_RANKS"], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


def test_binder_opens_the_course():
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
    assert installs == [f"--index-url https://example.org/whl/cpu torch=={TORCH}", "--editable '.[notebook]'"]


def test_make_lends_another_torch_all_the_rest(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    command = ["make", "-n", "-f", REPO / "Makefile", "test-torch"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    for version in OTHER_TORCH:
        assert re.search(rf"\.venv-torch-{version}/bin/python -m pip .*install \\\n *torch=={version}\n", lines)
        (tests,) = re.findall(rf"\.venv-torch-{version}/bin/python -m pytest .* --hypothesis-profile=few (.*)\n", lines)
        assert {path.partition("/")[0] for path in tests.split()} == {"tests"}
        assert all((REPO / path.partition("::")[0]).exists() for path in tests.split())
    assert "rm " not in lines
    assert {".venv/", ".venv-torch-*/", ".venv-nbgrader/"} <= set((REPO / ".gitignore").read_text().splitlines())
