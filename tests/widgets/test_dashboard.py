"""The answers of the dashboard's kernel side, with a fake workbench."""

import inspect
import json
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from anywidget import AnyWidget
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.device_trace import on_devices
from tests.helpers.fake_cluster import FakeCluster
from tests.helpers.held_ranks import HOLD_NS, stopped_before
from tests.helpers.ipython_shell import ipython_shell
from tests.helpers.simulated_job import Setup, example_trace, simulate
from tests.helpers.waiting import wait_until
from tests.panel.conftest import FakeComm
from workbench.base.codec import encode
from workbench.errors import UsageError
from workbench.events import MOVES, Edge, Kind
from workbench.live.long_poll import IDLE_S, LongPoll, RateLimit, mark
from workbench.live.messages import QUESTIONS, VERSION, VIEW_QUESTIONS, read_question
from workbench.live.overview import health
from workbench.live.packing import COLUMNS
from workbench.live.server import BUTTONS, MAX_VIEWS
from workbench.live.state_at import StateAt
from workbench.magics.shell import register, unregister
from workbench.panel.client import Client
from workbench.protocol.breakpoints import UNTIL, Breakpoint
from workbench.protocol.rank_messages import Hold, Position, StepPosition
from workbench.replay.spans import extent_ns, zero_ns
from workbench.reports.cursor import back, cut
from workbench.session.snapshot import ClusterSnapshot, pulse
from workbench.trace.columns import RankTrace, Trace, steps
from workbench.trace.schema import ClockReading, HostClock
from workbench.views import draw
from workbench.widgets.dashboard import DashboardWidget
from workbench.workbench import Workbench

RUNNING = Position(doing="step", place=StepPosition(1, 0))
HELD = Position(held=Hold(place=StepPosition(1, 7), kind=Kind.ALL_GATHER, edge=Edge.BEGIN, unit=1))


class FakeWorkbench:
    """A fake workbench: the test sets its trace and ranks."""

    def __init__(self, trace=None, positions=None, alive=None):
        self.trace = example_trace(num_ranks=4) if trace is None else trace
        self.positions = dict.fromkeys(range(4), RUNNING) if positions is None else positions
        self.alive = alive or [True] * 4
        self.pressed = []
        self.cursor, self.losses, self.running, self.exchange = None, {}, True, ""
        self.on_pulse = lambda: None

    def pulse(self):
        self.on_pulse()
        found = replace(pulse(self.trace, self.alive, self.positions), cursor=self.cursor, losses=self.losses)
        return found if self.running else replace(found, running=False, states={}, exchange=self.exchange)

    def activity(self):
        return ()

    def pause(self):
        self.pressed.append("pause")
        return "4 ranks stopped\nand more"

    def resume(self, *, background):
        self.pressed.append(("continue", background))
        return "it goes on"

    def abort(self):
        raise UsageError("there is nothing to abort")

    def break_clear(self, id):
        raise UsageError(f"there is no breakpoint {id}")


@pytest.fixture
def made(kept):
    """Makes dashboards whose messages are recorded in ``sent``, and closes them."""
    return lambda workbench, **settings: kept(DashboardWidget(workbench, **settings))


def ask(widget, what="feed", view="a", **more):
    """Return the answer to one message of the browser."""
    widget._handle_custom_msg({"view": view, "word": what, **more}, [])
    return widget.sent[-1]


def prefix(trace, count):
    return Trace(trace.header, tuple(RankTrace(r.rank, r.rows[:count], r.start) for r in trace.ranks))


def test_the_first_answer_is_complete_and_the_next_has_only_news(made):
    workbench = FakeWorkbench()
    widget = made(workbench)
    whole, buffers = ask(widget)
    assert whole["restart"]
    assert whole["groups"] == [[0, 1, 2, 3]]
    assert [whole["units"][unit] for unit in whole["order"]] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert whole["peaks"][0]["num_bytes"] > 0
    assert whole["now"]["ranks"][0]["label"] == "ranks 0-3"
    assert len(buffers[0]) > 10_000
    again, buffers = ask(widget)
    assert not again["restart"]
    assert again["now"] is again["units"] is again["order"] is again["holds"] is again["peaks"] is None
    assert buffers == [b""]


def test_other_ranks_are_distinguished_from_a_new_grouping(made):
    workbench = FakeWorkbench()
    widget = made(workbench)
    ask(widget)
    workbench.trace = Trace(
        workbench.trace.header,
        tuple(RankTrace(r.rank, r.rows[: len(r.rows) - (r.rank == 1)], r.start) for r in workbench.trace.ranks),
    )
    workbench.trace = of_others(workbench.trace)
    answer, _ = ask(widget)
    assert (answer["restart"], answer["another"]) == (True, True)
    assert not ask(widget)[0]["another"]


def test_before_the_first_step_it_explains_how_to_train(made):
    trace = example_trace(num_ranks=4)
    first = min(int(np.flatnonzero(r.rows["kind"] == Kind.STEP)[0]) for r in trace.ranks)
    assert first > 0
    workbench = FakeWorkbench(prefix(trace, first))
    widget = made(workbench)
    assert ask(widget)[0]["said"] == (
        "No step has run yet: %fsdp step 5 calls train_step(), which a %%fsdp cell defines with an optimizer."
    )
    workbench.trace = trace
    assert ask(widget)[0]["said"] == ""


def test_dead_ranks_are_sent_with_the_cause(made):
    workbench = FakeWorkbench()
    widget = made(workbench)
    assert ask(widget)[0]["said"] == ""
    workbench.alive, workbench.losses = [False] * 4, dict.fromkeys(range(4), "died: the process was killed")
    answer, _ = ask(widget)
    assert answer["said"] == (
        "ranks 0-3 died: the process was killed. No further step can run: %fsdp stop, then %fsdp start."
    )
    assert [group["state"] for group in answer["health"]] == ["gone"]


def of_others(trace):
    """Return the same trace, recorded by other processes."""
    ranks = tuple(replace(info, pid=info.pid + 1000) for info in trace.header.ranks)
    return Trace(replace(trace.header, ranks=ranks), trace.ranks)


def test_each_view_gets_everything_once(made):
    widget = made(FakeWorkbench())
    assert ask(widget, view="a")[0]["restart"]
    assert ask(widget, view="b")[0]["restart"]
    assert not ask(widget, view="a")[0]["restart"]
    ask(widget, view="a")
    widget._handle_custom_msg({"view": "a", "word": "bye"}, [])
    assert ask(widget, view="a")[0]["restart"]


def test_only_so_many_views_are_kept(made):
    widget = made(FakeWorkbench())
    for number in range(MAX_VIEWS + 3):
        ask(widget, view=str(number))
    assert len(widget._views) == MAX_VIEWS
    assert ask(widget, view="0")[0]["restart"]


def test_eight_ranks_stay_below_64_kib_a_second(made):
    trace, now = simulate(Setup(num_ranks=8, num_units=6, steps=40)), [0.0]
    workbench = FakeWorkbench(prefix(trace, 10), dict.fromkeys(range(8), RUNNING), [True] * 8)
    widget = made(workbench, clock=lambda: now[0])
    ask(widget)
    rows, sent = len(trace.rank(0).rows), 0
    for part in range(1, 11):  # ten answers in a second
        workbench.trace = prefix(trace, rows * part // 10)
        now[0] += 0.1
        answer, buffers = ask(widget)
        sent += sum(map(len, buffers)) + len(str(answer))
    assert 10_000 < sent < 64 * 1024


def test_the_cursor_is_answered_with_all_ranks_at_that_event(made):
    widget = made(FakeWorkbench())
    ask(widget)
    answer, _ = ask(widget, "at", t_us=2_000.0, number=7)
    assert answer["number"] == 7
    moment = answer["moment"]
    assert 0 < moment["t_us"] <= 2_000.0
    after, _ = ask(widget, "beside", rank=moment["rank"], seq=moment["seq"], by=1, number=8)
    assert after["moment"]["t_us"] >= moment["t_us"]
    assert after["moment"]["seq"] > moment["seq"]


def spans_sizes(count):
    """Return the bytes of each column of ``count`` spans in a buffer."""
    return [-(-count * np.dtype(code).itemsize // 8) * 8 for _, code in COLUMNS["spans"]]


def test_a_window_is_answered_with_every_change_in_it(made):
    workbench = FakeWorkbench()
    widget = made(workbench)
    feed, _ = ask(widget)
    about = {"from_us": 1_000.0, "to_us": feed["now"]["t_us"]}
    answer, buffers = ask(widget, "window", number=3, **about)
    assert answer.items() >= {"word": "window", "number": 3, "exact": True, **about}.items()
    rows = workbench.trace.rank(0).rows
    moves = rows[np.isin(rows["kind"], MOVES) & (rows["t_ns"] > rows["t_ns"][0] + 1_000_000)]
    assert answer["counts"]["memory"] == len(moves) + 1  # plus the state before them
    assert answer["counts"]["steps"] == 0
    first_us = np.frombuffer(buffers[0][sum(spans_sizes(answer["counts"]["spans"])) :], "<f8", 1)[0]
    assert first_us == 1_000.0


def held_run(hold_ns=HOLD_NS):
    return stopped_before(example_trace(), Kind.BACKWARD, number=5, hold_ns=hold_ns)


def test_time_in_which_ranks_were_held_is_not_on_the_axis(made):
    """All times are as if the ranks had never stopped; the answer has the place and length of each hold as well."""
    answer, free = (ask(made(FakeWorkbench(trace)))[0] for trace in (held_run(), example_trace()))
    ((at_us, length_us),) = answer["holds"]
    assert free["holds"] == []
    assert length_us == pytest.approx(HOLD_NS / 1e3, rel=1e-3)
    assert answer["now"]["t_us"] == pytest.approx(free["now"]["t_us"], rel=0.05)
    assert 0 < at_us < answer["now"]["t_us"]
    assert answer["peaks"][0]["t_us"] <= answer["now"]["t_us"]


def test_a_cursor_on_a_shortened_axis_finds_the_event(made):
    trace = held_run()
    widget = made(FakeWorkbench(trace))
    answer, _ = ask(widget)
    now = answer["now"]
    ((at_us, _),) = answer["holds"]
    for t_us in (at_us - 1, at_us, at_us + 1, now["t_us"]):
        moment = ask(widget, "at", t_us=t_us)[0]["moment"]
        assert moment["t_us"] <= t_us
        later = ask(widget, "beside", rank=moment["rank"], seq=moment["seq"], by=1)[0]["moment"]
        assert later["seq"] == moment["seq"] or later["t_us"] >= t_us
    assert ask(widget, "at", t_us=now["t_us"])[0]["moment"]["seq"] == now["seq"]


def test_a_window_on_a_shortened_axis_has_its_changes(made):
    widget = made(FakeWorkbench(held_run()))
    feed, _ = ask(widget)
    about = {"from_us": feed["begin_us"], "to_us": feed["now"]["t_us"]}
    answer, buffers = ask(widget, "window", number=1, **about)
    times = np.frombuffer(buffers[0], "<f8", answer["counts"]["memory"])
    assert answer["exact"]
    assert times.min() >= feed["begin_us"]
    assert times.max() <= feed["now"]["t_us"]


def later(trace, step, by_ns):
    """Delay everything from ``step`` on by ``by_ns``, and make everything before the first step earlier."""

    def moved(rows):
        rows = rows.copy()
        rows["t_ns"] += by_ns * (np.cumsum(rows["step"] == step) > 0) - HOLD_NS // 40 * (rows["step"] < 0)
        return rows

    return Trace(trace.header, tuple(replace(r, rows=moved(r.rows)) for r in trace.ranks))


@pytest.mark.parametrize("trace", [example_trace(), held_run(), later(example_trace(), 2, 7 * 10**9)])
def test_its_axis_ends_where_that_of_views_of_all_steps_ends(made, trace):
    """The trace begins before the first step, as when a model is sharded then."""
    answer, _ = ask(made(FakeWorkbench(trace)))
    assert answer["begin_us"] < 0
    for name in ("timeline", "memory", "states"):
        axis = draw(name, trace, steps=len(steps(trace))).layout.xaxis
        unit_us = {"time from the start [s]": 1e6, "time from the start [ms]": 1e3}[axis.title.text]
        assert answer["now"]["t_us"] / unit_us == pytest.approx(axis.range[1], rel=1e-9)


def test_its_axis_restarts_with_the_first_step(made):
    whole = example_trace()
    before = Trace(whole.header, tuple(replace(r, rows=r.rows[r.rows["step"] < 0]) for r in whole.ranks))
    workbench = FakeWorkbench(before)
    widget = made(workbench)
    first, _ = ask(widget)
    assert (first["restart"], first["begin_us"]) == (True, 0)
    assert not ask(widget)[0]["restart"]
    workbench.trace = whole
    answer, _ = ask(widget)
    assert answer["restart"]
    assert answer["begin_us"] == -(zero_ns(whole) - extent_ns(whole)[0]) / 1e3 < 0
    assert not ask(widget)[0]["restart"]


def test_views_are_notified_once_of_a_moved_cursor(made):
    workbench = FakeWorkbench()
    widget = made(workbench)
    now = ask(widget)[0]
    assert not now["has_moved"]
    origin_ns = zero_ns(workbench.trace)
    workbench.cursor, _ = back(workbench.trace, None, 12)
    cursor = ask(widget)[0]["cursor"]
    assert cursor["t_us"] == (workbench.cursor.t_ns - origin_ns) / 1e3 < now["now"]["t_us"]
    shown = StateAt().at(cut(workbench.trace, workbench.cursor), 1 << 62)  # as in all other views
    assert cursor["moment"]["ranks"] == encode(shown.ranks)
    assert cursor["moment"]["rank"] == 0
    assert not ask(widget)[0]["has_moved"]
    assert ask(widget, view="b")[0]["cursor"] == cursor  # opened later
    at_cursor, _ = ask(widget, "at", t_us=cursor["t_us"])
    assert at_cursor["moment"] == cursor["moment"]
    workbench.cursor = None
    away = ask(widget)[0]
    assert (away["has_moved"], away["cursor"]) == (True, None)
    assert not ask(widget)[0]["has_moved"]


def test_another_job_gets_the_cursor(made):
    workbench = FakeWorkbench()
    widget = made(workbench)
    workbench.cursor, _ = back(workbench.trace, None, 100)
    ask(widget)
    workbench.trace = Trace(replace(workbench.trace.header, ranks=()), workbench.trace.ranks)
    again = ask(widget)[0]
    assert again["restart"]
    assert again["cursor"]["moment"]


def test_back_of_the_workbench_reaches_the_snapshot():
    workbench = Workbench(2, cluster_factory=FakeCluster)
    assert workbench.pulse().cursor is None
    workbench._last = ClusterSnapshot(trace=example_trace())
    workbench.back(3)
    assert workbench.pulse().cursor == workbench.cursor is not None
    workbench.back(0)
    assert workbench.pulse().cursor is None


def test_a_view_that_waits_is_answered_when_there_is_something_new(made):
    workbench = FakeWorkbench()
    whole, workbench.trace = workbench.trace, prefix(workbench.trace, 100)
    now, looked = [0.0], threading.Semaphore(0)
    widget = made(workbench, clock=lambda: now[0])
    widget._handle_custom_msg({"view": "a", "word": "feed", "wait": True}, [])
    wait_until(lambda: len(widget.sent) == 1)  # all is new
    now[0] = 0.9 * IDLE_S  # else it would be answered that there is nothing new
    workbench.on_pulse = looked.release
    widget._handle_custom_msg({"view": "a", "word": "feed", "wait": True}, [])
    for _ in range(3):
        assert looked.acquire(timeout=30)
    assert len(widget.sent) == 1
    workbench.trace = whole
    wait_until(lambda: len(widget.sent) == 2)
    assert widget.sent[1][0]["counts"]["spans"] > 0
    assert not widget.sent[1][0]["restart"]


def test_while_it_waits_the_cursor_is_answered_and_ranks_may_be_stopped(made):
    workbench = FakeWorkbench()
    widget, looked = made(workbench), threading.Semaphore(0)
    ask(widget, wait=False)

    def stops():
        looked.release()
        raise UsageError("the ranks are not started")

    workbench.on_pulse, workbench.activity = stops, lambda: ("%fsdp stop",)  # so that no snapshot is used again
    widget._handle_custom_msg({"view": "a", "word": "feed", "wait": True}, [])
    assert looked.acquire(timeout=30)
    assert ask(widget, "at", t_us=2_000.0)[0]["word"] == "moment"
    workbench.on_pulse = lambda: None
    wait_until(lambda: widget.sent[-1][0]["word"] == "feed")


def test_a_closed_dashboard_waits_for_nothing(made):
    widget = made(FakeWorkbench())
    for _ in range(2):
        widget._handle_custom_msg({"view": "a", "word": "feed", "wait": True}, [])
    wait_until(lambda: widget.sent)
    widget._handle_custom_msg({"view": "a", "word": "feed", "wait": True}, [])
    widget.close()
    assert not any(thread.name.startswith("dashboard") for thread in threading.enumerate())


def test_closing_waits_for_threads_that_have_answered_and_are_about_to_end(made, monkeypatch):
    has_answered, is_waited_for = threading.Event(), threading.Event()

    class Lingering(threading.Thread):
        """Ends when another thread joins it."""

        def run(self):
            super().run()
            has_answered.set()
            is_waited_for.wait(30)

        def join(self, timeout=None):
            is_waited_for.set()
            super().join(timeout)

    monkeypatch.setattr(threading, "Thread", Lingering)
    widget = made(FakeWorkbench())
    widget._handle_custom_msg({"view": "a", "word": "feed", "wait": True}, [])
    assert has_answered.wait(30)
    widget.close()
    assert not any(thread.name.startswith("dashboard") for thread in threading.enumerate())


def test_at_most_ten_answers_a_second_and_fewer_where_they_take_long():
    pace = RateLimit()
    assert pace.rest_s(5.0) == 0.0
    assert pace.is_due(5.0, "a")
    pace.answered(5.0, "a", 0.002)
    assert pace.rest_s(5.02) == pytest.approx(0.08)
    assert not pace.is_due(5.1, "a")
    assert pace.is_due(5.1, "b")
    assert pace.is_due(6.1, "a")  # a sign of life
    pace.answered(6.1, "b", 0.03)
    assert pace.rest_s(6.1) == pytest.approx(0.24)
    pace.answered(7.0, "c", 1.0)
    assert pace.rest_s(7.0) == 1.0


def test_a_new_request_is_sent_immediately_despite_the_rate_limit():
    answers, states, now = [], ["running"], ClusterSnapshot(trace=Trace.empty())
    looked = []

    def look():
        looked.append(states[-1])
        return replace(now, record=looked[-1])

    def answer():
        return partial(answers.append, looked[-1])

    waiting = LongPoll(
        look,
        clock=lambda: 5.0,  # stands still: a view's rest never ends
        activity=lambda: states[-1],
    )
    waiting.ask("a", answer)
    wait_until(lambda: answers == ["running"])
    waiting.ask("a", answer)
    states.append("stopped")
    wait_until(lambda: answers == ["running", "stopped"])
    waiting.close()


def test_a_dashboard_shows_a_new_request_immediately(made):
    workbench = FakeWorkbench()
    workbench.activity = lambda: workbench.under_way
    workbench.under_way = ""
    widget = made(workbench, clock=lambda: 0.0)  # stands still: a rest lasts forever
    for count, workbench.under_way in enumerate(("", "%fsdp step 40", "%fsdp pause")):
        widget._handle_custom_msg({"view": "a", "word": "feed", "wait": True}, [])
        wait_until(lambda wanted=count + 1: len(widget.sent) == wanted)


@pytest.mark.parametrize(
    ("exchange", "waits_for", "words"),
    [
        ("start", "", "Starting or attaching ranks."),
        ("start", "starting 4 ranks, 12 s: importing torch", "Starting 4 ranks, 12 s: importing torch."),
        ("stop", "", "The ranks are stopping; the trace is kept."),
        ("open", "", "No ranks are running. Showing their last recording."),
    ],
)
def test_starting_and_stopping_ranks_are_reported(made, exchange, waits_for, words):
    workbench = FakeWorkbench()
    widget = made(workbench)
    ask(widget)
    found = replace(workbench.pulse(), running=False, states={}, exchange=exchange, waits_for=waits_for)
    workbench.pulse = lambda: found
    assert ask(widget)[0]["said"] == words


def test_a_new_request_alone_is_news():
    answers, requests = [], [("stop",)]
    waiting = LongPoll(
        lambda: ClusterSnapshot(trace=Trace.empty()),
        clock=lambda: 5.0,
        activity=lambda: requests[-1],
    )

    def answer():
        return lambda: answers.append(requests[-1])

    waiting.ask("a", answer)
    wait_until(lambda: answers == [("stop",)])
    waiting.ask("a", answer)
    requests.append(())
    wait_until(lambda: answers == [("stop",), ()])
    waiting.close()


def test_health_merges_equal_ranks_and_shows_where_they_are_held():
    trace = example_trace(num_ranks=4)
    positions = {0: HELD, 1: HELD, 2: Position(waiting=True)}
    found = health(pulse(trace, [True, True, True, False], positions))
    assert [(entry.label, entry.state, entry.where) for entry in found] == [
        ("ranks 0-1", "held", "before all-gather of blocks.1, step 1"),
        ("rank 2", "waiting", ""),
        ("rank 3", "gone", ""),
    ]
    assert health(pulse(trace, [True], {}))[0].state == "no answer"


@pytest.mark.parametrize(
    ("is_recorded", "words"),
    [
        (ClusterSnapshot(trace=Trace.empty()), "No ranks are running and nothing is recorded"),
        (
            ClusterSnapshot(trace=Trace.empty(), running=True),
            "No model is sharded yet. Define one in a %%fsdp cell, then shard it with %fsdp shard MODEL.",
        ),
        (ClusterSnapshot(trace=example_trace(num_ranks=2)), "Showing their last recording"),
        (
            ClusterSnapshot(trace=example_trace(num_ranks=2), record="run.trace"),
            "No ranks are running. Showing run.trace.",
        ),
        (
            ClusterSnapshot(
                trace=example_trace(num_ranks=2), running=True, holder="the notebook of ann on node1 (process 7)"
            ),
            "the notebook of ann on node1 (process 7) controls these ranks; here you can only view them. To take "
            "control: %fsdp attach --take.",
        ),
    ],
)
def test_without_ranks_there_is_the_last_trace_or_a_sentence(made, is_recorded, words):
    workbench = FakeWorkbench()
    workbench.pulse = lambda: is_recorded
    answer, _ = ask(made(workbench))
    assert words in answer["said"]
    assert ("now" in answer) == bool(answer["groups"]) or answer["now"] is None


def test_an_opened_file_is_sent_from_the_beginning(made):
    workbench = FakeWorkbench()
    widget = made(workbench)
    whole = workbench.pulse()
    ask(widget)
    part = replace(whole, trace=whole.trace.slice(first=1), running=False, states={}, record="part.trace")
    assert mark(part) != mark(replace(part, record=""))  # a waiting view gets an answer
    workbench.pulse = lambda: part
    answer, _ = ask(widget)
    assert (answer["restart"], answer["another"]) == (True, True)
    assert answer["counts"]["steps"] == 2
    assert not ask(widget)[0]["restart"]


def test_buttons_are_those_that_the_workbench_has(made):
    assert made(FakeWorkbench()).about["buttons"] == ["pause", "continue", "abort"]
    assert all(hasattr(Workbench, method) for method, _ in BUTTONS.values())


def test_a_button_runs_its_command_and_its_answer_is_one_line(made):
    workbench = FakeWorkbench()
    widget = made(workbench)
    for word in ("pause", "continue", "abort", "next month"):
        widget._handle_custom_msg({"view": "a", "word": "press", "button": word}, [])
        wait_until(lambda: not any(t.name.startswith("dashboard") for t in threading.enumerate()))
    assert workbench.pressed == ["pause", ("continue", True)]
    messages = [content for content, _ in widget.sent]
    refused = "there is no button 'next month'; the buttons: pause, continue, abort, break on, break off, break clear"
    assert [content["text"] for content in messages] == ["4 ranks stopped", "", "there is nothing to abort", refused]


def press(widget, word, argument):
    """Return the text after a button is pressed."""
    widget._handle_custom_msg({"view": "a", "word": "press", "button": word, "argument": argument}, [])
    wait_until(lambda: not any(t.name.startswith("dashboard") for t in threading.enumerate()))
    return widget.sent[-1][0]["text"]


def test_a_fault_is_chosen_from_a_list(made):
    with Workbench(2, cluster_factory=FakeCluster) as workbench:
        widget = made(workbench)
        assert {"random", "straggler"} <= set(widget.about["faults"])
        assert ask(widget)[0]["status"]["fault"] == ""
        workbench._session.cluster.fault = "straggler"
        assert wait_until(lambda: ask(widget)[0]["status"]["fault"] == "straggler") is not None
        assert "'straggler'" in press(widget, "fault", "stragler")
        assert "nothing is sharded yet, so there is nothing to inject a fault into" in press(widget, "fault", "random")


def test_breakpoints_are_listed_switched_and_cleared(made):
    with Workbench(2, cluster_factory=FakeCluster) as workbench:
        widget = made(workbench)
        assert ask(widget)[0]["breakpoints"] == []
        assert press(widget, "break", "all_gather") == "breakpoint 1: all_gather"
        workbench.break_add("forward.end", rank=1, when="num_bytes > 5")
        first = {"id": 1, "text": "all_gather", "is_on": True}
        other = {"id": 2, "text": "forward.end --rank 1 --when 'num_bytes > 5'", "is_on": True}
        assert ask(widget)[0]["breakpoints"] == [first, other]
        assert press(widget, "break off", "2") == "1 breakpoint turned off"
        assert ask(widget)[0]["breakpoints"] == [first, other | {"is_on": False}]
        assert press(widget, "break on", "2") == "1 breakpoint turned on"
        assert press(widget, "break clear", "1") == "removed 1 breakpoint"
        assert ask(widget)[0]["breakpoints"] == [other]
        assert press(widget, "break off", "1") == "there is no breakpoint 1; breakpoints: 2"
        assert "there is no event ''" in press(widget, "break", "")
        for argument in ("", "two"):  # without a number, all breakpoints would be meant
            message = f"break clear takes the number of a breakpoint, not {argument!r}"
            assert press(widget, "break clear", argument) == message
        assert "4300" in press(widget, "break clear", "1" * 5000)
        assert ask(widget)[0]["breakpoints"] == [other]
        assert [b.id for b in workbench.break_list().breakpoints] == [2]


EXAMPLES = (
    {"view": "a", "word": "feed", "wait": False},
    {"view": "a", "word": "at", "number": 3, "t_us": 2_000.0},
    {"view": "a", "word": "beside", "number": 4, "rank": 0, "seq": 9, "by": 1},
    {"view": "a", "word": "window", "number": 5, "from_us": 0, "to_us": 9_000.5},
    {"view": "a", "word": "press", "button": "pause", "argument": ""},
    {"view": "a", "word": "press", "button": "break clear", "argument": "1"},
    {"view": "a", "word": "bye"},
)
NUMBERS = st.integers() | st.sampled_from([2**31, 2**63, -(2**63), 10**400]) | st.floats()
TEXTS = st.text(max_size=4) | st.sampled_from(["feed", "at", "window", "do", "bye", "press", "look", "1", "nan"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw):
    """A request with one field missing, unknown, or of any value."""
    question = dict(draw(st.sampled_from(EXAMPLES)))
    name = draw(st.sampled_from([*question, "x"]))
    if draw(st.booleans()):
        question.pop(name, None)
    else:
        question[name] = draw(JSON)
    return question


def by_widget():
    widget = DashboardWidget(FakeWorkbench())
    sent = []
    widget.send = lambda content, buffers=None: sent.append(content)
    return SimpleNamespace(
        receive=lambda data: widget._handle_custom_msg(data, []), sent=lambda: list(sent), close=widget.close
    )


def by_comm():
    comm = FakeComm()
    served = Client(FakeWorkbench(), comm, version="0.2.0")
    comm.receive({"word": "hello", "number": 1, "version": VERSION, "extension": "0.2.0"})
    return SimpleNamespace(receive=comm.receive, sent=lambda: [data for data, _ in comm.sent], close=served.close)


def problem_of(data, known):
    """Why it is no question; empty: it is one."""
    try:
        read_question(data, known)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("carrier", "known"), [(by_widget, VIEW_QUESTIONS), (by_comm, QUESTIONS)])
def test_an_invalid_request_is_refused_and_the_next_one_answered(carrier, known):
    dashboard = carrier()

    @given(mutated() | JSON)
    def answers(data):
        num_sent = len(dashboard.sent())
        dashboard.receive(data)
        answered = dashboard.sent()[num_sent:]
        json.dumps(answered, allow_nan=False)
        sent = data if isinstance(data, dict) else {}
        problem = problem_of(data, known)
        if problem:
            (answer,) = [answer for answer in answered if answer["word"] == "refused"]
            assert answer["text"] == problem
            assert answer["view"] == (sent.get("view") if isinstance(sent.get("view"), str) else "")
            assert answer["number"] == (sent.get("number") if type(sent.get("number")) is int else -1)

    try:
        answers()
        dashboard.receive({"view": "z", "word": "feed"})
        assert dashboard.sent()[-1]["restart"]
    finally:
        dashboard.close()
        wait_until(lambda: not any(t.name.startswith("dashboard") for t in threading.enumerate()))


def test_a_question_that_cannot_be_answered_for_now_is_refused_with_the_reason(made):
    workbench = FakeWorkbench()
    widget = made(workbench)

    def are_being_stopped():
        raise UsageError("the ranks are being stopped")

    workbench.on_pulse = are_being_stopped
    refused = {"word": "refused", "view": "a", "number": -1, "text": "the ranks are being stopped"}
    assert ask(widget)[0] == refused
    assert ask(widget, "at", number=8, t_us=1.0)[0] == refused | {"number": 8}


def test_the_breakpoint_of_a_step_until_is_not_one_of_the_list(made):
    set_by_step, other = Breakpoint(id=UNTIL, event="all_gather", once=True), Breakpoint(id=3, event="forward")
    workbench = FakeWorkbench()
    snapshot = replace(workbench.pulse(), breakpoints=(set_by_step, other))
    workbench.pulse = lambda: snapshot
    assert [entry["id"] for entry in ask(made(workbench))[0]["breakpoints"]] == [3]


def test_nothing_is_left_of_a_closed_dashboard(made):
    widget = made(FakeWorkbench())
    ask(widget)
    widget.close()
    assert widget.comm is None
    assert not widget._views
    widget._views._do("a", "pause", lambda: "too late")
    assert len(widget.sent) == 1


def test_the_timeline_alone_is_a_dashboard_with_one_panel():
    with Workbench(2, cluster_factory=FakeCluster) as workbench:
        widget = workbench.canvas()
        assert (widget.about["buttons"], widget.about["panels"]) == ([], ["timeline"])
        widget.close()
    with ipython_shell() as shell:
        register(shell, lambda **options: Workbench(cluster_factory=FakeCluster, **options))
        widget = shell.run_line_magic("fsdp", "timeline --canvas")
        assert widget.about["panels"] == ["timeline"]
        widget.close()
        with pytest.raises(UsageError, match="no other flag"):
            shell.run_line_magic("fsdp", "timeline --canvas --step 3")
        unregister(shell)


def test_no_widget_attribute_is_overridden_by_accident():
    functions = {name for name, value in vars(DashboardWidget).items() if inspect.isfunction(value)}
    assert functions & set(dir(AnyWidget)) == {"__init__", "__repr__", "close"}


def test_the_command_and_the_method_return_a_dashboard():
    with Workbench(2, cluster_factory=FakeCluster) as workbench:
        widget = workbench.dashboard()
        assert isinstance(widget, DashboardWidget)
        assert workbench.pulse().states == {0: "idle", 1: "idle"}
        widget.close()
    assert not workbench.pulse().running
    with ipython_shell() as shell:
        register(shell, lambda **options: Workbench(cluster_factory=FakeCluster, **options))
        widget = shell.run_line_magic("fsdp", "dashboard")
        assert isinstance(widget, DashboardWidget)
        widget.close()
        unregister(shell)


def test_several_dashboards_of_one_workbench_are_independent():
    workbench = FakeWorkbench()
    first, second = DashboardWidget(workbench), DashboardWidget(workbench)
    first.close()
    assert second.comm is not None
    second.close()


def test_it_names_the_clock_of_the_timeline_and_other_panels(made):
    trace = example_trace()
    clocks = [ask(made(FakeWorkbench(shown)))[0]["clock"] for shown in (trace, on_devices(trace))]
    assert clocks == [["", ""], ["times are measured on the GPU, within 6.00 µs", "in host order and host time"]]
    hosts = Trace(
        replace(trace.header, ranks=tuple(replace(info, device="cuda:0") for info in trace.header.ranks)), trace.ranks
    )
    timeline, others = ask(made(FakeWorkbench(hosts)))[0]["clock"]
    assert timeline.startswith("times are when the host enqueued work")
    assert others == "in host order and host time"


def test_it_shows_the_clock_error_of_several_hosts(made):
    trace = example_trace(num_ranks=2)
    reading = ClockReading(t_ns=int(trace.rank(0).rows["t_ns"][-1]), offset_ns=10**12, error_ns=4_000_000)
    clocks = (HostClock(ranks=(1,), readings=(reading,)),)
    clock = ask(made(FakeWorkbench(Trace(replace(trace.header, clocks=clocks), trace.ranks))))[0]["clock"]
    assert clock == ["differences below 4.00 ms between hosts are within the clock error", ""]


def test_without_a_front_end_there_is_a_sentence():
    dashboard = DashboardWidget(FakeWorkbench())
    shown = dashboard._repr_mimebundle_()[0]["text/plain"]
    last = steps(example_trace(num_ranks=4))[-1]
    assert shown == f"live dashboard: 4 ranks, step {last} when displayed; as a page: %fsdp export page.html"
    assert repr(DashboardWidget(FakeWorkbench(), panels=("timeline",))).startswith("live timeline: 4 ranks, ")
