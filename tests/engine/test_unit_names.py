"""Units have names once sharded, before a first forward makes a root."""

import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.engine import fully_shard
from workbench.engine.fsdp_state import states_below, units_of


def names_of(model):
    units = units_of(states_below(model))
    return [unit.name for unit in units], [param.fqn for unit in units for param in unit.fsdp_params]


def are_named():
    model = make_net(num_blocks=2)
    for block in model.blocks:
        fully_shard(block)
    assert names_of(model)[0] == ["", ""]  # each name is relative to the unit, until a model around them is sharded
    fully_shard(model)
    before = names_of(model)
    assert sorted(before[0]) == ["", "blocks.0", "blocks.1"]
    assert "blocks.1.mlp.0.weight" in before[1]
    loss_of(model, batch(dist.get_rank(), 0)).backward()
    assert names_of(model) == before
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard([both[0], both[1]])
    fully_shard(both)
    assert names_of(both) == (["0, 1"], ["0.weight", "1.weight", "0.bias", "1.bias"])


def test_units_have_their_names_before_the_first_forward():
    run_ranks(2, are_named)
