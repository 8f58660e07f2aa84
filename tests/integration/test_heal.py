"""Ranks that die are replaced, and training goes on with the same losses, bit for bit."""

import os
import signal
from ast import literal_eval
from collections import defaultdict

import numpy as np
import pytest

from tests.helpers.waiting import wait_until
from workbench import Workbench
from workbench.base.text_formats import format_bytes
from workbench.errors import RankDied, RankError, UsageError
from workbench.events import Category
from workbench.magics.command_lines import parse_line
from workbench.session import healing
from workbench.trace.columns import steps
from workbench.trace.invariants import check

pytestmark = pytest.mark.cluster

MODEL = """
import os, signal
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x * (1 + self.seen / 100)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), Scaled(), nn.Linear(12, 5), nn.Linear(5, 1))
"""
TRAINING = """
opt = torch.optim.AdamW(model.parameters(), lr=0.05)
schedule = None
generator = torch.Generator().manual_seed(rank)
losses, doomed = [], {}

def train_step():
    global schedule
    schedule = schedule or torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)  # no cell makes it
    if doomed.get(rank) == len(losses):
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(torch.randn(4, 6, generator=generator)).float().square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    schedule.step()
    losses.append(loss.item())
    return losses[-1]
"""
STEPS, EVERY = 8, 3
WITH = {"snapshot": EVERY}, f" --snapshot {EVERY}", 2  # 5 steps were done
WITHOUT = {}, "", 0
HOLDERS = {"ddp": (0,), "hybrid": (1,), "classic hybrid": (1,), "torch's hybrid": (1,)}
"""The rank that has what the last one has, where no snapshots are taken."""
DDP = "model = torch.nn.parallel.DistributedDataParallel(model)"
POLICIES = {
    2: {
        "fully_shard": {},
        "classic": {"api": "classic"},
        "mixed": {"mp": "bf16"},
        "offload": {"offload": True},
        "ddp": {},
    },
    4: {
        "classic": {"api": "classic", "orig_params": True},
        "hybrid": {"mesh": (2, 2)},
        "classic hybrid": {"api": "classic", "strategy": "hybrid", "mesh": (2, 2)},
        "torch's hybrid": {"engine": "torch", "mesh": (2, 2)},
    },
}


@pytest.fixture
def wb(request):
    """A workbench for all rows of a table: a heal gives back the process that a death takes."""
    with Workbench(num_ranks=request.param, device="cpu") as started:
        yield started


def prepare(wb, name="", **policy):
    wb.run_cell(MODEL)
    if name == "ddp":
        wb.run_cell(DDP)
    else:
        wb.shard("model", **policy)
    wb.run_cell(TRAINING)


def losses_of(wb):
    return {rank: literal_eval(text) for rank, text in wb.run_cell("print(losses)").texts.items()}


def train_until(wb, deaths, **options):
    """Train until ranks kill themselves, each before its step."""
    wb.run_cell(f"doomed |= {deaths}")
    with pytest.raises(RankDied, match="%fsdp heal"):
        wb.step(STEPS, **options)
    wait_until(lambda: set(wb.losses) == deaths.keys())


def kill(wb, *ranks):
    for rank in ranks:
        os.kill(wb.status().ranks[rank].pid, signal.SIGKILL)
    wait_until(lambda: wb.losses.keys() >= {*ranks})


def groups_in_part(trace):
    """Yield the groups whose collectives in the newest step are not those of all their ranks, with these."""
    users = defaultdict(set)
    for part in trace.ranks:
        for group in np.unique(part.rows["comm_group"][part.rows["step"] == part.rows["step"].max()]):
            users[group].add(part.rank)
    for group, ranks in users.items():
        if group >= 0 and ranks != {*trace.header.comm_groups[group].ranks}:
            yield trace.header.comm_groups[group], ranks


@pytest.mark.parametrize("wb", POLICIES, indirect=True)
def test_training_goes_on_from_the_last_step_with_the_same_losses(wb, tmp_path):
    last = wb.num_ranks - 1
    for number, (name, policy) in enumerate(POLICIES[wb.num_ranks].items(), 1):
        prepare(wb, name, **policy)
        wb.step(STEPS)
        expected = losses_of(wb)
        prepare(wb, name, **policy)
        options, words, redone = WITHOUT if name in HOLDERS else WITH
        train_until(wb, {last: 5}, **options)
        healed = wb.heal()
        assert (healed.ranks, healed.steps_redone, healed.steps_lost, healed.failed) == ((last,), redone, 0, ()), name
        assert (healed.replicas, healed.lacking) == (HOLDERS.get(name, ()), ())
        assert healed.next == f"%fsdp step {STEPS - 5}{words}"
        assert losses_of(wb) == {rank: each[:5] for rank, each in expected.items()}, name
        wb.run_cell("doomed.clear()")
        if number == 1:
            kill(wb, 0)  # at which all meet, and between two commands; a heal leaves a snapshot
            assert wb.heal().steps_redone == 0
        wb.step(STEPS - 5)
        assert losses_of(wb) == expected, name
        assert [*groups_in_part(wb.trace)] == [], name
        assert wb.save(str(tmp_path / "runs")).step == 2 * STEPS * number
        assert list(check(wb.trace)) == []


@pytest.mark.parametrize("wb", [4], indirect=True)
def test_what_cannot_be_restored_is_named(wb, monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="all ranks run: nothing to heal"):
        wb.heal()
    prepare(wb)
    wb.run_cell("class Meter:\n    pass\n\nmeter, batches = Meter(), iter([1])\nmeter.seen = 0")
    wb.run_cell("only_here, meter.seen = object(), 1", ranks=[1])
    wb.run_cell("hidden = {torch.optim.lr_scheduler.StepLR(opt, 1)}")
    wb.run_cell("torch.save(1, os.devnull)")
    with pytest.raises(RankError, match="same error on ranks 1-3"):
        wb.run_cell("half = 1\nraise ValueError")
    wb.run_cell("whole = 2 * half")
    train_until(wb, {0: 5, 2: 5}, snapshot=EVERY)  # the others have both snapshots
    said = []
    healed = wb.heal(on_notice=said.append)
    assert (healed.ranks, healed.steps_redone, healed.steps_lost, healed.kept) == ((0, 2), 2, 0, ("only_here",))
    hidden = "an instance of StepLR that no public variable reaches"
    assert healed.other == (hidden, "batches", "meter.seen")
    assert healed.left_out == ("a cell that ran on rank 1 only",)
    assert (healed.failed, healed.failed_again) == ((), ("the cell 'half = 1': ValueError",))
    assert said == ["runs again: the cell that begins with 'torch.save(1, os.devnull)', which writes a file"]
    assert set(map(len, losses_of(wb).values())) == {5}

    kill(wb, 1, 2)  # rank 2 had the snapshot of rank 1
    restart, victims = healing.Session.restart_ranks, [3]

    def restart_and_kill(session, on_wait):
        restart(session, on_wait)
        if victims:
            kill(wb, victims.pop())

    monkeypatch.setattr(healing.Session, "restart_ranks", restart_and_kill)
    with pytest.raises(RankDied, match="rank 3 died"):
        wb.heal()
    healed = wb.heal()
    assert (healed.ranks, healed.steps_lost, healed.next) == ((3,), 5, f"%fsdp step {STEPS} --snapshot {EVERY}")
    assert set(map(len, losses_of(wb).values())) == {0}
    assert [type(entry).__name__ for entry in wb.program.entries].count("CompletedCommand") == 1, "steps are lost"
    assert f"views keep the lost steps, and call the next step {healed.next_step}" in str(healed).lower()
    assert wb.status().next == healed.next
    wb.run_cell("doomed.clear()")
    wb.step(STEPS, snapshot=EVERY)
    assert steps(wb.trace)[-STEPS] == healed.next_step
    assert (wb.save(str(tmp_path / "runs")).step, wb.status().next[:13]) == (STEPS, "%fsdp explain")


KILLED_AT = {
    "snapshots.capture": (3, 3),  # the snapshot after 6 steps is not copied, or not sent: the one before is whole
    "snapshots.Snapshots._send": (3, 3),
    "snapshots.Snapshots._receive": (3, None),  # it was sent a step ago, and may have arrived
    "checkpoint_writer.write_chunk": (1, None),  # in a thread, while training goes on
}
FAULT = """
import os, signal
from workbench.runtime import checkpoint_writer, snapshots
def die_in(owner, name, calls):
    original = getattr(owner, name)
    def counted(*args, **options):
        calls.append(name)
        if len(calls) == {nth}:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)
    setattr(owner, name, counted)
die_in({owner}, "{name}", [])
"""


def snapshot_bytes(wb):
    return {part.rank: part.bytes_before(len(part.rows))[Category.SNAPSHOTS] for part in wb.trace.ranks}


@pytest.mark.parametrize("wb", [4], indirect=True)
def test_a_rank_that_dies_inside_a_snapshot_or_save_is_healed_from_a_whole_snapshot(wb, tmp_path):
    prepare(wb)
    wb.step(STEPS)
    expected = losses_of(wb)
    said = []
    wb.do(parse_line("step 1 --snapshot 2"), on_notice=said.append)
    params = [3 * 6, 3, 2 * 12, 2, 5, 1]  # elements on rank 0, which has most
    padded = sum(-(-4 * numel // 64) * 64 for numel in params)
    state = 3 * padded + len(params) * 64 + 64  # parameters and two moments, a step count of each, and the buffer
    each = f"2 copies of {format_bytes(state)}"
    assert said == [f"snapshots take {format_bytes(2 * state)} of host memory on each rank, {each}"]
    taken = wb.snapshot()
    assert 2 * state < taken.kept_bytes < 2 * (state + 2000), "the rest is numbers and texts"
    kept = format_bytes(taken.kept_bytes)
    assert wb.status().ranks[0].doing == f"idle; keeps {kept} of snapshots"
    assert snapshot_bytes(wb)[0] == taken.kept_bytes
    for where, (nth, redone) in KILLED_AT.items():
        owner, _, name = where.rpartition(".")
        prepare(wb)
        wb.run_cell(FAULT.format(owner=owner, name=name, nth=nth), ranks=[2])
        with pytest.raises(RankDied):
            wb.step(STEPS, snapshot=EVERY, save=str(tmp_path / "runs"), every=EVERY)
        wait_until(lambda: 2 in wb.losses)
        healed = wb.heal()
        assert (healed.ranks, healed.steps_lost) == ((2,), 0), where
        assert redone in {None, healed.steps_redone}, where
        wb.do(parse_line(healed.next.removeprefix("%fsdp ")))
        assert losses_of(wb) == expected, where
        for rank, num_bytes in snapshot_bytes(wb).items():
            assert f"keeps {format_bytes(num_bytes)} of snapshots" in wb.status().ranks[rank].doing, where


DIES_IN_HEAL = {  # who dies, at which call of what, and who has the state then
    2: {"the only source, as it sends": (0, "torch.distributed", "send", 2, ())},
    4: {
        "the receiver, as it receives": (3, "torch.distributed", "recv", 2, (1,)),
        "the source, after it has sent": (1, "workbench.runtime.snapshots", "restore", 1, (3,)),
    },
}
ARMED = """
import importlib, os, signal
from pathlib import Path

def die_in(victim, owner, name, nth, armed):
    module, calls = importlib.import_module(owner), []
    original = getattr(module, name)
    def counted(*args, **options):
        calls.append(name)
        if rank == victim and len(calls) == nth and Path(armed).exists():
            os.remove(armed)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)
    setattr(module, name, counted)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("wb", DIES_IN_HEAL, indirect=True)
def test_a_rank_that_dies_inside_a_heal_from_replicas_is_named_and_the_next_heal_is_whole(wb, tmp_path):
    name, last = {2: "ddp", 4: "hybrid"}[wb.num_ranks], wb.num_ranks - 1
    prepare(wb, name, **POLICIES[wb.num_ranks].get(name, {}))
    wb.step(STEPS)
    expected = losses_of(wb)
    for words, (victim, *where, holders) in DIES_IN_HEAL[wb.num_ranks].items():
        armed = tmp_path / words  # each has its own, as a heal repeats the cells of the one before
        prepare(wb, name, **POLICIES[wb.num_ranks].get(name, {}))
        wb.run_cell(f"{ARMED}\ndie_in({victim}, *{where}, {str(armed)!r})")
        wb.step(5)
        kill(wb, last)
        armed.touch()
        with pytest.raises(RankDied, match=rf"^rank {victim} died: .*\. %fsdp heal begins again$"):
            wb.heal()
        healed = wb.heal()
        assert (healed.replicas, healed.lacking, healed.failed) == (holders, (), ()), words
        assert bool(healed.steps_lost) == (not holders), words
        wb.step(STEPS - 5 if holders else STEPS)
        assert losses_of(wb) == expected, words
