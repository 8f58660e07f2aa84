"""What the browser is told of a trace: all of it, each rectangle once, in the right columns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.on_device import on_devices
from tests.trace.simulation import example_trace
from tests.trace.strategies import Setup, simulate, traces
from tests.widgets.timeline_page import recorded
from workbench.events import Edge, Kind
from workbench.replay.collectives import table
from workbench.trace.columns import RankTrace, Trace
from workbench.views.tracks import COMPUTE, tracks
from workbench.widgets import timeline as module
from workbench.widgets.busy import answer_while_busy
from workbench.widgets.spans import SPAN_DTYPE, TRACKS
from workbench.widgets.timeline import COLUMNS, MAX_RANKS, Timeline, not_ended, pack


class Page:
    """What ``timeline_widget.js`` knows: it counts, and asks for what it misses."""

    def __init__(self):
        self.header, self.columns, self.open, self.num_messages = None, {}, {}, 0

    def take(self, message, buffers):
        self.num_messages += 1
        self.header = message["header"] or self.header
        for chunk, buffer in zip(message["chunks"], buffers, strict=False):
            have = self.columns.setdefault(chunk["track"], [])
            assert chunk["first"] == sum(len(part["start"]) for part in have)
            have.append(unpack(buffer, chunk["count"]))
        rest = buffers[len(message["chunks"]) :]
        self.open = {o["track"]: unpack(b, o["count"]) for o, b in zip(message["open"], rest, strict=True)}

    def column(self, track, name):
        return np.concatenate([part[name] for part in self.columns.get(track, [])] or [np.empty(0)])


def unpack(buffer, count):
    columns, at = {}, 0
    for name, code in COLUMNS:
        columns[name] = np.frombuffer(buffer, code, count, at)
        at += columns[name].nbytes
    assert at == len(buffer)
    return columns


def shares(trace, fraction):
    """The trace when each rank had recorded only this part of its rows."""
    return Trace(
        trace.header, tuple(RankTrace(r.rank, r.rows[: int(fraction * len(r.rows))], r.start) for r in trace.ranks)
    )


def ask(timeline, counts=()):
    timeline._handle_custom_msg({"type": "want", "page": "a", "counts": list(counts)}, [])


@pytest.fixture
def messages(monkeypatch):
    return recorded(monkeypatch)


def told(monkeypatch, *prefixes):
    """What a page knows that was there from the first prefix on."""
    with monkeypatch.context() as patch:
        messages, page = recorded(patch), Page()
        timeline = Timeline(prefixes[0])
        ask(timeline)
        for prefix in prefixes[1:]:
            timeline.append(prefix)
        for message in messages:
            page.take(*message)
    return page


@given(traces(whole=True))
def test_the_browser_gets_the_spans_of_the_trace(trace):
    page = told(pytest.MonkeyPatch(), trace)
    origin_ns = min((int(r.rows["t_ns"].min()) for r in trace.ranks), default=0)
    for place, rank in enumerate(r for r in trace.ranks if len(r.rows)):
        found = table(rank)
        for track, (_, kinds) in enumerate(TRACKS[1:], 1):
            mine, index = np.isin(found.kind, kinds), place * len(TRACKS) + track
            np.testing.assert_array_equal(page.column(index, "start"), (found.issue_ns[mine] - origin_ns) / 1e3)
            np.testing.assert_array_equal(page.column(index, "end"), (found.end_ns[mine] - origin_ns) / 1e3)
            for ours, theirs in (("kind", "kind"), ("unit", "unit"), ("bytes", "num_bytes")):
                np.testing.assert_array_equal(page.column(index, ours), getattr(found, theirs)[mine])
        assert_compute_is(page, place * len(TRACKS), rank, found, origin_ns)


def assert_compute_is(page, index, rank, found, origin_ns):
    """The first track is what the static timeline draws as compute, and the waits, with whence they were issued."""
    bars = tracks(rank, 0, 0).bars
    bars = bars[np.isin(bars.colour, COMPUTE)]
    kind, start, issued = (page.column(index, name) for name in ("kind", "start", "arrowFrom"))
    is_wait = kind == Kind.WAIT
    np.testing.assert_allclose(start[~is_wait], (bars.begin_ns - origin_ns) / 1e3)
    np.testing.assert_array_equal(kind[~is_wait], bars.colour)
    assert np.isnan(issued[~is_wait]).all()
    waited = np.flatnonzero(found.wait_begin_ns >= 0)
    waited = waited[np.argsort(found.wait_begin_ns[waited], kind="stable")]
    np.testing.assert_array_equal(issued[is_wait], (found.issue_ns[waited] - origin_ns) / 1e3)


@given(traces(whole=True), st.lists(st.floats(0, 1), max_size=4))
def test_increments_add_up(trace, fractions):
    once = told(pytest.MonkeyPatch(), trace)
    pieces = told(pytest.MonkeyPatch(), *(shares(trace, fraction) for fraction in sorted(fractions)), trace)
    assert len(once.header["tracks"]) == len(pieces.header["tracks"])
    for track in range(len(once.header["tracks"])):
        for name, _ in COLUMNS:
            np.testing.assert_array_equal(once.column(track, name), pieces.column(track, name))


def test_nothing_is_sent_twice(messages):
    trace = example_trace()
    timeline = Timeline(shares(trace, 0.9))
    ask(timeline)
    timeline.append(trace)
    timeline.append(trace)
    counts = [sum(chunk["count"] for chunk in message["chunks"]) for message, _ in messages]
    assert 0 < counts[1] < 0.2 * counts[0]
    assert counts[2] == 0
    assert [message["header"] is not None for message, _ in messages] == [True, False, False]


def test_of_too_many_spans_the_later_ones_are_kept_and_the_others_counted(messages, monkeypatch):
    trace = example_trace(num_ranks=2)
    whole = Timeline(trace)
    total = sum(whole._counts())
    monkeypatch.setattr(module, "MAX_SPANS", total // 2)
    timeline = Timeline(shares(trace, 0.3))
    for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        timeline.append(shares(trace, share))
        assert sum(len(part) for parts in timeline._told for part in parts) <= total // 2
    assert timeline._counts() == whole._counts()
    messages.clear()
    for each in (whole, timeline):
        ask(each)
    (all_of, buffers), (rest_of, rest) = messages
    assert rest_of["forgotten"] == [chunk["first"] for chunk in rest_of["chunks"]]
    assert all(count > 0 for count in rest_of["forgotten"])
    for known, chunk, all_columns, columns in zip(all_of["chunks"], rest_of["chunks"], buffers, rest, strict=False):
        assert chunk["first"] + chunk["count"] == known["count"]
        every, kept = unpack(all_columns, known["count"]), unpack(columns, chunk["count"])
        np.testing.assert_array_equal(kept["start"], every["start"][chunk["first"] :])
    ask(timeline, rest_of["forgotten"])
    assert messages[-1][0]["chunks"] == rest_of["chunks"]


def test_a_page_that_lost_something_gets_just_that(messages):
    timeline = Timeline(example_trace())
    ask(timeline)
    counts = [chunk["count"] for chunk in messages[0][0]["chunks"]]
    ask(timeline, [counts[0] - 2, *counts[1:]])
    assert messages[1][0]["chunks"] == [{"track": 0, "first": counts[0] - 2, "count": 2}]
    assert unpack(messages[1][1][0], 2)["start"].tolist() == unpack(messages[0][1][0], counts[0])["start"][-2:].tolist()
    assert messages[1][0]["page"] == "a"


def test_other_messages_are_not_answered(messages):
    Timeline(example_trace())._handle_custom_msg({"type": "hello"}, [])
    assert messages == []


def test_what_has_not_ended_is_there_and_ends_with_the_trace():
    rows = simulate(Setup(num_ranks=1, copies=1)).rank(0).rows
    begin = np.flatnonzero((rows["kind"] == Kind.FORWARD) & (rows["edge"] == Edge.BEGIN))[-1]
    found = not_ended(RankTrace(0, rows[: begin + 1]), 0)
    assert (found["track"].tolist(), found["kind"].tolist()) == ([0], [Kind.FORWARD])
    assert not_ended(RankTrace(0, rows), 0).tolist() == []
    assert not_ended(RankTrace(0, rows[:0]), 0).tolist() == []


@given(traces(), st.integers(-(10**6), 10**6))
def test_what_goes_on_is_one_piece_of_compute_at_most(trace, offset_ns):
    for rank in trace.ranks:
        found = not_ended(rank, offset_ns)
        assert (found["track"] == 0).sum() <= 1
        assert (found["end_ns"] >= found["begin_ns"]).all()
        assert len(rank.rows) or not len(found)


def test_many_ranks_share_the_tracks_one_of_each_group_first(messages):
    trace = simulate(Setup(num_ranks=12, steps=1, num_units=2))
    rows = trace.rank(11).rows.copy()
    rows["unit"][rows["kind"] == Kind.FORWARD] = 0  # the last one did something else
    odd = Trace(trace.header, (*trace.ranks[:-1], RankTrace(11, rows)))
    ask(Timeline(odd))
    drawn = {track["rank"] for track in messages[0][0]["header"]["tracks"]}
    assert len(drawn) == MAX_RANKS
    assert 11 in drawn


def test_ranks_that_come_later_get_tracks_behind_the_others(messages):
    trace = example_trace(num_ranks=2)
    timeline = Timeline(Trace(trace.header, trace.ranks[1:]))
    ask(timeline)
    timeline.append(trace)
    assert [track["rank"] for track in messages[-1][0]["header"]["tracks"]] == [1] * len(TRACKS) + [0] * len(TRACKS)


def test_only_the_ranks_asked_for(messages):
    ask(Timeline(example_trace(), ranks=[2]))
    assert {track["label"] for track in messages[0][0]["header"]["tracks"]} == {"rank 2"}


def test_an_empty_trace_and_a_closed_timeline(messages):
    timeline = Timeline(Trace.empty())
    ask(timeline)
    assert messages[0][0]["header"]["tracks"] == []
    timeline.close()
    timeline.append(example_trace())
    assert len(messages) == 1


def test_a_rank_that_says_nothing_any_more_keeps_what_it_has(messages):
    trace = example_trace(num_ranks=2)
    timeline = Timeline(trace)
    timeline.append(Trace(trace.header, trace.ranks[:1]))
    assert messages[0][0]["chunks"] == []
    ask(timeline)
    assert {chunk["track"] for chunk in messages[1][0]["chunks"]} == set(range(2 * len(TRACKS)))


def test_a_busy_kernel_answers_in_the_subshell_that_asked():
    class Comm:
        _reply_subshell_for = None

    comm = Comm()
    answer_while_busy(comm)
    assert comm._reply_subshell_for({}, "asked from") == "asked from"
    answer_while_busy(None)


def test_times_are_exact_after_a_day():
    day_ns = 86_400 * 10**9
    found = np.zeros(1, SPAN_DTYPE)
    found["begin_ns"], found["end_ns"], found["issue_ns"] = day_ns + 1, day_ns + 1001, -1
    columns = unpack(pack(found, 0), 1)
    assert columns["end"][0] - columns["start"][0] == pytest.approx(1, abs=1e-4)
    assert np.isnan(columns["arrowFrom"][0])


def test_it_says_whose_times_it_draws(monkeypatch):
    messages = recorded(monkeypatch)
    trace = example_trace(num_ranks=2, steps=1)
    for shown in (trace, on_devices(trace), on_devices(trace, tells=False)):
        Timeline(shown)._answer(None, {"type": "want", "page": "a", "counts": []}, [])
    said = [content["header"]["clock"] for content, _ in messages if content["type"] == "more"]
    assert said == ["", *["times are the GPU's, within 6.00 µs"] * 2]
    assert not any(chunk["count"] for chunk in messages[-1][0]["chunks"])  # its device has told nothing yet
