"""Stopping inside a step, from the notebook's side: the ranks are gates of a fake cluster."""

import itertools
import signal
import sys
import threading
from dataclasses import replace

import pytest

from tests.helpers.fake_cluster import (
    PROGRAM,
    FakeCluster,
    blocks,
    failed,
    gives,
    inside,
    prints,
    raises,
    rank_error,
    step_result,
    text_reply,
)
from tests.helpers.waiting import PATIENCE_S, wait_until
from tests.reports.test_inspect_table import FOUND, FULL, GATHERED
from workbench.base.fault import LATE, Fault
from workbench.cluster.pending_replies import Answer, Output
from workbench.errors import Interrupted, RankDied, RankError, UsageError
from workbench.protocol.breakpoints import EVENTS, nearest
from workbench.protocol.commands import Abort, Break, Continue, Evaluate, Inspect, Next, Pause
from workbench.protocol.rank_messages import CellLine, GiveUp, JobReply, SetBreakpoints
from workbench.reports.pause_reports import StopReport
from workbench.session import session, waiter
from workbench.session.pause_protocol import WHERE_S
from workbench.session.waiter import ASK_S, PATIENT_S
from workbench.workbench import Workbench


class Bench(Workbench):
    """A workbench on a fake cluster, available as ``fake``; a step has the events of PROGRAM."""

    def __init__(self, num_ranks=4):
        super().__init__(num_ranks, cluster_factory=self._make)

    def _make(self, **settings):
        self.fake = FakeCluster(**settings)
        self.fake.sharded()
        self.fake.script["step"] = self.fake.script["cell"] = inside
        return self.fake

    def requests(self, what):
        return [entry for entry in self.fake.log if entry[0] == what]

    def make_late(self, rank, late=True):
        self.fake.gates[rank].late = late


@pytest.fixture
def wb():
    with Bench() as bench:
        yield bench


def unit(wb, index):
    return wb.fake.gates[0].units[index]


def ordinals(report):
    assert isinstance(report, StopReport), report
    return {rank: report.stop.positions[rank].place.ordinal for rank in report.stop.held}


# ---- stop and continue


def test_until_stops_once_and_the_step_stays_under_way(wb):
    report = wb.step(1, until=f"forward:{unit(wb, 1)}")
    assert ordinals(report) == dict.fromkeys(range(4), PROGRAM.index(("forward", "begin", 1)))
    assert report.headline == f"4 ranks stopped before forward of {unit(wb, 1)}, step 0"
    assert "under way   %fsdp step --until forward" in str(report)
    assert not wb.requests("breakpoints")  # it is sent with the step, and so to all ranks or none
    assert tuple(wb.break_list().breakpoints) == ()
    for refused in (wb.step, lambda: wb.unshard("model"), wb.verify):
        with pytest.raises(UsageError, match="first %fsdp continue or %fsdp abort"):
            refused()
    assert wb.resume().steps_done == 1
    assert wb._session.request is None


def test_a_missed_event_is_reported_with_those_that_occurred(wb):
    wb.fake.script["step"] = wb.fake.trains(3)
    report = wb.step(3, until=f"offload:{unit(wb, 1)}")
    assert report.headline.endswith(f"; offload:{unit(wb, 1)} did not occur")
    assert report.occurred
    assert all(":" in event for event in report.occurred)
    assert f"occurred, nearest first  {report.occurred[0]}, " in str(report)
    assert tuple(wb.break_list().breakpoints) == ()
    wb.fake.script["step"] = inside
    assert wb.step(1).missed == ""


def test_until_outlives_a_stop_at_something_else(wb):
    wb.break_add("forward", rank=None)
    assert "breakpoint 1" in str(wb.step(1, until="optimizer"))
    wb.break_clear(1)
    assert "stopped by  --until optimizer" in str(wb.resume())
    assert wb.resume().missed == ""
    wb.step(1, until="forward")
    assert wb.resume().missed == ""


def test_until_is_not_a_breakpoint_to_turn_off_or_clear(wb):
    wb.break_add("forward", rank=None)
    wb.step(1, until="optimizer")
    assert [str(b) for b in wb.break_list().breakpoints] == ["forward", "optimizer"]
    wb.break_off()
    assert [b.is_on for b in wb.break_list().breakpoints] == [False, True]
    assert "removed 1 breakpoint" in str(wb.break_clear())
    assert [str(b) for b in wb.break_list().breakpoints] == ["optimizer"]
    assert "stopped by  --until optimizer" in str(wb.resume())
    assert wb.break_list().breakpoints == ()


def test_a_breakpoint_stops_at_every_such_event(wb):
    assert str(wb.break_add("reduce_scatter:*")) == "breakpoint 1: reduce_scatter:*"
    assert str(wb.break_list()).splitlines()[1:] == ["  1  reduce_scatter:*"]
    report = wb.step(1)
    found = [ordinals(report)[0]]
    assert "stopped by  breakpoint 1: reduce_scatter:*" in str(report)
    found += [ordinals(wb.resume())[0] for _ in range(2)]
    assert found == [i for i, (kind, _, _) in enumerate(PROGRAM) if kind == "reduce_scatter"]
    wb.break_clear(1)
    assert wb.resume().steps_done == 1
    assert wb.requests("breakpoints")[-1][1] == SetBreakpoints(breakpoints=())


def test_next(wb):
    wb.step(1, until="forward")
    assert set(ordinals(wb.next()).values()) == {3}
    wb.break_add("optimizer")
    assert set(ordinals(wb.next("phase")).values()) == {len(PROGRAM) - 1}
    assert wb.requests("next")[0][1] == Next()
    assert wb.next().steps_done == 1
    assert wb.requests("continue")  # it is not left for the next step


def test_a_breakpoint_on_one_rank_leaves_the_others_waiting(wb):
    wb.break_add("backward", rank=1)
    for rank in (0, 2, 3):
        wb.fake.gates[rank].waits = True
    report = wb.step(1)
    assert report.headline.endswith("step 0; ranks 0, 2-3 wait")
    with pytest.raises(UsageError, match="rank 0 is not held in the gate, only rank 1"):
        wb.evaluate("x", ranks=[0])
    assert wb.evaluate("x").texts == {1: "1: x"}
    for gate in wb.fake.gates:
        gate.waits = False
    wb.break_clear()
    assert wb.resume().steps_done == 1


def test_a_silent_rank_does_not_count_as_waiting(wb):
    wb.break_add("backward")
    gate, looks = wb.fake.gates[0], iter(range(8))
    gate.waits = True  # at its last reply

    def on_drain():
        if not wb.fake.gates[1].held:
            return
        is_silent = next(looks, None) is not None
        wb.fake.silent, gate.waits = {0} if is_silent else set(), is_silent

    wb.fake.on_drain = on_drain
    assert wb.step(1).stop.held == (0, 1, 2, 3)
    wb.abort()


def press_ctrl_c_on_drain(fake, times):
    left = times

    def on_drain():
        nonlocal left
        if left and any(gate.answer for gate in fake.gates):
            left -= 1
            signal.raise_signal(signal.SIGINT)

    fake.on_drain = on_drain


def stall(wb):
    """Make the ranks reach no stop point until a request to hold arrives."""
    for gate in wb.fake.gates:
        gate.program = [*PROGRAM * 10_000]


def test_one_ctrl_c_stops_all_ranks_at_one_event(wb):
    stall(wb)
    press_ctrl_c_on_drain(wb.fake, 1)
    report = wb.step(1)
    assert len(set(ordinals(report).values())) == 1
    assert wb.requests("give up") == wb.requests("interrupt") == []
    assert isinstance(wb.abort().headline, str)


@pytest.mark.parametrize(
    ("rule", "now"),
    [
        ("uneven-batches", "%fsdp abort, as continue would only wait again; before it, %fsdp where, inspect FQN, "),
        (LATE, "%fsdp where, inspect FQN, eval EXPR, views and %%fsdp cells; then %fsdp next, continue or abort"),
    ],
)
def test_a_stop_of_ranks_that_wait_keeps_the_cause(wb, monkeypatch, rule, now):
    cause = Fault(rule=rule, verdict="rank 3 has ended", fix="end together")
    for name in ("stall_cause", "parted"):
        monkeypatch.setattr(session, name, lambda trace, positions: cause)
    wb.fake.script["step"] = [inside, inside, inside, gives(step_result(1))]
    for gate in wb.fake.gates:
        gate.waits = True
    press_ctrl_c_on_drain(wb.fake, 1)
    facts = dict(wb.step(1).facts())
    assert (facts["fault"], facts["fix"]) == (cause.verdict, cause.fix)
    assert facts["now"].startswith(now)
    assert wb.where().cause == cause
    assert wb.explain().problem == cause.verdict
    wb.abort()


def test_ranks_at_different_events_run_to_the_furthest(wb):
    stall(wb)
    wb.fake.gates[2].ordinal = 0
    wb.fake.script["step"] = lambda cluster, rank, answer: (
        inside(cluster, rank, answer),
        setattr(cluster.gates[rank], "ordinal", 5 if rank == 2 else 0),
    )
    press_ctrl_c_on_drain(wb.fake, 1)
    assert len(set(ordinals(wb.step(1)).values())) == 1
    assert wb.requests("run to")
    wb.abort()


def test_a_ctrl_c_while_a_step_is_sent_stops_all_ranks(wb):
    stall(wb)

    def act(cluster, rank, answer):
        if rank == 1:
            signal.raise_signal(signal.SIGINT)
        inside(cluster, rank, answer)

    wb.fake.script["step"] = act
    assert wb.step(1).stop.held == (0, 1, 2, 3)
    assert "idle again" in wb.abort().headline
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # Ctrl-C has its earlier meaning again


def test_a_first_ctrl_c_shows_what_it_waits_for(wb):
    stall(wb)
    wb.make_late(3)
    press_ctrl_c_on_drain(wb.fake, 1)
    sentences = []

    def on_standing(sentence):
        sentences.append(sentence)
        wb.make_late(3, False)

    assert wb.step(1, on_standing=on_standing).stop.held == (0, 1, 2, 3)
    assert sentences == ["stops at the next event of rank 3; Ctrl-C again aborts"]
    wb.abort()


@pytest.mark.parametrize(("times", "align_s"), [(2, 0.0), (3, 2 * PATIENCE_S)])
def test_a_second_ctrl_c_aborts_ranks_that_do_not_stop_and_a_third_at_once(wb, monkeypatch, times, align_s):
    monkeypatch.setattr(waiter, "ALIGN_S", align_s)
    for rank in range(4):
        wb.make_late(rank)
    press_ctrl_c_on_drain(wb.fake, times)
    with pytest.raises(Interrupted, match=r"^Interrupted. The ranks are idle again"):
        wb.step(1)
    assert wb.requests("give up") == [("give up", GiveUp(reason="interrupted"), (0, 1, 2, 3))]
    assert len(wb.requests("recover")) == 1
    for rank in range(4):
        wb.make_late(rank, False)
    assert wb.step(1).steps_done == 1


def test_two_ctrl_c_at_once_abort_ranks_that_are_about_to_stop_at_the_same_event(wb, monkeypatch):
    monkeypatch.setattr(waiter, "ALIGN_S", PATIENCE_S)
    stall(wb)
    wb.make_late(3)
    press_ctrl_c_on_drain(wb.fake, 2)
    press, drains = wb.fake.on_drain, itertools.count()

    def on_drain():
        press()
        wb.make_late(3, next(drains) < 6)

    wb.fake.on_drain = on_drain
    with pytest.raises(Interrupted, match=r"^Interrupted. The ranks are idle again"):
        wb.step(1)
    assert not wb.fake.gates[3].late
    assert wb.requests("give up") == [("give up", GiveUp(reason="interrupted"), (0, 1, 2, 3))]


def test_a_late_rank_is_named(wb):
    stall(wb)
    wb.make_late(3)
    press_ctrl_c_on_drain(wb.fake, 1)
    assert str(wb.step(1)).splitlines()[0].endswith("; rank 3 stops at the next event")
    assert wb.fake.patience[-1] == ("drain", ASK_S)
    assert [row.state for row in wb.where().ranks] == ["held", "held", "held", "running"]
    assert wb.fake.patience[-2:] == [("locate", WHERE_S), ("line", WHERE_S)]
    assert wb._session.pulse().under_way.stop.endswith("; rank 3 stops at the next event")
    wb.make_late(3, False)
    wait_until(lambda: wb._session.pulse().under_way.stop.startswith("4 ranks stopped"))
    with pytest.raises(UsageError, match=r"is stopped \(4 ranks stopped"):
        wb.step(1)
    assert "idle again" in wb.abort().headline


def test_abort_inside_a_step(wb):
    wb.step(1, until="backward")
    assert wb.abort().headline == "Aborted. The ranks are idle again; their variables are kept."
    assert wb.requests("give up")[0][1] == GiveUp(reason="aborted")
    assert wb.step(1).steps_done == 1


def test_an_abort_explains_the_next_ctrl_c(wb):
    wb.step(1, until="backward")
    wb.fake.on_abort.clear()  # the ranks ignore it
    sentences = []

    def on_standing(sentence):
        sentences.append(sentence)
        for gate in wb.fake.gates:
            gate.end(rank_error(gate.rank, "StepAborted", ""))

    assert "idle again" in wb.abort(on_standing=on_standing).headline
    assert sentences == ["aborting; ranks 0-3 still run; Ctrl-C sends SIGINT"]


def test_a_rank_that_fails_frees_the_stopped_ones(wb):
    wb.fake.script["step"] = [inside, inside, raises("ValueError", "mine"), inside]
    with pytest.raises(RankError, match="rank 2 raised ValueError: mine"):
        wb.step(1, until="forward")
    assert wb.requests("give up")[0][2] == (0, 1, 3)
    assert wb._session.request is None


def test_a_rank_that_dies_while_stopped(wb):
    wb.step(1, until="forward")
    wb.fake.dead.add(1)
    wb.fake.gates[1].end(RankDied("rank 1 died", ranks=(1,)))
    assert [row.state for row in wb.where().ranks] == ["held", "gone", "held", "held"]
    assert str(wb.pause()).endswith("was running when rank 1 died: end it with %fsdp abort")
    with pytest.raises(UsageError, match="was running when rank 1 died"):
        wb.step(1)
    with pytest.raises(RankDied):
        wb.resume()
    assert wb._session.request is None


STOPPED = ": no step is stopped; stop one with %fsdp step --until all_gather, or %fsdp break add EVENT and %fsdp step"
NO_GATHER = f"there is no event 'gathers'; the events, nearest first: {', '.join(nearest('gathers', EVENTS))}"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("pause", "nothing to pause: no step is running"),
        ("abort", "nothing to abort: no step is running"),
        ("resume", f"continue{STOPPED}"),
        ("next", f"next{STOPPED}"),
    ],
)
def test_nothing_to_stop_or_continue(wb, method, message):
    with pytest.raises(UsageError) as caught:
        getattr(wb, method)()
    assert str(caught.value) == message


def test_a_repeated_pause_gives_the_same_report(wb):
    report = wb.step(1, until="forward")
    assert wb.pause() == report
    assert wb.requests("pause") == []


def test_a_pause_of_a_step_that_ends_meanwhile_says_so(wb):
    for rank in range(4):
        wb.make_late(rank)
    wb.step(1, background=True)

    def end_it():
        for gate in wb.fake.gates if wb.requests("pause") else ():
            gate.end(step_result(1))

    wb.fake.on_drain = end_it
    assert str(wb.pause()) == "%fsdp step --background has ended"


def test_a_step_of_the_previous_notebook_is_named(monkeypatch):
    monkeypatch.setattr(FakeCluster, "outlives", True)
    with Bench() as wb:
        for gate in wb.fake.gates[1:]:
            gate.begin(Answer())
            gate.late = True
        assert wb.pulse().under_way.words == "%fsdp step of the previous notebook"
        with pytest.raises(UsageError) as caught:
            wb.pause()
        assert str(caught.value) == (
            "the ranks still run %fsdp step of the previous notebook: wait, or abort it: %fsdp abort"
        )
        for gate in wb.fake.gates:
            gate.end(step_result(1))
        wb.status()
        with pytest.raises(UsageError, match=r"^nothing to pause: no step is running$"):
            wb.pause()


# ---- what ranks print


def writing(*texts, then=inside):
    """Make each rank write its text; the test writes further output."""
    answers = {}

    def act(cluster, rank, answer):
        answers[rank] = answer
        answer.outputs.append(Output("stdout", text=texts[rank]))
        then(cluster, rank, answer)

    return act, answers


def test_output_is_shown_once_when_ranks_stop(wb):
    outputs = []
    act, answers = writing(*["same\n"] * 3, "other\n")
    wb.fake.script["step"] = act
    wb.step(1, until="backward", on_output=lambda output: outputs.append(output.text or output.data["text/plain"]))
    assert outputs[-1] == "--- ranks 0-2:\nsame\n--- rank 3:\nother"
    del outputs[:]
    for answer in answers.values():
        answer.outputs.append(Output("stdout", text="later\n"))
    assert wb.news() == ()  # collects late output, as every command does
    assert outputs == ["later\n"]
    wb.resume()  # the callback is still in use
    assert outputs[1:] == ["--- 4 ranks agree\n"]


def test_output_of_a_rank_stopped_earlier_is_not_lost(wb):
    outputs = []
    wb.fake.script["cell"], answers = writing("a\nb\n", "a\n", "a\nb\n", "a\n")
    wb.break_add("backward")
    wb.run_cell("train()", on_output=lambda output: outputs.append(output.text))
    assert outputs == ["a\nb\n", "--- 4 ranks agree\n"]
    for rank in (1, 3):
        answers[rank].outputs.append(Output("stdout", text="b\n"))
    wb.break_clear()
    report = wb.resume(on_output=lambda output: outputs.append(output.text))
    assert outputs[2:] == ["--- 4 ranks agree\n"]
    assert set(report.texts.values()) == {"a\nb\n"}


# ---- in the background


def test_a_step_in_the_background(wb):
    stall(wb)
    report = wb.step(500, background=True)
    assert str(report).startswith("%fsdp step 500 --background runs in the background")
    with pytest.raises(UsageError, match=r"%fsdp step 500 --background runs in the background: %fsdp pause"):
        wb.step(1, background=True)
    with pytest.raises(UsageError, match="nothing is stopped: %fsdp step 500"):
        wb.next()
    with pytest.raises(UsageError, match="nothing is stopped: %fsdp step 500"):
        wb.evaluate("x")
    assert len(set(ordinals(wb.pause()).values())) == 1
    assert wb.news() == (), "the reply to the pause says it"
    wb.resume(background=True)
    assert "idle again" in wb.abort().headline
    assert wb.news() == ()


def test_only_the_last_stop_in_the_background_is_news(wb):
    wb.step(1, until="backward", background=True)
    wait_until(lambda: wb._session._news)
    wb.fake.gates[0].late = True
    wb.resume(background=True)  # as a button of the dashboard, which reads no news
    assert wb.news() == ()
    wb.abort()


def test_its_end_and_its_failure_are_reported_once(wb):
    wb.step(1, background=True)
    wait_until(lambda: wb._session._news)
    assert wb.news() == ("in the background, %fsdp step --background: 1 step, loss 4.5, 250 ms a step (median)",)
    wb.fake.script["step"] = [raises("ValueError", "mine"), blocks, blocks, blocks]
    wb.step(1, background=True)
    wait_until(lambda: wb._session._news)
    (notice,) = wb.news()
    assert "rank 0 raised ValueError: mine" in notice
    assert wb.news() == ()
    wb.fake.script["step"] = lambda cluster, rank, answer: answer.future.set_result(step_result(1))
    assert wb.step(1).steps_done == 1


def test_unexpected_errors_are_reported_too(wb):
    def on_progress(progress):
        raise KeyError("mine")

    wb.step(1, background=True, on_progress=on_progress)
    wait_until(lambda: wb._session._news)
    assert wb.news() == ("in the background, %fsdp step --background: KeyError: 'mine'",)


def test_an_abort_removes_only_its_own_notice(wb, monkeypatch):
    wb.step(1, background=True)
    wait_until(lambda: wb._session._news)
    stall(wb)
    is_asked = threading.Event()

    def on_progress(progress):
        assert is_asked.wait(PATIENCE_S)
        raise ValueError  # its message is empty

    wb.step(500, background=True, on_progress=on_progress)
    watch = wb._session.request.watch
    monkeypatch.setattr(watch, "request_abort", lambda **_: is_asked.set())
    wb.abort()
    (notice,) = wb.news()
    assert "1 step, loss 4.5" in notice


def test_no_notice_is_lost_concurrently(wb):
    count, received, before = 5000, [], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=lambda: [wb._session._news.append((None, number)) for number in range(count)])
        thread.start()
        while thread.is_alive():
            received += wb.news()
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert received + list(wb.news()) == list(range(count))


def test_a_background_step_continues_there_unless_overridden(wb):
    wb.step(1, until="backward", background=True)
    wait_until(lambda: wb._session._news)
    wb.next()  # waits for this
    wb.fake.gates[0].late = True
    assert "runs in the background" in wb.do(Continue()).headline
    wb.fake.gates[0].late = False
    wait_until(lambda: wb._session.request is None)
    wait_until(lambda: wb._session._news)
    (notice,) = wb.news()  # the notice of the stop is outdated
    assert "1 step" in notice
    wb.step(1, until="backward", background=True)
    wait_until(lambda: wb._session._news)
    assert "1 step" in wb.do(Continue(foreground=True)).headline


def test_a_step_of_the_foreground_is_let_go_in_the_background_and_stays_there(wb):
    wb.step(1, until="backward")
    wb.fake.gates[0].late = True
    assert not wb.is_background
    assert "runs in the background" in wb.do(Continue(background=True)).headline
    assert wb.is_background
    wb.fake.gates[0].late = False
    wait_until(lambda: wb._session.request is None)
    wait_until(lambda: wb._session._news)
    assert "1 step" in wb.news()[0]


@pytest.mark.parametrize("how", ["stopped", "background"])
def test_stopping_the_ranks_meanwhile_ends_everything(how):
    bench = Bench()
    bench.start()
    stall(bench)
    bench.step(1, until="forward" if how == "stopped" else "", background=how == "background")
    bench.stop()
    assert bench.fake.log[-1] == ("stop",)
    wait_until(lambda: not any(thread.name.startswith("workbench") for thread in threading.enumerate()))
    assert bench.news() == ()


def test_buttons_in_other_threads(wb):
    stall(wb)
    reports = []
    thread = threading.Thread(target=lambda: reports.append(wb.step(1)))
    thread.start()
    wait_until(lambda: wb._session.request is not None)
    stop = wb.pause()
    thread.join()
    assert reports == [stop]
    wb.resume(background=True)
    wb.abort()


# ---- inspection


def test_a_rank_that_has_not_begun_its_request_is_starting(wb):
    wb.fake.script["step"] = blocks
    wb.step(1, background=True)
    assert {row.state for row in wb.where().ranks} == {"starting"}
    assert set(wb.pulse().states.values()) == {"starting"}
    wb.fake.commands[1] += 1  # the rank has begun and ended: its answer is under way
    assert [row.state for row in wb.where().ranks] == ["starting", "idle", "starting", "starting"]
    wb.abort()
    wb.fake.script["cell"] = blocks

    def given_up():
        with pytest.raises(Interrupted):
            wb.run_cell("x")

    thread = threading.Thread(target=given_up)
    thread.start()
    wait_until(lambda: wb._session.request is not None)
    assert {row.state for row in wb.where().ranks} == {"running"}
    wb.abort()
    thread.join()
    assert {row.state for row in wb.where().ranks} == {"idle"}


def test_a_synchronised_device_is_reported(wb):
    wb.fake.gates[1].synchronised = True
    report = wb.step(1, until="backward")
    assert "synchronised on rank 1: all enqueued work is done" in str(report)
    assert [row.event for row in wb.where().ranks][:2] == ["before backward", "before backward, device synchronised"]
    wb.resume()


def test_where_is_a_table(wb):
    assert {row.state for row in wb.where().ranks} == {"idle"}
    wb.step(1, until="backward")
    wb.fake.silent.add(2)
    report = wb.where(stacks=True)
    assert [row.state for row in report.ranks] == ["held", "held", "no answer", "held"]
    assert report.headline == "ranks 0-1, 3 held; rank 2 no answer"
    assert "before backward" in str(report)
    assert "\nranks 0-1, 3, MainThread:\n    0  cell:3 in train_step: f()" in str(report)
    assert "<th" in report._repr_html_()
    assert "<pre" in report._repr_html_()


def test_only_stopped_ranks_are_waited_for(wb):
    wb.where(stacks=True)  # idle ranks answer once the machine lets them run
    assert wb.fake.patience[-3:] == [(kind, PATIENT_S) for kind in ("locate", "stacks", "line")]
    wb.status()
    assert ("drain", PATIENT_S) in wb.fake.patience[2:]
    wb.fake.script["step"] = blocks
    assert "runs in the background" in wb.step(1, background=True).headline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wb._session, "_take", lambda request, tick: {})
        wb.where()
        wb.status()
        assert {("locate", WHERE_S), ("drain", WHERE_S)} <= {*wb.fake.patience}
    wb.abort()
    wb.fake.script["step"] = inside
    wb.step(1, until="backward")
    assert wb.fake.patience[-1] == ("drain", PATIENT_S)
    wb.where(stacks=True)
    assert wb.fake.patience[-3:] == [(kind, PATIENT_S) for kind in ("locate", "stacks", "line")]


def test_eval_and_inspect_inside_a_step(wb):
    wb.step(1, until="backward")
    for gate in wb.fake.gates:
        gate.jobs = lambda rank, job: text_reply("7")
    assert str(wb.evaluate("3 + 4")) == "3 + 4 = 7   (4 ranks agree)"
    for gate in wb.fake.gates:
        gate.jobs = lambda rank, job: text_reply(str(rank % 2))
    assert str(wb.evaluate("rank % 2")).splitlines()[1:] == ["  ranks 0, 2  0", "  ranks 1, 3  1"]
    for gate in wb.fake.gates:
        gate.jobs = lambda rank, job: failed("NameError", "no x") if rank == 1 else text_reply("1")
    with pytest.raises(RankError, match=r"^rank 1 raised NameError: no x\nthe step is still stopped: 4 ranks stopped"):
        wb.evaluate("x")
    jobs = []
    for gate in wb.fake.gates:
        gate.jobs = lambda rank, job: jobs.append(job) or text_reply("1")
    wb.evaluate("dist.all_reduce(x)", ranks=[0])
    wb.evaluate("dist.all_reduce(x)")
    assert [job.alone.partition(":")[0] for job in jobs] == ["rank 0 would call it", *[""] * 4]
    with pytest.raises(UsageError, match=r"new_group\(\) waits for other ranks, and only ranks 0, 2 would call it"):
        wb.run_cell("new_group()", ranks=[0, 2])
    fqn = wb.parameters()[0]
    sharded = replace(FOUND, full=replace(FULL, why="why not"))
    gathered = replace(FOUND, full=replace(sharded.full, values=GATHERED))
    for gate in wb.fake.gates:
        gate.jobs = lambda rank, job: JobReply(inspected=gathered if rank == 1 else sharded)
    report = str(wb.inspect(fqn))
    assert f"{fqn} on ranks 0-3" in report
    assert "\n  full parameter  why not\n" in report
    rows = [line.split() for line in report.splitlines()[3:]]
    assert rows[0] == ["ranks", "0,", "2-3", "rank", "1"]
    assert ["bytes", "0", "B", "2.00", "KiB"] in rows
    with pytest.raises(UsageError, match=f"nearest first: {fqn}"):
        wb.inspect(fqn + "x")


def test_a_cell_inside_a_step(wb):
    wb.step(1, until="backward")
    outputs = []
    report = wb.run_cell("go", ranks=[1, 2], on_output=outputs.append)
    assert report.texts == {1: "1: go", 2: "2: go"}
    assert outputs[-1].data["text/plain"] == "--- rank 1:\n1: go\n--- rank 2:\n2: go"
    assert wb.requests("cell") == []
    for gate in wb.fake.gates:
        gate.jobs = lambda rank, job: failed("ValueError", "no")
    with pytest.raises(RankError, match="the step is still stopped"):
        wb.run_cell("go")
    line = CellLine(line=2, function="<module>", text="dist.barrier()")
    wb.fake.lines = {0: replace(line, inside="cell"), 1: line}  # that of rank 1 is of its step
    assert "rank 0 held, in dist.barrier() at line 2 of the cell; ranks 1-3 held\n" in str(wb.where())
    assert wb.resume().steps_done == 1


def test_a_loop_of_the_user_s_own_stops_as_well(wb):
    wb.break_add("backward")
    assert isinstance(wb.run_cell("train()"), StopReport)
    wb.break_clear()
    assert set(wb.resume().texts) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda wb: wb.break_add("gathers"), NO_GATHER),
        (
            lambda wb: wb.break_add("forward:nothing"),
            "there is no unit 'nothing'; the units, nearest first: (root), blocks.0, blocks.1",
        ),
        (lambda wb: wb.break_add("forward", rank=9), "there is no rank 9: the ranks are 0 to 3"),
        (
            lambda wb: wb.break_add("forward", when="f()"),
            "--when takes names, numbers and operators only, no Call as in 'f()'",
        ),
        (lambda wb: wb.break_clear(3), "there is no breakpoint 3; none is set"),
        (lambda wb: wb.step(1, until="gathers"), NO_GATHER),
        (
            lambda wb: wb.step(1, until="forward:nothing"),
            "there is no unit 'nothing'; the units, nearest first: (root), blocks.0, blocks.1",
        ),
        (lambda wb: wb.next("week"), f"next{STOPPED}"),
        (lambda wb: wb.back(-1), "back takes a number of events, 0 for the newest, not -1"),
        (
            lambda wb: wb.do(Inspect(fqn="embed.weigt")),
            "there is no parameter 'embed.weigt'; the parameters, nearest first: embed.weight, head.weight, "
            "norm.weight, blocks.0.mlp.down.weight, blocks.1.mlp.down.weight",
        ),
        (lambda wb: wb.evaluate("x"), f"eval{STOPPED}"),
    ],
)
def test_bad_requests_list_the_choices(wb, call, message):
    with pytest.raises(UsageError) as caught:
        call(wb)
    assert str(caught.value) == message
    assert wb._session.request is None
    assert not wb.requests("execute")


def test_commands_do_the_same_as_methods(wb):
    assert "breakpoint 1: forward" in str(wb.do(Break("add", "forward", rank=0, when="rank == 0")))
    wb.break_clear()
    wb.step(1, until="forward")
    assert wb.do(Evaluate(expr="x", ranks=(1,))).texts == {1: "1: x"}
    assert set(ordinals(wb.do(Next())).values()) == {3}
    assert ordinals(wb.do(Pause()))
    assert wb.do(Continue()).steps_done == 1
    wb.step(1, until="forward")
    assert "idle again" in str(wb.do(Abort()))


def test_every_event_can_be_stopped_at(wb):
    for event in EVENTS:
        wb.break_add(event)
    assert len(wb.break_list().breakpoints) == len(EVENTS)


# ---- back


def test_back_moves_the_shown_trace(wb):
    wb.fake.script["step"] = wb.fake.trains(3)
    wb.step(3)
    live = wb.training().to_json()
    assert "ranks 0-3 after" in str(wb.back(40))
    assert wb.shown_trace.num_rows < wb.trace.num_rows
    assert wb.training().to_json() != live
    assert wb.back(0).headline == "at the newest event"
    assert wb.training().to_json() == live
    wb.back(3)
    wb.fake.script["step"] = inside
    wb.step(1)
    assert wb.cursor is None
    wb.back(3)
    wb.fake.script["cell"] = prints("trained in a loop of my own")
    wb.run_cell("x")
    assert wb.cursor is None
    wb.back(3)
    wb.stop()
    assert wb.cursor is not None
    wb.start()
    assert wb.cursor is None
