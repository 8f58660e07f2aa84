import builtins
import importlib.metadata
import json

import psutil
import pytest
import torch

from workbench.cli import doctor, jupyter_extensions
from workbench.cli import main as cli
from workbench.cli.doctor import Finding, Verdict
from workbench.models import c10d


def only(findings):
    (finding,) = findings
    return finding


def test_a_finding_has_its_advice_below():
    assert str(Finding("memory", Verdict.GOOD, "8 GiB")) == "  ok  memory             8 GiB"
    lines = str(Finding("torch", Verdict.BAD, "not installed", "do this\nthen that")).splitlines()
    assert lines[0].startswith(" BAD  torch")
    assert [line.strip() for line in lines[1:]] == ["-> do this", "-> then that"]


def test_every_package_that_is_needed_is_here():
    found = list(doctor.packages())
    assert {"torch", "plotly", "ipyparallel", "numpy"} <= {f.name for f in found}
    assert "pytest" not in {f.name for f in found}
    assert all(f.verdict is Verdict.GOOD for f in found)


def test_a_package_that_is_missing_or_of_another_version():
    missing = doctor.package("no-such-package", ">=3")
    assert (missing.verdict, missing.advice) == (Verdict.BAD, 'pip install "no-such-package>=3"')
    other = doctor.package("numpy", ">=900")
    assert other.verdict is Verdict.BAD
    assert "but >=900 is required" in other.found


def test_a_package_newer_than_tested_is_a_warning():
    newer = doctor.package("numpy", "<2,>=1")
    assert newer.verdict is Verdict.NOTE
    assert "newer than the tested versions, <2,>=1" in newer.found
    assert newer.advice == 'if something does not work: pip install "numpy<2,>=1"'


def test_a_workbench_that_is_not_installed(monkeypatch):
    def missing(_name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert only(doctor.packages()).verdict is Verdict.BAD


@pytest.mark.parametrize(("free_gib", "verdict"), [(8, Verdict.GOOD), (1, Verdict.NOTE)])
def test_little_memory_is_noted(free_gib, verdict, monkeypatch):
    class Memory:
        available = free_gib * 2**30

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    cores, memory = doctor.machine()
    assert cores.verdict is Verdict.GOOD
    assert (memory.verdict, memory.found) == (verdict, f"{free_gib:.1f} GiB free")


@pytest.mark.parametrize(
    ("num_gpus", "gloo", "nccl", "verdicts"),
    [
        (0, True, False, [Verdict.GOOD, Verdict.GOOD]),
        (0, False, False, [Verdict.GOOD, Verdict.BAD]),
        (2, True, True, [Verdict.GOOD, Verdict.GOOD, Verdict.GOOD]),
        (2, True, False, [Verdict.GOOD, Verdict.GOOD, Verdict.NOTE]),
    ],
)
def test_devices_and_backends(num_gpus, gloo, nccl, verdicts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: gloo)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    found = list(doctor.devices())
    assert [f.verdict for f in found] == verdicts
    assert found[0].found == ("cpu, GPU 0, GPU 1" if num_gpus else "cpu, no cuda device")


def test_a_torch_that_cannot_be_loaded(monkeypatch):
    real = builtins.__import__

    def broken(name, *args):
        if name == "torch":
            raise OSError("libtorch_cpu.so: cannot open shared object file")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", broken)
    finding = only(doctor.devices())
    assert finding.verdict is Verdict.BAD
    assert "cannot open shared object file" in finding.found


@pytest.mark.parametrize("all_are_seen", [True, False])
def test_which_collectives_are_seen(all_are_seen, monkeypatch):
    monkeypatch.setattr(c10d, "HAS_HOOKS", all_are_seen)
    finding = only(doctor.collectives())
    assert finding.verdict is Verdict.GOOD
    assert ("torch 2.14" in finding.found) is not all_are_seen


def test_widgets_are_searched_in_jupyters_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(jupyter_extensions, "jupyter_path", lambda kind: [str(tmp_path / kind)])
    assert [f.verdict for f in doctor.widgets()] == [Verdict.NOTE, Verdict.NOTE]
    (tmp_path / "labextensions" / "anywidget").mkdir(parents=True)
    (tmp_path / "labextensions" / "anywidget" / "package.json").write_text(json.dumps({}))
    assert [f.verdict for f in doctor.widgets()] == [Verdict.NOTE, Verdict.GOOD]


@pytest.mark.parametrize(("there", "verdict"), [(False, Verdict.NOTE), (True, Verdict.GOOD)])
def test_the_panel(there, verdict, monkeypatch):
    monkeypatch.setattr(jupyter_extensions, "has_extension", lambda name: there and name == "fsdp-workbench")
    assert only(doctor.panel()).verdict is verdict


def test_a_self_test_that_raises_is_a_finding(monkeypatch):
    def fail():
        raise RuntimeError("no rank answered")

    monkeypatch.setattr(doctor, "_train", fail)
    finding = only(doctor.self_test())
    assert (finding.verdict, finding.found) == (Verdict.BAD, "RuntimeError: no rank answered")


@pytest.mark.parametrize(("limit_s", "verdict"), [(1e9, Verdict.GOOD), (0, Verdict.NOTE)])
def test_a_slow_self_test_is_noted(limit_s, verdict, monkeypatch):
    monkeypatch.setattr(doctor, "_train", lambda: 12)
    monkeypatch.setattr(doctor, "SELF_TEST_S", limit_s)
    finding = only(doctor.self_test())
    assert finding.verdict is verdict
    assert "12 collectives" in finding.found


@pytest.mark.parametrize("bad", [False, True])
def test_all_findings_are_printed(bad, monkeypatch, capsys):
    looks = ("python", "packages", "machine", "devices", "widgets", "panel", "self_test")
    for name in looks:
        verdict = Verdict.BAD if bad and name == "devices" else Verdict.GOOD
        monkeypatch.setattr(doctor, name, lambda name=name, verdict=verdict: iter([Finding(name, verdict, "x")]))
    assert cli.main(["doctor"]) == bad
    out = capsys.readouterr().out
    assert all(f"  {name}" in out or f" {name} " in out for name in looks)
    assert ("All checks passed." in out) is not bad


@pytest.mark.cluster
def test_two_ranks_train():
    finding = only(doctor.self_test())
    assert finding.verdict is not Verdict.BAD, finding
    assert "12 collectives as expected" in finding.found  # 2 steps, 2 units: 2 all-gathers, 1 reduce-scatter
