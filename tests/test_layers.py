"""The allowed imports between parts: the table in docs/architecture.md, checked both ways."""

import re
import subprocess
import sys

import pytest

from tests.helpers import documents
from tests.helpers.package_source import PACKAGE, imports, sources
from tests.helpers.warm_python import WARM

# modules that importing the part alone must not load
NEVER_LOADED = {
    "protocol": {"numpy", "torch", "ipyparallel", "IPython", "plotly"},
    "reports": {"torch", "ipyparallel", "IPython"},
    "trace": {"torch", "ipyparallel", "IPython", "plotly"},
    "importers": {"torch", "ipyparallel", "IPython", "plotly"},
    "replay": {"torch", "ipyparallel", "IPython", "plotly"},
    "views": {"torch", "ipyparallel", "IPython"},
    "engine": {"plotly", "ipywidgets", "IPython", "ipyparallel"},
    "models": {"plotly", "ipywidgets", "IPython", "ipyparallel"},
    "runtime": {"plotly", "ipywidgets"},
    "record": {"plotly", "ipywidgets", "IPython", "ipyparallel"},
    "cluster": {"torch", "plotly"},
    "live": {"torch"},
    "widgets": {"torch"},
    "course": {"torch"},
    "magics": {"torch"},
}


def allowed() -> list[tuple[set[str], set[str]]]:
    """Return the rows of that table: parts, and what they may import; folders end in a slash."""
    return [
        (set(documents.code(parts)), set(packages.replace(",", " ").split()) | set(documents.code(others)))
        for parts, _, packages, others in documents.table("part of `workbench/`")
    ]


def part_of(module: str) -> str:
    """Return the part that a module of the package belongs to, as written in the table."""
    name = module.split(".")[1] if "." in module else "__init__"
    return f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py"


def imported_by(parts: set[str]) -> set[str]:
    """Return the imports of the files of some parts, except of Python itself and of each other."""
    modules = {m for source in sources() if part_of(source.module) in parts for m in imports(source)}
    inside = {part_of(m) for m in modules if m.split(".")[0] == "workbench"}
    outside = {m.split(".")[0] for m in modules} - {"workbench"} - sys.stdlib_module_names
    return (inside - parts) | outside


def test_every_part_has_its_row():
    named = [part for parts, _ in allowed() for part in parts]
    assert sorted(named) == sorted({part_of(source.module) for source in sources()})


@pytest.mark.parametrize(("parts", "permitted"), allowed(), ids=lambda value: "+".join(sorted(value)) or "nothing")
def test_a_part_imports_exactly_the_allowed_modules(parts, permitted):
    found = imported_by(parts)
    assert sorted(found - permitted) == [], "forbidden imports"
    assert sorted(permitted - found) == [], "permissions that nothing uses"


@pytest.mark.parametrize("folder", NEVER_LOADED)
def test_importing_a_part_loads_nothing_heavy(folder):
    modules = [source.module for source in sources() if source.part == folder]
    program = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    python = sys.executable if "torch" in NEVER_LOADED[folder] else WARM.executable()
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & NEVER_LOADED[folder] == set()


def test_the_package_itself_loads_only_python():
    program = "import sys; before = set(sys.modules); import workbench; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} <= {"workbench"} | sys.stdlib_module_names


KIND_OF_DEVICE = re.compile(r"device\.type\b|\.is_cuda\b|\bdata_ptr\(|\btorch\.cuda\.(?!(Event|Stream)\b(?!\())")


@pytest.mark.parametrize(("folder", "num_files"), [("engine", 20), ("runtime", 15)])
def test_only_backends_depend_on_device_kinds_or_addresses(folder, num_files):
    others = [s for s in sources() if s.part == folder and ".backends" not in s.module]
    assert len(others) > num_files
    found = [
        f"{s.module}: {line.strip()}" for s in others for line in s.text.splitlines() if KIND_OF_DEVICE.search(line)
    ]
    assert found == []


SHARED = {f"shared.{name}" for name in ("hierarchical_comm", "shared_comm", "shared_memory", "shared_selection")}
KINDS = {"cpu", "cuda", "gloo", "streams"} | SHARED


def test_device_specific_behaviour_is_private_to_backends():
    private = {f"workbench.engine.backends.{name}" for name in KINDS}
    assert private <= {source.module for source in sources()}
    found = {s.module: imports(s) & private for s in sources() if ".backends" not in s.module}
    assert {module: names for module, names in found.items() if names} == {}
