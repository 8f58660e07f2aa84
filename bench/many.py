"""The cost of a command with many ranks and with many units: per rank and per unit, it must not grow."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.workbench import Workbench

Tree = dict[str, Any]

MODEL = """
from torch import nn
import torch
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(NUM_UNITS)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train_step():
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""


def measure_next(num_ranks: Sequence[int], num_times: int) -> Tree:
    """Return the time of ``next collective`` by number of ranks: in seconds, and per rank in ms.

    ``growth``: of the time per rank.
    """
    seconds = {}
    for count in num_ranks:
        with Workbench(count, device="cpu") as wb:
            wb.run_cell(f"NUM_UNITS = 3\n{MODEL}")
            wb.shard("model", wrap=["Linear"])
            wb.step(1)
            wb.step(1000, until="forward")
            seconds[count] = statistics.median(_seconds(lambda wb=wb: wb.next("collective")) for _ in range(num_times))
            wb.abort()
    per_rank = {f"{count} ranks": 1e3 * value / count for count, value in seconds.items()}
    return {
        "seconds": {f"{count} ranks": value for count, value in seconds.items()},
        "ms_per_rank": per_rank,
        "growth": _growth(per_rank),
    }


def measure_shard(num_units: Sequence[int]) -> Tree:
    """Return the time of ``shard`` and of the first two steps by number of units, in ms per unit, on two ranks.

    ``growth``: the highest of the three. ``lint_ms``: the median time of ``lint`` with the fewest units.
    """
    lint_ms: list[float] = []
    found: dict[str, dict[str, float]] = {"shard": {}, "first step": {}, "second step": {}}
    for count in num_units:
        with Workbench(2, device="cpu") as wb:
            wb.run_cell(f"NUM_UNITS = {count}\n{MODEL}")
            works = {
                "shard": lambda wb=wb: wb.shard("model", wrap=["Linear"]),
                "first step": lambda wb=wb: wb.step(1),
                "second step": lambda wb=wb: wb.step(1),
            }
            for name, work in works.items():
                found[name][f"{count} units"] = 1e3 * _seconds(work) / count
            if count == num_units[0]:
                lint_ms = [1e3 * _seconds(wb.lint) for _ in range(5)]
    return {
        **{f"{name} ms_per_unit": by_count for name, by_count in found.items()},
        "growth": max(map(_growth, found.values())),
        "lint_ms": statistics.median(lint_ms),
    }


def _growth(by_count: Mapping[str, float]) -> float:
    """Return the ratio of the cost at the highest count to that at the lowest: at most 1 if the total is linear."""
    costs = list(by_count.values())
    return costs[-1] / costs[0]


def _seconds(work: Any) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin
