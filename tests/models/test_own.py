"""An FSDP of one's own announces its units: the sequence of events, bytes, order of calls, and nothing unwatched."""

import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.own_fsdp import FSDP, PLAIN, run_cells
from tests.helpers.waiting import eventually
from tests.helpers.watched import recorded, watch
from workbench.engine import probe
from workbench.events import Category, Edge, Kind, Phase
from workbench.models.own import OwnParam, OwnUnits, log_metric
from workbench.replay import memory, training
from workbench.replay.collectives import compare
from workbench.trace import TraceBuilder, advance, check, steps

WIDTH, BLOCKS = 64, 4
BLOCK_NUMEL = 2 * 4 * WIDTH * WIDTH + 5 * WIDTH
HEAD_NUMEL = 3 * WIDTH + 3


def trained(num_steps=2, *, unwatched=False):
    names = run_cells(*FSDP, unwatched=unwatched)
    for _ in range(num_steps):
        names["train_step"]()
    return names["losses"]


def trained_twice(num_steps, **options):
    """Return the losses of steps, after a comparison with those of unsharded training."""
    losses = trained(num_steps, **options)
    expected = run_cells(*FSDP, PLAIN, **options)["expected"]
    torch.testing.assert_close(losses, expected[:num_steps])
    return losses


def freed(category):
    """Wait until no byte of a class is left: the transport's threads drop a collective's tensors after its end."""
    return eventually(lambda: not probe.active.drain().key_frame.bytes_by_category[category])


def trained_and_freed():
    trained()
    return [freed(category) for category in (Category.UNSHARDED_GRADS, Category.SHARDED_GRADS)]


def words(rank, **columns):
    """Return the events of a rank's rows as ``(kind, edge, unit)``, without those that are not of a unit's progress."""
    rows = rank.rows
    for name, value in columns.items():
        rows = rows[rows[name] == value]
    return [
        (Kind(kind), Edge(edge), unit)
        for kind, edge, unit in rows[["kind", "edge", "unit"]].tolist()
        if Kind(kind).info.is_event and unit >= 0
    ]


def test_its_losses_are_those_of_unsharded_training_watched_or_not():
    plain = run_ranks(2, lambda: trained_twice(5, unwatched=True))
    assert run_ranks(2, lambda: trained_twice(5)) == plain
    assert watch(2, lambda: trained_twice(5)).results == plain


def test_the_sequence_of_events_of_a_unit():
    trace = watch(2, trained).trace
    assert [(unit.name, unit.root) for unit in trace.header.units] == [(f"blocks.{i}", 4) for i in range(4)] + [("", 4)]
    assert "my fsdp" in trace.header.producer
    assert steps(trace) == [0, 1]
    begin, end, instant = Edge
    gathered = [(Kind.UNSHARD, begin), (Kind.ALL_GATHER, begin), (Kind.WAIT, begin), (Kind.WAIT, end)]
    gathered += [(Kind.ALL_GATHER, end), (Kind.UNSHARD, end)]
    reduced = [(Kind.REDUCE_SCATTER, begin), (Kind.WAIT, begin), (Kind.WAIT, end), (Kind.REDUCE_SCATTER, end)]
    forward = [*gathered, (Kind.FORWARD, begin), (Kind.FORWARD, end)]
    backward = [*gathered, (Kind.BACKWARD, begin), (Kind.BACKWARD, end), (Kind.RESHARD, instant), *reduced]
    for rank in trace.ranks:
        block = [(kind, edge) for kind, edge, _ in words(rank, step=1, unit=2)]
        assert block == [*forward, (Kind.RESHARD, instant), *backward]
        root = [(kind, edge) for kind, edge, _ in words(rank, step=1, unit=4)]
        assert root == [*forward, *backward[len(gathered) :]]
        phases = {
            kind: Phase(rank.rows["phase"][rank.rows["kind"] == kind][0]) for kind in (Kind.FORWARD, Kind.BACKWARD)
        }
        assert phases == {Kind.FORWARD: Phase.FORWARD, Kind.BACKWARD: Phase.BACKWARD}


@pytest.mark.parametrize("world_size", [2, 3])
def test_its_collectives_are_those_of_the_formula(world_size):
    trace = watch(world_size, trained).trace
    for step in (0, 1):
        found = compare(trace, step)
        assert {row.unit for row in found} == set(range(5))
        assert not [row for row in found if row.differs]
        assert sum(row.calls for row in found if row.kind is Kind.ALL_GATHER) == 9
        assert sum(row.calls for row in found if row.kind is Kind.REDUCE_SCATTER) == 5


@pytest.mark.parametrize("world_size", [1, 2])
def test_bytes_by_class(world_size):
    trace = watch(world_size, trained_and_freed).trace
    block, root = (4 * -(-numel // world_size) * world_size for numel in (BLOCK_NUMEL, HEAD_NUMEL))
    shards = (BLOCKS * block + root) // world_size
    for rank in trace.ranks:
        peak = memory.peak(trace.slice(step=1).rank(rank.rank))
        held = dict(zip(Category, peak.bytes_by_category, strict=True))
        assert held.pop(Category.UNSHARDED_GRADS) in (
            block,
            2 * block,
        )  # the transport may not have dropped the last ones
        assert {category: num_bytes for category, num_bytes in held.items() if num_bytes} == {
            Category.SHARDED_PARAMS: shards,
            Category.OPTIMIZER_STATE: 2 * shards + 5 * 4,  # and a step number of each flat parameter
            Category.UNSHARDED_PARAMS: block + root,  # at the end of the last block's backward
            Category.SHARDED_GRADS: (BLOCKS - 1) * block // world_size,
        }
        moves = rank.rows[(rank.rows["unit"] == 1) & (rank.rows["category"] < len(Category))]
        sums = Counter()
        for category, num_bytes in moves[["category", "num_bytes"]].tolist():
            sums[Category(category), num_bytes > 0] += abs(num_bytes)
        for category, num_bytes in {
            Category.ALL_GATHER_BUFFERS: 4 * block,  # until its output is the full parameters
            Category.UNSHARDED_PARAMS: 4 * block,
            Category.UNSHARDED_GRADS: 2 * block,  # from the end of backward until the reduce-scatter is over
            Category.SHARDED_GRADS: 2 * block // world_size,
        }.items():
            assert sums[category, True] == sums[category, False] == num_bytes, category
        end = advance(rank.start, rank.rows)
        assert end.unit_states == end.reducing == {}
        held = dict(zip(Category, end.bytes_by_category, strict=True))
        left = {category for category, num_bytes in held.items() if num_bytes}
        assert left <= {Category.SHARDED_PARAMS, Category.OPTIMIZER_STATE}


# ---- the order of calls, on one rank


def one(units=None, name="layer", **options):
    """Return a unit with a parameter of 4 rows, and its full parameter."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    shard = nn.Parameter(torch.ones(4 // size, 3))
    units = OwnUnits("mine") if units is None else units
    return units.add(name, [OwnParam(f"{name}.weight", (4, 3), shard)], **options), torch.ones(4, 3)


def unsharded(unit, full):
    with unit.unshard():
        pass
    unit.end_unshard(full)


def reshard_first():
    unit, _ = one()
    unit.reshard()


def unshard_twice():
    unit, full = one()
    unsharded(unit, full)
    with unit.unshard():
        pass


def end_without_unshard():
    unit, full = one()
    unit.end_unshard(full)


def forward_without_parameters():
    unit, _ = one()
    with unit.forward():
        pass


def forward_in_forward():
    unit, full = one()
    unsharded(unit, full)
    with unit.forward(), unit.forward():
        pass


def backward_while_forward_waits():
    unit, _ = one()
    unit.begin_forward()
    unit.begin_backward()


def backward_ends_first():
    unit, _ = one()
    unit.end_backward()


def reduce_in_reduce():
    unit, full = one()
    with unit.reduce(full), unit.reduce(full):
        pass


def copy_outside():
    unit, _ = one()
    with unit.copy_in():
        pass


def a_full_parameter_of_another_shape():
    unit, _ = one()
    unsharded(unit, torch.ones(3, 4))


def other_names():
    unit, full = one()
    unsharded(unit, {"bias": full})


def a_shard_of_another_shape():
    OwnUnits("mine").add("layer", [OwnParam("layer.weight", (4, 3), torch.ones(3, 3))])


def rows_that_do_not_add_up():
    OwnUnits("mine").add("layer", [OwnParam("layer.weight", (4, 3), torch.ones(4, 3), rows_per_rank=(3,))])


def no_such_dimension():
    OwnUnits("mine").add("layer", [OwnParam("layer.weight", (4, 3), torch.ones(4, 3), dim=2)])


def parts_that_are_too_many():
    OwnUnits("mine").add("layer", [OwnParam("flat", (4,), torch.ones(4), parts={"weight": (2, 3)})])


def the_same_unit_twice():
    units = OwnUnits("mine")
    kept = one(units)
    one(units)
    return kept


def the_same_parameter_twice():
    params = [OwnParam("weight", (1,), torch.ones(1))] * 2
    OwnUnits("mine").add("layer", params)


def no_parameters():
    OwnUnits("mine").add("layer", [])


def a_comma():
    OwnUnits("mine, yours")


REFUSED = {
    reshard_first: "unit layer is not unsharded, so it cannot be resharded: call end_unshard(full) before",
    unshard_twice: "unit layer is unsharded already: call reshard() before the next unshard()",
    end_without_unshard: "unit layer has no unshard to end: put its all-gather into `with unit.unshard():`",
    forward_without_parameters: "forward of unit layer ends, but nothing unsharded it: call end_unshard(full) before",
    forward_in_forward: "forward of unit layer has begun and not ended, and its forward begins: call end_forward()",
    backward_while_forward_waits: "forward of unit layer has begun and not ended, and its backward begins",
    backward_ends_first: "backward of unit layer ends, but has not begun: call begin_backward() before",
    reduce_in_reduce: "unit layer is in a reduction already: leave its `with unit.reduce():` before",
    copy_outside: "copy-in of unit layer belongs into `with unit.unshard():` or `with unit.reduce():`",
    a_full_parameter_of_another_shape: "full parameter layer.weight of unit layer has shape (3, 4), not (4, 3)",
    other_names: "unit layer has the parameters layer.weight; expected a tensor for each, got bias",
    a_shard_of_another_shape: "parameter layer.weight of unit layer has a shard of shape (3, 3) on rank 0; expected (4",
    rows_that_do_not_add_up: "parameter layer.weight of unit layer has 4 rows for 1 ranks; rows_per_rank says (3,)",
    no_such_dimension: "parameter layer.weight of unit layer has shape (4, 3), and no dimension 2 to split",
    parts_that_are_too_many: "parameter flat of unit layer has 6 elements in its parts, and shape (4,)",
    the_same_unit_twice: "mine has a unit layer already: give each unit its own name",
    the_same_parameter_twice: "unit layer has two parameters of one name: weight, weight",
    no_parameters: "unit layer has no parameters: add only units that shard some",
    a_comma: "a source of events needs a name without commas, not 'mine, yours'",
}


def refusals():
    said = {}
    for wrong in REFUSED:
        with pytest.raises(ValueError, match=r"\w+") as refused:
            wrong()
        said[wrong.__name__] = str(refused.value)
    return said


def test_a_wrong_order_is_refused_in_a_sentence_and_the_trace_stays_valid():
    seen = watch(1, refusals)  # which checks the trace's rules
    for wrong, sentence in REFUSED.items():
        assert seen.results[0][wrong.__name__].startswith(sentence)


def unwatched():
    assert probe.active is None
    unit, full = one()
    unit.reshard()
    unit.end_backward()
    with unit.forward(), unit.unshard(), unit.copy_in(), unit.copy_out(), unit.reduce(full):
        unit.end_unshard(full)
    log_metric("loss", "no number")
    gone = weakref.ref(full)
    del full
    return gone() is None, unit.tensors()["layer.weight"].full


def test_where_nothing_records_nothing_is_checked_or_kept():
    assert run_ranks(1, unwatched) == [(True, None)]


def two_pieces():
    """Prefetch the second of two units, and wait for it later; gather with copies, on the second dimension."""
    rank, size = dist.get_rank(), dist.get_world_size()
    units = OwnUnits("mine")
    shards = [torch.full((3, 4), float(rank)) for _ in range(2)]
    first, second = (
        units.add(name, [OwnParam("w", (3, 4 * size), shard, dim=1)]) for name, shard in zip("ab", shards, strict=True)
    )
    outputs = [torch.empty(size, 3, 4) for _ in shards]
    with first.forward():
        for unit, output, shard in zip((first, second), outputs, shards, strict=True):
            with unit.unshard():
                with unit.copy_in():
                    flat = shard.flatten()
                work = dist.all_gather(list(output.flatten(1)), flat, async_op=unit is second)
        with first.unshard(), first.copy_out():
            full = outputs[0].movedim(0, 1).reshape(3, -1)
        first.end_unshard(full)
    with second.forward():
        with second.unshard():
            work.wait()
        second.end_unshard(outputs[1].movedim(0, 1).reshape(3, -1))
        found = second.tensors()["w"].full.tolist()
    del outputs, output, work
    first.reshard()
    second.reshard()
    return found, freed(Category.ALL_GATHER_BUFFERS)


def test_a_prefetched_unit_ends_its_unshard_when_it_is_waited_for():
    seen = watch(2, two_pieces)
    assert seen.results[0] == ([[0.0] * 4 + [1.0] * 4] * 3, True)
    for rank in seen.trace.ranks:
        kinds = [
            (kind, edge, unit)
            for kind, edge, unit in words(rank)
            if kind in (Kind.UNSHARD, Kind.FORWARD, Kind.COPY_IN, Kind.COPY_OUT)
        ]
        begin, end, _ = Edge
        assert kinds == [
            (Kind.UNSHARD, begin, 0),
            (Kind.COPY_IN, begin, 0),
            (Kind.COPY_IN, end, 0),
            (Kind.UNSHARD, begin, 1),
            (Kind.COPY_IN, begin, 1),
            (Kind.COPY_IN, end, 1),
            (Kind.COPY_OUT, begin, 0),
            (Kind.COPY_OUT, end, 0),
            (Kind.UNSHARD, end, 0),
            (Kind.FORWARD, begin, 0),
            (Kind.FORWARD, end, 0),
            (Kind.UNSHARD, end, 1),
            (Kind.FORWARD, begin, 1),
            (Kind.FORWARD, end, 1),
        ]
        copied = {
            kind: set(rank.rows["num_bytes"][rank.rows["kind"] == kind]) for kind in (Kind.COPY_IN, Kind.COPY_OUT)
        }
        assert copied == {Kind.COPY_IN: {48}, Kind.COPY_OUT: {96}}
        waits = rank.rows[(rank.rows["kind"] == Kind.WAIT) & (rank.rows["unit"] == 1)]
        assert len(waits) == 2


def failing(unit, full, *, cleans_up):
    with unit.forward():
        unsharded(unit, full)
        try:
            raise RuntimeError("no luck")
        finally:
            if cleans_up:
                unit.reshard()


def given_up():
    unit, full = one()
    for cleans_up in (True, False):
        with pytest.raises(RuntimeError, match="no luck"):
            failing(unit, full, cleans_up=cleans_up)
    unit.end_forward()  # as code does that unwinds by itself: the forward is over
    with unit.forward():
        unsharded(unit, full)
    unit.reshard()
    with pytest.raises(ValueError, match="not unsharded"):
        unit.reshard()


def test_after_an_error_the_unit_is_reset_and_goes_on():
    rank = watch(1, given_up).trace.ranks[0]
    kinds = [kind for kind, edge, _ in words(rank) if edge is not Edge.BEGIN]
    unshard, forward, reshard, reset = Kind.UNSHARD, Kind.FORWARD, Kind.RESHARD, Kind.RESET
    assert kinds == [unshard, reshard, reset, unshard, reset, unshard, forward, reshard]
    assert not advance(rank.start, rank.rows).bytes_by_category[Category.UNSHARDED_PARAMS]


def dropped():
    units = OwnUnits("mine")
    first, _ = one(units, "first")
    one(units, "second")  # dropped at once
    again, _ = one(OwnUnits("mine"))  # another model of the same source's name
    gc.collect()
    probe.active.note_gone()
    return [unit.gone for unit in probe.active.header.units], [
        len(probe.active.tensors(unit.info.index)) for unit in (first, again)
    ]


def test_a_unit_exists_as_long_as_its_model_and_models_may_share_a_name():
    seen = watch(1, dropped)
    assert seen.results[0] == ([False, True, False], [1, 1])
    end = advance(seen.trace.ranks[0].start, seen.trace.ranks[0].rows)
    assert end.bytes_by_category[Category.SHARDED_PARAMS] == 0


def logged():
    names = run_cells(*FSDP)
    for _ in range(2):
        log_metric("loss", names["train_step"]())
    return names["losses"]


def test_a_logged_loss_belongs_to_its_step():
    seen = watch(1, logged)
    found = training.advance(training.start(), seen.trace.ranks[0].rows).values
    assert found["step"].tolist() == [0, 1]
    assert found["value"].tolist() == seen.results[0]


def recorded_again():
    """Train unwatched, watched, unwatched and watched: the second time the root is unsharded when watching begins."""
    names = run_cells(*FSDP)
    root = names["model"]
    names["train_step"]()
    first = recorded(names["train_step"])
    root.unshard()
    root.reshard()
    root.unshard()

    def resharded_then_trained():
        root.reshard()
        names["train_step"]()
        return names["losses"]

    return [first, recorded(resharded_then_trained)]


def test_units_that_exist_before_are_introduced_to_each_recorder():
    results = run_ranks(1, recorded_again)[0]
    for _, header, drained in results:
        builder = TraceBuilder()
        builder.update_header(header, rank=0)
        builder.append(0, drained.rows, lost=drained.lost, key_frame=drained.key_frame)
        trace = builder.snapshot()
        assert check(trace) == []
        assert [unit.name for unit in trace.header.units if unit.in_use][:5] == [f"blocks.{i}" for i in range(4)] + [""]
        kinds = Counter(kind for kind, edge, unit in words(trace.ranks[0]) if edge is not Edge.END and unit < 5)
        counts = [
            kinds[kind] for kind in (Kind.UNSHARD, Kind.RESHARD, Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE_SCATTER)
        ]
        assert counts == [9, 9, 5, 5, 5]
    assert results[1][0] == run_ranks(1, lambda: trained(3, unwatched=True))[0]


def in_copies():
    """Two copies on two ranks each, of one parameter; gradients are reduced in bf16."""
    rank = dist.get_rank()
    shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    copies = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group, replicate_group = shards[rank // 2], copies[rank % 2]
    shard = nn.Parameter(torch.ones(2, 3))
    unit = OwnUnits("mine").add(
        "", [OwnParam("w", (4, 3), shard)], group=group, replicate_group=replicate_group, reduce_dtype=torch.bfloat16
    )
    for _ in range(2):
        unit.begin_forward()
        for begin, end in ((None, unit.end_forward), (unit.begin_backward, unit.end_backward)):
            if begin is not None:
                begin()
            full = torch.empty(4, 3)
            with unit.unshard():
                dist.all_gather(list(full.chunk(2)), shard.data, group=group)
            unit.end_unshard(full)
            end()
            unit.reshard()
        grad = torch.ones(4, 3, dtype=torch.bfloat16)
        with unit.reduce(grad):
            out = torch.empty(2, 3, dtype=torch.bfloat16)
            dist.reduce_scatter(out, list(grad.chunk(2)), group=group)
            dist.all_reduce(out, group=replicate_group)
            shard.grad = out.float()
        torch.optim.SGD([shard], 0.1).step()
    return shard.tolist()


def test_copies_and_another_dtype_of_the_reduction_are_in_the_formula():
    trace = watch(4, in_copies).trace
    (unit,) = trace.header.units
    assert (unit.shard_size, unit.replicate_size, unit.reduce_dtype) == (2, 2, "bfloat16")
    found = compare(trace, 1)
    assert not [row for row in found if row.differs]
    assert {row.kind: (row.calls, row.num_bytes) for row in found} == {
        Kind.ALL_GATHER: (2, 96),
        Kind.REDUCE_SCATTER: (1, 24),
        Kind.ALL_REDUCE: (1, 12),
    }
