from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.helpers.figure_checks import subtitle, title, words
from tests.helpers.trace_strategies import Setup, example_trace, simulate
from workbench.errors import UsageError
from workbench.events import Edge, Kind
from workbench.replay.collectives import table
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ClockReading, HostClock
from workbench.views.timeline import MAX_ARROWS, MAX_RANKS, timeline


def bars(fig):
    return {t.name: t for t in fig.data if t.type == "bar"}


def arrows(fig):
    return next(t for t in fig.data if t.name == "issue to wait")


def tracks(fig):
    """Return the position of each track: (rank or "", track) -> y."""
    found, name = {}, ""
    for y, text in zip(fig.layout.yaxis.tickvals, fig.layout.yaxis.ticktext, strict=True):
        *names, track = (part.strip() for part in text.removeprefix("<b>").split("</b>"))
        name = names[0] if names else name
        found[name, track] = y
    return found


def without(rank, kind):
    rows = rank.rows[rank.rows["kind"] != kind].copy()
    rows["seq"] = np.arange(len(rows))
    return RankTrace(rank.rank, rows)


def test_every_rank_has_its_tracks():
    found = tracks(timeline(example_trace(num_ranks=2)))
    assert list(found) == [
        (f"rank {rank}", track) for rank in (0, 1) for track in ("compute", "all-gather", "reduce-scatter", "wait")
    ]


def test_a_track_with_one_kind_of_collective_is_named_after_it():
    found = tracks(timeline(simulate(Setup(num_ranks=2, copies=2)), rank=0))
    assert list(found) == [("rank 0", track) for track in ("compute", "all-reduce", "wait")]


def test_the_title_shows_duration_and_waiting_time():
    assert title(timeline(example_trace())) == "Step 2: 6.81 ms, compute waits for communication 5 to 6% of the time"
    assert title(timeline(example_trace(num_ranks=1))).endswith("compute waits for no communication")


def test_collectives_are_drawn_from_issue_to_their_true_end():
    trace = example_trace(num_ranks=2)
    fig, part = timeline(trace, rank=0), trace.slice(step=2).rank(0)
    found = table(part)
    origin = part.rows["t_ns"].min()
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        drawn, mine = bars(fig)[kind.words], found.kind == kind
        order = np.argsort(drawn.base)
        assert drawn.base[order] == pytest.approx((found.issue_ns[mine] - origin) / 1e6)
        assert drawn.x[order] == pytest.approx((found.end_ns - found.issue_ns)[mine] / 1e6)
    drawn = bars(fig)["wait (exposed)"]
    assert np.sum(drawn.x) * 1e6 == pytest.approx(found.wait_ns.sum())


def test_concurrent_collectives_are_in_adjacent_lanes():
    fig = timeline(example_trace(num_ranks=2), rank=0)
    drawn, middle = bars(fig)["all-gather"], tracks(fig)["rank 0", "all-gather"]
    assert set(drawn.y) == {middle - 0.2, middle + 0.2, middle}
    boxes = sorted(zip(drawn.y, drawn.base, drawn.x, drawn.width, strict=True))
    for (y, begin, width, height), (next_y, next_begin, _, _) in pairwise(boxes):
        assert next_y != y or begin + width <= next_begin + 1e-9
        assert height == (0.8 if y == middle else 0.38)


def test_nothing_on_the_compute_track_overlaps():
    fig = timeline(example_trace(num_ranks=2), rank=0)
    middle = tracks(fig)["rank 0", "compute"]
    boxes = sorted((b, x) for t in bars(fig).values() for y, b, x in zip(t.y, t.base, t.x, strict=True) if y == middle)
    assert len(boxes) > 10
    for (begin, width), (next_begin, _) in pairwise(boxes):
        assert begin + width <= next_begin + 0.01  # merged rectangles may be off by a pixel


def test_compute_and_waits_never_overlap_and_the_root_does_not_cover_its_units():
    trace = example_trace(num_ranks=2)
    fig, part = timeline(trace, rank=0), trace.slice(step=2).rank(0)
    rows = part.rows
    forward = rows[(rows["kind"] == Kind.FORWARD) & (rows["unit"] == 3)]["t_ns"]
    drawn = bars(fig)["forward"]
    of_root = [text.startswith("<b>forward of (root)</b>") for text in drawn.hovertext]
    assert 0 < np.sum(drawn.x[of_root]) * 1e6 < 0.5 * (forward[1] - forward[0])


def as_messages(rank):
    """Return the trace of a rank with sends in place of all-gathers, and receives in place of reduce-scatters."""
    rows = rank.rows.copy()
    for kind, other in ((Kind.ALL_GATHER, Kind.SEND), (Kind.REDUCE_SCATTER, Kind.RECV)):
        rows["kind"][rank.rows["kind"] == kind] = other
    rows["unit"][np.isin(rows["kind"], (Kind.SEND, Kind.RECV))] = -1
    return RankTrace(rank.rank, rows, rank.start)


def test_what_one_rank_sends_another_is_drawn():
    trace = example_trace()
    fig = timeline(Trace(trace.header, tuple(map(as_messages, trace.ranks))))
    assert {"send", "recv"} <= {trace.name for trace in fig.data}
    assert any("other" in name for name in tracks(fig))


def test_an_arrow_leads_from_an_issue_to_its_wait():
    trace = example_trace(num_ranks=2)
    fig, part = timeline(trace, rank=0), trace.slice(step=2).rank(0)
    found, origin = table(part), part.rows["t_ns"].min()
    x = np.array(arrows(fig).x).reshape(-1, 3)
    expected = {(i, w) for i, w in zip(found.issue_ns - origin, found.wait_begin_ns - origin, strict=True)}
    assert {(round(a * 1e6), round(b * 1e6)) for a, b, _ in x} == expected
    assert np.isnan(x[:, 2]).all()


def test_arrows_stay_few():
    fig = timeline(simulate(Setup(num_ranks=4, num_units=40, steps=2)), steps=2)
    assert len(arrows(fig).x) // 3 == MAX_ARROWS


def test_a_hover_shows_kind_bytes_duration_and_exposed_time():
    fig = timeline(example_trace(num_ranks=2))
    text = bars(fig)["reduce-scatter"].hovertext[0]
    assert text.startswith("<b>reduce-scatter of blocks.2</b><br>193 KiB, ")
    assert " exposed, " in text
    assert " hidden<br>rank 0, from " in text
    assert bars(fig)["wait (exposed)"].hovertext[0].startswith("<b>wait for all-gather of (root)</b><br>")
    assert ", exposed<br>" in bars(fig)["wait (exposed)"].hovertext[0]


def test_many_ranks_that_did_the_same_are_two_that_waited_least_and_most():
    fig = timeline(simulate(Setup(num_ranks=16, steps=1)))
    names = [name for name, track in tracks(fig) if track == "compute"]
    assert len(names) == 2
    assert {name.split(": ")[1] for name in names} == {"waited least", "waited most"}
    assert "Ranks 0-15 did the same" in subtitle(fig)


def test_a_different_rank_among_many_is_drawn_separately():
    trace = simulate(Setup(num_ranks=12, steps=1))
    odd = Trace(trace.header, tuple(without(r, Kind.COPY_OUT) if r.rank == 5 else r for r in trace.ranks))
    names = [name for name, track in tracks(timeline(odd)) if track == "compute"]
    assert "rank 5" in names
    assert len(names) == 3
    assert "Ranks 0-4, 6-11 did the same" in subtitle(timeline(odd))


def test_undrawn_rows_make_no_difference():
    trace = simulate(Setup(num_ranks=12, steps=1))
    odd = Trace(trace.header, tuple(without(r, Kind.ALLOC) if r.rank == 5 else r for r in trace.ranks))
    assert "Ranks 0-11 did the same" in subtitle(timeline(odd))


def test_when_all_of_many_ranks_differ_some_are_drawn():
    trace = simulate(Setup(num_ranks=MAX_RANKS + 4, steps=1))
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["kind"][np.flatnonzero(rows["kind"] == Kind.COPY_IN)[: rank.rank]] = Kind.LOG
        ranks.append(RankTrace(rank.rank, rows))
    fig = timeline(Trace(trace.header, tuple(ranks)))
    assert len([track for _, track in tracks(fig) if track == "compute"]) == MAX_RANKS
    assert "4 ranks not drawn" in subtitle(fig)


def test_a_hang_is_drawn_to_the_edge_and_marked_unfinished():
    trace = example_trace(num_ranks=2)
    rank = trace.rank(0)
    rows = rank.rows
    wait = np.flatnonzero((rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.BEGIN) & (rows["step"] == 2))[3]
    fig = timeline(Trace(trace.header, (rank.cut(0, int(rows["seq"][wait]) + 1),)))
    assert title(fig).startswith("Step 2 has not ended: ")
    assert " so far, compute waits" in title(fig)
    drawn = bars(fig)["wait (exposed)"]
    assert (drawn.base + drawn.x)[-1] == pytest.approx(fig.layout.xaxis.range[1])
    assert "and not ended" in drawn.hovertext[-1]
    assert drawn.x[-1] > 0


def test_an_aborted_step_does_not_cover_the_next_one():
    trace = example_trace(num_ranks=2, steps=3)
    rank = trace.rank(0)
    rows = rank.rows
    given_up = (rows["step"] == 1) & (np.arange(len(rows)) > np.flatnonzero(rows["step"] == 1)[60])
    kept = rows[~given_up].copy()
    kept["seq"] = np.arange(len(kept))
    fig = timeline(Trace(trace.header, (RankTrace(0, kept),)), steps=3)
    begin = (rows["t_ns"][rows["step"] == 2][0] - rows["t_ns"][rows["step"] == 0][0]) / 1e6
    for name, drawn in bars(fig).items():
        before = np.array(drawn.base) < begin - 1e-9
        assert ((drawn.base + drawn.x)[before] <= begin + 0.02).all(), name


def test_the_clock_error_of_the_drawn_hosts_is_shown():
    trace = example_trace(num_ranks=4, steps=2)
    begin_ns = int(trace.rank(0).rows["t_ns"][0])
    readings = tuple(
        ClockReading(t_ns=begin_ns + at_ns, offset_ns=10**12, error_ns=error_ns)
        for at_ns, error_ns in ((0, 30_000), (10**12, 5_000_000))
    )
    hosts = Trace(replace(trace.header, clocks=(HostClock(ranks=(2, 3), readings=readings),)), trace.ranks)
    assert "differences below 5.00 ms between hosts are within the clock error" in subtitle(timeline(hosts)).lower()
    assert "within the clock error" not in subtitle(timeline(hosts, rank=2)).lower()
    assert "within the clock error" not in subtitle(timeline(trace)).lower()


def on_another_clock(trace, ranks, *, moved_ns=0, error_ns=0):
    """Return the trace with some ranks on another clock, with shifted times."""
    reading = ClockReading(t_ns=int(trace.rank(0).rows["t_ns"][0]), offset_ns=0, error_ns=error_ns)
    moved = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["t_ns"] += moved_ns if rank.rank in ranks else 0
        moved.append(replace(rank, rows=rows))
    clocks = (HostClock(ranks=tuple(ranks), readings=(reading,)),)
    return Trace(replace(trace.header, clocks=clocks), tuple(moved))


def hovers(fig):
    return [text for drawn in bars(fig).values() for text in drawn.hovertext]


def test_a_collective_names_the_last_rank_unless_within_the_clock_error():
    trace = simulate(Setup(num_ranks=2, late=1, steps=1))
    lines = [line for text in hovers(timeline(trace)) for line in text.split("<br>") if "last" in line]
    assert lines
    assert all(line.startswith("rank 1 arrived last, by ") for line in lines)
    exact = hovers(timeline(on_another_clock(trace, [1], error_ns=1)))
    assert [line for text in exact for line in text.split("<br>") if "last" in line] == lines
    found = "".join(hovers(timeline(on_another_clock(trace, [1], error_ns=10**10))))
    assert "arrived last, by" not in found
    assert "last rank unknown: arrivals differ by less than the clock error of 10.0 s" in found
    assert "last" not in "".join(hovers(timeline(simulate(Setup(num_ranks=MAX_RANKS + 1, steps=1)))))


@pytest.mark.parametrize("moved_ns", [-(10**7), 5, 10**8])
def test_the_rank_that_waited_least_does_not_depend_on_the_clocks(moved_ns):
    trace = simulate(Setup(num_ranks=20, late=6, steps=1))
    late = "rank 6 waits least, others up to "
    assert late in title(timeline(trace))
    assert late in title(timeline(on_another_clock(trace, range(5, 10), moved_ns=moved_ns)))


def test_of_few_ranks_the_one_that_waits_least_is_named_if_others_wait_longer():
    assert "waits least" not in title(timeline(example_trace()))
    fig = timeline(simulate(Setup(num_ranks=4, late=2)))
    assert "; rank 2 waits least, others up to " in title(fig)
    assert title(fig).endswith(" longer")
    assert "waits least" not in title(timeline(simulate(Setup(num_ranks=4, late=2)), rank=2))


def test_missing_steps_and_ranks_are_named():
    with pytest.raises(UsageError, match="no rank 9; its ranks are: "):
        timeline(example_trace(), rank=9)
    with pytest.raises(UsageError, match="no step 9"):
        timeline(example_trace(), step=9)
    assert "No training step is recorded yet" in words(timeline(example_trace(steps=0)))


def test_never_more_than_two_thousand_rectangles():
    fig = timeline(simulate(Setup(num_ranks=8, num_units=40, steps=4)), steps=4)
    assert 1000 < sum(len(t.y) for t in bars(fig).values()) <= 2000
