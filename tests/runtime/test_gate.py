"""Ranks that stop within a step: where, all at the same event, and the effect on numbers and rows."""

import itertools
import os
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from tests.helpers.booted_ranks import drain, execute, prepare, run
from tests.helpers.small_models import loss_of
from tests.helpers.stopped_step import Channel, Meeting, beside
from tests.helpers.waiting import PATIENCE_S
from tests.runtime.test_commands import trace_of
from workbench.engine import StepAborted, cancellable_waits
from workbench.engine.classic.comm_hooks import all_reduce
from workbench.events import Edge, Kind, Phase
from workbench.protocol.breakpoints import UNTIL
from workbench.protocol.commands import Continue, Evaluate, Next, Pause, Shard, Step, Verify
from workbench.protocol.rank_messages import GiveUp, Job, RunTo, StepPosition
from workbench.runtime import rank as rank_module
from workbench.trace.invariants import check


def sharded(**options):
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), reshard_after_forward="true", **options))
    return ns


def weights(ns):
    return [p.full_tensor().sum().item() for p in ns["model"].parameters()]


def undisturbed(steps, **options):
    ns = sharded(**options)
    return [execute(Step())["losses"][0] for _ in range(steps)], weights(ns)


def place(held):
    return held.kind.key, held.edge.key, held.phase.key, held.unit


STOPS = [
    ({"event": "step"}, ("step", "begin", "idle", "")),
    ({"event": "all_gather", "unit": "blocks.1"}, ("all_gather", "begin", "forward", "blocks.1")),
    ({"event": "forward.end", "unit": "blocks.*"}, ("forward", "end", "forward", "blocks.0")),
    ({"event": "reshard", "unit": "blocks.2"}, ("reshard", "instant", "forward", "blocks.2")),
    ({"event": "backward", "unit": "blocks.1"}, ("backward", "begin", "backward", "blocks.1")),
    ({"event": "reduce_scatter", "unit": "blocks.0"}, ("reduce_scatter", "begin", "post_backward", "blocks.0")),
    ({"event": "all_gather", "when": "phase == 'pre_backward'"}, ("all_gather", "begin", "pre_backward", None)),
    ({"event": "copy_out.end", "unit": "(root)"}, ("copy_out", "end", "forward", "(root)")),
    ({"event": "optimizer"}, ("optimizer", "begin", "optimizer", "")),
    ({"event": "optimizer.end"}, ("optimizer", "end", "optimizer", "")),
    ({"event": "step.end"}, ("step", "end", "idle", "")),
]


def stopped_everywhere():
    ns = sharded()
    losses, stops = [], []
    for breakpoint_, _ in STOPS:

        def script(channel, breakpoint_=breakpoint_):
            return channel.until_held(), channel.expression("rank").text

        Channel().break_at(breakpoint_)
        done, held = beside(script, Step())
        losses += done["losses"]
        stops.append(held)
    trace = trace_of(*drain())
    names = {u.index: u.name or "(root)" for u in trace.header.units}
    stops = [(held, names.get(held.unit, ""), reported) for held, reported in stops]
    rows = trace.ranks[0].rows
    rows = rows[~np.isin(rows["kind"], (Kind.ALLOC, Kind.FREE))]  # frees by garbage collection may be anywhere
    gates = np.flatnonzero((rows["kind"] == Kind.GATE) & (rows["edge"] == Edge.END))
    after = [(Kind(r["kind"]).name.lower(), Edge(r["edge"]).name.lower()) for r in rows[gates + 1]]
    return losses, weights(ns), stops, check(trace), after


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_stop_at_the_same_event_and_numbers_are_those_of_an_undisturbed_run(world_size):
    expected = run(world_size, undisturbed, len(STOPS))
    results = run(world_size, stopped_everywhere)
    for rank, (losses, after, stops, broken, rows_after) in enumerate(results):
        assert (losses, after) == expected[rank]
        assert broken == []
        assert [held.place.step for held, _, _ in stops] == list(range(len(STOPS)))
        for (held, held_unit, reported), (_, (kind, edge, phase, unit)) in zip(stops, STOPS, strict=True):
            assert place(held)[:3] == (kind, edge, phase)
            assert unit is None or held_unit == unit
            assert held.breakpoint == 0
            assert reported == str(rank)
        assert rows_after == [(kind, edge) for _, (kind, edge, _, _) in STOPS]
    for held in zip(*(stops for _, _, stops, _, _ in results), strict=True):
        assert len({(h.place, *place(h), h.num_bytes) for h, _, _ in held}) == 1


def paused_again_and_again(meeting, times):
    """Request a pause in every 13 steps; the last of the 13 waits for the request."""
    ns = sharded()
    rank, step = ns["rank"], ns["train_step"]
    numbers, requested = itertools.count(1), [threading.Event() for _ in range(times)]
    seen = []

    def train_step():
        pauses, rest = divmod(next(numbers), 13)
        assert rest or requested[pauses - 1].wait(PATIENCE_S)
        return step()

    ns["train_step"] = train_step

    def align(channel, is_asked):
        channel(Pause())
        is_asked.set()
        target = meeting.furthest(rank, channel.until_held())
        channel(RunTo(place=StepPosition(*target)))
        held = channel.until(lambda where: where.held and where.held.place == StepPosition(*target))
        meeting.wait()
        return held.held

    def script(channel):
        for is_asked in requested:
            channel.until(lambda where: where.place.step >= 0)
            align(channel, is_asked)
            for what in ("event", "collective", "unit", "phase", "phase", "event"):
                before = channel.where().held
                channel(Next(what=what))
                held = channel.until_held()
                seen.append((what, before.phase, held.place.step, held.place.ordinal, *place(held)))
                meeting.wait()
            channel(Continue())
        return seen

    done, seen = beside(script, Step(count=40))
    return done["losses"], seen, check(trace_of(*drain()))


@pytest.mark.parametrize("world_size", [2, 4])
def test_pause_and_next_bring_all_ranks_to_the_same_event(world_size):
    results = run(world_size, paused_again_and_again, Meeting(world_size), 3)
    assert all(seen == results[0][1] for _, seen, _ in results)
    assert all(broken == [] for _, _, broken in results)
    expected = run(world_size, undisturbed, 40)
    assert [losses for losses, _, _ in results] == [losses for losses, _ in expected]
    for what, _, _, _, kind, edge, _, _ in results[0][1]:
        if what == "collective":
            assert kind in {"all_gather", "reduce_scatter"}
        if what == "unit":
            assert kind in {"forward", "backward"}
        if what in {"collective", "unit"}:
            assert edge == "begin"
    assert all(a[6] != b[6] for a, b in itertools.pairwise(results[0][1]) if b[0] == "phase")


def one_rank_only(meeting):
    ns = sharded()
    execute(Step())
    awaited = next(u.index for u in trace_of(*drain()).header.units if u.name == "blocks.2")
    Channel().break_at({"event": "all_gather", "unit": "blocks.2", "rank": 1})

    def is_awaited(newest):
        return (newest.kind, newest.edge, newest.unit) == (Kind.WAIT, Edge.BEGIN, awaited)

    def script(channel):
        if ns["rank"] != 1:
            # in step 1 and for that unit: other waits end without help
            where = channel.until(lambda where: where.waiting and where.place.step == 1 and is_awaited(where.newest))
            meeting.wait()
            meeting.wait()
            channel(Pause())  # a wait is a stop point as well
            held = channel.until_held()
            meeting.wait()
            answer = channel.evaluate("rank")
            channel(Continue())
            return where.held, held.kind.key, answer
        held = channel.until_held()
        meeting.wait()
        text = channel.evaluate("rank * 10")
        meeting.wait()
        meeting.wait()
        channel.break_at()
        channel(Continue())
        return held.kind.key, held.breakpoint, text

    done, reported = beside(script, Step())
    return done["losses"], reported


def test_a_breakpoint_of_one_rank_leaves_the_others_waiting():
    results = run(3, one_rank_only, Meeting(3))
    expected = run(3, undisturbed, 2)
    for rank, (losses, reported) in enumerate(results):
        assert losses == expected[rank][0][1:]
        assert reported == (("all_gather", 0, "10") if rank == 1 else (None, "wait", str(rank)))


def looks_from_now():
    """Return a list that grows whenever this rank reaches a stop point during a wait."""
    looks, look = [], cancellable_waits.stop_point
    cancellable_waits.stop_point = lambda: (looks.append(None), look())
    return looks


def paused_before_a_collective_of_the_users_own(meeting):
    """Rank 0 has finished its backward and waits for rank 1; then both clip the norm."""
    ns = prepare(clip=1.0)
    execute(Shard(model="model", wrap=("Block",)))
    execute(Step())
    last_wait = {"event": "wait", "unit": "(root)", "when": "phase == 'post_backward'"}
    Channel().break_at({**last_wait, "rank": 1})

    def is_through(where):
        after_backward = where.newest.phase is Phase.POST_BACKWARD and where.newest.kind is Kind.COPY_OUT
        return where.waiting and (after_backward or where.newest.kind is Kind.ALL_REDUCE)

    def script(channel):
        where = channel.until(lambda where: where.held if ns["rank"] else is_through(where))
        furthest = StepPosition(*meeting.furthest(ns["rank"], where))
        channel.break_at()
        channel(Pause())
        looks = looks_from_now()
        if not ns["rank"]:
            channel.until(lambda where: where.held or len(looks) > 1)  # it was at a stop point, and waits again
        meeting.wait()
        channel(RunTo(place=furthest))
        held = channel.until_held()
        meeting.wait()
        channel(Continue())
        return held.place > where.place, place(held)

    done, reported = beside(script, Step())
    return done["losses"], reported


def clipped_after_a_sum(params, max_norm):
    """An engine collective without an event, like a grad scaler's, then one of the user's."""
    all_reduce(torch.ones(()), dist.ReduceOp.SUM, dist.group.WORLD, "all-reduce")
    clip_grad_norm_(params, max_norm)


# over shared memory rank 0 waits for the readers of its gradients, over gloo in that sum
@pytest.mark.parametrize(
    ("comm", "clip", "place"),
    [
        ("", clip_grad_norm_, ("all_reduce", "begin", "idle", -1)),
        ("gloo", clipped_after_a_sum, ("wait", "begin", "idle", -1)),
    ],
)
def test_a_rank_is_not_held_in_a_wait_without_an_event_as_others_may_be_past_it(comm, clip, place, monkeypatch):
    monkeypatch.setenv("WORKBENCH_COMM", comm)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    (_, (moved, where)), (_, (other_moved, other_where)) = run(
        2, paused_before_a_collective_of_the_users_own, Meeting(2)
    )
    assert where == other_where == place
    assert (moved, other_moved) == (False, True)


def give_up(how, event, meeting):
    ns = sharded()
    first = execute(Step())["losses"]
    Channel().break_at({"event": event, "unit": "blocks.1"})

    def script(channel):
        channel.until_held()
        meeting.wait()
        if how == "abort":
            channel(GiveUp(reason="the user gave up"))
        else:
            os.kill(os.getpid(), signal.SIGINT)
        channel.until(lambda where: where.doing == "")
        return channel(Job(ticket="late", work=Evaluate(expr="1")))

    handler = signal.getsignal(signal.SIGINT)
    error, accepted = beside(script, Step())
    meeting.wait()
    rank_module.recover(1)
    ns["opt"].zero_grad()
    ns["generator"].manual_seed(ns["rank"])
    after = execute(Step(count=2))["losses"]
    assert signal.getsignal(signal.SIGINT) is handler
    return first, type(error).__name__, str(error), accepted, after, check(trace_of(*drain()))


def restarted():
    ns = sharded()
    first = execute(Step())["losses"]
    ns["generator"].manual_seed(ns["rank"])
    return first + execute(Step(count=2))["losses"]


@pytest.mark.parametrize("event", ["all_gather", "backward"])
@pytest.mark.parametrize("how", ["abort", "interrupt"])
def test_an_abort_while_held_leaves_a_usable_rank(how, event):
    expected = run(2, restarted)
    for rank, (first, name, text, accepted, after, broken) in enumerate(run(2, give_up, how, event, Meeting(2))):
        reported = {"abort": (StepAborted.__name__, "the user gave up"), "interrupt": ("KeyboardInterrupt", "")}
        assert (name, text) == reported[how]
        assert not accepted
        assert first + after == expected[rank]
        assert broken == []


def change_a_parameter(when):
    ns = sharded()
    change = "with torch.no_grad():\n    p = next(model.blocks[1].parameters())\n    p.to_local().add_(0.5)"
    ns["torch"] = torch
    if when == "before":
        exec(change, ns)
        return execute(Step(count=2))["losses"]
    Channel().break_at({"event": "forward", "unit": "blocks.0", "once": True})  # blocks.1 is sharded, not gathered yet

    def script(channel):
        channel.until_held()
        return channel.cell(change)

    done, answer = beside(script, Step(count=2))
    assert answer.error is None, answer
    return done["losses"]


def test_a_parameter_changed_while_stopped_is_used_afterwards():
    held, before = run(2, change_a_parameter, "held"), run(2, change_a_parameter, "before")
    assert held == before
    assert held != [losses for losses, _ in run(2, undisturbed, 2)]


def accumulating(ns):
    def train_step():
        for micro in range(2):
            ns["model"].set_requires_gradient_sync(micro == 1)
            tokens = torch.randint(7, (4, 6), generator=ns["generator"])
            loss = loss_of(ns["model"], tokens)
            loss.backward()
        ns["opt"].step()
        ns["opt"].zero_grad()
        return loss.item()

    ns["train_step"] = train_step


def stopped_under_accumulation(stops):
    ns = sharded(prefetch=2)
    accumulating(ns)
    execute(Step())
    if stops:
        Channel().break_at({"event": "backward.end", "unit": "blocks.1"}, {"event": "forward", "unit": "blocks.0"})

    def script(channel):
        reported = []
        for _ in range(4 * stops):
            held = channel.until_held()
            gathered = channel.inspect("blocks.2.mlp.0.weight")
            grad = channel.inspect("blocks.1.mlp.0.weight")
            reported.append((held.kind.key, gathered.full.state.words, grad.full_grad is not None))
            channel(Continue())
        return reported

    done, reported = beside(script, Step())
    return done["losses"], weights(ns), reported


def test_stops_with_prefetch_in_flight_and_under_accumulation_change_nothing():
    plain, stopped = run(2, stopped_under_accumulation, 0), run(2, stopped_under_accumulation, 1)
    assert [r[:2] for r in plain] == [r[:2] for r in stopped]
    for _, _, reported in stopped:
        assert [kind for kind, _, _ in reported] == ["forward", "backward", "forward", "backward"]
        assert [state for kind, state, _ in reported if kind == "forward"] == ["all-gather in flight"] * 2
        assert [grad for _, _, grad in reported] == [False, True, True, True]


def nothing_holds_outside_of_steps():
    ns = prepare()
    channel = Channel()
    channel(Pause())
    channel.break_at({"event": "all_gather"}, {"event": "forward"}, {"event": "wait"})
    execute(Shard(model="model"))
    ok = execute(Verify())["ok"]
    with torch.no_grad():
        ns["model"](torch.zeros(1, 2, dtype=torch.long))
    channel.break_at()
    channel(Continue())
    return ok, execute(Step())["steps_done"], bool((trace_of(*drain()).ranks[0].rows["kind"] == Kind.GATE).any())


def test_nothing_holds_a_rank_outside_of_steps():
    assert run(2, nothing_holds_outside_of_steps) == [(True, 1, False)] * 2


def until():
    """Two steps that stop once, although breakpoints are replaced meanwhile; then one that reaches the event again."""
    sharded()

    def script(channel):
        first = channel.until_held()
        channel.break_at({"event": "optimizer"})
        channel(Continue())
        channel.until(lambda where: where.held is not None and where.held.kind is Kind.OPTIMIZER)
        return first

    done, held = beside(script, Step(count=2, until="backward:blocks.1"))
    return held.breakpoint, place(held)[:3], done["steps_done"], execute(Step())["steps_done"]


def test_until_stops_once_and_ends_with_its_steps():
    assert run(2, until) == [(UNTIL, ("backward", "begin", "backward"), 2, 1)] * 2


def own_loop():
    """A training loop in a cell: it is not a command, yet it stops."""
    ns = sharded()
    channel = Channel()
    channel.break_at({"event": "optimizer"})
    reported = []

    def script():
        reported.append(channel.until_held().place.step)
        reported.append(channel.cell("opt.zero_grad(); model(torch.zeros(1, 2, dtype=torch.long)); 7").text)
        channel.break_at()
        channel(Continue())

    ns["torch"] = torch
    thread = threading.Thread(target=script)
    thread.start()
    ns["train_step"]()
    ns["train_step"]()
    thread.join()
    rows = trace_of(*drain()).ranks[0].rows
    return reported, rows["step"][rows["kind"] == Kind.STEP].tolist()


def test_a_user_loop_stops_and_cells_inside_end_no_step():
    for reported, steps in run(2, own_loop):
        assert reported == [0, "7\n"]
        assert steps == [0, 0, 1, 1]


def interrupted_in_user_code(times):
    ns = sharded()
    plain = ns["train_step"]
    ns["reached"] = []

    def train_step():
        for number in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            ns["reached"].append(number)
        return plain()

    ns["train_step"] = train_step
    try:
        execute(Step())
    except KeyboardInterrupt:
        return ns["reached"]
    return None


def test_the_first_interrupt_waits_for_the_gate_and_the_second_does_not():
    assert run(1, interrupted_in_user_code, 1) == [[0]]
    assert run(1, interrupted_in_user_code, 3) == [[0]]
