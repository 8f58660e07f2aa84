"""What pip builds of the workbench: with the panel where Node is available, otherwise without it and with a message."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import hatch_build
from tests.helpers.built_panel import built_panel, bundle_bytes, with_node
from tests.helpers.package_source import REPO

NOT_SOURCES = {".git", ".venv", "build", "dist", "labextension", "node_modules", "lib", "__pycache__", ".hypothesis"}
NO_NODE = "/nowhere"
MOST_BYTES = 300_000

pytestmark = pytest.mark.timeout(900)  # the first build of a checkout fetches the compilers


@pytest.fixture(scope="module")
def panel():
    return built_panel()


@pytest.fixture
def clone(tmp_path):
    """A copy of the files under version control, without a built panel."""
    ignored = shutil.ignore_patterns(*NOT_SOURCES, ".venv-torch-*", ".*_cache")
    return Path(shutil.copytree(REPO, tmp_path / "clone", ignore=ignored, symlinks=True))


def packed(kind, source, out, **env):
    """Build a distribution without build isolation; return its file and the output."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(
        command, env=with_node() | {"WORKBENCH_PANEL": "auto"} | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return file, done.stdout + done.stderr


def of_the_panel(wheel):
    """Return the names of the panel's files in a wheel, below the folder where JupyterLab looks."""
    place = f".data/data/{hatch_build.SHARE}/"
    return {name.partition(place)[2] for name in zipfile.ZipFile(wheel).namelist() if place in name}


def test_it_is_small(panel):
    assert bundle_bytes(panel) <= MOST_BYTES


@pytest.mark.thorough
def test_a_source_distribution_carries_it_and_its_wheel_installs_where_no_node_is(panel, tmp_path):
    sdist, _ = packed("sdist", REPO, tmp_path / "sdist")
    (tmp_path / "unpacked").mkdir()
    ran(["tar", "-xzf", sdist, "-C", tmp_path / "unpacked"], tmp_path, None)  # Python 3.11.2 lacks tarfile's filters
    (source,) = (tmp_path / "unpacked").iterdir()
    assert not (source / "extension" / "node_modules").exists()
    wheel, _ = packed("wheel", source, tmp_path / "wheel", PATH=NO_NODE, WORKBENCH_PANEL="require")
    files = of_the_panel(wheel)
    assert files == {path.relative_to(panel).as_posix() for path in panel.rglob("*") if path.is_file()}

    python = empty_environment(tmp_path / "empty")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel)]
    ran(pip, tmp_path, env)
    where = ran([python, "-c", "import workbench; print(workbench.__file__)"], tmp_path, env).stdout
    assert where.startswith(str(tmp_path / "empty"))
    listed = ran([python, "-m", "jupyterlab.labextensions", "list"], tmp_path, env | {"PATH": NO_NODE})
    (line,) = [each for each in (listed.stdout + listed.stderr).splitlines() if "fsdp-workbench" in each]
    assert "enabled" in line
    assert "OK" in line


def ran(command, folder, env):
    """Run a command that must succeed."""
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def empty_environment(folder):
    """Make an empty environment that can import this one's packages; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = ran([python, "-c", ask], folder, os.environ).stdout.strip()
    lent = sysconfig.get_path("purelib")
    (Path(own) / "lent.pth").write_text(f"import sys; sys.path.append({lent!r})\n")  # ignores the .pth files in there
    return str(python)


def test_an_editable_installation_has_it(panel, tmp_path):
    out = tmp_path / "made"
    out.mkdir()
    build = f"from hatchling.build import build_editable; build_editable({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=REPO, env=os.environ | {"PATH": NO_NODE}, check=True)
    (wheel,) = out.glob("*.whl")
    assert "package.json" in of_the_panel(wheel)


def test_without_node_everything_but_the_panel_is_packed_with_a_message(clone, tmp_path):
    wheel, output = packed("wheel", clone, tmp_path / "wheel", PATH=NO_NODE)
    assert of_the_panel(wheel) == set()
    files = {*zipfile.ZipFile(wheel).namelist()}
    assert {"workbench/workbench.py", "workbench/reports/schema.json"} <= files
    notebooks = {f"workbench/{path.relative_to(REPO)}" for path in (REPO / "notebooks").rglob("*.*") if path.is_file()}
    assert notebooks <= files, "workbench course copies them"
    assert "panel not installed: it was not built, as there is no Node." in output


def test_a_failing_build_is_reported_with_npms_output(clone, tmp_path):
    (tmp_path / "npm").write_text("#!/bin/sh\necho no such package\nexit 7\n")
    (tmp_path / "npm").chmod(0o755)
    wheel, output = packed("wheel", clone, tmp_path / "wheel", PATH=str(tmp_path))
    assert of_the_panel(wheel) == set()
    assert "panel not installed: npm ci failed with code 7: no such package." in output


def test_where_the_panel_is_required_its_absence_is_an_error(clone, tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(clone)]
    env = os.environ | {"PATH": NO_NODE, "WORKBENCH_PANEL": "require"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "there is no Node" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def hook(root):
    return hatch_build.PanelHook(str(root), {}, None, None, str(root), "wheel")


def test_node_is_downloaded_only_if_a_build_needs_it(panel, clone, tmp_path, monkeypatch):
    monkeypatch.delenv("WORKBENCH_PANEL", raising=False)
    monkeypatch.setenv("PATH", NO_NODE)
    assert hook(REPO).dependencies() == []
    assert hook(clone).dependencies() == [hatch_build.NODE]
    monkeypatch.setenv("WORKBENCH_PANEL", "skip")
    assert hook(clone).dependencies() == []
    monkeypatch.delenv("WORKBENCH_PANEL")
    (tmp_path / "npm").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hook(clone).dependencies() == []


def test_a_build_from_other_sources_is_outdated(panel, clone):
    shutil.copytree(panel, hatch_build.panel_folder(clone))
    assert hatch_build.is_fresh(clone)
    (clone / "extension" / "src" / "index.ts").write_text("// changed")
    assert not hatch_build.is_fresh(clone)


def test_the_lock_names_no_host():
    assert "http" not in "".join(
        line for line in (REPO / "extension" / "package-lock.json").read_text().splitlines() if '"resolved"' in line
    )
