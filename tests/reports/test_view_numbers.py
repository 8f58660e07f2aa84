"""The numbers behind figures: they equal those that the figures show, and what the simulated job did."""

import json
from itertools import pairwise

import pytest
from hypothesis import given

from tests.helpers import json_schema
from tests.helpers.simulated_job import Setup, simulate
from tests.helpers.trace_strategies import example_trace, traces
from workbench.errors import UsageError
from workbench.events import Category, Kind
from workbench.replay import memory
from workbench.reports.json_document import document
from workbench.reports.view_numbers import compared, numbers
from workbench.trace.columns import Trace
from workbench.views import VIEWS, draw
from workbench.views.theme import title_and_subtitle

TRACE = example_trace(num_ranks=2, num_units=3, steps=3)


def check(report):
    """Return the report in its document, which the schema describes."""
    return json_schema.check(document("x", report))["report"]


@pytest.mark.parametrize("name", VIEWS)
def test_title_and_subtitle_are_those_of_the_figure(name):
    found = check(numbers(name, TRACE))
    assert (found["headline"], found["subtitle"]) == title_and_subtitle(draw(name, TRACE))


@pytest.mark.parametrize("name", VIEWS)
def test_nothing_recorded_says_what_to_do(name):
    assert "%fsdp" in check(numbers(name, Trace.empty()))["headline"]


@pytest.mark.parametrize("name", VIEWS)
@given(trace=traces(max_ranks=2))
def test_any_trace_has_numbers(name, trace):
    json.dumps(check(numbers(name, trace)), allow_nan=False)


def test_wrong_options_are_refused_as_by_the_figure():
    with pytest.raises(UsageError, match="the trace has no step 9"):
        numbers("memory", TRACE, step=9)
    with pytest.raises(UsageError, match="there is no unit 'head'"):
        numbers("comms", TRACE, unit="head")
    with pytest.raises(UsageError, match="there is no view 'memmory'; did you mean 'memory'"):
        numbers("memmory", TRACE)


def test_a_view_without_numbers_says_so(monkeypatch):
    monkeypatch.setitem(VIEWS, "gantt", VIEWS["timeline"])
    with pytest.raises(UsageError, match="gantt only draws"):
        numbers("gantt", TRACE)


def test_layout():
    found = check(numbers("layout", TRACE))
    assert [unit["name"] for unit in found["units"]] == ["(root)", "blocks.0", "blocks.1"]
    own = [unit["params"] for unit in found["units"]]
    assert sum(map(len, own)) == found["totals"]["num_params"]
    one = check(numbers("layout", TRACE, unit="blocks.1", fold=True))
    assert [unit["name"] for unit in one["units"]] == ["blocks.1"]
    assert one["totals"]["num_params"] == len(one["units"][0]["params"])


def test_memory_has_the_peak_of_each_rank():
    found = check(numbers("memory", TRACE, steps=2))
    assert (found["first_step"], found["last_step"]) == (1, 2)
    first, second = found["ranks"]
    begin, end = TRACE.rank(0).places_of(1, 2)
    rows = TRACE.rank(0)
    peak = memory.peak(rows.cut(rows.start.seq + begin, rows.start.seq + end))
    assert first["peak_bytes"] == peak.num_bytes
    assert first["peak_phase"] == peak.phase.key
    assert list(first["peak_bytes_by_category"]) == [category.key for category in Category]
    assert first["peak_bytes"] == memory.in_use(list(first["peak_bytes_by_category"].values()))
    assert [each["rank"] for each in check(numbers("memory", TRACE, rank=1))["ranks"]] == [second["rank"]] == [1]


def test_sampled_processes_are_in_the_memory():
    sampled = check(numbers("memory", simulate(Setup(num_ranks=2, samples=True))))
    assert all(each["max_process_bytes"] > 0 for each in sampled["ranks"])
    assert check(numbers("memory", simulate(Setup(num_ranks=2))))["ranks"][0]["max_process_bytes"] is None


def test_timeline_has_each_collective_once():
    found = check(numbers("timeline", TRACE, step=1))
    spans = found["ranks"][0]["spans"]
    gathers = [span for span in spans if span["kind"] == "all_gather"]
    rows = TRACE.rank(0).rows[slice(*TRACE.rank(0).places_of(1, 1))]
    assert len(gathers) == ((rows["kind"] == Kind.ALL_GATHER) & (rows["edge"] == 0)).sum()
    assert len({(span["comm_group"], span["comm_seq"]) for span in gathers}) == len(gathers)
    assert all(0 <= span["begin_ns"] <= span["end_ns"] for span in gathers)
    assert {span["step"] for span in spans} == {1}
    assert found["ranks"][0]["waited_ns"] == pytest.approx(
        sum(span["end_ns"] - span["begin_ns"] for span in spans if span["kind"] == "wait")
    )


def test_states_have_no_gap():
    found = check(numbers("states", TRACE, unit="blocks.*"))
    for rank in found["ranks"]:
        for unit in ("blocks.0", "blocks.1"):
            own = [span for span in rank["spans"] if span["unit"] == unit]
            assert {"sharded", "unsharded"} <= {span["state"] for span in own}
            assert all(a["end_ns"] == b["begin_ns"] for a, b in pairwise(own))
        assert {span["unit"] for span in rank["spans"]} == {"blocks.0", "blocks.1"}


def test_comms_counts_and_compares():
    found = check(numbers("comms", TRACE))
    assert (found["step"], found["as_expected"]) == (2, True)
    gathers = [row for row in found["rows"] if row["kind"] == "all_gather"]
    assert [row["unit"] for row in gathers] == ["(root)", "blocks.0", "blocks.1"]
    assert sum(row["calls"] for row in gathers) == sum(row["expected_calls"] for row in gathers) == 5
    total = next(each for each in found["totals"] if each["kind"] == "all_gather")
    assert (total["ranks"], total["calls"], total["expected_calls"]) == ([0, 1], 5, 5)
    assert total["num_bytes"] == sum(row["num_bytes"] for row in gathers)
    one = check(numbers("comms", TRACE, unit="blocks.1", step=0))
    assert ({row["unit"] for row in one["rows"]}, one["step"]) == ({"blocks.1"}, 0)


def test_a_missing_collective_is_not_as_expected():
    rows = TRACE.rank(0).rows
    kept = ~((rows["kind"] == Kind.ALL_GATHER) & (rows["step"] == 2) & (rows["unit"] == 0))
    cut = rows[kept].copy()
    cut["seq"] = range(len(cut))
    one = type(TRACE.rank(0))(0, cut, TRACE.rank(0).start)
    found = check(numbers("comms", Trace(TRACE.header, (one, *TRACE.ranks[1:])), step=2))
    assert found["as_expected"] is False
    assert [row["as_expected"] for row in found["rows"] if row["ranks"] == [0]].count(False) == 1


def test_training_has_a_series_for_each_metric():
    found = check(numbers("training", TRACE))
    assert found["metrics"][0]["name"] == "loss"
    assert found["metrics"][0]["steps"] == found["step_times_ns"]["steps"] == [0, 1, 2]
    assert found["num_steps"] == 3


def test_compare():
    parts = TRACE.slice(first=0, last=0), TRACE.slice(first=2, last=2)
    found = check(compared(*parts, names=("a", "b")))
    assert found["names"] == ["a", "b"]
    assert found["change"]["ranks"] == [0, 1]
    same = check(compared(parts[1], parts[1], names=("a", "b")))
    assert same["change"]["same_events"]
    assert same["change"]["peak_bytes"][0] == same["change"]["peak_bytes"][1]
    assert (same["change"]["collectives"], same["change"]["peak_step"]) == ([], None)
    assert same["headline"].startswith("the same, event for event")
    assert check(compared(Trace.empty(), TRACE, names=("a", "b")))["change"] is None
    with pytest.raises(UsageError, match="no rank 7"):
        compared(*parts, names=("a", "b"), rank=7)
