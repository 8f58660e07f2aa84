"""A probe may hold a rank at any event and raise an interrupt there; this must leave nothing behind."""

import copy
import gc

import pytest
import torch.distributed as dist
from torch import nn

from tests.helpers.expected_sizes import NET
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads, shard_net
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.waiting import eventually
from workbench.engine import process_groups
from workbench.events import Category


class Interrupt(BaseException):
    """Stands for the user's Ctrl-C."""


def interrupted_at(number: int, record: Recording, model: nn.Module, micro_batches: int) -> bool:
    """Run micro-batches, the last with sync; interrupt at the ``number``-th event. Return False if there are fewer."""
    left = [number]

    def event(kind, edge, *_):
        left[0] -= 1
        if left[0] < 0:
            raise Interrupt(f"{kind.name} {edge.name}")

    record.event = event
    try:
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            loss_of(model, batch(dist.get_rank(), micro)).backward()
    except Interrupt:
        return True
    finally:
        del record.event
    return False


def interrupted_everywhere(reshard: bool | None, micro_batches: int) -> int:
    gc.freeze()  # the repeated collections below skip existing objects
    plain = make_net(**NET)
    number = 0
    with recording() as record:
        model = shard_net(copy.deepcopy(plain), reshard_after_forward=reshard)
        at_rest = record.alive
        loss_of(plain, batch(dist.get_rank(), 0)).backward()
        average_grads(plain)
        while interrupted_at(number, record, model, micro_batches):
            number += 1
            # every rank stopped at the same event, so its issued collectives complete
            assert eventually(lambda: process_groups.num_unfinished() == 0)
            model.reset_iter_state()
            model.zero_grad()
            gc.collect()  # the interrupt's traceback holds gradients
            assert record.alive == at_rest, number
            if number % 5 == 0:
                model.set_requires_gradient_sync(True)
                loss_of(model, batch(dist.get_rank(), 0)).backward()
                assert_same_shards(model, plain)
                model.zero_grad()
        assert set(record.alive) == {Category.SHARDED_PARAMS, Category.SHARDED_GRADS}
    return number


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("reshard", "micro_batches"), [(None, 1), (False, 2)])
def test_an_interrupt_at_any_event_leaves_a_clean_state_after_a_reset(world_size, reshard, micro_batches):
    numbers = run_ranks(world_size, interrupted_everywhere, reshard, micro_batches)
    assert numbers[0] > 20
    assert len(set(numbers)) == 1
