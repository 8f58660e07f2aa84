"""Units have names once wrapped, before a first forward makes a root."""

import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import CPU, OURS, wrap_net
from workbench.engine.fsdp_state import states_below, units_of


def names_of(model):
    units = units_of(states_below(model))
    return [unit.name for unit in units], [part.fqn for unit in units for part in unit.fsdp_params[0].parts]


def are_named():
    for use_orig_params in (False, True):
        model = wrap_net(OURS, make_net(num_blocks=2), use_orig_params=use_orig_params)
        before = names_of(model)
        assert before[0] == ["", "blocks.0", "blocks.1"]
        assert "blocks.1.mlp.0.weight" in before[1]
        loss_of(model, batch(dist.get_rank(), 0)).backward()
        assert names_of(model) == before
    inner = OURS.FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU)
    assert names_of(inner)[0] == [""]
    outer = OURS.FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Sequential(inner)), device_id=CPU)
    assert names_of(outer) == (["", "1.0"], ["0.weight", "0.bias", "1.0.weight", "1.0.bias"])


def test_units_have_their_names_before_the_first_forward():
    run_ranks(2, are_named)
