"""The live timeline of a workbench: it tells all there is, then what is new, and follows runs, words and the cursor."""

import inspect
import threading
from dataclasses import replace

import numpy as np
import pytest
from anywidget import AnyWidget

from tests.fake_cluster import FakeCluster
from tests.shells import ipython_shell
from tests.trace.holding import HOLD_NS, stopped_before
from tests.trace.simulation import Setup, example_trace, simulate
from tests.waiting import wait_until
from tests.widgets.test_timeline import Page, shares
from workbench.errors import UsageError
from workbench.events import Kind
from workbench.magics.shell import register, unregister
from workbench.reports.cursor import Cursor
from workbench.session.pulse import Pulse
from workbench.trace.columns import RankTrace, Trace
from workbench.widgets.canvas import Canvas, canvas
from workbench.widgets.dashboard import Dashboard
from workbench.widgets.pace import BYTES_PER_S
from workbench.widgets.timeline import Timeline
from workbench.widgets.waiting import MAX_VIEWS
from workbench.workbench import Workbench


class Pretender:
    """A workbench whose trace is what a test says."""

    def __init__(self, trace):
        self.trace, self.running, self.cursor = trace, True, None

    def pulse(self):
        return Pulse(trace=self.trace, running=self.running, cursor=self.cursor)


@pytest.fixture
def made(kept):
    """Makes canvases whose messages are kept in ``sent``, and closes them; their clock is ``now[0]``."""

    def make(workbench):
        now = [0.0]
        widget = kept(Canvas(workbench, clock=lambda: now[0]))
        widget.now = now
        return widget

    return make


def ask(widget, page, name="a", **more):
    """Put a page's question; it takes the answer."""
    counts = [sum(len(part["start"]) for part in page.columns.get(k, [])) for k in range(99)] if page.columns else []
    question = {"type": "want", "page": name, "run": getattr(page, "run", 0), "counts": counts, **more}
    widget._handle_custom_msg(question, [])
    message, buffers = widget.sent[-1]
    if message["run"] != getattr(page, "run", 0):
        page.columns.clear()
    page.run = message["run"]
    page.take(message, buffers)
    return message


def columns(page):
    return {track: page.column(track, "start").tolist() for track in page.columns}


def whole(trace):
    """What a page knows of a finished trace."""
    with pytest.MonkeyPatch.context() as patch:
        page, messages = Page(), []
        patch.setattr(Timeline, "send", lambda self, content, buffers=None: messages.append((content, buffers)))
        Timeline(trace)._handle_custom_msg({"type": "want", "page": "a", "counts": []}, [])
        page.take(*messages[0])
    return page


def test_it_grows_with_the_run(made):
    trace = example_trace()
    workbench, page = Pretender(shares(trace, 0.3)), Page()
    widget = made(workbench)
    assert ask(widget, page)["said"] == ""
    for share in (0.3, 0.6, 1.0):
        workbench.trace = shares(trace, share)
        widget.now[0] += 100.0
        ask(widget, page, wait=False)
    assert columns(page) == columns(whole(trace))


def test_a_page_that_waits_is_answered_when_there_is_something_new(made):
    trace = example_trace()
    workbench = Pretender(shares(trace, 0.5))
    widget = made(workbench)
    ask(widget, Page())
    for count in (2, 3):
        workbench.trace = shares(trace, count / 4)
        widget.now[0] += 1.0
        widget._handle_custom_msg({"type": "want", "page": "a", "run": 0, "counts": [], "wait": True}, [])
        wait_until(lambda count=count: len(widget.sent) == count)
    widget._handle_custom_msg({"type": "want", "page": "a", "run": 0, "counts": [], "wait": True}, [])
    assert [message["header"] is not None for message, _ in widget.sent] == [True, False, False]
    widget.close()
    assert not any(thread.name.startswith("dashboard") for thread in threading.enumerate())
    widget._reply({}, [])
    assert len(widget.sent) == 3


def test_another_job_begins_anew(made):
    first, second = example_trace(num_ranks=4), example_trace(num_ranks=2, num_units=3)
    workbench, page = Pretender(first), Page()
    widget = made(workbench)
    ask(widget, page)
    header = replace(second.header, ranks=tuple(replace(info, pid=1) for info in second.header.ranks))
    workbench.trace = Trace(header, second.ranks)
    assert ask(widget, page)["run"] == 1
    assert columns(page) == columns(whole(second))
    assert len(page.header["tracks"]) == len(whole(second).header["tracks"])


def test_ranks_that_come_after_it_was_opened_are_shown_whole(made):
    workbench, page = Pretender(Trace.empty()), Page()
    widget = made(workbench)
    assert "Nothing is recorded yet" in ask(widget, page)["said"]
    workbench.trace = example_trace()
    assert ask(widget, page)["run"] == 0
    assert columns(page) == columns(whole(workbench.trace))


def test_what_happens_while_it_is_open_stays_below_64_kib_a_second(made):
    trace = simulate(Setup(num_ranks=8, num_units=6, steps=60))
    workbench, page = Pretender(shares(trace, 0.1)), Page()
    widget = made(workbench)
    ask(widget, page)
    for tenth in range(1, 11):
        workbench.trace = shares(trace, 0.1 + 0.9 * tenth / 10)
        widget.now[0] += 0.1
        ask(widget, page)
    sent = sum(len(buffer) for _, buffers in widget.sent[1:] for buffer in buffers)
    assert 0.3 * BYTES_PER_S < sent < 64 * 1024
    busy = [np.sum(known.column(0, "end") - known.column(0, "start")) for known in (page, whole(trace))]
    assert busy[0] == pytest.approx(busy[1], rel=1e-6)  # merged ones are as wide as they were together


@pytest.mark.parametrize("widget", [Canvas, Dashboard])
def test_nothing_of_a_widget_is_overridden_by_chance(widget):
    bases = [base for base in widget.__mro__ if base.__module__.startswith("workbench.")]
    functions = {name for base in bases for name, value in vars(base).items() if inspect.isfunction(value)}
    assert functions & set(dir(AnyWidget)) == {"__init__", "close"}


def test_it_follows_the_cursor_of_the_word(made):
    trace = example_trace()
    workbench, page = Pretender(trace), Page()
    widget = made(workbench)
    ask(widget, page)
    row = trace.rank(0).rows["t_ns"][200]
    workbench.cursor = Cursor(t_ns=int(row), ends={})
    ask(widget, page)
    assert widget.cursor_us == (row - min(r.rows["t_ns"].min() for r in trace.ranks)) / 1e3
    widget.cursor_us = 5.0  # the person's
    ask(widget, page)
    assert widget.cursor_us == 5.0
    workbench.cursor = None
    ask(widget, page)
    assert widget.cursor_us is None


def test_only_so_many_pages_are_kept(made):
    widget = made(Pretender(example_trace()))
    for number in range(MAX_VIEWS + 3):
        ask(widget, Page(), str(number))
    assert len(widget._pages) == len(widget._told_headers) == MAX_VIEWS


def test_the_word_and_the_method_give_a_canvas(kept):
    with Workbench(2, cluster_factory=FakeCluster) as workbench:
        widget = workbench.canvas()
        assert isinstance(widget, Canvas)
        widget.close()
    canvas(workbench).close()
    with ipython_shell() as shell:
        register(shell, lambda **options: Workbench(cluster_factory=FakeCluster, **options))
        widget = shell.run_line_magic("fsdp", "timeline --canvas")
        assert isinstance(widget, Canvas)
        assert "%fsdp start" in ask(kept(widget), Page())["said"]
        widget.close()
        with pytest.raises(UsageError, match="no other flag"):
            shell.run_line_magic("fsdp", "timeline --canvas --step 3")
        unregister(shell)


def test_the_last_ranks_trace_is_shown_without_a_cluster(made):
    workbench, page = Pretender(example_trace()), Page()
    workbench.running = False
    assert "last ones recorded" in ask(made(workbench), page)["said"]
    assert columns(page) == columns(whole(workbench.trace))


def test_a_gap_begins_anew(made):
    trace = example_trace()
    workbench, page = Pretender(shares(trace, 0.2)), Page()
    widget = made(workbench)
    ask(widget, page)
    workbench.trace = Trace(trace.header, tuple(r.cut(r.end_seq // 2, r.end_seq) for r in trace.ranks))
    assert ask(widget, page)["run"] == 1
    assert isinstance(workbench.trace.ranks[0], RankTrace)


def test_time_in_which_ranks_were_held_is_not_on_the_axis(made):
    """And the cursor is where the moment is shown, also one in the hold itself."""
    trace = stopped_before(example_trace(), Kind.BACKWARD, number=5)
    free, workbench, page = whole(example_trace()), Pretender(trace), Page()
    widget = made(workbench)
    message = ask(widget, page)
    ((at_us, length_us),) = message["header"]["holds"]
    assert length_us == pytest.approx(HOLD_NS / 1e3, rel=1e-3)
    last_us = max(page.column(track, "end").max() for track in page.columns)
    assert last_us == pytest.approx(max(free.column(track, "end").max() for track in free.columns), rel=0.05)
    rows = trace.rank(0).rows
    held_ns = int(rows["t_ns"][rows["kind"] == Kind.GATE][1]) - HOLD_NS // 2
    workbench.cursor = Cursor(t_ns=held_ns, ends={})
    ask(widget, page)
    assert widget.cursor_us == pytest.approx(at_us, abs=0.01)
