"""Checkpoints of real ranks in a notebook: progress, Ctrl-C, the death of a rank, and a disk that is full."""

import threading
from pathlib import Path

import pytest

from tests.helpers.ctrl_c import CtrlCCallback
from tests.helpers.notebook_model import CELL
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench import Workbench
from workbench.errors import Interrupted, RankDied, UsageError
from workbench.protocol.commands import Save
from workbench.runtime.checkpoint_files import PARTIAL
from workbench.trace import steps

pytestmark = pytest.mark.cluster

SLOW = """
import time
from pathlib import Path
from workbench.runtime import checkpoint_writer
at_once = checkpoint_writer.write_chunk

def when_there_is(file, chunk):
    at_once(file, chunk[:9])
    while not Path("{gate}").exists():
        time.sleep(0.01)
    at_once(file, chunk[9:])

checkpoint_writer.write_chunk = when_there_is
"""
"""Writes the rest of each part of a checkpoint once there is a file."""

SAVE = Save("runs")


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def interrupt_and_fail(bench, tmp_path, after):
    """Interrupt a save, fill the disk, kill a rank, and load in new ranks, whose next losses are ``after``."""
    (tmp_path / "gate").unlink()
    bench.step(1)
    press = CtrlCCallback(anyway=True)
    with pytest.raises(Interrupted):
        bench.do(SAVE, on_standing=lambda text: "written" in text and press(text))
    (tmp_path / "gate").touch()
    wait_until(lambda: not any(name.startswith(PARTIAL) for name in names("runs")))
    assert names("runs") == ["step-2", "step-4", "step-6"]
    bench.run_cell("checkpoint_writer.write_chunk = at_once")

    bench.fault("disk-full", rank=1)
    with pytest.raises(UsageError, match=r"^rank 1: cannot write into .*/runs: the disk is full"):
        bench.step(2, save="runs")
    bench.fault("off")
    assert bench.verify(resume="runs/step-6").faults[0].rule == "other-step"

    bench.fault("kill-during-save", rank=1)
    with pytest.raises(RankDied, match="rank 1 died"):
        bench.save("runs")
    assert names("runs") == ["step-2", "step-4", "step-6"]
    bench.stop()
    bench.start()
    bench.run_cell(CELL)
    bench.shard("model", wrap=["Block"], api="classic")
    bench.run_cell("opt = torch.optim.AdamW(model.parameters(), lr=3.0)")
    loaded = bench.load("runs/step-4")
    assert (loaded.step, loaded.notes) == (4, ())
    assert bench.step(2).losses == pytest.approx(after)
    assert bench.save("runs").step == 6
    assert bench.verify(resume="runs").problem == ""


def test_saves_are_shown_interrupted_and_survive_a_killed_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_STALL_S", "0.2")
    with Workbench(2, device="cpu") as bench:
        bench.run_cell(CELL)
        bench.shard("model", wrap=["Block"])
        trained = bench.step(4, save="runs", every=2)
        assert trained.saved == tuple(str(tmp_path / "runs" / name) for name in ("step-2", "step-4"))
        after = bench.step(2).losses
        bench.run_cell(SLOW.format(gate=tmp_path / "gate"))

        bench.step(3, save="slow", every=2, background=True)  # the last step is taken while the first save waits
        wait_until(lambda: max(steps(bench.trace)) == 8)
        assert all(name.startswith(PARTIAL) for name in names("slow"))
        (tmp_path / "gate").touch()
        wait_until(bench.news)
        assert names("slow") == ["step-8", "step-9"]
        (tmp_path / "gate").unlink()
        bench.load("runs/step-4")
        assert bench.step(2).losses == after

        shown, seen, ended = [], threading.Event(), []
        notice = lambda text: (shown.append(text), "written" in text and seen.set())  # noqa: E731
        save = threading.Thread(target=lambda: ended.append(bench.do(SAVE, on_standing=notice)))
        save.start()
        assert seen.wait(PATIENCE_S)
        assert "% written" in bench.status().ranks[0].doing
        (tmp_path / "gate").touch()
        save.join(PATIENCE_S)
        assert (ended[0].step, names("runs")) == (6, ["step-2", "step-4", "step-6"])

        interrupt_and_fail(bench, tmp_path, after)
