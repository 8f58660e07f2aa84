"""Deaths of ranks and heals: the losses beside those of a run without them, and what snapshots cost a step."""

import os
import random
import signal
import statistics
import time
from ast import literal_eval
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from workbench import Workbench
from workbench.errors import RankDied

Tree = dict[str, Any]
PAGE = Path("build/heal.html")
NUM_RANKS, STEPS, EVERY, DEATHS = 4, 300, 10, 3
SMALL, LARGE = (2, 64), (6, 512)  # blocks and width; the second has 19.2 M parameters
PROGRAM = """
import os, signal
import torch
from workbench.zoo import GPT, GPTConfig, load_text, next_token_loss, rank_generator, sample_batch
text = load_text()
torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=len(text.characters), num_blocks={blocks}, width={width}, max_tokens=64))
"""
TRAINING = """
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
generator = rank_generator(seed=0, rank=rank)
losses, doomed = [], {}

def train_step():
    if doomed.get(rank) == len(losses):
        os.kill(os.getpid(), signal.SIGKILL)
    inputs, targets = sample_batch(text.train, num_sequences=4, num_tokens=64, generator=generator)
    loss = next_token_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    return losses[-1]
"""


def _prepare(wb: Workbench, size: tuple[int, int]) -> None:
    wb.run_cell(PROGRAM.format(blocks=size[0], width=size[1]))
    wb.shard("model")
    wb.run_cell(TRAINING)


def _losses(wb: Workbench) -> list[list[float]]:
    return [literal_eval(text) for text in wb.run_cell("print(losses)").texts.values()]


def measure_heals() -> Tree:
    """Return the seconds of each heal, the steps done again, and whether all losses of all ranks are equal."""
    draw = random.Random(0)
    deaths = [
        (rank, step) for step in sorted(draw.sample(range(STEPS), DEATHS)) for rank in [draw.randrange(NUM_RANKS)]
    ]
    with Workbench(num_ranks=NUM_RANKS, device="cpu") as wb:
        _prepare(wb, SMALL)
        wb.step(STEPS)
        expected = _losses(wb)
        _prepare(wb, SMALL)
        seconds, start_s, redone, left, seen_s = [], [], [], STEPS, []
        for rank, step in deaths:
            wb.run_cell(f"doomed = {{{rank}: {step}}}")
            try:
                wb.step(left, snapshot=EVERY)
            except RankDied:
                while rank not in wb.losses:
                    time.sleep(0.001)
            healed = wb.heal()
            wb.run_cell("doomed = {}")
            left = STEPS - step
            seconds.append(healed.seconds)
            start_s.append(healed.start_s)
            redone.append(healed.steps_redone)
        wb.step(left, snapshot=EVERY)
        found = _losses(wb)
        for rank in range(NUM_RANKS):
            os.kill(wb.status().ranks[rank].pid, signal.SIGKILL)
            begin = time.monotonic()
            while rank not in wb.losses:
                time.sleep(0.001)
            seen_s.append(time.monotonic() - begin)
    _draw(expected[0], found[0], deaths, redone)
    return {
        "deaths": deaths,
        "seconds": seconds,
        "start_s": start_s,
        "longest_s": max(seconds),
        "redone": redone,
        "most_redone": max(redone),
        "equal": found == expected,
        "num_losses": sum(map(len, found)),
        "seen_s": statistics.median(seen_s),
    }


def _draw(expected: list[float], found: list[float], deaths: list[tuple[int, int]], redone: list[int]) -> None:
    figure = go.Figure()
    figure.add_scatter(y=expected, name="without deaths", line={"width": 6, "color": "#bbbbbb"})
    figure.add_scatter(y=found, name="with deaths and heals", line={"width": 1.5, "color": "#0072b2"})
    for (rank, step), again in zip(deaths, redone, strict=True):
        figure.add_vline(x=step, line_dash="dot", annotation_text=f"rank {rank} dies; {again} steps again")
    figure.update_layout(xaxis_title="step", yaxis_title="loss of rank 0", template="plotly_white")
    PAGE.parent.mkdir(exist_ok=True)
    figure.write_html(PAGE)


def measure_snapshots(rounds: int) -> Tree:
    """Return the milliseconds of a step with and without snapshots every 10 steps, and the ratio of each pair."""
    seconds: dict[int, list[float]] = {0: [], EVERY: []}
    with Workbench(num_ranks=2, device="cpu") as wb:
        _prepare(wb, LARGE)
        wb.step(3, snapshot=EVERY)
        for number in range(2 * rounds):
            every = EVERY * (number % 2)
            wb.step(EVERY, snapshot=every)  # the next one begins with the snapshot at its end
            begin = time.monotonic()
            wb.step(2 * EVERY, snapshot=every)
            seconds[every].append((time.monotonic() - begin) / (2 * EVERY))
        taken = wb.snapshot()
    with_s, without_s = (statistics.median(seconds[every]) for every in (EVERY, 0))
    ratios = sorted(each / other for each, other in zip(seconds[EVERY], seconds[0], strict=True))
    return {
        "with_ms": with_s * 1e3,
        "without_ms": without_s * 1e3,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "snapshot_s": taken.seconds,
        "num_bytes": taken.num_bytes,
        "kept_bytes": taken.kept_bytes,
    }
