"""Partial sums of gradients that wait for an all-reduce, without any rank."""

from dataclasses import dataclass

import pytest
import torch

from tests.helpers.recording_probe import recording
from workbench.engine.probe import BufferHandle
from workbench.engine.reduction import PartialSum, Reducer
from workbench.engine.unit_collectives import UnitId
from workbench.events import Category

UNIT = UnitId(3, "blocks.0")


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its unit."""

    position: int
    slot_numel: int
    shard_grad_dtype: torch.dtype | None = torch.float32


FIRST, SECOND, THIRD = (Slot(position, slot_numel) for position, slot_numel in enumerate((2, 3, 1)))


def reducer(*, offloads=False):
    return Reducer(UNIT, None, offloads=offloads, pins=False)


def partial_sum(params, value, dtype=torch.float32):
    output = torch.full((sum(param.slot_numel for param in params),), value, dtype=dtype)
    return PartialSum(params, output, BufferHandle(Category.SHARDED_GRADS, UNIT.index, output.nbytes))


@pytest.mark.parametrize(
    ("dtype", "category", "num_bytes"),
    [(torch.float32, Category.SHARDED_GRADS, 24), (torch.bfloat16, Category.REDUCE_SCATTER_BUFFERS, 12)],
)
def test_sums_of_some_parameters_each_are_added_over_all_of_them(dtype, category, num_bytes):
    one, other = partial_sum([FIRST, THIRD], 1.0, dtype), partial_sum([SECOND, THIRD], 2.0, dtype)
    with recording() as probe:
        total = reducer().added(one, other)
    assert total.params == [FIRST, SECOND, THIRD]
    assert total.output.tolist() == [1, 1, 2, 2, 2, 3]
    assert total.output.dtype == dtype
    assert probe.deltas == [(category, UNIT.index, num_bytes)]
    assert (total.handle.category, total.handle.num_bytes) == (category, num_bytes)
    assert one.output.tolist() == [1, 1, 1]


def test_sums_of_the_same_parameters_are_added_in_place():
    one, other = partial_sum([FIRST], 1.0), partial_sum([FIRST], 2.0)
    with recording() as probe:
        assert reducer().added(one, other) is one
    assert one.output.tolist() == [3, 3]
    assert probe.deltas == []


def test_a_kept_sum_is_taken_once():
    keeps = reducer()
    keeps.sync.all_reduce_grads = False
    keeps.keep(partial_sum([FIRST], 1.0))
    keeps.keep(partial_sum([FIRST], 2.0))
    assert not keeps.owes_all_reduce
    waiting = keeps.plan(["w"])
    assert (waiting.keeps, waiting.kept, waiting.unused) == (True, None, ("w",))
    keeps.sync.all_reduce_grads = True
    assert keeps.owes_all_reduce
    assert keeps.plan([]).kept.output.tolist() == [3, 3]
    assert keeps.kept is None
    assert not keeps.owes_all_reduce
