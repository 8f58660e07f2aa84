"""Jobs on a held rank: expressions, cells and inspections, in the thread of the stopped step."""

import math
import os
import signal
import threading

import pytest
import torch
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.helpers.booted_ranks import drain, execute, run
from tests.helpers.small_models import loss_of
from tests.helpers.stopped_step import Channel, beside
from tests.runtime.test_commands import trace_of
from tests.runtime.test_gate import sharded, undisturbed, weights
from workbench.events import UnitState
from workbench.protocol.commands import Continue, Evaluate, Inspect, Step
from workbench.protocol.rank_messages import Forget, JobError, LocateLine, RunCell, Stacks
from workbench.trace.invariants import check


def stopped_at(event, unit, script, *, steps=1, **options):
    """Run ``script(channel, ns)`` at the event's first stop in the last of ``steps`` steps."""
    ns = sharded(**options)
    ns["torch"] = torch
    if steps > 1:
        execute(Step(count=steps - 1))
    Channel().break_at({"event": event, "unit": unit})

    def held(channel):
        channel.until_held()
        return script(channel, ns)

    done, reported = beside(held, Step())
    assert done["steps_done"] == 1
    return reported


def expressions():
    def script(channel, ns):
        ns["main"] = threading.main_thread().ident
        requested = (
            "rank + 1",
            "x.shape",  # of Block.forward, whose child is about to run
            "[i for i in range(3) if i < rank + 2]",
            "torch.is_grad_enabled()",
            "__import__('threading').get_ident() == main",
            "float('nan')",
            "10 ** 400",
            "torch.tensor(2.5)",
        )
        return {text: channel.evaluate(text) for text in requested}

    return stopped_at("forward", "blocks.1", script)


def test_expressions_see_the_cells_and_the_stopped_function_in_its_own_thread_and_grad_mode():
    for rank, reported in enumerate(run(2, expressions)):
        assert reported["rank + 1"] == str(rank + 1)
        assert reported["x.shape"] == "torch.Size([4, 5, 16])"
        assert reported["[i for i in range(3) if i < rank + 2]"] == str(list(range(min(3, rank + 2))))
        assert reported["torch.is_grad_enabled()"] == "True"
        assert reported["__import__('threading').get_ident() == main"] == "True"
        assert reported["float('nan')"] == "nan"
        assert reported["10 ** 400"] == str(10**400)
        assert reported["torch.tensor(2.5)"] == "tensor(2.5000)"


def step_with_locals(ns, forward):
    """Return a step with its own local variables, called by a function with others."""

    def one_step():
        batch = torch.randint(7, (4, 6), generator=ns["generator"])
        x = torch.ones(3, 2)  # the name that the modules use
        loss = forward(lambda: loss_of(ns["model"], batch))
        loss.backward()
        ns["opt"].step()
        ns["opt"].zero_grad()
        return loss.item() + 0 * x.sum().item()

    def train_step():
        accumulated = 0.25
        return one_step() + 0 * accumulated

    return train_step


EVENTS_OF_A_STEP = ("forward:blocks.1", "backward:blocks.1", "reduce_scatter.end:blocks.1", "optimizer")
SEEN = ("list(batch.shape)", "accumulated", "[accumulated for _ in range(2)]", "rank", "loss_of.__name__")


def callers_locals():
    ns = sharded()
    ns["train_step"] = step_with_locals(ns, lambda forward: forward())
    reported = {}

    def script(channel):
        for event in EVENTS_OF_A_STEP:
            kind, _, unit = event.partition(":")
            channel.break_at({"event": kind, "unit": unit or None})
            channel(Continue())
            channel.until(lambda where, kind=kind: where.held and kind.startswith(where.held.kind.key))
            reported[event] = [channel.expression(text).text for text in SEEN], channel.cell("accumulated").text

    Channel().break_at({"event": "step"})
    beside(script, Step())
    return reported


def test_the_variables_of_callers_are_found_in_forward_in_backward_and_in_the_optimizer():
    for rank, reported in enumerate(run(2, callers_locals)):
        own = ["[4, 6]", "0.25", "[0.25, 0.25]", str(rank), "'loss_of'"]
        assert reported == dict.fromkeys(EVENTS_OF_A_STEP, (own, "0.25\n"))


def frames():
    ns = sharded()
    ns["train_step"] = step_with_locals(ns, lambda forward: forward())
    Channel().break_at({"event": "forward", "unit": "blocks.1"})

    def script(channel):
        channel.until_held()
        shapes = [channel.expression("list(x.shape)", frame=number).text for number in range(7)]
        return shapes, channel.expression("batsh"), channel.expression("x", frame=70), channel(Stacks())[0]

    return beside(script, Step())[1]


def test_a_frame_is_chosen_and_a_wrong_name_brings_the_nearest_and_the_frames():
    ((shapes, unknown, beyond, stack),) = run(1, frames)
    users = {f.number: f.text for f in stack.frames if f.number is not None}
    number = next(number for number, text in users.items() if " in one_step" in text)
    assert shapes[0] == "[4, 5, 16]"
    assert shapes[number] == "[3, 2]"
    assert shapes[number + 1] == ""  # not searched for in the functions that it called
    assert unknown.error.ename == "NameError"
    reported = unknown.error.evalue
    assert reported.startswith("name 'batsh' is not defined; nearest: batch")
    assert "; frames: 0 forward at small_models.py:" in reported
    assert f", {number} one_step at test_held_jobs.py:" in reported
    assert "train_step at" in reported
    assert "runtime" not in reported
    assert "in backward" not in reported
    assert beyond.error.evalue.startswith("there is no frame 70 here; frames: 0 forward at")


def in_another_thread():
    """Autograd runs the hooks of a device in a separate thread while the main thread waits."""
    ns = sharded()

    def elsewhere(forward):
        found = []
        thread = threading.Thread(target=lambda: found.append(forward()))
        thread.start()
        thread.join()
        return found[0]

    ns["train_step"] = step_with_locals(ns, elsewhere)
    Channel().break_at({"event": "forward", "unit": "blocks.1"})

    def script(channel):
        channel.until_held()
        return [channel.expression(text).text for text in ("accumulated", "list(x.shape)")]

    return beside(script, Step())[1]


def test_a_hook_in_another_thread_sees_the_variables_of_the_main_one():
    assert run(1, in_another_thread) == [["0.25", "[4, 5, 16]"]]


def assigned_in_an_expression():
    def script(channel, ns):
        channel.evaluate("[kept := 5, (lambda: (inner := 1))()]")
        return ns["kept"], "inner" in ns, channel.evaluate("kept")

    return stopped_at("forward", "blocks.1", script)


def test_assignments_in_an_expression_become_cell_variables():
    assert run(1, assigned_in_an_expression) == [(5, False, "5")]


def no_grad_there():
    return stopped_at("all_gather", "blocks.1", lambda channel, ns: channel.evaluate("torch.is_grad_enabled()"))


def test_the_grad_mode_is_that_of_the_event():
    assert run(2, no_grad_there) == ["False", "False"]


def dtensors():
    def script(channel, ns):
        weight = ns["model"].blocks[2].mlp[0].weight
        assert isinstance(weight, DTensor)
        ns["partial"] = DTensor.from_local(torch.tensor(1.0), weight.device_mesh, [Partial()])
        return (
            channel.evaluate("model.blocks[2].mlp[0].weight"),
            channel.expression("partial.item()"),
            channel.evaluate("partial.full_tensor()"),
        )

    return stopped_at("forward", "blocks.0", script)


def test_a_dtensor_is_described_by_its_shard_and_a_partial_sum_is_refused():
    for shard, partial, full in run(2, dtensors):
        assert shard.startswith("this shard, [25, 16] of [49, 16]") or shard.startswith(
            "this shard, [24, 16] of [49, 16]"
        )
        assert partial.error.ename == "TypeError"
        assert "full_tensor()" in partial.error.evalue
        assert full == "tensor(2.)"


ALONE = {"alone": "rank R would call it: leave -t out", "ranks": [0]}
WAITING = {
    "model.blocks[2].mlp[0].weight.full_tensor()": "all_gather_into_tensor",
    "model.blocks[2].mlp[0].weight.redistribute(placements=[Replicate()])": "all_gather_into_tensor",
    "dist.barrier()": "barrier",
    "dist.all_reduce(torch.ones(1))": "allreduce",
    "dist.broadcast_object_list([1])": "broadcast",
    "dist.send(torch.ones(1), 1 - rank)": "send",
    "dist.all_reduce(torch.ones(1), group=both)": "allreduce",
    "functional.all_reduce(torch.ones(1), 'sum', both)": "all_reduce",
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)": "all_reduce",
    "model(torch.zeros(1, 2, dtype=torch.long))": "unshard of (root)",
    "model.unshard()": "unshard of (root)",
}


def alone(comm):
    os.environ["WORKBENCH_COMM"] = comm
    ns = sharded()
    dist = torch.distributed
    ns |= {"torch": torch, "dist": dist, "functional": _functional_collectives, "Replicate": Replicate}
    ns |= {"both": dist.new_group([0, 1]), "own": [dist.new_group([rank]) for rank in range(2)]}
    Channel().break_at({"event": "optimizer"})

    def script(channel):
        channel.until_held()
        refused = {text: channel.expression(text, **ALONE) for text in WAITING}
        local = channel.expression("model.blocks[2].mlp[0].weight.to_local().sum()", **ALONE)
        mine = channel.expression("dist.all_reduce(torch.ones(1), group=own[rank])", alone="x", ranks=[ns["rank"]])
        everybody = channel.expression("dist.all_reduce(x := torch.ones(1)) or x.item()")
        channel.break_at()
        return refused, local, mine, everybody

    done, reported = beside(script, Step(count=2))
    return reported, done["losses"], weights(ns), check(trace_of(*drain()))


@pytest.mark.parametrize("comm", ["gloo", ""])
def test_code_on_some_ranks_may_not_wait_for_others(comm):
    expected = run(2, undisturbed, 2)
    for rank, ((refused, local, mine, everybody), *after, broken) in enumerate(run(2, alone, comm)):
        for text, answer in refused.items():
            reported = f"{WAITING[text]} waits for other ranks, and only rank R would call it: leave -t out"
            assert (answer.error.ename, answer.error.evalue) == ("UsageError", reported), text
        assert local.error is None
        assert mine.error is None, mine
        assert everybody.text == "2.0"
        assert after == list(expected[rank])
        assert broken == []


def failures():
    def script(channel, ns):
        answers = [
            channel.expression("1 / 0"),
            channel.expression("for"),
            channel.expression("exit()"),
            channel.cell("a = 1\nb = unknown\n"),
            channel.expression("x"),
            channel.job(Inspect(fqn="blocks.1.mlp.0.weigth")),
        ]
        return answers, channel.where().held.kind.key, ns["a"]

    return stopped_at("backward", "blocks.1", script)


def test_an_exception_is_one_line_and_the_stop_remains():
    ((answers, held, assigned),) = run(1, failures)
    assert held == "backward"
    assert assigned == 1
    assert "nearest" not in answers[4].error.evalue  # no builtins such as hex or max
    assert [a.error is None for a in answers] == [False] * 6
    errors = [a.error for a in answers]
    assert errors[0] == JobError(
        ename="ZeroDivisionError",
        evalue="division by zero",
        traceback="ZeroDivisionError: division by zero",
    )
    assert errors[1].ename == "SyntaxError"
    assert errors[2].ename == "SystemExit"
    assert "line 2" in errors[3].traceback
    assert "b = unknown" in errors[3].traceback
    assert errors[3].evalue.endswith("in backward, forward has returned and its variables are gone")
    assert "workbench" not in errors[3].traceback
    assert errors[5].ename == "UsageError"
    assert "nearest: blocks.1.mlp.0.weight" in errors[5].evalue


def cells():
    def script(channel, ns):
        reported = channel.cell(
            "import sys\nprint('out', rank)\nprint('err', file=sys.stderr)\ndef f():\n    return y\ny = 5\nf()"
        )
        shadowed = channel.cell("tokens = 'mine'\ntokens")
        return reported.text, shadowed.text, ns["tokens"], ns["y"]

    return stopped_at("optimizer", None, script)


def test_a_cell_prints_defines_and_shows_its_last_value():
    for rank, (text, shadowed, tokens, y) in enumerate(run(2, cells)):
        assert text == f"out {rank}\nerr\n5\n"
        assert (shadowed, tokens, y) == ("'mine'\n", "mine", 5)


def with_a_sharded_parameter():
    def script(channel, ns):
        ns["weight"] = ns["model"].blocks[2].mlp[0].weight
        in_a_cell = channel.cell("weight @ torch.ones(2, 2)").error
        return in_a_cell.traceback, channel.expression("weight @ torch.ones(2, 2)").error.traceback

    return stopped_at("optimizer", None, script)


def test_an_error_about_a_sharded_parameter_has_a_note():
    for in_a_cell, in_an_expression in run(2, with_a_sharded_parameter):
        for text in (in_a_cell, in_an_expression):
            assert (
                "\n[workbench] parameter 'blocks.2.mlp.0.weight' is sharded; unit 'blocks.2' is sharded: freed a"
                in text
            )
            assert "\nfix: call model.blocks[2](...), or compute between model.blocks[2].unshard() and " in text


def interrupted_job():
    def script(channel, ns):
        channel.send("loop", RunCell(code="began = True\nwhile True:\n    pass"))
        channel.until(lambda where: "began" in ns)
        line = channel(LocateLine())
        channel.send("later", Evaluate(expr="1 + 1"))
        os.kill(os.getpid(), signal.SIGINT)
        where = channel.until(lambda where: "later" in where.tickets)
        channel(Forget(tickets=("loop",)))
        return where, list(channel.where().tickets), (line.inside, line.line in (2, 3)), channel(LocateLine())

    return stopped_at("forward", "blocks.1", script)


def test_an_interrupt_ends_the_cell_that_runs_and_not_the_stop():
    ((where, left, line, afterwards),) = run(1, interrupted_job)
    assert line == ("cell", True)
    assert getattr(afterwards, "inside", "") == ""
    assert where.held is not None
    assert where.tickets["loop"].error.ename == "KeyboardInterrupt"
    assert where.tickets["later"].text == "2"
    assert left == ["later"]


def inspections():
    def script(channel, ns):
        names = {
            "running": "blocks.1.mlp.0.weight",
            "sharded": "model.blocks.0.mlp.0.weight",
            "prefetched": "blocks.2.mlp.0.weight",
        }
        return {what: channel.inspect(name) for what, name in names.items()}

    return stopped_at("forward", "blocks.1", script, steps=2, prefetch=1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_inspect_shows_the_ranks_part_of_a_parameter_and_why(world_size):
    rows = [len(c) for c in torch.arange(49).chunk(world_size)]
    totals = {"running": 0.0, "sharded": 0.0}
    fulls = set()
    for rank, reported in enumerate(run(world_size, inspections)):
        running, sharded_, prefetched = reported["running"], reported["sharded"], reported["prefetched"]
        shard = running.shard
        assert shard.values.shape == (rows[rank], 16)
        assert (shard.first_row, shard.num_rows) == (sum(rows[:rank]), rows[rank])
        assert shard.values.num_bytes == rows[rank] * 16 * 4
        assert running.unit == "blocks.1"
        assert running.full.state is UnitState.UNSHARDED
        assert running.full.why == "its forward is about to run (requested in forward of step 1)"
        assert running.full.values.num_bytes == 49 * 16 * 4
        assert (sharded_.full.state, sharded_.full.values) == (UnitState.SHARDED, None)
        assert sharded_.fqn == "blocks.0.mlp.0.weight"
        assert sharded_.full.why == "not needed now: only this rank's rows are in memory"
        assert prefetched.full.state is UnitState.ALL_GATHER_IN_FLIGHT
        assert prefetched.full.why.startswith("its all-gather was issued (requested in forward of step 1)")
        (optimizer,) = running.optimizers
        assert (optimizer.name, optimizer.type) == ("opt", "AdamW")
        assert optimizer.state["exp_avg"].shape == shard.values.shape
        assert optimizer.state["exp_avg"].num_bytes == shard.values.num_bytes
        assert running.full_grad is None
        assert 0 < abs(shard.values.mean) < shard.values.max_abs <= running.full.values.max_abs
        totals["running"] += shard.values.norm**2
        fulls.add(running.full.values.norm)
    assert len(fulls) == 1
    assert math.sqrt(totals["running"]) == pytest.approx(fulls.pop(), rel=1e-5)


def gradients():
    def script(channel, ns):
        return channel.inspect("blocks.1.mlp.0.weight")

    return stopped_at("backward.end", "blocks.1", script), stopped_at("optimizer", None, script)


def test_inspect_finds_full_and_sharded_gradients():
    for in_backward, in_optimizer in run(2, gradients):
        assert in_backward.full_grad.num_bytes == 49 * 16 * 4
        assert in_backward.full_grad.norm > 0
        assert in_backward.full.why.startswith("its backward runs (requested in pre-backward of")
        assert in_backward.sharded_grad is None
        assert in_optimizer.sharded_grad.num_bytes == in_optimizer.shard.values.num_bytes
        assert in_optimizer.full_grad is None


def stacks_while_held():
    def script(channel, ns):
        channel.evaluate("rank")  # a rank counts as held a moment before it is in the gate's loop
        return channel(Stacks())

    return stopped_at("backward", "blocks.1", script)


def test_stacks_begin_with_the_main_thread_and_its_position():
    (found,) = run(1, stacks_while_held)
    assert found[0].name == "MainThread"
    assert found[0].is_main
    frames = found[0].frames
    assert " in _next_message: " in next(f.text for f in frames if "gate.py" in f.text)
    users = [f for f in frames if f.number is not None]
    assert [f.number for f in users] == list(range(len(users)))
    assert " in train_step: loss.backward()" in users[0].text  # the code that ran forward has returned
