"""Activations of a recorded step, in this process: by owner, and what checkpointing would save."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from tests.helpers.trace_strategies import setups, simulate
from workbench.engine import probe
from workbench.events import Activation, Category, Phase
from workbench.models.activation_watch import ActivationWatch
from workbench.models.patches import Patches
from workbench.replay import activations, memory
from workbench.replay.peak_savings import Knob, savings
from workbench.runtime.recorder import Recorder
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, Header, RankInfo
from workbench.views.memory import memory as memory_figure


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.blocks = nn.Linear(16, 16), nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x):
        return self.blocks(self.inner(x))


def recorded(model, steps=1) -> Trace:
    """Return the trace of a rank that trains an unsharded model; the phases are those that an engine announces."""
    recorder, watch, patches = Recorder(Header(world_size=1)), ActivationWatch(), Patches("activations are")
    info = RankInfo(rank=0, host="here", device="cpu", pid=1)
    recorder.set_run(info, mesh_shape=(1,), mesh_axes=("rank",))
    patches.install(watch.install)
    probe.active = recorder
    try:
        for _ in range(steps):
            recorder.begin_step()
            recorder.phase(Phase.FORWARD)
            loss = model(torch.ones(8, 16)).sum()
            watch.before_backward(loss)
            recorder.phase(Phase.BACKWARD)
            loss.backward()
            del loss
            recorder.phase(Phase.IDLE)
            recorder.end_step()
    finally:
        probe.active = None
        patches.undo()
    drained = recorder.drain()
    return Trace(recorder.header, [RankTrace(0, np.frombuffer(drained.rows, ROW_DTYPE))])


@pytest.mark.parametrize(
    ("path", "block", "part"),
    [
        ("blocks.2.mlp.0", "blocks.2", "blocks.*.mlp"),
        ("model.layers.11", "model.layers.11", "model.layers.*"),
        ("0.1", "0", "*.1"),
        ("inner.up", "", "inner"),
        ("(root)", "", "(root)"),
    ],
)
def test_parts_of_a_model(path, block, part):
    assert (activations.block_of(path), activations.part_of(path)) == (block, part)


@pytest.mark.parametrize("by", activations.GROUPINGS)
def test_groups_add_up_to_the_class_at_every_moment(by):
    trace = recorded(Net(), steps=2)
    whole = trace.rank(0)
    for part in (whole, whole.cut(*whole.places_of(1, 1))):
        moments = memory.series(part)
        peak = memory.peak(part)
        kept = activations.kept_at(trace.header, part, peak.seq)
        found = activations.grouped(kept, by, peak.num_bytes)
        assert sum(found.values()) == peak.num_bytes == peak.bytes_by_category[Category.ACTIVATIONS]
        series = activations.series(trace.header, part, moments.seq, list(found)[:2], by)
        assert (series >= 0).all()
        assert np.array_equal(series.sum(axis=1), moments.num_bytes[:, Category.ACTIVATIONS])
        assert series[list(moments.seq).index(peak.seq)].tolist()[:2] == list(found.values())[:2]


def test_what_a_cut_trace_does_not_name_is_a_group_of_its_own():
    trace = recorded(Net())
    whole = trace.rank(0)
    middle = len(whole.rows) // 3
    late = whole.cut(middle, len(whole.rows))
    peak = memory.peak(late)
    kept = activations.kept_at(trace.header, late, peak.seq)
    rest = activations.grouped(kept, "module", peak.num_bytes)[activations.UNKNOWN]
    assert rest == late.start.bytes_by_category[Category.ACTIVATIONS] > 0


def test_checkpointing_saves_what_its_formula_says():
    plain, again = Net(), Net()
    apply_activation_checkpointing(again, check_fn=set(again.blocks).__contains__)
    trace = recorded(plain)
    part = trace.rank(0)
    peak = memory.peak(part)
    (saving,) = savings(trace.header, part, peak, {}, on_device=False)
    assert (saving.knob, saving.modules, saving.is_bound) == (Knob.CHECKPOINT, "blocks", True)
    assert saving.peak_bytes == memory.peak(recorded(again).rank(0)).num_bytes
    assert saving.peak_bytes + saving.saved_bytes == peak.num_bytes
    checkpointed = recorded(again)
    part = checkpointed.rank(0)
    assert savings(checkpointed.header, part, memory.peak(part), {}, on_device=False) == ()


def test_a_figure_splits_activations_by_what_made_them():
    trace = recorded(Net())
    names = [area.name for area in memory_figure(trace, by="module").data]
    assert names[:2] == ["activations: blocks.*.mlp", "activations: blocks.*.norm"]
    assert set(names[2:4]) == {"activations: blocks.*", "activations: inner"}
    names = Counter(area.name for area in memory_figure(trace, by="op").data)
    assert names["activations: gelu"] == 1
    assert "activations at the peak: blocks.*.mlp 12.0 KiB" in memory_figure(trace).layout.title.subtitle.text.replace(
        "<br>", " "
    )


def test_an_owner_is_read_from_its_text():
    owner = Activation(module="blocks.0", op="addmm", kept_by="blocks.1")
    assert Activation.from_text(owner.text) == owner
    assert Activation.from_text("") == Activation(module="", op="", kept_by="")


@given(setups())
def test_activations_that_one_trace_alone_has_are_left_out_of_a_comparison(setup):
    watched, plain = (simulate(replace(setup, activations=has)) for has in (True, False))
    first, second, note = activations.comparable(watched, plain)
    assert (second is plain, bool(note)) == (True, setup.steps > 0)
    for mine, other in zip(first.ranks, second.ranks, strict=True):
        assert memory.peak(mine).num_bytes == memory.peak(other).num_bytes
    assert activations.comparable(watched, watched) == (watched, watched, "")
