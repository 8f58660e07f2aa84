"""What a rank did, read column by column, is what one reads row by row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.on_device import hung, on_devices
from tests.trace.strategies import cuttings, example_trace, traces
from tests.widgets.long_trace import long_trace
from workbench.events import COLLECTIVES, COPIES, Edge, Kind
from workbench.trace import check
from workbench.trace.columns import RankTrace
from workbench.widgets.spans import TRACKS, RankSpans

COLUMNS = ["track", "kind", "exposed", "unit", "begin_ns", "end_ns", "issue_ns", "num_bytes"]
OWN = (*TRACKS[0][1], Kind.STEP)  # what the rank's own thread does


class Reader:
    """Reads a whole trace of a rank one row after the other."""

    def __init__(self, rank_trace):
        self.open, self.since, self.compute = [], None, []
        self.collectives, self.issued = {}, {}
        for row in rank_trace.rows:
            key = (int(row["comm_group"]), int(row["comm_seq"]))
            if row["kind"] in OWN:
                self.own(row, key)
            elif row["kind"] in COLLECTIVES:
                self.collective(row, key)

    def own(self, row, key):
        name = (int(row["kind"]), int(row["unit"]), key)
        if row["edge"] == Edge.BEGIN:
            self.goes_by(int(row["t_ns"]))
            self.open.append((name, int(row["num_bytes"])))
            if row["kind"] == Kind.WAIT and key in self.collectives and self.collectives[key][5] is None:
                self.collectives[key][2] = 1  # compute waits before its end is known
        else:
            mine = next(k for k in reversed(range(len(self.open))) if self.open[k][0] == name)
            if mine == len(self.open) - 1:
                self.goes_by(int(row["t_ns"]))
            del self.open[mine]

    def goes_by(self, t_ns):
        """Time up to now belongs to what began last."""
        if self.open and t_ns > self.since:
            (kind, unit, key), num_bytes = self.open[-1]
            is_wait = kind == Kind.WAIT
            issue_ns = self.issued.get(key, -1) if is_wait else -1
            if kind != Kind.STEP:
                self.compute.append([0, kind, int(is_wait), unit, self.since, t_ns, issue_ns, num_bytes])
        self.since = t_ns

    def collective(self, row, key):
        if row["edge"] == Edge.BEGIN:
            track = next(track for track, (_, kinds) in enumerate(TRACKS) if row["kind"] in kinds)
            begin_ns, unit = int(row["t_ns"]), int(row["unit"])
            self.issued[key] = begin_ns
            self.collectives[key] = [track, int(row["kind"]), 0, unit, begin_ns, None, -1, int(row["num_bytes"])]
        else:
            self.collectives[key][5] = int(row["t_ns"])

    def spans(self):
        tracks = range(1, len(TRACKS))
        return [*self.compute, *(found for track in tracks for found in self.collectives.values() if found[0] == track)]


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
        for track in range(len(TRACKS)):
            assert [span for span in pieces if span[0] == track] == [span for span in whole if span[0] == track]


def test_a_long_trace_is_a_valid_one():
    assert check(long_trace(num_ranks=2, rows_per_rank=4_000)) == []


# ---- on devices


def as_listed(parts):
    """Spans in the order of their tracks and begins."""
    found = np.concatenate(parts)
    return sorted(found[COLUMNS].tolist())


@given(st.sampled_from([1, 7, 40, 333]))
def test_spans_of_a_device_are_those_it_did_however_late_they_are_told(piece):
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
        told, true_spans = mine[mine["track"] == track], expected[expected["track"] == track]
        assert told[COLUMNS].tolist() == true_spans[COLUMNS].tolist()
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WAIT):
        ends = [int(part["end_ns"][part["kind"] == kind].max()) for part in (mine, expected)]
        assert ends[0] == ends[1]
    assert as_listed(parts) == as_listed([RankSpans().take(whole, header=trace.header)])


def test_a_device_that_hangs_is_seen_in_what_it_is_in():
    trace = on_devices(example_trace(num_ranks=2, steps=2))
    rows = trace.rank(0).rows
    waits = (rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.END) & (rows["step"] == 1)
    stuck = hung(trace, 0, int(np.flatnonzero(waits)[2]))
    reader = RankSpans()
    reader.take(stuck.rank(0), header=stuck.header)
    open_now = reader.open
    assert [Kind(kind) for kind in open_now["kind"][open_now["track"] == 0]] == [Kind.WAIT]


def test_nothing_is_told_of_a_device_before_it_tells():
    trace = on_devices(example_trace(num_ranks=2, steps=1), tells=False)
    reader = RankSpans()
    assert len(reader.take(trace.rank(0), header=trace.header)) == 0
    assert len(reader.open) == 0
