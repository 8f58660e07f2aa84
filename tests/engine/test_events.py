"""The events of a rank during a step, and how often it communicates."""

import functools

import pytest

from tests.helpers.expected_sizes import BLOCK_SHAPES, BLOCKS, DIM, FP32, NET, ROOT_SHAPES, UNITS, VOCAB, slots
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.recording_probe import (
    ROOT,
    Recording,
    begin_reduce,
    begin_unshard,
    end_reduce,
    end_unshard,
    recording,
    span,
)
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.events import Edge, Kind, Phase

POLICIES = (None, True, False)


def one_step(reshard: bool | None, steps: int = 1) -> Recording:
    """Train; recording starts after the first step, so that it contains no one-time events."""
    with recording() as record:
        model = shard_net(make_net(**NET), reshard_after_forward=reshard)
        for step in range(steps + 1):
            record.clear()
            loss_of(model, batch(0, step)).backward()
    return record


def expected_forward(reshard: bool | None, *, alone: bool) -> list[str]:
    """Each unit's forward is preceded by the start of the all-gather of the unit that ran next last time."""
    inner = reshard is not False
    begin = functools.partial(begin_unshard, alone=alone)
    end = functools.partial(end_unshard, alone=alone)
    return [
        *begin(ROOT),
        *begin("blocks.0"),
        *end(ROOT),
        "FORWARD BEGIN root",
        *end("blocks.0"),
        *begin("blocks.1"),
        "FORWARD BEGIN blocks.0",
        "FORWARD END blocks.0",
        *(["RESHARD INSTANT blocks.0"] if inner else []),
        *end("blocks.1"),
        "FORWARD BEGIN blocks.1",
        "FORWARD END blocks.1",
        *(["RESHARD INSTANT blocks.1"] if inner else []),
        "FORWARD END root",
        *(["RESHARD INSTANT root"] if reshard is True else []),
    ]


def _whole_unshard(unit: str, *, alone: bool) -> list[str]:
    return [*begin_unshard(unit, alone=alone), *end_unshard(unit, alone=alone)]


def expected_backward(reshard: bool | None, *, alone: bool) -> list[str]:
    """Each unit's all-gather starts while the unit after it runs; each reduction ends when the next one starts."""
    again = reshard is not False
    begin = functools.partial(begin_unshard, alone=alone)
    end = functools.partial(end_unshard, alone=alone)
    start_reduce = (lambda unit: span("COPY_IN", unit)) if alone else begin_reduce
    finish_reduce = (lambda _: []) if alone else end_reduce
    return [
        *(_whole_unshard(ROOT, alone=alone) if reshard is True else []),
        *(begin("blocks.1") if again else []),
        "BACKWARD BEGIN root",
        *(end("blocks.1") if again else []),
        *(begin("blocks.0") if again else []),
        "BACKWARD BEGIN blocks.1",
        "BACKWARD END blocks.1",
        "RESHARD INSTANT blocks.1",
        *start_reduce("blocks.1"),
        *(end("blocks.0") if again else []),
        "BACKWARD BEGIN blocks.0",
        "BACKWARD END blocks.0",
        "RESHARD INSTANT blocks.0",
        *finish_reduce("blocks.1"),
        *start_reduce("blocks.0"),
        "BACKWARD END root",
        "RESHARD INSTANT root",
        *finish_reduce("blocks.0"),
        *start_reduce(ROOT),
        *finish_reduce(ROOT),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("reshard", POLICIES)
def test_sequence_of_events_of_a_step(world_size, reshard):
    alone = world_size == 1
    expected = [*expected_forward(reshard, alone=alone), *expected_backward(reshard, alone=alone)]
    for record in run_ranks(world_size, one_step, reshard):
        assert record.events == expected


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("reshard", POLICIES)
def test_collectives_equal_the_closed_form(world_size, reshard):
    num_units = BLOCKS + 1
    root, block = slots(world_size, ROOT_SHAPES), slots(world_size, BLOCK_SHAPES)
    model = root + BLOCKS * block
    gathered = {None: 2 * model - root, True: 2 * model, False: model}[reshard]
    gathers = {None: 2 * num_units - 1, True: 2 * num_units, False: num_units}[reshard]
    for record in run_ranks(world_size, one_step, reshard):
        assert record.count(Kind.ALL_GATHER).total() == gathers
        assert record.count(Kind.ALL_GATHER) == record.count(Kind.ALL_GATHER, Edge.END)
        assert record.payload(Kind.ALL_GATHER) == world_size * gathered * FP32
        assert record.count(Kind.REDUCE_SCATTER) == dict.fromkeys(UNITS, 1)
        assert record.count(Kind.REDUCE_SCATTER) == record.count(Kind.REDUCE_SCATTER, Edge.END)
        assert record.payload(Kind.REDUCE_SCATTER) == world_size * model * FP32


def test_a_single_rank_does_no_collective():
    (record,) = run_ranks(1, one_step, None)
    assert {kind for kind, *_ in record.rows} == {
        Kind.FORWARD,
        Kind.BACKWARD,
        Kind.UNSHARD,
        Kind.RESHARD,
        Kind.COPY_OUT,
        Kind.COPY_IN,
    }
    assert record.groups == {}


def test_collectives_have_the_same_numbers_on_all_ranks_and_their_true_end():
    records = run_ranks(2, one_step, None, 2)
    issued = [
        [(kind, record.name(unit), comm) for kind, edge, unit, _, comm, _ in record.rows if comm and edge is Edge.BEGIN]
        for record in records
    ]
    assert issued[0] == issued[1]
    for record in records:
        assert list(record.groups.values()) == [(0, 1)]
        comms = [
            (comm.group, comm.seq)
            for kind, edge, _, _, comm, _ in record.rows
            if edge is Edge.BEGIN and kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}
        ]
        # two earlier steps, each 2G - 1 + G collectives, G = 3; the comparison of models is not counted
        assert comms == [(next(iter(record.groups)), seq) for seq in range(16, 24)]
        ends = [row for row in record.rows if row[1] is Edge.END and row[0] in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}]
        assert all(t_ns > 0 for *_, t_ns in ends)
        others = [row for row in record.rows if row not in ends]
        assert all(t_ns is None for *_, t_ns in others)


def test_phases_of_a_step():
    (record,) = run_ranks(1, one_step, None)
    backward_of_unit = [Phase.PRE_BACKWARD, Phase.BACKWARD]
    assert record.phases == [
        *[Phase.FORWARD] * 3,  # root, blocks.0, blocks.1
        Phase.IDLE,
        *backward_of_unit,  # root
        *backward_of_unit,  # blocks.1
        Phase.POST_BACKWARD,
        *backward_of_unit,  # blocks.0
        Phase.POST_BACKWARD,
        Phase.POST_BACKWARD,  # root
        Phase.IDLE,
    ]


def units_in_order() -> list[list[str]]:
    model = shard_net(make_net(**NET))
    order = model._get_fsdp_state()._comm_ctx.post_forward_order
    seen = []
    for fails in (False, True, False):
        loss = loss_of(model, batch(0, 0))
        seen.append([state._fsdp_param_group.name for state in order])
        if fails:
            model.reset_iter_state()
        else:
            loss.backward()
        seen.append([state._fsdp_param_group.name for state in order])
    return seen


def test_the_order_of_forwards_is_forgotten_after_a_backward_or_a_reset():
    assert run_ranks(1, units_in_order) == [[["blocks.0", "blocks.1", ""], []] * 3]


def units_of(reshard: bool | None) -> dict[str, tuple]:
    with recording() as record:
        model = shard_net(make_net(**NET), reshard_after_forward=reshard)
        before = [(u.name, u.root) for u in record.units.values()]
        model(batch(0, 0))
    assert before == [("blocks.0", -1), ("blocks.1", -1), ("", -1)]
    return record.units


@pytest.mark.parametrize("reshard", POLICIES)
def test_units_are_announced_with_their_names_policy_and_layout(reshard):
    units = run_ranks(2, units_of, reshard)[1]
    inner = reshard is not False
    root = max(units)
    assert [(u.name, u.root, u.reshard_after_forward) for u in units.values()] == [
        ("blocks.0", root, inner),
        ("blocks.1", root, inner),
        ("", root, reshard is True),
    ]
    assert [p.fqn for p in units[root].params] == ["scale", "embed.weight", "head.weight"]
    embed = units[root].params[1]
    assert (embed.shape, embed.dtype, embed.itemsize) == ((VOCAB, DIM), "float32", FP32)
    assert (embed.rows_per_rank, embed.padded_rows, embed.trainable) == ((4, 3), 4, True)
    assert [p.fqn for p in units[root - 1].params][:2] == ["blocks.1.norm.weight", "blocks.1.norm.bias"]
    assert all((u.shard_size, u.retired) == (2, False) for u in units.values())
