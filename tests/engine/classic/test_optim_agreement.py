"""If the optimizers of the ranks differ, every rank raises the same error before any state is exchanged."""

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import OURS, adam, kept, wrap_net
from workbench.engine.errors import RanksDisagreeError

FSDP = OURS.FullyShardedDataParallel


def differ(kind: str, use_orig_params: bool, message: str) -> None:
    model = wrap_net(OURS, make_net(num_blocks=2), use_orig_params=use_orig_params)
    optimizer, rank = adam(model.parameters()), dist.get_rank()
    loss_of(model, batch(rank, 0)).backward()
    if kind == "one steps" and rank == 0:
        optimizer.step()
    if kind == "one steps twice":
        for _ in range(1 + rank):
            optimizer.step()
    if kind == "one holds fewer" and rank == 1:
        optimizer = adam(list(model.parameters())[1:])
    calls = FSDP.optim_state_dict, FSDP.full_optim_state_dict, FSDP.sharded_optim_state_dict, get_optimizer_state_dict
    for call in calls:
        with pytest.raises(RanksDisagreeError, match=message):
            call(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "use_orig_params", "message"),
    [
        ("one steps", False, r"in the optimizer state of '.*: rank 0 has .*; rank 1 has none"),
        ("one steps", True, r"in the optimizer state of '.*: rank 0 has .*; rank 1 has none"),
        ("one steps twice", False, r"rank 0 has .* step float32 number 1\.0; rank 1 has .* step float32 number 2\.0"),
        ("one steps twice", True, r"rank 0 has .* step float32 number 1\.0; rank 1 has .* step float32 number 2\.0"),
        ("one holds fewer", False, r"in the optimizer of '.*_flat_param': rank 0 has AdamW; rank 1 has none; create"),
    ],
)
def test_ranks_whose_optimizers_differ_are_named_on_every_rank(kind, use_orig_params, message):
    run_ranks(2, differ, kind, use_orig_params, message)


def loads(use_orig_params: bool) -> None:
    model = wrap_net(OURS, make_net(num_blocks=2), use_orig_params=use_orig_params)
    optimizer, rank = adam(model.parameters()), dist.get_rank()
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    full = kept(FSDP.full_optim_state_dict(model, optimizer, rank0_only=False))
    split = FSDP.sharded_optim_state_dict(model, optimizer)

    def refused(message, load, given, **options):
        with pytest.raises(RanksDisagreeError, match=message):
            load(given, model, **options)

    def without(given, name):
        return {**given, "state": {key: state for key, state in given["state"].items() if key != name or rank == 0}}

    of_rank = adam(list(model.parameters())[rank:])
    message = (
        r"ranks differ in the optimizer of '.*': rank 0 has AdamW, group 0; rank 1 has none; create it from the same"
    )
    refused(message, FSDP.shard_full_optim_state_dict, full, optim=of_rank)
    refused(message, FSDP.scatter_full_optim_state_dict, full if rank == 0 else None, optim=of_rank)
    refused(message, FSDP.flatten_sharded_optim_state_dict, split, optim=of_rank)
    last = "blocks.1.mlp.2.bias"
    message = rf"loaded optimizer state of '{last}': rank 0 has exp_avg .*; rank 1 has no entry of this name; load the"
    refused(message, FSDP.shard_full_optim_state_dict, without(full, last), optim=optimizer)
    refused(message, FSDP.flatten_sharded_optim_state_dict, without(split, last), optim=optimizer)
    groups = [{**full["param_groups"][0]}] if rank == 0 else []
    refused(
        "loaded optimizer state of 'group 0': rank 0 has 15 parameters; rank 1 has no entry of this name",
        FSDP.shard_full_optim_state_dict,
        {**full, "param_groups": groups},
    )
    with pytest.raises(ValueError, match="this one has nothing"):  # rank 0's message, raised on every rank
        FSDP.scatter_full_optim_state_dict(full if rank == 1 else None, model, optim=optimizer)
    FSDP.shard_full_optim_state_dict(full, model, optim=optimizer)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_ranks_that_would_load_different_things_are_named_on_every_rank(use_orig_params):
    run_ranks(2, loads, use_orig_params)
