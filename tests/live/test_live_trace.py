"""Clients of one workbench share its snapshots and the fold of its trace."""

import gc
import weakref

import numpy as np
import pytest

from tests.helpers.simulated_job import example_trace
from tests.live.test_feed import prefix
from tests.panel.conftest import FakeComm
from tests.widgets.test_dashboard import FakeWorkbench, ask
from workbench.live.feed import Feed
from workbench.live.live_trace import LiveTrace, live_trace_of
from workbench.live.messages import VERSION
from workbench.panel.client import Client
from workbench.replay import memory
from workbench.session.snapshot import ClusterSnapshot
from workbench.widgets.dashboard import DashboardWidget


class CountingWorkbench(FakeWorkbench):
    """A workbench that counts its snapshots, and that a panel can show."""

    outlives, held_by, one_job, exchange, cores = False, "", "", "", 1

    def __init__(self, *given):
        super().__init__(*given)
        self.taken, self.requests = 0, ()
        self.settings = {"num_ranks": 4, "device": "cpu", "profile": None}
        self.on_pulse = self.count

    def count(self):
        self.taken += 1

    def activity(self):
        return self.requests

    def shown(self):
        return self


@pytest.fixture
def clients(kept):
    """Two dashboards and a panel of one workbench; each is asked how everything is, and returns its answer."""
    workbench, comm = CountingWorkbench(), FakeComm()
    panel = Client(workbench, comm, version="0.2.0")
    comm.receive({"word": "hello", "number": 1, "version": VERSION, "extension": "0.2.0"})

    def look():
        comm.receive({"word": "look", "number": 2})
        return comm.sent[-1][0]

    widgets = [kept(DashboardWidget(workbench)) for _ in range(2)]
    yield workbench, [*(lambda widget=widget: ask(widget)[0] for widget in widgets), look]
    panel.close()


def test_they_share_the_fold_of_the_trace(clients, monkeypatch):
    workbench, looks = clients
    read, whole = [], memory.advance

    def counted(state, rows):
        read.append(len(rows))
        return whole(state, rows)

    trace = workbench.trace
    workbench.trace = prefix(trace, [300] * 4)
    for look in looks:
        look()
    monkeypatch.setattr(memory, "advance", counted)
    workbench.trace = prefix(trace, [310] * 4)
    feeds = [look() for look in looks]
    assert sum(read) == 4 * 10, "each new row of each rank once"
    for feed in feeds[:2]:
        assert feed["counts"] == feeds[0]["counts"]
        assert not feed["restart"]
    assert feeds[2]["ranks"][0]["num_bytes"] == list(live_trace_of(workbench).fold.rank(0).memory.bytes_by_category)


def test_a_client_that_opens_later_receives_what_another_received_in_pieces():
    trace, live, early = example_trace(num_ranks=2), LiveTrace(), Feed()
    rows, parts = len(trace.rank(0).rows), []
    for part in range(1, 5):
        live.show(ClusterSnapshot(trace=prefix(trace, [rows * part // 4] * 2)))
        parts.append(early.take(live.fold, 1 << 24))
    late = Feed().take(live.fold, 1 << 24)
    assert late.restart
    for name in ("spans", "steps"):
        received = np.concatenate([getattr(part, name) for part in parts])
        assert sorted(received.tolist()) == sorted(getattr(late, name).tolist())
    assert late.memory["num_bytes"][-1].tolist() == parts[-1].memory["num_bytes"][-1].tolist()


def test_waiting_clients_share_a_snapshot_until_it_is_old_or_a_request_changes():
    workbench, live = CountingWorkbench(), LiveTrace()
    first = live.poll(workbench, 60.0)
    assert live.poll(workbench, 60.0) is first
    assert workbench.taken == 1
    workbench.requests = ("%fsdp step 40",)
    assert live.poll(workbench, 60.0) is not first
    assert live.poll(workbench) is not live.poll(workbench)  # without a maximum age each call takes a snapshot
    assert workbench.taken == 4


def test_nothing_is_kept_for_a_deleted_workbench():
    workbench = CountingWorkbench()
    live_trace_of(workbench).poll(workbench)
    fold, gone = weakref.ref(live_trace_of(workbench).fold), weakref.ref(workbench)
    del workbench
    gc.collect()
    assert (gone(), fold()) == (None, None)
