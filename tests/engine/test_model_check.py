"""Ranks that built different models all raise before anything hangs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.small_models import Block, batch, loss_of, make_net
from workbench.engine import RanksDisagreeError, fully_shard, process_groups
from workbench.engine.model_check import _first_difference

DIM = 4


def another_shape(odd: bool) -> nn.Module:
    return shard_blocks(nn.Sequential(Block(DIM), Block(DIM + 1 if odd else DIM)))


def another_name(odd: bool) -> nn.Module:
    model = nn.Sequential(Block(DIM))
    if odd:
        model[0].linear = model[0].mlp
        del model[0].mlp
    return shard_blocks(model)


def another_order(odd: bool) -> nn.Module:
    model = nn.Linear(DIM, DIM)
    if odd:
        model._parameters["weight"] = model._parameters.pop("weight")
    return fully_shard(model)


def another_number_of_units(odd: bool) -> nn.Module:
    model = nn.Sequential(Block(DIM), Block(DIM))
    for block in model if not odd else model[:1]:
        fully_shard(block)
    return fully_shard(model)


def another_dtype(odd: bool) -> nn.Module:
    return fully_shard(nn.Linear(DIM, DIM, dtype=torch.float64 if odd else None))


def frozen(odd: bool) -> nn.Module:
    return fully_shard(nn.Linear(DIM, DIM).requires_grad_(not odd))


def another_policy(odd: bool) -> nn.Module:
    model = shard_blocks(nn.Sequential(Block(DIM)))
    if odd:
        model[0].set_reshard_after_forward(False)
    return model


def more_parameters(odd: bool) -> nn.Module:
    return fully_shard(nn.Linear(DIM, DIM, bias=not odd))


def shard_blocks(model: nn.Module) -> nn.Module:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


CASES = {  # the parts of ranks 0 and 1, and of rank 2
    another_shape: (6, "'1: 1.norm.weight [4] float32'", "'1: 1.norm.weight [5] float32'"),
    another_name: (2, "'0: 0.mlp.0.weight [13, 4] float32'", "'0: 0.linear.0.weight [13, 4] float32'"),
    another_order: (0, "'(root): weight [4, 4] float32, kept after forward'", "'(root): bias [4] float32, kept after"),
    another_number_of_units: (0, "'0: 0.norm.weight [4] float32'", "'(root): 1.norm.weight [4] float32, kept after"),
    another_dtype: (0, "'(root): weight [4, 4] float32, kept after forward'", "'(root): weight [4, 4] float64, kept"),
    frozen: (0, "'(root): weight [4, 4] float32, kept after forward'", "'(root): weight [4, 4] float32 frozen, kept"),
    another_policy: (0, "'0: 0.norm.weight [4] float32'", "'0: 0.norm.weight [4] float32, kept after forward'"),
    more_parameters: (1, "'(root): bias [4] float32, kept after forward'", "nothing"),
}


def disagree(build) -> tuple[list[str], float]:
    model = build(dist.get_rank() == 2)
    messages = []
    for _ in range(2):  # it stays refused
        with pytest.raises(RanksDisagreeError) as refused:
            model(torch.ones(1, DIM))
        messages.append(str(refused.value))
    assert process_groups.num_unfinished() == 0
    dist.barrier()  # no rank is stuck, and the same groups still work
    good = shard_net(make_net(num_blocks=1))
    loss = loss_of(good, batch(0, 0))
    loss.backward()
    return messages, loss.item()


@pytest.mark.parametrize("build", CASES)
def test_every_rank_names_the_differing_parameter_and_survives(build):
    results = run_ranks(3, disagree, build)
    assert all(result == results[0] for result in results)
    messages = results[0][0]
    assert messages[0] == messages[1]
    number, common, odd = CASES[build]
    message = f"ranks built different models; parameter {number}: ranks 0, 1 have {common}; rank 2 has {odd}"
    assert messages[0].startswith(message)
    assert messages[0].endswith("Build the same model on every rank, and shard it in the same way.")


def test_the_first_difference():
    assert _first_difference([["a"], ["b"], ["a"]], [4, 5, 6]) == "parameter 0: ranks 4, 6 have 'a'; rank 5 has 'b'"
    assert _first_difference([["a", "b"], ["a", "b"], ["a", "c"]], [0, 1, 2]) == (
        "parameter 1: ranks 0, 1 have 'b'; rank 2 has 'c'"
    )
    assert _first_difference([["a", "b"], ["a"]], [0, 1]) == "parameter 1: rank 0 has 'b'; rank 1 has nothing"
