"""Stopping inside a step on real ranks: pause, breakpoints, inspection, continue, Ctrl-C, background, stop."""

import os
import signal

import psutil
import pytest

from tests.helpers.ctrl_c import TOGETHER, CtrlCCallback
from tests.helpers.notebook_model import CELL
from tests.helpers.waiting import wait_until
from workbench import Workbench
from workbench.errors import Interrupted, RankError, UsageError
from workbench.reports.pause_reports import StopReport
from workbench.trace import advance

pytestmark = pytest.mark.cluster

FOREVER = 1_000_000


@pytest.fixture(scope="module")
def wb():
    """Two ranks with a model, sharded and trained for a step."""
    with Workbench(2, device="cpu") as bench:
        bench.run_cell(CELL)
        bench.shard("model", wrap=["Block"])
        bench.step(1)
        yield bench


@pytest.fixture
def ready(wb):
    """The same ranks between requests, whatever the previous test did."""
    if wb._session.request is not None:
        wb.abort()
    wb.break_clear()
    wb.news()
    yield wb
    if wb._session.request is not None:
        wb.abort()


def places(report):
    """Return the positions of the ranks: one entry if all are stopped at the same event."""
    assert isinstance(report, StopReport), report
    return {p.held.place for p in report.stop.positions.values()}


def states(bench):
    """Return the set of the ranks' states; on a busy machine a rank may briefly not answer."""
    return {row.state for row in bench.where().ranks}


@pytest.mark.parametrize(
    "event", ["forward:blocks.1", "backward:blocks.1", "optimizer", "all_gather:blocks.2", "reduce_scatter:(root)"]
)
def test_until_stops_all_ranks_before_the_same_event(ready, event):
    report = ready.step(2, until=event)
    assert len(places(report)) == 1
    assert report.stop.held == (0, 1)
    assert report.headline.startswith("2 ranks stopped before ")
    wait_until(lambda: states(ready) == {"held"})
    done = ready.resume()
    assert done.steps_done == 2
    assert ready.verify().ok


def test_a_breakpoint_on_values_names_the_gradient(ready):
    ready.run_cell("model.head.register_forward_hook(lambda m, a, out: out * (float('nan') if rank else 1.0)).id")
    report = ready.step(2, until="nan")
    assert len(places(report)) == 1
    assert "stopped by  --until optimizer --when nan; rank 0: " in str(report)
    assert "of the gradient of " in report.reasons[1]
    ready.abort()
    ready.run_cell("model.head._forward_hooks.clear()")


def test_next_goes_from_event_to_event_on_all_ranks(ready):
    seen = [places(ready.step(1, until="forward:blocks.0"))]
    for what in ("event", "collective", "unit", "phase"):
        report = ready.next(what)
        seen.append(places(report))
    assert all(len(found) == 1 for found in seen)
    assert sorted(seen, key=lambda found: next(iter(found))) == seen
    assert report.stop.positions[0].held.phase.key.endswith("backward")
    assert ready.resume().steps_done == 1


def test_a_breakpoint_holds_again_and_again_until_it_is_cleared(ready):
    ready.break_add("backward:blocks.0", when="num_bytes >= 0")
    first = ready.step(2)
    second = ready.resume()
    assert second.stop.positions[0].held.place.step == first.stop.positions[0].held.place.step + 1
    assert "breakpoint" in str(second)
    ready.break_clear()
    assert ready.resume().steps_done == 2


def test_a_breakpoint_on_one_rank_leaves_the_other_waiting(ready):
    ready.break_add("all_gather:blocks.1", rank=1)
    report = ready.step(1)
    assert report.stop.held == (1,)
    assert "rank 0 waits" in str(report)
    wait_until(lambda: [row.state for row in ready.where().ranks] == ["waiting", "held"])
    with pytest.raises(UsageError, match="rank 0 is not held in the gate"):
        ready.evaluate("1", ranks=[0])
    ready.break_clear()
    assert ready.resume().steps_done == 1


def test_the_classes_that_wrap_may_name(ready):
    expected = ("Block", "LayerNorm", "Linear", "Sequential")
    assert {names.classes for names in ready.names().values()} == {expected}


@pytest.mark.parametrize("ask", ["input('how many? ')", "import getpass; getpass.getpass()"])
def test_a_cell_that_asks_for_input_says_where_to_ask(ready, ask):
    with pytest.raises(RankError, match="a rank cannot ask for input: ask in a cell without %%fsdp"):
        ready.run_cell(ask)


def test_a_parameter_can_be_inspected_between_steps(ready):
    ready.step(2)
    report = ready.inspect("blocks.1.mlp.0.weight")
    assert {rank: found.shard.num_rows for rank, found in report.by_rank.items()} == {0: 16, 1: 16}
    assert report.by_rank[0].optimizers
    with pytest.raises(UsageError, match=r"nearest first: blocks\.1\.mlp\.0\.weight"):
        ready.inspect("blocks.1.mlp.0.wieght")


def test_looking_around_inside_the_step(ready):
    ready.step(1, until="backward:blocks.1")
    assert ready.evaluate("1 + 1").texts == {0: "2", 1: "2"}
    assert ready.evaluate("rank").texts == {0: "0", 1: "1"}
    with pytest.raises(RankError) as caught:
        ready.evaluate("1 / rank", ranks=[0])
    assert str(caught.value).startswith("rank 0 raised ZeroDivisionError: division by zero\nthe step is still stopped")
    refused = r"^all_gather_into_tensor waits for other ranks, and only rank 1 would call it: leave -t out"
    with pytest.raises(UsageError, match=refused):
        ready.evaluate("model.blocks[2].mlp[0].weight.full_tensor().sum()", ranks=[1])
    assert len(set(ready.evaluate("model.blocks[2].mlp[0].weight.full_tensor().sum().item()").texts.values())) == 1
    report = ready.inspect("blocks.1.mlp.0.weight")
    assert set(report.by_rank) == {0, 1}
    assert "shard" in str(report)
    with pytest.raises(UsageError, match=r"nearest first: blocks\.1\.mlp\.0\.weight"):
        ready.inspect("blocks.1.mlp.0.wieght")
    outputs = []
    cell = ready.run_cell("print('inside', rank)\ninside = rank", on_output=outputs.append)
    assert cell.texts == {0: "inside 0\n", 1: "inside 1\n"}
    assert outputs[-1].data["text/plain"] == "--- rank 0:\ninside 0\n--- rank 1:\ninside 1"
    assert len(ready.states().data) > 0
    for refused in (lambda: ready.step(1), lambda: ready.unshard("model")):
        with pytest.raises(UsageError, match="first %fsdp continue or %fsdp abort"):
            refused()
    assert set(ready.evaluate("loss.requires_grad").texts.values()) == {"True"}  # a variable of train_step
    with pytest.raises(
        RankError, match=r"ranks 0-1 raised NameError: .* nearest: loss.*; frames: 0 train_step at cell:"
    ):
        ready.evaluate("losss")
    report = wait_until(
        lambda: (found := ready.where(stacks=True)) and all(row.stacks for row in found.ranks) and found
    )
    assert len(str(report)) < 3_000
    assert "\nranks 0-1, MainThread:\n    0  cell:" in str(report)
    assert " in train_step: loss.backward()\n" in str(report)
    assert ready.resume().steps_done == 1
    assert ready.run_cell("print(inside)").texts == {0: "0\n", 1: "1\n"}


def test_one_ctrl_c_pauses_and_the_step_continues(ready, every_rank_comes):
    report = ready.step(FOREVER, on_progress=CtrlCCallback())
    assert len(places(report)) == 1
    assert report.stop.held == (0, 1)
    assert len(places(ready.resume(on_progress=CtrlCCallback()))) == 1
    assert "idle again" in ready.abort().headline
    assert ready.step(1).steps_done == 1
    assert ready.verify().ok


def test_a_second_ctrl_c_aborts_and_the_ranks_are_ready_again(ready):
    ready.run_cell(
        """
import time
old_step = train_step
def train_step():
    if rank == 1 and slow:
        time.sleep(1000)
    return old_step()
slow = True
"""
    )
    with pytest.raises(Interrupted, match="idle again"):
        ready.step(1, on_progress=CtrlCCallback(2, anyway=True))
    ready.run_cell("slow = False")
    assert ready.step(1).steps_done == 1
    ready.run_cell("train_step = old_step")


def test_a_late_rank_is_named_and_stops_later(ready, tmp_path):
    flag = tmp_path / "go"
    ready.run_cell(
        f"""
import os
old_step = train_step
def train_step():
    if rank == 1:
        while not os.path.exists({str(flag)!r}): pass
    return old_step()
"""
    )
    press = CtrlCCallback(anyway=True)

    def press_once_rank_0_waits(progress):
        if ready.where().ranks[0].state == "waiting":
            press(progress)

    try:
        report = ready.step(1, on_progress=press_once_rank_0_waits)
        assert "rank 1 stops at the next event" in str(report)
    finally:
        flag.touch()
        wait_until(lambda: states(ready) == {"held"})
    assert ready.resume().steps_done == 1
    ready.run_cell("train_step = old_step")


def test_ctrl_c_in_a_cell_interrupts_it(ready):
    with pytest.raises(Interrupted):
        ready.run_cell(f"{TOGETHER}while True: pass", on_output=CtrlCCallback())
    assert ready.step(1).steps_done == 1


def test_background_steps_pause_continue_and_are_reported(ready, every_rank_comes):
    assert "runs in the background" in str(ready.step(FOREVER, background=True))
    assert states(ready) <= {"starting", "running", "waiting", "no answer"}  # never idle
    wait_until(lambda: states(ready) <= {"running", "waiting"})
    with pytest.raises(UsageError, match="in the background"):
        ready.step(1)
    with pytest.raises(UsageError, match="nothing is stopped"):
        ready.next()
    report = ready.pause()
    assert len(places(report)) == 1
    assert ready.evaluate("rank").texts == {0: "0", 1: "1"}
    ready.resume(background=True)
    assert len(places(ready.pause())) == 1
    ready.resume(background=True)
    assert "idle again" in ready.abort().headline
    report = ready.step(3, background=True)
    news = []
    wait_until(lambda: news.extend(ready.news()) or any("3 steps" in sentence for sentence in news))


@pytest.mark.parametrize("event", ["wait.end", "reduce_scatter:blocks.1", "copy_out.end:(root)", "optimizer"])
def test_an_aborted_step_leaves_no_memory_behind(ready, event):
    ready.run_cell("import gc; gc.collect()")  # reference cycles of earlier tests may be freed at any time
    ready.step(1)
    before = in_use(ready)
    for _ in range(2):
        ready.step(1, until=event)
        ready.abort()
        ready.step(1)
        assert in_use(ready) == before


def in_use(bench):
    """Return the bytes of each rank by category, after its last event."""
    return [advance(rank.start, rank.rows).bytes_by_category for rank in bench.trace.ranks]


def test_gradients_of_an_aborted_step_are_reported(ready):
    ready.step(1)  # drops those that the previous test may have left
    ready.step(1, until="forward:blocks.1")
    assert "gradients" not in ready.abort().headline  # there are none yet
    ready.step(1, until="optimizer")
    sentence = "gradients of that step remain on ranks 0-1, and the next backward adds to them"
    assert sentence in ready.abort().headline
    ready.step(1, until="optimizer")
    assert "gradients" not in ready.abort().headline  # as before that step: some loops keep them
    ready.run_cell("opt.zero_grad()")
    with pytest.raises(RankError, match=sentence):
        ready.run_cell("train_step.__globals__['opt'] = None\ntrain_step()")
    ready.run_cell("opt = torch.optim.AdamW(model.parameters(), lr=1e-2)\nopt.zero_grad()")
    assert ready.verify().ok


SKEWED = """
import time
prompt = train_step

def train_step():
    loss = model(torch.randn(8, 16, generator=generator)).square().mean()
    loss.backward()
    time.sleep(0.1 * rank)  # rank 0 is in its next step, with its gradients cleared, when rank 1 has its own
    opt.step()
    opt.zero_grad()
"""


def test_an_abort_of_running_steps_leaves_the_ranks_alike(ready):
    ready.run_cell(SKEWED)
    try:
        for _ in range(3):
            ready.step(FOREVER, background=True)
            before = ready.trace.num_rows
            wait_until(lambda: ready.pulse().trace.num_rows > before + 200)  # noqa: B023 - called at once
            assert "not on" not in ready.abort().headline
            ready.unshard("model")
            ready.shard("model", wrap=["Block"])
    finally:
        ready.run_cell("train_step = prompt")


def test_a_loop_of_the_user_s_own_stops_as_well(ready):
    ready.break_add("forward:blocks.2")
    report = ready.run_cell("loss = train_step(); print('done')")
    assert len(places(report)) == 1
    ready.break_clear()
    outputs = []
    done = ready.resume(on_output=outputs.append)
    assert done.texts == {0: "done\n", 1: "done\n"}
    assert "".join(output.text for output in outputs).startswith("done\n")


def test_back_moves_the_cursor_and_nothing_else(ready):
    ready.run_cell("import gc; gc.collect()")  # reference cycles of earlier tests may be freed at any time
    ready.step(1)
    live = ready.states()
    assert "before the newest" in str(ready.back(30))
    assert ready.states() != live
    ready.back(0)
    assert ready.states() == live


def test_where_waits_for_no_rank_that_does_not_answer(ready):
    ready.step(FOREVER, background=True)
    pid = ready.status().ranks[1].pid
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: {psutil.Process(t.id).status() for t in psutil.Process(pid).threads()} == {"stopped"})
    try:
        assert ready.where().ranks[1].state == "no answer"
    finally:
        os.kill(pid, signal.SIGCONT)
    ready.abort()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["stopped", "background", "one rank"])
def test_stopping_the_cluster_ends_everything(how):
    with Workbench(2, device="cpu") as bench:
        bench.run_cell(CELL)
        bench.shard("model", wrap=["Block"])
        if how == "background":
            bench.step(FOREVER, background=True)
        else:
            if how == "one rank":
                bench.break_add("all_gather", rank=0)
            bench.step(1, until="" if how == "one rank" else "backward")
    assert not bench.running
    assert bench.trace.num_rows > 0
