"""The live measurements; every target finds its number in their results."""

import json
from dataclasses import replace

import pytest

from bench import __main__ as bench
from bench import live, report
from bench.aims import HOSTS, LAB, LIVE, MANY, SCALE, verdicts
from bench.cases import HOSTS_CASES
from bench.watched import (
    PLAIN,
    UNWATCHED,
    VIEWERS,
    WATCHED,
    Blocks,
    DashboardViewer,
    PanelViewer,
    measure_watched,
    size_of,
)
from tests.helpers.fake_cluster import FakeCluster
from tests.helpers.waiting import wait_until
from tests.widgets.test_dashboard import FakeWorkbench
from workbench.protocol.rank_messages import DrainReply, Position
from workbench.workbench import Workbench

FOUND = {
    "watched:measure_watched": {"cpu_to_plain": 1.02, "cpu_to_unwatched": 1.01, "drained_kb": 3.0},
    "watched:measure_to_browser": {"kib_per_s": 50.0},
    "round_trips:measure_control_channel": {"python_ms": 8.0, "torch_ms": 4.0},
    "round_trips:measure_control_channel_of_hosts": {"python_ms": 9.0, "latency_ms": 2.0, "above_links_ms": 5.0},
    "round_trips:measure_start": {"seconds": 3.0, "cpu_s": 2.0},
    "many:measure_next": {"seconds": {"4 ranks": 0.4}, "ms_per_rank": {"4 ranks": 100.0}, "growth": 1.1},
    "many:measure_shard": {"shard ms_per_unit": {"100 units": 5.0}, "growth": 0.9, "lint_ms": 110.0},
    "round_trips:measure_attach": {"median_s": 1.5, "all_s": [1.5], "first_s": 9.0},
    "cells:measure_cells": {"to_px": 1.2, "px_ms": {"median": 1, "lower": 1, "upper": 2, "count": 3}},
    "traces:measure_trace": {
        "load_ms": 400,
        "state_ms": 40,
        "figure_ms": 80,
        "figures_ms": {"memory": 80.0},
        "explain_ms": 150,
    },
    "pixels:measure_timeline": {"fps_pan": 59.9, "fps_zoom": 60.1, "first_paint_ms": 300},
    "traces:measure_scale": {"load_ms": 3000, "figure_ms": 200, "figures_ms": {"memory": 200.0}},
    "pixels:measure_scrub": {"fps": 55.0, "moments": 31.0},
    "pixels:measure_pixels": {"median_ms": 90},
    "panel:measure_panel": {"median_ms": 120, "first_paint_ms": 80, "recovers_ms": 300, "bundle_kb": 250.0},
    "soak:measure_soak": {"kernel_mb": 150.0, "page_mb": 100.0},
}
RECORDING = {"rows_percent": 0.4, "cpu_ratio": 1.0, "failed": {}}


def call(function, timeout_s=0, **arguments):
    json.dumps(arguments)
    return FOUND[function.removeprefix("bench.")]


def whole():
    """Return a result in which everything was measured."""
    found = {"recording": dict.fromkeys(("3.7M", "0.23M"), RECORDING), "trace": live.trace(bench.QUICK, call)}
    found["hosts"] = {name: {"to_torch": 0.8, "failed": {}} for name in HOSTS_CASES}
    quick = bench.QUICK
    parts = {"live": live.live(quick, call), "browser": live.browser(call), "scale": live.scale(quick, call)}
    parts["many"] = live.many(quick, call)
    for part, works in parts.items():
        for name, work in works.items():
            bench._put(found, (part, name), live.measured(name, work))
    return found


def test_every_figure_finds_its_number():
    found = list(verdicts(whole()))
    assert [verdict.aim for verdict in found] == [*LIVE, *MANY, *LAB, *SCALE, *HOSTS]
    assert {verdict.word for verdict in found} == {"met"}
    assert {v.aim.what: v.number for v in found}["control channel while ranks compute, median"] == "8.00 ms"


def test_the_lines_of_the_report_fit():
    found = whole()
    lines = list(report.verdicts(verdicts(found)))
    assert "  to the browser, 8 ranks" in lines[9]
    assert lines[9].endswith("must <= 64 KiB/s   50.00 KiB/s       met")
    assert all(len(line) <= 120 for line in lines)
    assert list(report.numbers(found["live"]["cells"])) == ["  to_px: 1.2", "  px_ms: 1 (1 to 2, 3)"]
    assert list(report.numbers({"all_s": [1.0, 2.5], "by": {"a": 1.0, "b": 2}})) == [
        "  all_s: 1, 2.5",
        "  by: a 1, b 2",
    ]


def test_parts_are_chosen_or_a_check_is_made():
    assert bench._arguments(["--only", "live", "trace"]).only == ["live", "trace"]
    assert bench._arguments(["--check", "--quick"]).check
    with pytest.raises(SystemExit):
        bench._arguments(["--check", "--only", "live"])


def test_a_block_is_the_time_between_its_first_and_last_mark():
    blocks = Blocks()
    for name, cpu in ((PLAIN, 10), (UNWATCHED, 11), (WATCHED, 12)):
        slow, fast = [[0, 0], [99, 1], [2 * cpu, 60]], [[5, 5], [0, 0], [5 + 2 * cpu, 25]]
        blocks.add(name, [slow, fast])
    found = blocks.ratios()
    assert found["cpu_to_plain"] == pytest.approx(1.2)
    assert found["cpu_to_unwatched"] == pytest.approx(12 / 11)
    assert found["watched_wall_ms"] == pytest.approx(30e-6)
    assert found["wall_to_plain_low"] == found["wall_to_plain_high"] == 1


def test_the_size_of_an_answer_is_that_of_its_text_and_buffers():
    small = DrainReply(rows=memoryview(b""), lost=0, key_frame={}, header=None, header_version=0, position=Position())
    assert size_of(replace(small, rows=memoryview(bytes(7)))) == size_of(small) + 7
    assert size_of(replace(small, key_frame={"a": 1})) == size_of(small) + len('"a": 1')


def test_a_viewer_counts_answers_after_the_first():
    viewer = DashboardViewer(FakeWorkbench())
    for _ in range(2):
        viewer._dashboard._handle_custom_msg({"view": "bench", "word": "feed"}, [])
    viewer.close()
    whole_answer, nothing_new = viewer.sizes
    assert whole_answer > 10_000
    assert 300 < nothing_new < 3_000
    viewer.times_s = [1.0, 3.0]
    assert viewer.kib_per_s() == nothing_new / 1024 / 2


def test_a_dashboard_without_an_answer_is_reported(monkeypatch):
    monkeypatch.setattr("bench.watched.ANSWER_S", 0.0)
    viewer = DashboardViewer(FakeWorkbench())
    viewer._is_answered.clear()
    with pytest.raises(RuntimeError, match="did not answer"), viewer.asking():
        viewer.close()


def test_a_viewer_sends_the_next_request_after_the_answer(monkeypatch):
    monkeypatch.setattr("bench.watched.ASK_EVERY_S", 0.0)
    viewer = DashboardViewer(FakeWorkbench())
    with viewer.asking():
        wait_until(lambda: len(viewer.sizes) >= 2)
    viewer.close()


def test_a_panel_is_greeted_and_answers_with_how_everything_is():
    with Workbench(num_ranks=2, device="cpu", cluster_factory=FakeCluster) as workbench:
        viewer = PanelViewer(workbench)
        assert viewer.sizes == []  # a welcome does not answer a request
        viewer.ask(wait=False)
        (size,) = viewer.sizes
        viewer.close()
    assert size > 500


def test_a_request_without_an_answer_from_the_panel_is_reported():
    with Workbench(num_ranks=2, device="cpu", cluster_factory=FakeCluster) as workbench:
        viewer = PanelViewer(workbench)
        with pytest.raises(RuntimeError, match="refused"):
            viewer._receive({"word": "look", "number": "one"})
        viewer.close()


@pytest.mark.thorough
@pytest.mark.cluster
@pytest.mark.parametrize("viewer", VIEWERS)
def test_a_cluster_is_watched(viewer):
    found = measure_watched("0.23M", num_ranks=2, rounds=1, block_s=0.1, viewer=viewer)
    assert found["drained_kb"] > 1
    assert {name for name in found if name.endswith("_wall_ms")} == {
        "plain_wall_ms",
        "unwatched_wall_ms",
        "watched_wall_ms",
    }
