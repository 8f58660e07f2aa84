"""Inputs and outputs of every kind, modules without either, and modules within modules."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.recording_probe import ROOT
from tests.helpers.unsharded_copy import DIM, Outer, blocks, compare, data, shard_each, squares
from workbench.engine import fully_shard
from workbench.engine.tensor_trees import tensors_in
from workbench.events import Edge, Kind


class Containers(nn.Module):
    """Outputs of every kind; one of them is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, *, options: dict[str, list[torch.Tensor]]) -> dict[str, object]:
        y = self.inner(x)
        return {"a": [y, {"b": (y * options["scale"][0], "text")}], "unused": y.sum(), "none": None}


class OddInterfaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), Containers()

    def forward(self, *, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
        hidden = self.first(x)
        out = self.second(x=hidden, options={"scale": [hidden.mean()]})
        return hidden, out


def odd_loss(model: nn.Module, step: int) -> torch.Tensor:
    hidden, out = model(x=data(step))
    return hidden.mean() + out["a"][0].square().mean() + out["a"][1]["b"][0].sum()


@pytest.mark.parametrize("world_size", [1, 2])
def test_keyword_inputs_and_nested_outputs(world_size):
    record = run_ranks(world_size, compare, OddInterfaces, shard_each, odd_loss)[0]
    assert record.count(Kind.BACKWARD) == {"first": 1, "second": 1}
    assert record.count(Kind.BACKWARD, Edge.END) == {"first": 1, "second": 1}


class NoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, DIM))

    def forward(self) -> torch.Tensor:
        return self.weight * 2


class UsesNoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = NoInput(), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.table().T


@pytest.mark.parametrize("world_size", [1, 2])
def test_forward_without_inputs(world_size):
    run_ranks(world_size, compare, UsesNoInput, shard_each, squares)


class NoParameters(nn.Module):
    """A root without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def shard_blocks_and_root(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert model.unshard() is None
    model.unshard(async_op=True).wait()
    model.reshard()
    model.reset_iter_state()
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_root_without_parameters(world_size):
    record = run_ranks(world_size, compare, NoParameters, shard_blocks_and_root, squares)[0]
    assert record.count(Kind.FORWARD) == {"blocks.0": 1, "blocks.1": 1}
    if world_size > 1:
        assert record.count(Kind.ALL_GATHER) == {"blocks.0": 2, "blocks.1": 2}


@dataclass(slots=True)
class Answer:
    hidden: torch.Tensor
    scores: list[torch.Tensor]
    note: str = "none"


class AnswersWithObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Answering(), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.distributions.Normal:
        answer = self.first(x)
        return torch.distributions.Normal(self.second(answer.hidden), answer.scores[0].exp())


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(self.linear(x), [self.linear(x + 1)])


@pytest.mark.parametrize("world_size", [1, 2])
def test_tensors_in_objects_that_are_no_containers(world_size):
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return -model(data(step)).log_prob(torch.zeros(4, DIM)).mean()

    record = run_ranks(world_size, compare, AnswersWithObjects, shard_each, loss)[0]
    assert record.count(Kind.BACKWARD) == {"first": 1, "second": 1}


def test_containers_that_are_searched_for_tensors():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    loop = SimpleNamespace(c=c, text="x", number=1)
    loop.itself = loop
    found = list(tensors_in({"a": [a, None, 1.5], "b": (Answer(b, []), loop, nn.Linear(1, 1), nn.Linear)}))
    assert {id(t) for t in found} == {id(a), id(b), id(c)}
    assert len(found) == 3


# ---- nesting


def shard_three_levels(model: nn.Module) -> None:
    for middle in model.middle:
        fully_shard(middle.inner)
        fully_shard(middle)
    fully_shard(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_three_levels(world_size):
    record = run_ranks(world_size, compare, Outer, shard_three_levels, squares)[0]
    units = ["middle.0", "middle.0.inner", "middle.1", "middle.1.inner", ROOT]
    assert record.count(Kind.BACKWARD) == dict.fromkeys(units, 1)
    if world_size > 1:
        assert record.count(Kind.ALL_GATHER) == dict.fromkeys(units[:4], 2) | {ROOT: 1}
        assert record.count(Kind.REDUCE_SCATTER) == dict.fromkeys(units, 1)
