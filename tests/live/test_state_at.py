"""The cluster's state at one moment matches the replay."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.simulated_job import Setup, example_trace, simulate
from tests.helpers.trace_strategies import traces
from workbench.events import BESIDE, Kind
from workbench.live import state_at
from workbench.live.state_at import StateAt
from workbench.replay import states
from workbench.trace import advance
from workbench.trace.columns import Trace


@given(traces(), st.data())
def test_the_state_at_any_row_matches_replay(trace, data):
    ranks = [r for r in trace.ranks if len(r.rows)]
    if not ranks:
        assert StateAt().at(trace, 0) is None
        return
    rank = data.draw(st.sampled_from(ranks))
    seq = data.draw(st.integers(rank.start.seq, rank.end_seq - 1))
    moment = StateAt().at_row(trace, rank.rank, seq)
    mine = next(shown for shown in moment.ranks if rank.rank in shown.ranks)
    times = np.maximum.accumulate(rank.rows["t_ns"])
    if mine.ranks[0] == rank.rank:
        last = rank.start.seq + int((times <= times[seq - rank.start.seq]).sum()) - 1  # known when row ``seq`` arrived
        found = states.at(rank, last)
        assert mine.units == tuple(int(found[unit.index]) for unit in trace.header.units)
        assert mine.bytes == advance(rank.start, rank.rows[: last + 1 - rank.start.seq]).bytes_by_category
    assert moment.t_us == times[seq - rank.start.seq]
    assert StateAt().at(trace, int(moment.t_us)).t_us == moment.t_us
    assert sorted(r for shown in moment.ranks for r in shown.ranks) == [r.rank for r in ranks]


def test_intermediate_key_frames_change_nothing(monkeypatch):
    monkeypatch.setattr(state_at, "EVERY", 32)
    trace = simulate(Setup(num_ranks=2, steps=3))
    kept, rows = StateAt(), trace.rank(1).rows
    for seq in [*np.random.default_rng(0).integers(0, len(rows), 50).tolist(), len(rows) - 1]:
        assert kept.at_row(trace, 1, seq) == StateAt().at_row(trace, 1, seq)
    later = Trace(trace.header, tuple(r.cut(100, r.end_seq) for r in trace.ranks))
    assert kept.at_row(later, 1, 300) == StateAt().at_row(later, 1, 300)
    assert kept.at_row(later, 1, 50) is None
    assert kept.at_row(later, 7, 300) is None


def test_equal_ranks_are_sent_once():
    moment = StateAt().at(example_trace(num_ranks=4), 1 << 62)
    assert [shown.label for shown in moment.ranks] == ["ranks 0-3"]


def test_arrow_keys_go_event_by_event_and_stop_at_the_ends():
    trace, found = example_trace(num_ranks=2), StateAt()
    rows = trace.rank(0).rows
    events = rows["seq"][~np.isin(rows["kind"], BESIDE)].tolist()
    seen, seq = [events[0]], events[0]
    for _ in range(10):
        seq = found.beside(trace, 0, seq, 1).seq
        seen.append(seq)
    assert seen == events[:11]
    assert found.beside(trace, 0, seq, -1).seq == events[9]
    assert found.beside(trace, 0, events[0], -1).seq == events[0]
    assert found.beside(trace, 0, 10**9, 1).seq == events[-1]
    memory_row = int(rows["seq"][rows["kind"] == Kind.ALLOC][5])
    after, before = (found.beside(trace, 0, memory_row, by).seq for by in (1, -1))
    assert before < memory_row < after
    assert events.index(after) == events.index(before) + 2  # skips the event that the memory row belongs to
    assert found.beside(trace, 9, 0, 1) is None


def test_a_moment_names_the_last_event_before_it():
    trace = example_trace(num_ranks=2)
    row = trace.rank(1).rows[40]
    moment = StateAt().at(trace, int(row["t_ns"]))
    assert moment.t_us <= row["t_ns"]
    assert moment.event.startswith("rank ")


def test_a_phase_is_mentioned_once():
    trace = example_trace(num_ranks=2, num_units=2)
    sentences = {state_at.describe_with_phase(trace.header, row) for row in trace.rank(0).rows}
    assert {"backward of blocks.0 begins", "optimizer begins", "forward of (root) ends"} <= sentences
    assert any(text.startswith("forward · all-gather of blocks.0 begins (") for text in sentences)
    assert any(text.startswith("post-backward · ") for text in sentences)
    assert not any(
        text.startswith(("backward · backward", "optimizer · optimizer", "forward · forward")) for text in sentences
    )


def test_rows_read_as_sentences():
    trace = example_trace(num_ranks=2, num_units=2)
    sentences = {state_at.describe(trace.header, row) for row in trace.rank(0).rows}
    assert any(text.startswith("all-gather of blocks.0 begins (") for text in sentences)
    assert "wait of (root) ends" in sentences
    assert "freed unsharded params of blocks.0" in sentences
    assert any(text.startswith("allocated sharded grads of blocks.0 (") for text in sentences)
    assert "optimizer begins" in sentences
