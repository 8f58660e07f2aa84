"""``workbench doctor``: check the installation and advise on every problem.

Every check yields a :class:`Finding`; a failed check does not raise.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from workbench import INSTALL
from workbench.base.devices import HOST, OFFERED
from workbench.replay.units import seen_words

PACKAGE = "fsdp-workbench"
NOTEBOOK = "notebook"
"""The extra with the packages for notebooks."""

SELF_TEST_RANKS = 2
SELF_TEST_S = 10.0

_NEEDED = re.compile(r"""(?P<name>[\w.-]+)(?P<versions>[^;]*?)\s*(?:;.*\bextra == ['"](?P<extra>\w+)['"])?""")
_BOUND = re.compile(r"(<|>=)([\d.]+)")

_WIDGETS = {
    "ipywidgets": "@jupyter-widgets/jupyterlab-manager",
    "anywidget": "anywidget",
}  # package: the JupyterLab extension that it installs

_MODEL = """
import torch

torch.manual_seed(0)
tiny = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
"""
_SCRIPT = """
import torch.distributed as dist
from workbench.engine import fully_shard

dist.init_process_group("gloo")
device = "cpu"
"""
_SHARD = """
fully_shard(tiny)
"""
_STEP = """
tiny_optimizer = torch.optim.AdamW(tiny.parameters())


def tiny_step():
    loss = tiny(torch.ones(4, 8, device=device)).square().mean()
    loss.backward()
    tiny_optimizer.step()
    tiny_optimizer.zero_grad()
    return loss.item()
"""


class Verdict(Enum):
    """How serious a finding is."""

    GOOD = "ok"
    NOTE = "note"  # the workbench works without it
    BAD = "BAD"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: what was checked.
        verdict: how serious it is.
        found: what the check found.
        advice: what to do about it; may be empty.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict.value:>4}  {self.name:<18} {self.found}"
        return line + "".join(f"\n{'':25}-> {text}" for text in self.advice.splitlines())


@dataclass(frozen=True)
class Diagnosis:
    """The results of all checks.

    Attributes:
        findings: in the order of the checks.
    """

    computed = ("is_well",)

    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Whether no finding is bad."""
        return all(finding.verdict is not Verdict.BAD for finding in self.findings)


def show(finding: Finding) -> None:
    """Print a finding."""
    sys.stdout.write(f"{finding}\n")
    sys.stdout.flush()


def run(on_finding: Callable[[Finding], None] = show) -> Diagnosis:
    """Run all checks.

    Args:
        on_finding: called with each finding at once.
    """
    found = []
    for look in (python, packages, machine, devices, collectives, widgets, panel, self_test):
        for finding in look():
            on_finding(finding)
            found.append(finding)
    return Diagnosis(tuple(found))


def python() -> Iterator[Finding]:
    """Yield the version of the interpreter."""
    yield Finding("python", Verdict.GOOD, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def packages() -> Iterator[Finding]:
    """Yield the version of each required package, and whether the workbench supports it."""
    try:
        needed = [match for text in importlib.metadata.requires(PACKAGE) or () if (match := _NEEDED.fullmatch(text))]
    except importlib.metadata.PackageNotFoundError:
        yield Finding(PACKAGE, Verdict.BAD, "not installed", "pip install -e . in the clone's folder")
        return
    yield from (package(each["name"], each["versions"]) for each in needed if not each["extra"])
    if missing := missing_for_notebooks():
        yield Finding("notebooks", Verdict.NOTE, f"not possible without {', '.join(missing)}", INSTALL)
    else:
        yield from (package(each["name"], each["versions"]) for each in needed if each["extra"] == NOTEBOOK)


def missing_for_notebooks() -> list[str]:
    """Return the packages for notebooks that are not installed."""
    needed = [match for text in importlib.metadata.requires(PACKAGE) or () if (match := _NEEDED.fullmatch(text))]
    return [each["name"] for each in needed if each["extra"] == NOTEBOOK and _version(each["name"]) is None]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package(name: str, versions: str) -> Finding:
    """Return the finding for one package.

    Args:
        name: of the package.
        versions: those that the workbench supports, such as ``<10,>=9.2``; empty: all.
    """
    advice = f'pip install "{name}{versions}"'
    version = _version(name)
    if version is None:
        return Finding(name, Verdict.BAD, "not installed", advice)
    bounds = [_BOUND.fullmatch(each.strip()) for each in versions.split(",") if each]
    pairs = [(bound[1], _numbers(version), _numbers(bound[2])) for bound in bounds if bound is not None]
    if any(sign == ">=" and found < bound for sign, found, bound in pairs):
        return Finding(name, Verdict.BAD, f"{version}, but {versions} is required", advice)
    if any(sign == "<" and found >= bound for sign, found, bound in pairs):
        found = f"{version}, newer than the tested versions, {versions}"
        return Finding(name, Verdict.NOTE, found, f"if something does not work: {advice}")
    return Finding(name, Verdict.GOOD, version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version: ``"2.15.0+cpu"`` -> ``(2, 15, 0)``."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)  # type: ignore[index]


def machine() -> Iterator[Finding]:
    """Yield cores and memory; ranks share both."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", Verdict.GOOD, f"{cores}; ranks share them, with at least one thread each")
    try:
        import psutil  # noqa: PLC0415 - of the notebook's packages
    except ImportError:
        return
    free = psutil.virtual_memory().available / 2**30
    if free < 1.5:
        advice = "four small ranks take about 1.1 GiB: close other programs, or start fewer ranks: %fsdp start -n 2"
        yield Finding("memory", Verdict.NOTE, f"{free:.1f} GiB free", advice)
    else:
        yield Finding("memory", Verdict.GOOD, f"{free:.1f} GiB free")


def devices() -> Iterator[Finding]:
    """Yield the devices that ranks can compute on, and the backends that they can communicate with."""
    try:
        import torch  # noqa: PLC0415 - its absence is a finding
        import torch.distributed as dist  # noqa: PLC0415

        from workbench.engine._torch import untried  # noqa: PLC0415 - needs torch
        from workbench.engine.backends import counts, kind  # noqa: PLC0415
    except (ImportError, OSError) as error:  # OSError: one of torch's libraries cannot be loaded
        yield Finding(
            "devices", Verdict.BAD, f"torch cannot be imported: {error}", "pip install --force-reinstall torch"
        )
        return
    if warning := untried():
        yield Finding("torch", Verdict.NOTE, warning)
    here = counts()
    found = {name: number for name, number in here.items() if number}
    cards = [torch.get_device_module(name).get_device_name(i) for name, number in found.items() for i in range(number)]
    shared = [name for name in OFFERED if name not in here]
    yield Finding("devices", Verdict.GOOD, ", ".join(shared + (cards or [f"no {' or '.join(here)} device"])))
    for name in (HOST, *found):
        backend = kind(name).c10d
        if dist.is_available() and dist.is_backend_available(backend):
            yield Finding(f"backend {backend}", Verdict.GOOD, f"for ranks on {name}")
        else:
            verdict = Verdict.BAD if name == HOST else Verdict.NOTE
            advice = f"ranks on {name} need it: install a torch that was built with {backend}"
            yield Finding(f"backend {backend}", verdict, "missing", advice)


def collectives() -> Iterator[Finding]:
    """Yield which collectives of programs that do not use the workbench's engine are seen."""
    try:
        from workbench.models.c10d import sees_all_collectives  # noqa: PLC0415 - needs torch
    except (ImportError, OSError):  # a finding of devices
        return
    yield Finding("collectives", Verdict.GOOD, seen_words(sees_cpp=sees_all_collectives()))


def widgets() -> Iterator[Finding]:
    """Yield whether JupyterLab can show the widgets: progress bars and controls."""
    try:
        from workbench.cli.jupyter_extensions import has_extension  # noqa: PLC0415 - of the notebook's packages
    except ImportError:
        return
    for name, extension in _WIDGETS.items():
        if has_extension(extension):
            yield Finding(f"{name} in Lab", Verdict.GOOD, f"{extension} is installed")
        else:
            advice = f"pip install --force-reinstall {name}, in the environment that JupyterLab runs in"
            yield Finding(f"{name} in Lab", Verdict.NOTE, f"{extension} is not installed", advice)


def panel() -> Iterator[Finding]:
    """Yield whether JupyterLab finds the panel."""
    try:
        from workbench.cli.jupyter_extensions import PANEL, REMEDY, has_extension  # noqa: PLC0415 - as above
    except ImportError:
        return
    if has_extension(PANEL):
        yield Finding("Lab panel", Verdict.GOOD, "installed")
    else:
        yield Finding("Lab panel", Verdict.NOTE, "not installed", REMEDY)


def self_test() -> Iterator[Finding]:
    """Yield whether two ranks can start, train a tiny sharded model and stop."""
    begin = time.monotonic()
    try:
        calls = _train_script() if missing_for_notebooks() else _train()
    except Exception as error:  # noqa: BLE001 - any error is the finding
        advice = "if all lines above are ok, this is a bug; else repair those first"
        yield Finding("self-test", Verdict.BAD, f"{type(error).__name__}: {error}", advice)
        return
    seconds = time.monotonic() - begin
    as_expected = f"{calls} collectives as expected, " if calls else ""
    found = f"{SELF_TEST_RANKS} ranks trained a sharded model, {as_expected}{seconds:.1f} s"
    slow = "ranks start slowly here: is the machine busy?" if seconds > SELF_TEST_S else ""
    yield Finding("self-test", Verdict.NOTE if slow else Verdict.GOOD, found, slow)


def _train_script() -> int:
    """Train a step without the packages for notebooks; return 0, as collectives are not counted."""
    from workbench.session.script_ranks import ScriptRanks  # noqa: PLC0415 - needs torch

    with tempfile.TemporaryDirectory() as folder, ScriptRanks(SELF_TEST_RANKS, lambda _: None) as ranks:
        script = Path(folder) / "self_test.py"
        script.write_text(f"{_SCRIPT}{_MODEL}{_SHARD}{_STEP}\ntiny_step()\n", "utf-8")
        ranks.run_script(str(script), ())
        ranks.lint()
    return 0


def _train() -> int:
    """Train two steps; return the number of collectives that each rank issued.

    Raises:
        RuntimeError: the number differs from the expected one.
    """
    from workbench.cli.demo import communication  # noqa: PLC0415 - needs all packages
    from workbench.workbench import Workbench  # noqa: PLC0415 - needs all packages

    with Workbench(SELF_TEST_RANKS, device="cpu") as wb:
        wb.run_cell(_MODEL)
        wb.shard("tiny", wrap=("Linear",))
        wb.run_cell(_STEP)
        wb.step(2, fn="tiny_step")
        sent = communication(wb.trace)
    if not sent.as_expected or not sent.calls:
        raise RuntimeError(f"{sent.calls} collectives were recorded, {sent.expected_calls} were expected")
    return sent.calls
