import html
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.figure_checks import subtitle, title
from tests.helpers.simulated_job import BASELINE_BYTES
from tests.helpers.trace_strategies import Setup, example_trace, simulate
from workbench.replay import process
from workbench.trace import load, save
from workbench.trace.columns import Trace
from workbench.views.memory import memory
from workbench.views.process import BASELINE, NOT_OWNED, OWNED

MIB = 2**20


def strip(fig):
    """Return the areas of the strip, by name."""
    return {trace.name: np.array(trace.y) for trace in fig.data if trace.stackgroup == "process"}


def test_the_strip_adds_up_to_the_systems_count():
    trace = simulate(Setup(samples=True))
    areas = strip(memory(trace, process=True))
    part = trace.slice(step=2).rank(0)
    assert list(areas) == [BASELINE, NOT_OWNED, OWNED]
    found = process.series(trace.header, part)
    assert sum(areas.values())[:-1] * MIB == pytest.approx(found.resident)
    assert areas[OWNED][:-1] * MIB == pytest.approx(found.owned)
    assert set(areas[BASELINE] * MIB) == {BASELINE_BYTES}


def test_the_series_are_distinct_and_in_the_legend_once():
    fig = memory(simulate(Setup(samples=True)), process=True)
    looks = [(t.name, t.showlegend, t.fillpattern.shape, t.line.color) for t in fig.data if t.stackgroup == "process"]
    assert len({look[2:] for look in looks}) == 3
    assert all(shown for _, shown, _, _ in looks)
    assert sorted(name for name, *_ in looks) == sorted({name for name, *_ in looks})


def test_the_subtitle_reconciles_the_classes_with_the_process():
    text = html.unescape(subtitle(memory(simulate(Setup(samples=True)), process=True)))
    assert (
        "the whole process uses up to 128 MiB: 520 KiB the engine's, 63.5 MiB not the engine's, 64.0 MiB from" in text
    )
    assert "activations are not measured" in text


def test_a_trace_without_samples_is_marked_and_drawn():
    fig = memory(example_trace(), process=True)
    assert "process memory was not sampled" in subtitle(fig)
    assert not strip(fig)
    assert title(fig) == title(memory(simulate(Setup(samples=True))))


def test_without_a_known_baseline_all_of_it_is_not_owned():
    trace = simulate(Setup(samples=True))
    ranks = tuple(replace(info, baseline_bytes=0) for info in trace.header.ranks)
    areas = strip(memory(Trace(replace(trace.header, ranks=ranks), trace.ranks), process=True))
    assert list(areas) == [NOT_OWNED, OWNED]


def test_a_saved_trace_draws_the_same(tmp_path):
    trace = simulate(Setup(samples=True))
    save(trace, tmp_path / "a.trace")
    assert memory(load(tmp_path / "a.trace")).to_json() == memory(trace).to_json()


def test_it_is_shown_only_on_request():
    fig = memory(simulate(Setup(samples=True)))
    assert not strip(fig)
    assert "process" not in subtitle(fig)
