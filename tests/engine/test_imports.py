"""The engine's imports, and the modules that importing it loads."""

import ast
import re
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
def test_engine_files_import_only_allowed_modules(path):
    names = imported_by(path)
    assert not [name for name in names if name.startswith(FORBIDDEN)]
    known = ("workbench.engine", "workbench.events", "workbench.base.devices")
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


OF_TORCH = {
    "_parameters",
    "_buffers",
    "_modules",
    "_metadata",
    "_version",
    "_module_classes_to_ignore",
    "_apply",
    "_save_to_state_dict",
    "_load_from_state_dict",
}
"""Private names of torch's classes that the engine reads outside of ``_torch.py``."""
OF_CONTRACTS = {"_fqns", "_get_fsdp_state", "_state", "_workbench_handle"}
"""Names that other libraries read, or that modules and tensors carry for the engine."""


def private_names_of_others(path: Path) -> set[str]:
    """Private attributes that a file reads from objects that are neither ``self`` nor ``cls`` nor a module."""
    tree = ast.parse(path.read_text())
    modules = {
        alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch("_[a-z]\\w*", node.attr):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in {"self", "cls"} | modules):
                found.add(node.attr)
    own = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }
    functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    return found - own - functions - OF_TORCH - OF_CONTRACTS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_file_of_the_engine_reads_private_names_of_another(path):
    if path.name not in {"_torch.py", "_spmd_types.py"}:  # each has all uses of what torch or a package hides
        assert private_names_of_others(path) == set()


def test_importing_the_engine_loads_no_forbidden_module():
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
