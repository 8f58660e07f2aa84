import os
from pathlib import Path

import psutil
import pytest

from workbench.events import Edge, Kind, Phase
from workbench.runtime.recorder import Recorder
from workbench.runtime.rss_sampler import EVERY_NS, RssSampler
from workbench.trace import TraceBuilder, check
from workbench.trace.schema import Header

has_statm = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux tells it")


class Clock:
    """A clock that the test sets, in nanoseconds."""

    now = 0

    def __call__(self):
        return self.now


@pytest.fixture
def statm(tmp_path):
    (tmp_path / "statm").write_text("900 12 3 4 0 5 0\n")
    return tmp_path / "statm"


def test_resident_pages_are_reported_in_bytes(statm):
    found = []
    sampler = RssSampler(lambda num_bytes, _: found.append(num_bytes), statm)
    sampler.sample()
    assert found == [12 * os.sysconf("SC_PAGE_SIZE")] == [sampler.num_bytes()]


def test_no_two_samples_are_closer_than_a_few_milliseconds(statm):
    clock, found = Clock(), []
    sampler = RssSampler(lambda num_bytes, _: found.append(num_bytes), statm, clock)
    for clock.now in (0, EVERY_NS - 1, EVERY_NS, EVERY_NS + 1, 3 * EVERY_NS):
        sampler.sample()
    assert len(found) == 3
    sampler.sample("reading model.pt")  # is never left out
    assert len(found) == 4


def test_each_sample_reads_again(statm):
    clock, found = Clock(), []
    sampler = RssSampler(lambda num_bytes, _: found.append(num_bytes), statm, clock)
    sampler.sample()
    statm.write_text("900 13 3 4 0 5 0\n")
    clock.now = EVERY_NS
    sampler.sample()
    assert found[1] - found[0] == os.sysconf("SC_PAGE_SIZE")


def test_without_a_system_counter_nothing_is_sampled(tmp_path):
    found = []
    sampler = RssSampler(lambda num_bytes, _: found.append(num_bytes), tmp_path / "none")
    sampler.sample()
    assert (found, sampler.num_bytes()) == ([], 0)


@has_statm
def test_it_matches_psutil():
    mine, theirs = RssSampler(print).num_bytes(), psutil.Process().memory_info().rss
    assert mine == pytest.approx(theirs, rel=0.05)


def num_open(path):
    """Count this process's descriptors of the file: other descriptors may change at any time."""
    found = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link) == str(path) for link in found)


@has_statm
def test_a_descriptor_is_closed_with_its_sampler(statm):
    assert num_open(statm) == 0
    sampler = RssSampler(print, statm)
    assert num_open(statm) == 1
    del sampler
    assert num_open(statm) == 0


def recorded(recorder):
    builder = TraceBuilder()
    drained = recorder.drain()
    builder.update_header(recorder.header)
    builder.append(0, drained.rows, key_frame=drained.key_frame)
    return builder.snapshot()


def test_a_phase_is_sampled_at_its_end_and_the_rows_are_valid():
    recorder = Recorder(Header(world_size=1))
    recorder.on_phase = lambda: recorder.resident(4096)
    recorder.begin_step()
    for phase in (Phase.FORWARD, Phase.PRE_BACKWARD, Phase.IDLE):
        recorder.phase(phase)
    recorder.optimizer_edge(Edge.BEGIN)
    recorder.optimizer_edge(Edge.END)
    recorder.end_step()
    trace = recorded(recorder)
    rows = trace.rank(0).rows
    samples = rows[rows["kind"] == Kind.RESIDENT]
    assert [Phase(phase) for phase in samples["phase"]] == [
        Phase.IDLE,
        Phase.IDLE,
        Phase.FORWARD,
        Phase.PRE_BACKWARD,
        Phase.IDLE,
        Phase.OPTIMIZER,
    ]
    assert set(samples["num_bytes"].tolist()) == {4096}
    assert set(samples["step"].tolist()) == {0}
    assert check(trace) == []


def test_a_sample_is_not_a_position():
    recorder = Recorder(Header(world_size=1))
    recorder.begin_step()
    recorder.resident(4096)
    assert Kind(recorder.last_event()["kind"]) is Kind.STEP
