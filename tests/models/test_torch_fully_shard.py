"""Models that torch's ``fully_shard`` shards are seen as they are, and train as if nobody looked."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import OF_TORCHS_FSDP2, ignoring_warnings
from tests.helpers.watched import make_blocks, shard_by_torch, train, watch
from workbench.events import Category, Edge, Kind, Phase
from workbench.replay import memory
from workbench.replay.collectives import compare
from workbench.trace import advance, steps

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def trained(shape=(), num_backwards=1, **options):
    return train(shard_by_torch(make_blocks(), shape, **options), 2, num_backwards)


POLICIES = {
    "plain": {},
    "kept after forward": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
    "bf16, reduced in the default dtype": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "accumulated": {"num_backwards": 2},
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_collective_is_the_one_that_the_formula_expects(name):
    seen = watch(2, lambda: trained(**POLICIES[name]))
    assert seen.results == run_ranks(2, lambda: trained(**POLICIES[name]))
    assert [unit.name for unit in seen.trace.header.units] == ["", "0", "1", "2", "3"]
    assert steps(seen.trace) == [0, 1]
    for step in (0, 1):
        found = compare(seen.trace, step)
        assert {row.unit for row in found} == {0, 1, 2, 3, 4}
        assert [(row.calls, row.num_bytes) for row in found] == [
            (row.expected.calls, row.expected.num_bytes) for row in found
        ]


def test_a_plain_step_has_nine_all_gathers_and_five_reduce_scatters():
    trace = watch(2, trained).trace
    for rank in trace.ranks:
        rows = rank.rows[(rank.rows["step"] == 1) & (rank.rows["edge"] == Edge.BEGIN)]
        counts = Counter(Kind(kind) for kind in rows["kind"].tolist())
        assert (counts[Kind.ALL_GATHER], counts[Kind.REDUCE_SCATTER]) == (9, 5)
        assert (counts[Kind.FORWARD], counts[Kind.BACKWARD], counts[Kind.UNSHARD], counts[Kind.OPTIMIZER]) == (
            5,
            5,
            9,
            1,
        )
        assert counts[Kind.WAIT] == 14


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_on_four_ranks_also_with_copies(shape):
    seen = watch(4, trained, shape)
    assert seen.results == run_ranks(4, trained, shape)
    found = compare(seen.trace, 1)
    kinds = Counter(row.kind for row in found for _ in row.ranks)
    assert kinds[Kind.ALL_REDUCE] == (20 if len(shape) == 2 else 0)
    assert all((row.calls, row.num_bytes) == (row.expected.calls, row.expected.num_bytes) for row in found)
    assert {unit.replicate_size for unit in seen.trace.header.units} == {shape[0] if len(shape) == 2 else 1}


def test_one_rank_gathers_nothing():
    trace = watch(1, trained).trace
    kinds = {Kind(kind) for kind in np.unique(trace.ranks[0].rows["kind"])}
    assert not kinds & {Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.WAIT}
    assert {Kind.UNSHARD, Kind.RESHARD, Kind.FORWARD, Kind.BACKWARD} <= kinds


@ignoring_warnings(*OF_TORCHS_FSDP2)
def counted_by_torch():
    model = shard_by_torch(make_blocks())
    train(model, 1)
    with CommDebugMode() as mode:
        train(model, 1)
    return sum(mode.get_comm_counts().values())


def test_there_are_as_many_collectives_as_torch_counts():
    seen = watch(2, counted_by_torch)
    rows = seen.trace.ranks[0].rows
    begins = rows[(rows["step"] == 1) & (rows["edge"] == Edge.BEGIN)]
    kinds = Counter(Kind(kind) for kind in begins["kind"].tolist())
    assert kinds[Kind.ALL_GATHER] + kinds[Kind.REDUCE_SCATTER] == seen.results[0]


def test_all_units_are_unsharded_once_in_forward_and_once_in_backward_but_the_root():
    trace = watch(2, trained).trace
    for rank in trace.ranks:
        unshards = rank.rows[(rank.rows["kind"] == Kind.UNSHARD) & (rank.rows["edge"] == Edge.END)]
        assert Counter(unshards["unit"].tolist()) == {0: 2, 1: 4, 2: 4, 3: 4, 4: 4}
        end = advance(rank.start, rank.rows)
        assert end.unit_states == end.reducing == {}
        held = dict(zip(Category, end.bytes_by_category, strict=True))
        assert {category for category, num_bytes in held.items() if num_bytes} <= {
            Category.SHARDED_PARAMS,
            Category.OPTIMIZER_STATE,
        }


def finalized():
    model = shard_by_torch(make_blocks())
    model.set_manual_backward_finalization(True)
    model.set_keep_unsharded_storage(True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for is_async in (False, True):
        for _ in range(2):
            model(torch.ones(8, 16)).square().mean().backward()
        handle = model.finalize_backward(async_op=is_async)
        if handle is not None:
            handle.wait()
        optimizer.step()
        optimizer.zero_grad()
    return [param.sum().item() for param in model.parameters()]


@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="before torch 2.15, backward finalizes itself")
def test_a_backward_that_the_program_finalizes_with_full_parameters_that_stay_allocated():
    seen = watch(2, finalized)
    assert seen.results == run_ranks(2, finalized)
    full = sum(4 * 2 * math.prod((p.padded_rows, *p.shape[1:])) for u in seen.trace.header.units for p in u.params)
    for rank in seen.trace.ranks:
        end = advance(rank.start, rank.rows)
        assert end.unit_states == end.reducing == {}
        assert dict(zip(Category, end.bytes_by_category, strict=True))[Category.UNSHARDED_PARAMS] == full
        optimizers = rank.rows[(rank.rows["kind"] == Kind.OPTIMIZER) & (rank.rows["edge"] == Edge.BEGIN)]
        assert len(optimizers) == 2
        reduced = rank.rows[(rank.rows["kind"] == Kind.REDUCE_SCATTER) & (rank.rows["edge"] == Edge.BEGIN)]
        # autograd reduces the others, whose inputs take gradients, in each backward
        assert Counter(reduced["unit"].tolist()) == {0: 2, 1: 2, 2: 4, 3: 4, 4: 4}
        assert set(reduced["phase"].tolist()) == {Phase.POST_BACKWARD}
        begun = rank.rows[(rank.rows["kind"] == Kind.STEP) & (rank.rows["step"] == 1)]
        assert begun["phase"][0] == Phase.IDLE


def tracked():
    model = shard_by_torch(make_blocks(dim=64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tracker = FSDPMemTracker(model, optimizer)
    data = torch.randn(1, 64)
    tracker.track_inputs((data,))
    with tracker:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(kind): num_bytes for kind, num_bytes in peak.items()}


def test_bytes_by_class_at_the_peak_are_those_that_torch_tracks():
    seen = watch(2, tracked)
    for torchs, rank in zip(seen.results, seen.trace.ranks, strict=True):
        peak = memory.peak(rank).bytes_by_category
        for category, name in {
            Category.SHARDED_PARAMS: "SHARDED_PARAM",
            Category.UNSHARDED_PARAMS: "UNSHARDED_PARAM",
            Category.ALL_GATHER_BUFFERS: "ALL_GATHER",
            Category.REDUCE_SCATTER_BUFFERS: "REDUCE_SCATTER",
            Category.SHARDED_GRADS: "SHARDED_GRAD",
        }.items():
            assert peak[category] == torchs[f"_FSDPRefType.{name}"] > 0, name
        block = 4 * (64 * 128 * 2 + 64 + 128)  # torch tracks gradients as temporary until they belong to a parameter
        assert peak[Category.UNSHARDED_GRADS] == block <= torchs["_FSDPRefType.TEMP"]


class FrozenHalf(nn.Module):
    """A layer in bfloat16 that is not trained, and one in float32 that is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.trained = nn.Linear(16, 32, dtype=torch.bfloat16).requires_grad_(False), nn.Linear(32, 3)

    def forward(self, x):
        return self.trained(self.frozen(x.bfloat16()).float())


def of_two_dtypes():
    return train(fully_shard(FrozenHalf()), 2)


def test_each_parameter_of_a_group_is_counted_by_what_is_gathered_of_it():
    seen = watch(2, of_two_dtypes)
    (unit,) = seen.trace.header.units
    assert [unit.gathered_itemsize(param) for param in unit.params] == [2, 2, 4, 4]
    found = compare(seen.trace, 1)
    assert {row.kind for row in found} == {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}
    assert not any(row.differs for row in found)
