"""Ctrl-C, dead ranks and dead kernels, on real ranks."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.ctrl_c import TOGETHER, CtrlCCallback
from tests.helpers.leaks import is_running
from tests.helpers.notebook_model import CELL
from tests.helpers.pairwise import quick
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench import Workbench
from workbench.errors import Interrupted, RankDied, RankError, UsageError
from workbench.events import BESIDE
from workbench.live.state_at import describe
from workbench.replay.spans import chosen, of_kind
from workbench.session import stall_notice

pytestmark = pytest.mark.cluster


@contextmanager
def trained():
    with Workbench(2, device="cpu") as wb:
        wb.run_cell(CELL)
        wb.shard("model", wrap=["Block"])
        wb.step(1)
        yield wb


@pytest.fixture(scope="module")
def lasting():
    """Ranks shared by several tests, each of which leaves all of them alive."""
    with trained() as wb:
        yield wb


@pytest.fixture
def living(lasting):
    """The same ranks, ready for the next request whatever the previous test did."""
    if lasting._session.request is not None:
        lasting.abort()
    return lasting


@pytest.fixture
def bench():
    """Ranks of one test, which may kill them."""
    with trained() as wb:
        yield wb


def newest_events(wb):
    """Return the texts of the ranks' newest events, as the dashboard shows them."""
    trace = wb.trace
    return {describe(trace.header, chosen(r.rows, ~of_kind(r.rows, BESIDE))[-1]) for r in trace.ranks}


def test_after_a_failed_cell_the_newest_event_is_that_of_the_last_step(living):
    living.step(1)
    with pytest.raises(RankError, match="rank 0 raised ValueError"):
        living.run_cell("if rank == 0:\n    raise ValueError('mine')")
    assert newest_events(living) == {"step ends"}
    with pytest.raises(RankError, match="rank 1 raised ValueError"):
        living.run_cell(
            "with torch.no_grad():\n    model(torch.ones(8, 16))\nif rank == 1:\n    raise ValueError('mine')"
        )
    assert newest_events(living) == {"reshard of (root)"}
    assert living.step(1).steps_done == 1


def test_ctrl_c_stops_a_step_which_is_aborted_and_training_continues(living, every_rank_comes):
    assert "2 ranks stopped " in str(living.step(100_000, on_progress=CtrlCCallback()))  # before an event, or in a wait
    assert "idle again" in str(living.abort())
    assert living.step(2).steps_done == 2
    assert living.verify().ok


def test_ctrl_c_ends_a_cell_that_computes_or_sleeps(living):
    for code in ("while True: pass", "import time; time.sleep(1000)"):
        with pytest.raises(Interrupted):
            living.run_cell(TOGETHER + code, on_output=CtrlCCallback())
    assert living.run_cell("print('well')").texts[1].strip() == "well"


INIT = "dist.init_process_group('gloo', rank=rank, world_size=world_size)\n"


def test_a_cell_that_joins_the_process_group_is_told_that_it_is_in_one(living):
    def join_again():
        with pytest.raises(RankError, match="twice! The ranks are in a process group from the start: leave init_pro"):
            living.run_cell(INIT)

    living.run_cell("import torch.distributed as dist")
    join_again()
    living.run_cell("dist.destroy_process_group()")
    assert living.run_cell("print(dist.is_initialized())").texts == {0: "False\n", 1: "False\n"}
    assert living.step(1).steps_done == 1  # commands need the group
    assert living.run_cell(f"{INIT}dist.barrier()\nprint(dist.is_initialized())").texts == {0: "True\n", 1: "True\n"}
    living.run_cell(f"dist.destroy_process_group()\n{INIT}dist.barrier()")
    join_again()


@pytest.mark.parametrize(
    "code",
    [
        "group = dist.new_group([0, 1])\nif rank == 0:\n    dist.barrier(group)",
        "if rank == 0:\n    alone = dist.new_group([0, 1])",
        "import os\nif rank:\n    dist.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), 2, False).get('nothing')",
    ],
    ids=["its own group", "a group that others do not make", "a store"],
)
def test_an_interrupt_frees_a_cell_that_waits_in_torch(living, code):
    with pytest.raises(Interrupted, match="idle again"):
        living.run_cell(TOGETHER + code, on_output=CtrlCCallback())
    living.run_cell("dist.barrier()")
    assert living.step(1).steps_done == 1


def test_a_hanging_cell_shows_which_rank_waits_where(living, monkeypatch):
    monkeypatch.setattr(living._session, "_quiet_s", 0.1)
    monkeypatch.setattr(stall_notice, "AGAIN_S", 0.1)
    expected = r"rank 1 has run for \d+ s, in dist.barrier\(\) at line 3 of the cell; rank 0 has ended"
    sentences = []

    def give_up_once_it_is_said(sentence):
        sentences.append(sentence)
        if re.fullmatch(expected, sentence):
            living.abort()

    code = "import torch.distributed as dist\nif rank == 1:\n    dist.barrier()"
    with pytest.raises(Interrupted, match="idle again"):
        living.run_cell(code, on_standing=give_up_once_it_is_said)
    assert any(re.fullmatch(expected, sentence) for sentence in sentences)
    assert living.step(1).steps_done == 1


def test_ranks_that_issue_different_collectives_are_told_which(living, monkeypatch):
    monkeypatch.setattr(living._session, "_quiet_s", 0.1)
    monkeypatch.setattr(stall_notice, "AGAIN_S", 0.1)
    verdict = (
        "ranks 0-1 part: rank 0 issued all-reduce (cell:5, under `if not (rank)` of cell:2), "
        "rank 1 barrier (cell:3, under `if rank` of cell:2)"
    )
    causes = []

    def give_up_once_it_is_said(sentence):
        if sentence.startswith(verdict) and not causes:
            causes.append(living.where())
            living.abort()

    code = "import torch.distributed as dist\nif rank:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(1))"
    with pytest.raises(Interrupted, match="idle again"):
        living.run_cell(code, on_standing=give_up_once_it_is_said)
    (found,) = causes
    assert (found.cause.rule, found.cause.verdict) == ("other-collective", verdict)
    assert "rank 1 is in cell:3 in <module>, if 2 `rank`: dist.barrier()" in found.cause.evidence
    living.run_cell("dist.barrier()")
    assert living.where().cause is None


def test_a_killed_rank_is_named_and_the_others_keep_their_variables(bench):
    victims = [bench.status().ranks[1].pid]

    def kill(progress):
        if progress.done and victims:
            os.kill(victims.pop(), signal.SIGKILL)

    with pytest.raises(RankDied, match="rank 1") as caught:
        bench.step(100_000, on_progress=kill)
    assert caught.value.ranks == (1,)
    assert "%fsdp stop" in str(caught.value)
    assert bench.run_cell("print(type(model).__name__)", ranks=[0]).texts[0].strip() == "FSDPNet"


@pytest.mark.parametrize("word", quick(["resume", "abort"], ["resume"]))
def test_a_rank_killed_during_a_stop_is_named_by_any_next_command(bench, word):
    bench.step(5, until="backward:blocks.1")
    os.kill(bench.status().ranks[1].pid, signal.SIGKILL)
    wait_until(lambda: [row.state for row in bench.where().ranks] == ["held", "gone"])
    wait_until(lambda: bench._session.request.dead == (1,))
    assert bench.evaluate("rank").texts == {0: "0"}
    with pytest.raises(UsageError, match="only rank 0 of 2 can call it here: stop where all ranks stop"):
        bench.run_cell("import torch.distributed as dist\ndist.barrier()")
    for refused in (lambda: bench.step(1), lambda: bench.unshard("model")):
        with pytest.raises(UsageError, match="was running when rank 1 died: end it with %fsdp abort"):
            refused()
    with pytest.raises(RankDied, match="rank 1 died") as caught:
        getattr(bench, word)()
    assert "%fsdp stop, then %fsdp start" in str(caught.value)
    wait_until(lambda: [row.state for row in bench.where().ranks] == ["idle", "gone"])
    with pytest.raises(RankDied, match=r"^rank 1 died: "):
        bench.step(1)
    assert bench.run_cell("print('well')", ranks=[0]).texts == {0: "well\n"}


SCRIPT = f"""
import sys
from workbench import Workbench
wb = Workbench(2, device="cpu")
wb.start()
wb.run_cell({CELL!r})
wb.shard("model", wrap=["Block"])

def say(progress):
    sys.stdout.write("trains\\n" * (progress.done > 0))
    sys.stdout.flush()

wb.step(100_000, on_progress=say)
"""


def descendants(process):
    return [process, *process.children(recursive=True)]


def gone(processes):
    return not any(map(is_running, processes))


@pytest.mark.parametrize("how", quick([signal.SIGKILL, signal.SIGTERM], [signal.SIGKILL]))
def test_nothing_outlives_a_kernel_that_dies_in_a_step(how, tmp_path):
    root = str(Path(__file__).parents[2])
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=root)
    with child:
        assert child.stdout.readline() == "trains\n"
        family = descendants(psutil.Process(child.pid))
        assert len(family) > 3
        child.send_signal(how)
        child.wait(PATIENCE_S)
        wait_until(lambda: gone(family))


FAILS = CELL.replace("return x + self.mlp(self.norm(x))", "return x + self.mlp(self.norm(x)) @ x")
LEFT = """
import gc
gc.collect()
print(sum(isinstance(each, nn.Module) and hasattr(each, "blocks") and each is not model for each in gc.get_objects()))
"""


def by_step(wb):
    with pytest.raises(RankError):
        wb.step(1)


def by_cell(wb):
    with pytest.raises(RankError):
        wb.run_cell("train_step()")


def by_chained_error(wb):
    with pytest.raises(RankError):
        wb.run_cell("try:\n    train_step()\nexcept RuntimeError as error:\n    raise OSError('no data') from error")


def by_verify(wb):
    with pytest.raises(RankError):
        wb.verify("model")


@pytest.mark.parametrize("fail", [by_step, by_cell, by_chained_error, by_verify])
def test_the_model_of_a_step_that_failed_is_gone_once_its_cell_runs_again(fail, living):
    living.run_cell(FAILS)
    living.shard("model", wrap=["Block"])
    fail(living)
    living.run_cell(CELL)
    living.shard("model", wrap=["Block"])
    assert living.run_cell(LEFT).texts == {0: "0\n", 1: "0\n"}
    assert [unit.in_use for unit in living.trace.header.units].count(True) == 4
