"""Functions that a workbench's ranks run while it is measured; called by name, in the ranks' processes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer

from bench.cases import NUM_SEQUENCES, NUM_TOKENS, RECORDED
from workbench.engine import probe
from workbench.runtime.namespace import user_namespace
from workbench.zoo import GPT, next_token_loss

_marks: list[tuple[int, int]] = []


def build(case: str) -> None:
    """Make the model of a case, not sharded yet, under the name ``model``."""
    torch.manual_seed(0)
    user_namespace()["model"] = GPT(RECORDED[case].config)


def make_trainable(case: str) -> None:
    """Define ``train_step()`` as in a notebook; it also records the time at its end."""
    model = user_namespace()["model"]
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(RECORDED[case].config.vocab_size, (NUM_SEQUENCES, NUM_TOKENS + 1))

    def train_step() -> torch.Tensor:
        loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        adam.step()
        adam.zero_grad()
        _marks.append((time.process_time_ns(), time.perf_counter_ns()))
        return loss.detach()

    user_namespace().update(train_step=train_step, optimizer=adam)


def take_marks() -> list[tuple[int, int]]:
    """Return and clear the marks: CPU time of the process and time at the end of each step, in nanoseconds."""
    taken = list(_marks)
    _marks.clear()
    return taken


def train_unrecorded(count: int) -> None:
    """Train ``count`` steps without recording."""
    with _unrecorded():
        for _ in range(count):
            user_namespace()["train_step"]()


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Run the body without the probe and without the optimizers' hooks."""
    active, probe.active = probe.active, None
    tables = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        probe.active = active
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def compute(what: str, seconds: float) -> int:
    """Compute in the main thread for some seconds, in ``python`` or in ``torch``; return the number of rounds."""
    work = {"python": lambda: sum(number * number for number in range(100_000)), "torch": _multiply()}[what]
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        work()
        rounds += 1
    return rounds


def _multiply(size: int = 512) -> Any:
    left, right = torch.rand(size, size), torch.rand(size, size)
    return lambda: left @ right
