"""A training run of an FSDP behind CS336's adapters, with two micro-batches a step, and what it should compute."""

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, BLOCKS, STEPS, MICRO_BATCHES, LEARNING_RATE = 16, 4, 4, 2, 0.5
SOLUTIONS = "tests.course.solutions"


class Net(nn.Module):
    """Blocks with residuals, and a head."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head's outputs."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(model: nn.Module, step: int, micro_batch: int, rank: int) -> torch.Tensor:
    """Return the loss of a rank's micro-batch; the mean over the micro-batches is the loss of the step."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    x = torch.randn(16, WIDTH, generator=generator)
    return (model(x) - x[:, :4].sin()).square().mean() / MICRO_BATCHES


def expected() -> dict[str, Any]:
    """Train without sharding, from the weights that rank 0 draws, on the data of all ranks."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    found: dict[str, Any] = {"initial": named(dict(model.named_parameters())), "losses": []}
    for step in range(STEPS):
        ranks = range(dist.get_world_size())
        by_rank = [sum(loss_of(model, step, batch, rank) for batch in range(MICRO_BATCHES)) for rank in ranks]
        torch.stack(by_rank).mean().backward()
        if step == 0:
            found["gradients"] = named({name: param.grad for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(by_rank[dist.get_rank()].item())
    return found | {"weights": named(dict(model.named_parameters()))}


def trained(name: str) -> dict[str, Any]:
    """Train with one of the solutions; each rank draws other initial weights.

    Returns:
        losses of the steps, full parameters before and after training, and the gradients of the first step.
    """
    adapters = importlib.import_module(f"{SOLUTIONS}.{name}")
    torch.manual_seed(dist.get_rank())
    model = adapters.get_fsdp(Net())
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    initial, losses, gradients = adapters.fsdp_gather_full_params(model), [], {}
    for step in range(STEPS):
        total = 0.0
        for batch in range(MICRO_BATCHES):
            loss = loss_of(model, step, batch, dist.get_rank())
            loss.backward()
            total += loss.item()
        adapters.fsdp_on_after_backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if step == 0:
            weights = adapters.fsdp_gather_full_params(model)
            gradients = {name: (initial[name] - weights[name]) / LEARNING_RATE for name in initial}
    weights = adapters.fsdp_gather_full_params(model)
    return {
        "losses": losses,
        "initial": named(initial),
        "gradients": named(gradients),
        "weights": named(weights),
        "expected": expected(),
    }


def named(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return tensors by name as lists."""
    return {name: tensor.tolist() for name, tensor in sorted(tensors.items())}
