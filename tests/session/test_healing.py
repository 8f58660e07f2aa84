"""What a heal repeats, and what it says of steps, for programs without ranks; deaths are in ``test_heal.py``."""

from types import SimpleNamespace

import pytest

from workbench.errors import RankError
from workbench.protocol.checkpoint_replies import LoadReply, SaveReply
from workbench.protocol.commands import Load, Save, Shard, Snapshot, Step, StepReply
from workbench.session.healing import ReplayedProgram
from workbench.session.program import CompletedCell, CompletedCommand, Omission


def steps(count, left=0, saved=(), **options):
    replies = tuple(SaveReply(folder=each, step=0, num_bytes=0, blocked_s=0, variables=()) for each in saved)
    reply = StepReply(steps_done=count, losses=None, seconds=(), optimizer_steps=count, first_step=0, saved=replies)
    return CompletedCommand(command=Step(count, **options), left=left, reply=None if left else reply)


def undone(count):
    return Omission(what=f"%fsdp step {count} that lost a rank", is_loss=True, left=Step(count))


LOAD = CompletedCommand(
    command=Load("runs"), reply=LoadReply(folder="runs/step-40", step=40, saved_ranks=2, variables=())
)
SAVE = CompletedCommand(
    command=Save("runs"), reply=SaveReply(folder="runs/step-5", step=5, num_bytes=0, blocked_s=0, variables=())
)
RAISED = Omission(what="a cell that raised ValueError", code="x = 1\nboom()")


def repeated(*entries, ends=None):
    """Repeat a program after a loss without snapshot; ``ends`` has the errors of cells by their first line."""
    ran = []

    def run_cell(code, *_):
        ran.append(code)
        name = (ends or {}).get(code.splitlines()[0], "")
        if name:
            raise RankError(f"rank 0 raised {name}: no\nmore", rank=0, ename=name, evalue="no")

    session = SimpleNamespace(run=lambda command, _: ran.append(command), run_cell=run_cell)
    found = ReplayedProgram(session, entries, None, [1])
    found.run()
    return found, ran


@pytest.mark.parametrize(
    ("entries", "lost", "line"),
    [
        ([], 0, ""),
        ([steps(5)], 5, "%fsdp step 5"),
        ([steps(5), steps(3)], 8, "%fsdp step 8"),
        ([steps(5, left=3)], 5, "%fsdp step 8"),
        ([steps(5), undone(3)], 5, "%fsdp step 8"),
        ([steps(5, left=3), steps(3)], 8, "%fsdp step 8"),
        ([undone(3)], 0, "%fsdp step 3"),
        (
            [steps(5, until="all_gather"), steps(2, fn="b"), undone(3)],
            7,
            "%fsdp step 5, then %fsdp step 2 --fn b, then %fsdp step 3",
        ),
        ([steps(5, left=1, snapshot=9)], 5, "%fsdp step 6 --snapshot 9"),
        ([steps(5), LOAD, steps(2), undone(3)], 2, "%fsdp step 5"),
        ([steps(5), LOAD], 0, ""),
        ([steps(5), SAVE, steps(2), undone(3)], 7, "%fsdp load runs/step-5, then %fsdp step 5"),
        ([steps(5), SAVE], 5, "%fsdp load runs/step-5"),
        ([SAVE, steps(5), LOAD, steps(1)], 1, "%fsdp step"),
        (
            [steps(5, save="r", every=2, saved=("r/step-2", "r/step-4"))],
            5,
            "%fsdp load r/step-4, then %fsdp step --save r --every 2",
        ),
        ([steps(5, save="r", saved=("r/step-5",))], 5, "%fsdp load r/step-5"),
    ],
)
def test_the_line_does_all_lost_steps_again_and_those_that_were_left(entries, lost, line):
    found, ran = repeated(*entries)
    assert (found.lost, found.next) == (lost, line)
    assert ran == [Load("runs/step-40")] * (LOAD in entries), "the checkpoint that was the newest then"


@pytest.mark.parametrize(
    ("ends", "again", "failed", "now"),
    [
        ({"x = 1": "ValueError"}, ["the cell 'x = 1': ValueError"], [], [RAISED]),
        (
            {"x = 1": "KeyError"},
            [],
            ["the cell 'x = 1': rank 0 raised KeyError: no, not ValueError as before"],
            [Omission],
        ),
        ({}, [], ["the cell 'x = 1': it completed, and is a cell that raised ValueError of before"], [CompletedCell]),
    ],
)
def test_a_cell_that_raised_on_every_rank_runs_again(ends, again, failed, now):
    found, ran = repeated(RAISED, ends=ends)
    assert (ran, found.failed_again, found.failed, found.left_out) == ([RAISED.code], again, failed, [])
    assert [each if each is RAISED else type(each) for each in found.entries] == now


def test_the_rest_of_a_program():
    model, local = CompletedCell(code="model = 1"), Omission(what="a cell that ran on rank 1 only")
    found, ran = repeated(
        model, local, CompletedCommand(command=Shard("model")), CompletedCommand(command=Snapshot()), undone(2)
    )
    assert (ran, found.cells, found.left_out) == (["model = 1", Shard("model")], 2, [local.what])
    found, _ = repeated(model, ends={"model = 1": "NameError"})
    assert found.failed == ["the cell 'model = 1': rank 0 raised NameError: no"]
