"""The numbers: a sharded model trains as its unsharded copy does, on 1, 2 and 4 ranks."""

import functools

import pytest

from tests.engine.models import make_net
from tests.engine.parity import check_parity, shard_net
from tests.engine.ranks import run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_ten_steps_equal_the_unsharded_copy(world_size, reshard):
    shard = functools.partial(shard_net, reshard_after_forward=reshard)
    run_ranks(world_size, check_parity, make_net, shard)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tied_weights_and_clipping(world_size):
    run_ranks(world_size, check_parity, functools.partial(make_net, tied=True), shard_net, 5, 0.1)
