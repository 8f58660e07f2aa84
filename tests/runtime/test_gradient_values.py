"""Breakpoints on NaN and on the norm of gradients: all ranks stop where the values of one rank meet the condition."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.helpers.booted_ranks import drain, execute, run, use
from tests.helpers.stopped_step import Channel, beside
from tests.runtime.test_commands import trace_of
from workbench.events import Kind
from workbench.protocol.commands import Continue, Shard, Step
from workbench.trace.invariants import check

DDP = None
VALUES = {1: 1000.0, 2: float("nan")}
CONDITIONS = ("grad_norm > 100 and not nan", "nan")


class Net(torch.nn.Module):
    """One unit, whose last row of weights the last shard rank holds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(4, 8, bias=False)

    def forward(self, x):
        return self.head(x)


def trained(options):
    """Train four steps; the gradient of the last row is 1000 times as large in step 1, and NaN in step 2."""
    ns = use(Net())
    if options is DDP:
        ns["model"] = torch.nn.parallel.DistributedDataParallel(ns["model"])
    else:
        execute(Shard(model="model", wrap=("Linear",), **options))
    clip = getattr(ns["model"], "clip_grad_norm_", lambda norm: clip_grad_norm_(ns["model"].parameters(), norm))
    numbers = iter(range(4))

    def train_step():
        ns["number"] = next(numbers)
        scale = torch.ones(8)
        scale[-1] = VALUES.get(ns["number"], 1.0) if ns["rank"] == 0 else 1.0
        (ns["model"](torch.full((2, 4), ns["rank"] + 1.0)) * scale).sum().backward()
        ns["norm"] = float(clip(1.0))
        ns["opt"].step()
        ns["opt"].zero_grad()

    ns["train_step"] = train_step
    original = torch.autograd.backward
    Channel().break_at(*({"event": "optimizer", "when": when} for when in CONDITIONS))

    def script(channel):
        stops = []
        for _ in CONDITIONS:
            held = channel.until_held()
            stops.append((held, channel.evaluate("number"), float(channel.evaluate("norm"))))
            channel(Continue())
        return stops

    done, stops = beside(script, Step(count=3))
    execute(Step())  # without a breakpoint
    return stops, done["steps_done"], torch.autograd.backward is original, check(trace_of(*drain()))


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {}),
        (2, {"api": "classic"}),
        (2, {"engine": "torch"}),
        (2, {"engine": "torch", "api": "classic", "orig_params": True}),
        (2, DDP),
        (4, {"mesh": "2x2"}),
        (4, {"engine": "torch", "mesh": "2x2"}),
    ],
)
def test_ranks_stop_together_where_one_of_them_has_the_value(world_size, options):
    results = run(world_size, trained, options)
    rank, numel, unit = (0, 32, "(root)") if options is DDP else (1, 16, "head")
    for (tall, wrong), steps, *ended in results:
        held, number, norm = tall
        assert (held.kind, held.breakpoint, number) == (Kind.OPTIMIZER, 0, "1")
        assert held.because == (
            f"the norm of all gradients is {norm:.4g}; the largest part, {norm:.4g}, is on rank {rank}: head.weight "
            f"(unit {unit})"
        )
        held, number, _ = wrong
        assert (held.kind, held.breakpoint, number) == (Kind.OPTIMIZER, 1, "2")
        assert held.because.startswith(
            f"rank {rank}: 4 of {numel} elements of the gradient of head.weight (unit {unit})"
        )
        assert (steps, *ended) == (3, True, [])
    assert len({tuple(held.place for held, *_ in stops) for stops, *_ in results}) == 1
