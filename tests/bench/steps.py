"""Training steps of one model under several implementations, measured on every rank.

Runs in forked ranks. ``alone`` is the same model without any communication: what lies above it is the price of
sharding. Each implementation gets processes of its own; torch's gets slower when it shares one with another.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from workbench.engine import fully_shard, probe
from workbench.runtime.recorder import Recorder
from workbench.runtime.training import Trainer
from workbench.trace.schema import ROW, Category, Header
from workbench.zoo import GPT, GPTConfig, next_token_loss

WARM_UP = 3
NUM_SEQUENCES = 4
NUM_TOKENS = 64
SIZES = {
    "3.3M": GPTConfig(vocab_size=256, num_blocks=4, width=256, max_tokens=NUM_TOKENS),
    "19.2M": GPTConfig(vocab_size=256, num_blocks=6, width=512, num_heads=8, max_tokens=NUM_TOKENS),
}
Step = Callable[[], None]


@dataclass(frozen=True)
class Sample:
    """One step on one rank.

    Attributes:
        wall_ns: from the moment at which all ranks were ready.
        cpu_ns: of the whole process, communication threads included.
    """

    wall_ns: int
    cpu_ns: int


def _per_block(model: GPT, shard: Callable[[torch.nn.Module], object]) -> torch.nn.Module:
    for block in model.blocks:
        shard(block)
    shard(model)
    return model


PREPARE: dict[str, Callable[[GPT], torch.nn.Module]] = {
    "alone": lambda model: model,
    "ddp": DistributedDataParallel,
    "torch": lambda model: _per_block(model, torch_fully_shard),
    "ours": lambda model: _per_block(model, fully_shard),
}


def make_step(size: str, name: str) -> Step:
    """Return the training step of one implementation."""
    torch.manual_seed(0)
    model = PREPARE[name](GPT(SIZES[size]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(SIZES[size].vocab_size, (NUM_SEQUENCES, NUM_TOKENS + 1))

    def step() -> None:
        next_token_loss(model(ids[:, :-1]), ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(size: str, name: str, num_steps: int) -> list[Sample]:
    """Return the samples of ``num_steps`` steps, after some to warm up."""
    step = make_step(size, name)
    for _ in range(WARM_UP):
        step()
    return [_timed(step) for _ in range(num_steps)]


@dataclass(frozen=True)
class Recording:
    """What recording costs on one rank.

    Attributes:
        on: recorded steps, each with a drain of its rows as the notebook does now and then.
        off: plain steps, taken in turns with the others.
        num_rows: rows of one recorded step.
        row_ns: median time of one append.
    """

    on: list[Sample]
    off: list[Sample]
    num_rows: int
    row_ns: float


def measure_recording(size: str, num_pairs: int) -> Recording:
    """Return the samples of ``num_pairs`` recorded and as many plain steps; which comes first changes every time."""
    recorder = Recorder(Header())
    trainer = Trainer(recorder)
    num_rows = next_seq = 0

    def recorded_step() -> None:
        nonlocal num_rows, next_seq
        recorder.begin_step()
        step()
        recorder.end_step()
        drained = recorder.drain(next_seq)
        num_rows, next_seq = len(drained.rows) // ROW.size, drained.key_frame.seq

    with _recording(recorder, trainer):  # units tell the probe of themselves when they are made
        step = make_step(size, "ours")
        for _ in range(WARM_UP):
            recorded_step()
    on: list[Sample] = []
    off: list[Sample] = []
    for pair in range(num_pairs):
        for is_recorded in (True, False) if pair % 2 else (False, True):
            if is_recorded:
                with _recording(recorder, trainer):
                    on.append(_timed(recorded_step))
            else:
                off.append(_timed(step))
    return Recording(on, off, num_rows, _row_ns(recorder))


@contextmanager
def _recording(recorder: Recorder, trainer: Trainer) -> Iterator[None]:
    """The probe and the optimizers' hooks in, as on a rank of the workbench."""
    handles = trainer.install()
    probe.active = recorder
    try:
        yield
    finally:
        probe.active = None
        for handle in handles:
            handle.remove()


def _row_ns(recorder: Recorder, repeats: int = 21, num_rows: int = 500) -> float:
    """Median time of one append, in nanoseconds, its call included."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        for _ in range(num_rows):
            recorder.memory_of(Category.OTHER, -1, 8)
        times.append((time.perf_counter_ns() - begin) / num_rows)
    return statistics.median(times)


def _timed(step: Step) -> Sample:
    dist.barrier()
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    step()
    return Sample(time.perf_counter_ns() - wall, time.process_time_ns() - cpu)
