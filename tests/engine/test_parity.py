"""A sharded model trains as its unsharded copy does, on 1, 2 and 4 ranks."""

import functools

import pytest
import torch.distributed as dist

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, check_parity, shard_net
from tests.helpers.small_models import make_net


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_ten_steps_equal_the_unsharded_copy(world_size, reshard):
    shard = functools.partial(shard_net, reshard_after_forward=reshard)
    run_ranks(world_size, check_parity, make_net, shard)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tied_weights_and_clipping(world_size):
    run_ranks(world_size, check_parity, functools.partial(make_net, tied=True), shard_net, 5, 0.1)


def noticed(damaged_rank: int) -> list[str]:
    """Damage each parameter in turn; return the names of those for which this rank noticed the wrong number."""
    plain, sharded = make_net(), shard_net(make_net())
    assert_same_shards(sharded, plain)
    found = []
    for name, value in sharded.named_parameters():
        part = value.to_local().detach()
        if dist.get_rank() == damaged_rank and part.numel():
            part.view(-1)[-1] += 1
        try:
            assert_same_shards(sharded, plain)
        except AssertionError:
            found.append(name)
            part.view(-1)[-1] -= 1
    return found


@pytest.mark.parametrize("damaged_rank", [0, 2])
def test_the_rank_that_holds_a_wrong_number_notices_it(damaged_rank):
    names = [name for name, value in make_net().named_parameters() if value.chunk(4)[damaged_rank:]]
    assert run_ranks(4, noticed, damaged_rank) == [names if rank == damaged_rank else [] for rank in range(4)]
