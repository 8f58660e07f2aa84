"""The workbench in a training environment: torch, numpy and nothing else; what needs more says how to install it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from tests.helpers.package_source import REPO
from tests.helpers.scripts import RECIPE
from tests.helpers.warm_python import WarmPython, torchrun
from workbench import INSTALL

HOOK = """
import sys
from importlib.machinery import PathFinder


class WithoutSome(PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        return None if name.partition(".")[0] in {forbidden!r} else super().find_spec(name, *rest)

    @classmethod
    def find_distributions(cls, *context):
        found = super().find_distributions(*context)
        return (each for each in found if each.name.lower().replace("_", "-").replace(".", "-") in {here!r})


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutSome
"""


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """What pip reads in a wheel of this checkout."""
    folder = tmp_path_factory.mktemp("metadata")
    program = f"from hatchling import build; print(build.prepare_metadata_for_build_wheel({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", program], cwd=REPO, check=True)
    (info,) = folder.iterdir()
    return importlib.metadata.Distribution.at(info)


def required(texts, extra=""):
    """Return the requirements that hold with an extra."""
    found = [Requirement(text) for text in texts or ()]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]


def test_pip_adds_numpy_and_the_workbench_and_takes_any_torch(metadata):
    base = required(metadata.requires)
    assert {each.name for each in base} == {"numpy", "torch"}
    assert not importlib.metadata.requires("numpy")
    (torch,) = (each for each in base if each.name == "torch")
    assert (str(torch.specifier), torch.url) == ("", None)
    extra = {each.name for each in required(metadata.requires, "notebook")} - {"numpy", "torch"}
    assert {"ipyparallel", "jupyterlab", "plotly"} <= extra
    assert "torch" not in {each.name for name in extra for each in required(importlib.metadata.requires(name))}


def with_parts(name, found):
    """Add a distribution, and those that it needs, to ``found``."""
    plain = re.sub(r"[-_.]+", "-", name).lower()
    if plain not in found:
        found.add(plain)
        try:
            needed = required(importlib.metadata.requires(name))
        except importlib.metadata.PackageNotFoundError:
            return found
        for each in needed:
            with_parts(each.name, found)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory, metadata):
    """Run Python with torch and numpy alone, in a folder of its own, without a network."""
    folder = tmp_path_factory.mktemp("bare")
    here = with_parts("numpy", with_parts("torch", {"fsdp-workbench", "pip", "setuptools"}))
    owners = importlib.metadata.packages_distributions().items()
    forbidden = {name for name, of in owners if not any(re.sub(r"[-_.]+", "-", each).lower() in here for each in of)}
    (folder / "sitecustomize.py").write_text(HOOK.format(forbidden=forbidden - sys.stdlib_module_names, here=here))
    (folder / "train.py").write_text(RECIPE)
    path = (folder, metadata.locate_file(""), REPO)
    environ = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    python = WarmPython(os.environ | environ, is_inherited=True)

    def run(*words, num_ranks=0):
        if num_ranks:
            return torchrun(*words, num_ranks=num_ranks, python=python, cwd=folder, **environ)
        command = [python.executable(), *words]
        return subprocess.run(
            command, cwd=folder, env=os.environ | environ, capture_output=True, text=True, check=False
        )

    assert "No module named 'plotly'" in run("-c", "import plotly").stderr
    yield run
    python.end()


WORKBENCH = ("-m", "workbench.cli.main")


def test_a_run_is_recorded_and_explained(bare):
    done = bare("-m", "workbench.record", "--out", "out", "train.py", num_ranks=2)
    assert done.returncode == 0, done.stderr
    where = bare(*WORKBENCH, "where", "out", "--json")
    assert (where.returncode, json.loads(where.stdout)["error"]) == (0, None), where.stderr
    assert "the run has ended\n" in bare(*WORKBENCH, "where", "out").stdout


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("lint", "train.py", "-n", "2"), 0, "model: no faults found"),
        (("verify", "train.py"), 0, "sharded training is the same as unsharded: 4 parameters"),
        (("doctor",), 0, f"-> {INSTALL}"),
    ],
)
def test_a_script_is_checked(bare, words, status, text):
    done = bare(*WORKBENCH, *words)
    assert done.returncode == status, done.stdout + done.stderr
    assert text in done.stdout


def test_engine_and_watch_are_imported_and_the_api_says_what_it_needs(bare):
    done = bare(
        "-c", "from workbench.engine import fully_shard; import workbench.watch; from workbench import Workbench"
    )
    assert f"ModuleNotFoundError: Workbench needs more packages: {INSTALL}" in done.stderr


@pytest.mark.parametrize("words", [("demo",), ("lab",), ("course",), ("grade", "a.ipynb"), ("view", "out"), ("mcp",)])
def test_a_command_that_needs_more_says_so_in_one_sentence(bare, words):
    done = bare(*WORKBENCH, *words)
    assert done.returncode == 1
    install = INSTALL.replace("notebook", "mcp") if words == ("mcp",) else INSTALL
    assert done.stderr.splitlines()[-1].startswith(f"workbench {words[0]} needs more packages: {install} (")
    assert done.stdout == ""


def test_the_skill_needs_no_more(bare):
    assert bare(*WORKBENCH, "skill").stdout.startswith("---\nname: fsdp-workbench\n")


@pytest.mark.parametrize("words", [("where", "none"), ("where", "none", "--json"), ("lint", "none.py")])
def test_a_text_loads_no_picture(words):
    program = f"import sys; from workbench.cli.main import main; main({list(words)!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "numpy" in loaded
    assert loaded & {"plotly", "IPython", "ipyparallel", "ipywidgets", "psutil", "zmq", "torch"} == set()
