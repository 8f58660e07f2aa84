"""What the ranks have done: the cells and commands that all of them completed."""

import pytest

from tests.helpers.fake_cluster import SHARD_RESULT, FakeCluster, blocks, gives, raises, returns
from tests.helpers.waiting import wait_until
from workbench.errors import Interrupted, RankDied, RankError, UsageError
from workbench.protocol.commands import Shard, Step
from workbench.session.program import CompletedCell, CompletedCommand, Omission, Program, cell_on, failed
from workbench.trace.file import save
from workbench.workbench import Workbench


@pytest.fixture
def wb():
    fakes = []

    def make(**settings):
        fakes.append(FakeCluster(**settings))
        return fakes[-1]

    with Workbench(2, cluster_factory=make) as bench:
        bench.fakes = fakes
        yield bench


def done(wb):
    """Return what a workbench's ranks have done: code of cells, commands, and what was left out."""
    return [
        entry.code if isinstance(entry, CompletedCell) else getattr(entry, "command", entry)
        for entry in wb.program.entries
    ]


def test_cells_and_commands_in_order(wb):
    fake = wb.fakes[-1]
    fake.sharded()
    wb.run_cell("x = 1")
    fake.script["shard"] = gives(SHARD_RESULT)
    wb.shard("model", wrap=["Block"])
    fake.script["step"] = fake.trains(3)
    wb.step(3)
    wb.run_cell("y = 2")
    assert done(wb) == ["x = 1", Shard("model", wrap=["Block"]), Step(3), "y = 2"]
    assert wb.program.entries[2].reply.losses == (4.5, 4.4, 4.3)
    assert (wb.program.device, wb.program.ranks_per_host, wb.program.is_attached) == ("cpu", (2,), False)


def test_what_fails_is_left_out(wb):
    fake = wb.fakes[-1]
    fake.script["cell"] = raises("NameError", "no x")
    with pytest.raises(RankError):
        wb.run_cell("x")
    fake.script["cell"] = raises("SyntaxError")
    with pytest.raises(RankError):
        wb.run_cell("x = ")
    fake.script["cell"] = returns
    wb.run_cell("z", ranks=[1])
    fake.script["shard"] = raises("UsageError", "there is no Blok")
    with pytest.raises(UsageError):
        wb.shard("model", wrap=["Blok"])
    with pytest.raises(UsageError):
        wb.shard("modell")
    raised = Omission(what="a cell that raised NameError", code="x")
    assert done(wb) == [raised, Omission(what="a cell that ran on rank 1 only")]


def test_the_finished_steps_of_an_aborted_command_count(wb):
    fake = wb.fakes[-1]
    fake.sharded()
    trains, record_step = fake.trains(5), fake.on_drain
    fake.on_drain = lambda: None
    fake.script["step"] = [lambda *call: (trains(*call), blocks(*call))] * 2
    wb.step(5, background=True)
    record_step()
    record_step()
    wait_until(lambda: wb.pulse().under_way.progress.done == 2)
    assert wb.program.under_way == "%fsdp step 5 --background"
    wb.abort()
    rest = "the rest of %fsdp step 5 --background, which was aborted after 2 of its 5 steps"
    assert done(wb) == [Step(2), Omission(what=rest)]
    assert wb.program.under_way == ""


def test_it_outlives_the_ranks_and_an_opened_trace_until_the_next_start(wb, tmp_path):
    wb.run_cell("x = 1")
    save(wb.trace, tmp_path / "a.trace")
    wb.stop()
    wb.open_record(tmp_path / "a.trace")
    assert done(wb) == ["x = 1"]
    wb.start()
    assert done(wb) == []


def test_a_workbench_without_ranks_has_done_nothing():
    assert Workbench().program == Program()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (Interrupted("aborted"), "was aborted"),
        (RankDied("rank 1 died", ranks=(1,)), "lost a rank"),
        (RankError("r", rank=0, ename="ValueError", evalue="", line=None, traceback=""), "raised ValueError"),
        (OSError(), "failed"),
    ],
)
def test_why_work_is_left_out(error, why):
    assert failed("a cell", None, error, 0) == [Omission(what=f"a cell that {why}")]
    finished, rest = failed("%fsdp step 9 --fn f", Step(9, fn="f"), error, 4)
    assert finished == CompletedCommand(command=Step(4, fn="f"), left=5 if isinstance(error, RankDied) else 0)
    assert rest.what == f"the rest of %fsdp step 9 --fn f, which {why} after 4 of its 9 steps"


def test_refused_work_leaves_nothing():
    assert failed("%fsdp shard m", Shard("m"), UsageError("there is no m"), 0) == []


def test_a_cell_on_all_ranks():
    assert cell_on("x", (0, 1), 2) == CompletedCell(code="x")
    assert cell_on("x", (0, 2), 3) == Omission(what="a cell that ran on ranks 0, 2 only")
