"""Ranks on engines of a running cluster: detached, attached again with their variables, and stopped."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.ipp_engines import running_profile
from tests.helpers.notebook_model import CELL
from tests.helpers.waiting import wait_until
from workbench.errors import RankDied, UsageError
from workbench.events import Kind
from workbench.session import session
from workbench.workbench import Workbench

pytestmark = [pytest.mark.thorough, pytest.mark.cluster]

profile = running_profile


BLOCKED = """
import torch.distributed as dist

def train_step():
    if rank:
        dist.barrier()  # no flag of ours ends it, and rank 0 never comes
    model(torch.randn(8, 16)).sum().backward()
"""

DEAF = """
import time

as_fast_as_it_can, naps = train_step, [600.0, 600.0]

def train_step():
    while naps:
        try:
            time.sleep(naps.pop())
        except KeyboardInterrupt:
            pass  # it takes two to end it
    return as_fast_as_it_can()
"""

AT_WORK = """
from tests.helpers.notebook_model import CELL
from workbench.workbench import Workbench

bench = Workbench.attach(2, profile="running", device="cpu")
bench.run_cell(CELL)
bench.shard("model", wrap="Block")
bench.step(100_000, background=True)
while bench.pulse().trace.num_rows < 1000:
    pass
print("it trains", flush=True)
input()
"""


@pytest.fixture
def bench(profile):
    """Two ranks with a sharded model."""
    with Workbench.attach(2, profile="running", device="cpu") as bench:
        bench.run_cell(CELL)
        bench.shard("model", wrap="Block")
        yield bench


def again():
    """Attach to the ranks that were left, as another notebook."""
    return Workbench.attach(profile="running", device="cpu")


def given_up(bench):
    """Stop ranks inside a step and abort it."""
    bench.step(1, until="forward")
    bench.abort()


def trains(bench):
    """Wait until further steps end."""
    num_rows = bench.pulse().trace.num_rows
    wait_until(lambda: bench.pulse().trace.num_rows > num_rows + 1000)


def optimizer_rows(bench):
    """Return how many begins and ends of optimizers each rank recorded."""
    return [int((rank.rows["kind"] == Kind.OPTIMIZER).sum()) for rank in bench.trace.ranks]


def test_a_model_continues_training_after_a_detach(profile):
    with Workbench.attach(2, profile="running", device="cpu") as first:
        first.run_cell(CELL)
        first.shard("model", wrap="Block")
        losses = list(first.step(2).losses)
        num_rows = first.trace.num_rows
        first.detach()
        assert not first.running
        assert first.trace.num_rows >= num_rows
    with Workbench.attach(profile="running", device="cpu") as again:
        (model,) = again.status().models
        assert set(model.units) == {"(root)", "blocks.0", "blocks.1", "blocks.2"}
        assert again.trace.num_rows >= num_rows
        losses += again.step(2).losses
        recorded = optimizer_rows(again)
    with Workbench.attach(2, profile="running", device="cpu") as anew:  # the ranks were stopped
        assert anew.status().models == ()
        anew.run_cell(CELL)
        anew.shard("model", wrap="Block")
        assert list(anew.step(4).losses) == pytest.approx(losses)
        assert optimizer_rows(anew) == recorded  # no listener of the earlier ranks is left


def test_ranks_at_work_are_not_left(profile):
    with Workbench.attach(2, profile="running", device="cpu") as bench:
        bench.run_cell(CELL)
        bench.shard("model", wrap="Block")
        bench.step(1, until="forward")
        with pytest.raises(UsageError, match=r"%fsdp step --until forward is stopped .* then %fsdp detach"):
            bench.detach()
        bench.abort()


def test_each_notebook_may_give_steps_up(bench):
    given_up(bench)
    bench.detach()
    with again() as other:
        given_up(other)  # its process group has a different name from the first one's
        assert len(other.step(2).losses) == 2


def test_ranks_that_were_at_work_when_their_notebook_closed_train_again(bench):
    bench.step(100_000, background=True)
    trains(bench)
    bench.close()
    with again() as other:
        assert len(other.step(2).losses) == 2


def test_ranks_that_have_yet_to_end_what_their_notebook_aborted_are_waited_for(bench, monkeypatch):
    monkeypatch.setattr(session, "PATIENT_S", 0.2)
    bench.run_cell(DEAF)
    bench.step(1, background=True)
    wait_until(lambda: all("train_step" in str(row.stacks) for row in bench.where(stacks=True).ranks))
    bench.close()
    with again() as other:
        assert len(other.step(2).losses) == 2


def test_ranks_that_block_when_they_are_stopped_become_ranks_again(bench):
    bench.run_cell(BLOCKED)
    bench.step(2, background=True)
    wait_until(lambda: any("barrier" in str(thread) for row in bench.where(stacks=True).ranks for thread in row.stacks))
    bench.stop()
    with Workbench.attach(2, profile="running", device="cpu") as anew:
        anew.run_cell(CELL)
        anew.shard("model", wrap="Block")
        assert len(anew.step(2).losses) == 2


@pytest.fixture
def left_at_work(profile):
    """Two ranks that train for a killed notebook."""
    command, pipe = [sys.executable, "-c", AT_WORK], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as notebook:
        assert notebook.stdout.readline() == "it trains\n"
        notebook.kill()


def test_a_new_notebook_can_abort_the_request_of_a_lost_one(left_at_work):
    with again() as bench:
        for ask in (bench.step, bench.pause):
            with pytest.raises(
                UsageError,
                match=r"still run %fsdp step of the previous notebook: wait, or .*%fsdp abort",
            ):
                ask()
        trains(bench)  # they still train
        assert bench.pulse().under_way.words == "%fsdp step of the previous notebook"
        assert str(bench.abort()) == "aborted the request of the previous notebook"
        assert len(bench.step(2).losses) == 2
        with pytest.raises(UsageError, match="nothing to abort"):
            bench.abort()


def test_ranks_that_work_for_a_lost_notebook_can_be_stopped(left_at_work):
    again().stop()
    with Workbench.attach(2, profile="running", device="cpu") as anew:
        assert anew.status().models == ()


def test_ranks_started_here_cannot_be_detached():
    bench = Workbench(1, device="cpu")
    with pytest.raises(UsageError, match="No ranks are running"):
        bench.detach()


def test_an_engine_that_is_no_rank_takes_the_place_of_one_that_died(profile):  # the last test: an engine is gone then
    with Workbench.attach(2, profile="running", device="cpu") as bench:
        bench.run_cell(CELL)
        bench.shard("model", wrap="Block")
        losses = list(bench.step(4).losses)
        bench.run_cell(CELL)
        bench.shard("model", wrap="Block")
        bench.step(2, snapshot=2)
        os.kill(bench.status().ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: 1 in bench.losses)
        healed = bench.heal()
        assert (healed.ranks, healed.steps_redone, healed.steps_lost) == ((1,), 0, 0)
        assert list(bench.step(2).losses) == losses[2:]
        pid = bench.status().ranks[0].pid
        with pytest.raises(RankDied):
            bench.run_cell("import ctypes\n\nctypes.string_at(0)", ranks=[0])
        wait_until(lambda: 0 in bench.losses)
        host = bench.status().ranks[0].host
        killed = "was killed by SIGSEGV (line 3 of the cell)"
        assert bench.losses[0] == f"died: the process on {host} {killed}"
        assert [*Path(tempfile.gettempdir()).glob(f"fsdp-workbench-crash-*-{pid}")] == []
        with pytest.raises(UsageError, match=r"has no engine for rank 0: start one with ipcluster engines -n 1"):
            bench.heal()
