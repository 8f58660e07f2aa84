"""An FSDP of one's own in the cells of a notebook: stopped at its all-gather, inspected, given up, trained on."""

from tests.helpers.booted_ranks import drain, execute, namespace, run
from tests.helpers.own_fsdp import FSDP, run_cells
from tests.helpers.stopped_step import Channel, Meeting, beside
from tests.runtime.test_gate import trace_of
from workbench.events import Kind, UnitState
from workbench.protocol.commands import Continue, Step
from workbench.protocol.rank_messages import GiveUp
from workbench.runtime import rank as rank_module
from workbench.trace import check

WEIGHT = "blocks.1.0.weight"  # the first of the flat parameter


def prepare():
    return run_cells(*FSDP, names=namespace())


def undisturbed(count):
    prepare()
    return execute(Step(count=count))["losses"]


def stopped(meeting):
    prepare()
    Channel().break_at({"event": "all_gather", "unit": "blocks.1"}, {"event": "backward", "unit": "blocks.1"})

    def script(channel):
        found = []
        for _ in range(3):  # before the all-gathers of forward and backward, and before the backward
            held = channel.until_held()
            inspected = channel.inspect(WEIGHT)
            found.append((held.kind, held.phase.key, inspected))
            meeting.wait()
            channel(Continue())
            channel.until(lambda where, held=held: where.held is None or where.held.place != held.place)
        channel.break_at()
        meeting.wait()
        return found

    done, found = beside(script, Step(count=3))
    return done["losses"], found, check(trace_of(*drain()))


def test_a_step_stops_at_its_all_gather_and_its_tensors_are_inspected():
    expected = run(2, undisturbed, 3)
    for rank, (losses, found, broken) in enumerate(run(2, stopped, Meeting(2))):
        assert losses == expected[rank]
        assert broken == []
        assert [(kind, phase) for kind, phase, _ in found] == [
            (Kind.ALL_GATHER, "forward"),
            (Kind.ALL_GATHER, "pre_backward"),
            (Kind.BACKWARD, "backward"),
        ]
        for kind, _, inspected in found:
            assert (inspected.unit, inspected.global_shape) == ("blocks.1", (256, 64))
            # of 33,088 elements of the block, rank 0 has 16,544: all of this weight and more
            assert (inspected.shard.num_rows, inspected.shard.of_rows) == (16384 if rank == 0 else 0, 16384)
            is_full = kind is Kind.BACKWARD
            assert inspected.full.state is (UnitState.UNSHARDED if is_full else UnitState.SHARDED)
            assert (inspected.full.values is not None) == is_full
        assert found[-1][2].full.values.shape == (256, 64)


def given_up(event, meeting):
    ns = prepare()
    execute(Step())
    Channel().break_at({"event": event, "unit": "blocks.1"})

    def script(channel):
        channel.until_held()
        meeting.wait()
        channel(GiveUp(reason="the user gave up"))
        channel.until(lambda where: where.doing == "")

    error, _ = beside(script, Step())
    meeting.wait()
    rank_module.recover("1")
    ns["optimizer"].zero_grad()
    after = execute(Step(count=2))["losses"]
    return str(error), after, ns["losses"], check(trace_of(*drain()))


def test_a_step_that_is_given_up_leaves_a_model_that_trains_on():
    for event in ("all_gather", "reduce_scatter"):
        expected = run(2, undisturbed, 3)
        for rank, (error, after, losses, broken) in enumerate(run(2, given_up, event, Meeting(2))):
            assert "the user gave up" in error
            assert losses == expected[rank]
            assert after == expected[rank][1:]
            assert broken == []
