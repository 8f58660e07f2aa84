"""Models in torch's classic wrapper are seen as they are, and train as if nobody looked."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import NO_SHARD, ignoring_warnings
from tests.helpers.watched import make_blocks, train, watch
from workbench.engine import probe
from workbench.engine.module_names import clean
from workbench.events import Category, Edge, Kind
from workbench.replay.collectives import compare
from workbench.trace import advance

NAMES = ["", "0", "1", "2", "3"]


def wrapped(strategy="FULL_SHARD", shape=(), **options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
    model = make_blocks()
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy([nn.Sequential]),
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        **options,
    )


@ignoring_warnings(*NO_SHARD)
def trained(strategy="FULL_SHARD", num_backwards=1, **options):
    return train(wrapped(strategy, **options), 2, num_backwards)


CASES = {
    "full": {},
    "kept after forward": {"strategy": "SHARD_GRAD_OP"},
    "original parameters": {"use_orig_params": True},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "accumulated": {"num_backwards": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_every_collective_is_the_one_that_the_formula_expects(name):
    seen = watch(2, lambda: trained(**CASES[name]))
    assert seen.results == run_ranks(2, lambda: trained(**CASES[name]))
    assert [unit.name for unit in seen.trace.header.units] == NAMES
    found = compare(seen.trace, 1)
    assert {row.unit for row in found} == set(range(5))
    assert [(row.calls, row.num_bytes) for row in found] == [
        (row.expected.calls, row.expected.num_bytes) for row in found
    ]


def test_with_copies_on_four_ranks():
    seen = watch(4, lambda: trained("HYBRID_SHARD", shape=(2, 2)))
    assert seen.results == run_ranks(4, lambda: trained("HYBRID_SHARD", shape=(2, 2)))
    found = compare(seen.trace, 1)
    assert Counter(row.kind for row in found for _ in row.ranks)[Kind.ALL_REDUCE] == 20
    assert all((row.calls, row.num_bytes) == (row.expected.calls, row.expected.num_bytes) for row in found)


def test_units_come_back_to_rest_with_their_bytes_freed():
    trace = watch(2, trained).trace
    for rank in trace.ranks:
        begins = rank.rows[(rank.rows["step"] == 1) & (rank.rows["edge"] == Edge.BEGIN)]
        counts = Counter(Kind(kind) for kind in begins["kind"].tolist())
        assert (counts[Kind.ALL_GATHER], counts[Kind.REDUCE_SCATTER]) == (9, 5)
        assert (counts[Kind.FORWARD], counts[Kind.BACKWARD], counts[Kind.UNSHARD]) == (5, 5, 9)
        end = advance(rank.start, rank.rows)
        assert end.unit_states == end.reducing == {}
        held = dict(zip(Category, end.bytes_by_category, strict=True))
        assert {category for category, num_bytes in held.items() if num_bytes} <= {
            Category.SHARDED_PARAMS,
            Category.OPTIMIZER_STATE,
        }
        assert not np.any(rank.rows["num_bytes"][rank.rows["kind"] == Kind.FREE] > 0)


def parts():
    model = wrapped(use_orig_params=True)
    train(model, 1)
    (source,) = (each for each in probe.active._sources if each.name == "torch.FullyShardedDataParallel")
    unit = next(unit for unit in probe.active.header.units if unit.name == "1")
    with FullyShardedDataParallel.summon_full_params(model):
        whole = {clean(name): param.detach().clone() for name, param in model.named_parameters()}
    tensors = source.tensors(unit.index)
    (flat,) = unit.params
    return [
        (part.fqn, [tensors[part.fqn].shard.tolist()], whole[part.fqn].flatten().tolist()) for part in flat.parts
    ], dist.get_rank()


def test_its_tensors_are_the_pieces_of_the_parameters():
    seen = watch(2, parts)
    (first, _), (second, _) = seen.results
    assert [name for name, *_ in first] == ["1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"]
    for (_, (piece,), whole), (_, (rest,), _) in zip(first, second, strict=True):
        assert piece + rest == whole
