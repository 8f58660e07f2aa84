"""A rank's spans: reading by columns gives the same as reading row by row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.aborted_steps import aborted
from tests.helpers.device_trace import hung, on_devices
from tests.helpers.held_ranks import stopped_before
from tests.helpers.live_view import FeedView
from tests.helpers.long_trace import long_trace
from tests.helpers.trace_strategies import cuttings, example_trace, traces
from workbench.events import COLLECTIVES, COPIES, RANK_TRACKS, Edge, Kind, Track, on_track
from workbench.live.live_spans import NUM_TRACKS, RankSpans
from workbench.replay.spans import last_ns, zero_ns
from workbench.replay.tracks import NESTED, NUMBER
from workbench.trace import check
from workbench.trace.columns import RankTrace, Trace
from workbench.views.timeline import timeline
from workbench.views.tracks import LANES, tracks
from workbench.views.window import window

COLUMNS = ["track", "kind", "exposed", "unit", "begin_ns", "end_ns", "issue_ns", "num_bytes"]
WAITS = NUMBER[Track.WAIT]


class Reader:
    """Reads a rank's trace one row after the other."""

    def __init__(self, rank_trace):
        self.open, self.since, self.compute = [], None, []
        self.collectives, self.issued = {}, {}
        self.waits, self.wait_of = [], {}
        for row in rank_trace.rows:
            key = (int(row["comm_group"]), int(row["comm_seq"]))
            if row["kind"] in NESTED:
                self.own(row, key)
            elif row["kind"] in COLLECTIVES:
                self.collective(row, key)

    def own(self, row, key):
        name = (int(row["kind"]), int(row["unit"]), key)
        if row["edge"] == Edge.BEGIN:
            self.goes_by(int(row["t_ns"]))
            self.open.append((name, int(row["num_bytes"])))
            if row["kind"] == Kind.WAIT:
                if key in self.collectives and self.collectives[key][5] is None:
                    self.collectives[key][2] = 1  # compute waits before its end is known
                begin_ns, issue_ns = int(row["t_ns"]), self.issued.get(key, -1)
                fields = [WAITS, int(Kind.WAIT), 1, int(row["unit"]), begin_ns, None, issue_ns, int(row["num_bytes"])]
                self.waits.append(fields)
                self.wait_of[name] = fields
        else:
            if row["kind"] == Kind.WAIT:
                self.wait_of[name][5] = int(row["t_ns"])
            mine = next(k for k in reversed(range(len(self.open))) if self.open[k][0] == name)
            if mine == len(self.open) - 1:
                self.goes_by(int(row["t_ns"]))
            del self.open[mine]

    def goes_by(self, t_ns):
        """Assign the time up to now to the newest open span."""
        if self.open and t_ns > self.since:
            (kind, unit, _), num_bytes = self.open[-1]
            if kind not in (Kind.STEP, Kind.WAIT):
                self.compute.append([0, kind, 0, unit, self.since, t_ns, -1, num_bytes])
        self.since = t_ns

    def collective(self, row, key):
        if row["edge"] == Edge.BEGIN:
            track = next(n for n, track in enumerate(RANK_TRACKS) if row["kind"] in on_track(track))
            begin_ns, unit = int(row["t_ns"]), int(row["unit"])
            self.issued[key] = begin_ns
            self.collectives[key] = [track, int(row["kind"]), 0, unit, begin_ns, None, -1, int(row["num_bytes"])]
        else:
            self.collectives[key][5] = int(row["t_ns"])

    def spans(self):
        whole = [*self.collectives.values(), *self.waits]
        return [*self.compute, *(found for track in range(1, NUM_TRACKS) for found in whole if found[0] == track)]


@given(traces(whole=True))
def test_columns_are_read_as_rows(trace):
    for rank_trace in trace.ranks:
        found = RankSpans().take(rank_trace)[COLUMNS].tolist()
        assert [list(span) for span in found] == Reader(rank_trace).spans()


@given(st.data())
def test_in_pieces_or_at_once(data):
    trace = data.draw(traces())
    for rank_trace in trace.ranks:
        once, reader, pieces = RankSpans(), RankSpans(), []
        for part in data.draw(cuttings(len(rank_trace.rows))):
            pieces += reader.take(RankTrace(rank_trace.rank, rank_trace.rows[: part.stop], rank_trace.start)).tolist()
        whole = once.take(rank_trace).tolist()
        for track in range(NUM_TRACKS):
            assert [span for span in pieces if span[0] == track] == [span for span in whole if span[0] == track]


def test_a_long_trace_is_a_valid_one():
    assert check(long_trace(num_ranks=2, rows_per_rank=4_000)) == []


# ---- compared with the static timeline


def drawn(trace):
    """What the static timeline draws of all steps: rank, track, kind, unit, begin and end of each bar on its axis."""
    shown = window(trace, None, 10**6).drawn(trace)
    found = set()
    for part in (part for part in shown.trace.ranks if len(part.rows)):
        rank, until_ns = part.rank, last_ns(part.rows)
        bars = tracks(part, until_ns, copies=shown.copies.get(rank), host=shown.host.get(rank)).bars
        begin_ns, end_ns = bars.begin_ns - shown.extent_ns[0], bars.end_ns - shown.extent_ns[0]
        columns = bars.lane // LANES, bars.colour, bars.unit, begin_ns, end_ns
        found |= {(rank, *bar) for bar in zip(*(column.tolist() for column in columns), strict=True)}
    return found


def live_spans(trace):
    """The same of the live timeline: what has ended, and what has not."""
    feed = FeedView(history_rows=trace.num_rows)
    new = feed.take(trace, 1 << 40)
    found, zero = [], feed.fold.cuts.shown_at(zero_ns(trace))
    for part in (new.spans, new.open):
        part["begin_ns"] -= zero
        part["end_ns"] -= zero
        spans = part[["track", "kind", "unit", "begin_ns", "end_ns"]].tolist()
        found.append({(new.ranks[track // NUM_TRACKS], track % NUM_TRACKS, *span) for track, *span in spans})
    return found


def check_the_pictures_agree(trace):
    bars, (ended, still_open) = drawn(trace), live_spans(trace)
    assert {span for span in ended if span[4] >= 0 and span[5] > span[4]} <= bars  # before it are no steps
    in_both = {bar for bar in bars if bar[1] < NUM_TRACKS}  # not those that only a device has
    begun = {span[:5] for span in still_open}
    assert {bar for bar in in_both - ended if bar[:5] not in begun} == set()


@st.composite
def scenes(draw):
    """Traces of ranks that train, were held, gave up a step, or recorded only a part, on a CPU or on devices."""
    trace = draw(traces(whole=draw(st.booleans())))
    is_whole = all((r.rows["step"] == 0).any() and r.start.seq == 0 for r in trace.ranks)
    has_two = all((r.rows["step"] == 1).any() for r in trace.ranks)  # a picture of steps ends with the last one
    is_given_up = is_whole and has_two and draw(st.booleans())
    if is_given_up:
        trace = aborted(trace, 0, draw(st.floats(0, 1)))
    forwards = [int(((r.rows["kind"] == Kind.FORWARD) & (r.rows["edge"] == Edge.BEGIN)).sum()) for r in trace.ranks]
    if min(forwards) and draw(st.booleans()):
        trace = stopped_before(trace, Kind.FORWARD, number=draw(st.integers(0, min(forwards) - 1)))
    # each picture cuts the idle time of hosts, in which a device that lags behind may work
    return on_devices(trace) if is_whole and not is_given_up and draw(st.booleans()) else trace


@settings(max_examples=200)
@given(scenes())
def test_a_span_is_in_the_same_track_of_every_picture(trace):
    check_the_pictures_agree(trace)


def test_a_wait_for_a_collective_from_before_the_picture_is_drawn_in_each():
    """It is exposed time all the same, and the spans around it do not compute."""
    trace = example_trace(num_ranks=2, steps=3)
    rows = trace.rank(0).rows
    first = int(np.flatnonzero((rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.BEGIN))[20])
    cut = Trace(trace.header, tuple(r.cut(first, r.end_seq) for r in trace.ranks))
    check_the_pictures_agree(cut)
    bars = tracks(cut.rank(0), last_ns(rows)).bars
    waits = bars[bars.colour == Kind.WAIT]
    assert (waits.begin_ns[0], waits.waits_for[0]) == (rows["t_ns"][first], -1)
    (bar,) = (bar for bar in timeline(cut, steps=3).data if bar.name == "wait (exposed)")
    assert any(text.startswith("<b>wait of ") for text in bar.hovertext)


@given(st.floats(0, 1), st.booleans(), st.data())
def test_an_abort_ends_open_spans(share, goes_on, data):
    trace = aborted(example_trace(num_ranks=2, steps=3), 1, share)
    for rank_trace in trace.ranks:
        rows = rank_trace.rows
        reset = np.flatnonzero(rows["kind"] == Kind.RESET)
        whole = rank_trace if goes_on else rank_trace.cut(0, int(reset[-1]) + 1)
        reader = RankSpans()
        pieces = [reader.take(whole.cut(0, part.stop)) for part in data.draw(cuttings(len(whole.rows)))]
        assert not len(reader.open)
        found = np.concatenate(pieces)
        until_ns = rows["t_ns"][: reset[0]].max()
        begun = found[found["begin_ns"] <= until_ns]
        assert begun["end_ns"].max() <= until_ns, "nothing of the aborted step lies over what follows"


# ---- on devices


def as_listed(parts):
    """Return spans in the order of their tracks and begins."""
    found = np.concatenate(parts)
    return sorted(found[COLUMNS].tolist())


@given(st.sampled_from([1, 7, 40, 333]))
def test_late_device_spans_have_their_true_times(piece):
    true = example_trace(num_ranks=2, steps=4)
    trace = on_devices(true)
    whole = trace.rank(1)
    reader, ends = RankSpans(), [*range(0, len(whole.rows), piece), len(whole.rows)]
    parts = [reader.take(whole.cut(0, end), header=trace.header) for end in ends]
    expected = RankSpans().take(true.rank(1))
    copies = np.isin(expected["kind"], COPIES)
    found = np.concatenate(parts)
    mine = found[~np.isin(found["kind"], COPIES)]
    expected = expected[~copies]
    for track in (1, 2):
        live_spans, true_spans = mine[mine["track"] == track], expected[expected["track"] == track]
        assert live_spans[COLUMNS].tolist() == true_spans[COLUMNS].tolist()
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WAIT):
        ends = [int(part["end_ns"][part["kind"] == kind].max()) for part in (mine, expected)]
        assert ends[0] == ends[1]
    assert as_listed(parts) == as_listed([RankSpans().take(whole, header=trace.header)])


def test_a_hanging_device_shows_its_open_span():
    trace = on_devices(example_trace(num_ranks=2, steps=2))
    rows = trace.rank(0).rows
    waits = (rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.END) & (rows["step"] == 1)
    stuck = hung(trace, 0, int(np.flatnonzero(waits)[2]))
    reader = RankSpans()
    reader.take(stuck.rank(0), header=stuck.header)
    open_now = reader.open
    assert [Kind(kind) for kind in open_now["kind"][open_now["track"] == WAITS]] == [Kind.WAIT]
    assert not (open_now["track"] == 0).any(), "it waits, and does not compute"


def test_nothing_is_shown_for_a_device_before_its_first_time():
    trace = on_devices(example_trace(num_ranks=2, steps=1), has_device_rows=False)
    reader = RankSpans()
    assert len(reader.take(trace.rank(0), header=trace.header)) == 0
    assert len(reader.open) == 0
