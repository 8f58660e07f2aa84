"""The engine's imports, and the modules that importing it loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import workbench.engine

SOURCES = sorted(Path(workbench.engine.__file__).parent.rglob("*.py"))
# the engine uses neither torch's FSDP nor plots, notebooks or other parts of the workbench
FORBIDDEN = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "plotly", "ipywidgets", "IPython", "numpy")


def imported_by(path: Path) -> set[str]:
    """Return every module that a file imports, ``from a import b`` as a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_of_the_engine_imports_only_what_it_may(path):
    names = imported_by(path)
    assert not [name for name in names if name.startswith(FORBIDDEN)]
    known = ("workbench.engine", "workbench.events", "workbench.devices")
    ours = [name for name in names if name.startswith("workbench") and not name.startswith(known)]
    assert ours == []
    top_level = {name.split(".")[0] for name in names}
    assert top_level <= {"torch", "workbench"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_private_pieces_of_torch_are_named_in_one_file_only(path):
    if path.name == "_torch.py":
        return
    tree = ast.parse(path.read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & {"_local_tensor", "_spec", "_execution_engine", "_C"}


def test_importing_the_engine_loads_none_of_what_it_must_not():
    code = (
        "import sys, workbench.engine\n"
        "print([m for m in sys.modules if m.startswith(('torch.distributed.fsdp', 'plotly', 'ipywidgets', 'IPython', "
        "'workbench.trace', 'workbench.runtime', 'workbench.views'))])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_public_names():
    assert sorted(workbench.engine.__all__) == workbench.engine.__all__
    assert all(hasattr(workbench.engine, name) for name in workbench.engine.__all__)
