"""The commands that stop inside a step, in a real IPython shell."""

import pytest

from tests.helpers.fake_cluster import failed, inside, prints
from tests.helpers.waiting import wait_until
from workbench.errors import RankError, UsageError
from workbench.magics.command_lines import parse_line
from workbench.magics.completion import candidates
from workbench.magics.parser import HelpAsked
from workbench.protocol.breakpoints import EVENTS
from workbench.protocol.commands import Break, Evaluate, Inspect, Next, Step


@pytest.fixture
def stoppable(notebook):
    notebook.fake.sharded()
    notebook.fake.script["step"] = inside
    return notebook


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("step 3 --until all_gather:blocks.0", Step(count=3, until="all_gather:blocks.0")),
        ("step 500 --background", Step(count=500, background=True)),
        ("next", Next()),
        ("next unit", Next(what="unit")),
        ("break add forward:* --rank 1 --when 'step > 2'", Break("add", "forward:*", rank=1, when="step > 2")),
        ("inspect a.b", Inspect(fqn="a.b")),
        ("eval x['a'] + 1", Evaluate(expr="x['a'] + 1")),
        ('eval f"{x}" -t 0,2', Evaluate(expr='f"{x}"', ranks=(0, 2))),
        ("eval -t 1-2  x - 1", Evaluate(expr="x - 1", ranks=(1, 2))),
        ("eval x -t", Evaluate(expr="x -t")),
        ("eval --frame 2 x.shape -t 0", Evaluate(expr="x.shape", ranks=(0,), frame=2)),
        ("eval -t 0 --frame=1 x --frame", Evaluate(expr="x --frame", ranks=(0,), frame=1)),
        ("eval x --targets 0 --frame 1", Evaluate(expr="x", ranks=(0,), frame=1)),
        ("eval -t 0 -- x -t 1", Evaluate(expr="x -t 1", ranks=(0,))),
        ("eval -- --help", Evaluate(expr="--help")),
        ("eval -- -- x", Evaluate(expr="-- x")),
        ("eval x[0] -- x[1]", Evaluate(expr="x[0] -- x[1]")),
        ("eval\tx['a']", Evaluate(expr="x['a']")),
        ("inspect -- --rank", Inspect(fqn="--rank")),
        ("break --rank 1 -- add -x", Break("add", "-x", rank=1)),
    ],
)
def test_lines_become_commands(line, command):
    assert parse_line(line) == command


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("break add", "needs an event, such as all_gather:blocks.2"),
        ("break", "required: add|list|clear"),
        ("break dance x", "there is no 'dance'; choose from: add, list, clear, "),
        ("break clear all_gather", "takes a number that %fsdp break list shows"),
        ("break list 3", "takes no event"),
        ("break clear 3 --rank 1", "takes no --rank"),
        ("break add forward --rank one", "expected a rank such as 1"),
        ("next week", "there is no 'week'; choose from: event, collective, unit, phase"),
        ("next colective", "there is no 'colective', did you mean 'collective'? choose from: event, "),
        ("eval", "required: EXPR"),
        ("eval -t 1", "required: EXPR"),
        ("eval -t 1 --", "required: EXPR"),
        ("inspect -- -a -b", "unknown argument '-b'"),
        ("eval x -t 1,,2", "such as 1,3 or 0-2"),
        ("eval --frame 1,2 x", "argument --frame: expected a whole number, 0 for the innermost, got '1,2'"),
        ("back -1", "0 for the newest event, got '-1'"),
        ("back few", "0 for the newest event"),
        ("inspect", "required: FQN"),
    ],
)
def test_wrong_lines_explain_the_correction(line, message):
    with pytest.raises(UsageError) as caught:
        parse_line(line)
    assert message in str(caught.value)


def test_help_of_eval_and_its_names():
    with pytest.raises(HelpAsked, match="the rest of the line as typed"):
        parse_line("eval --help")
    assert parse_line("eval {who} -t {who}", {"who": "0,3"}.__getitem__) == Evaluate("{who}", (0, 3))


def names(kind):
    return {"events": EVENTS, "units": ["blocks.0", "(root)"], "fqns": ["blocks.0.weight"]}[kind]


@pytest.mark.parametrize(
    ("before", "symbol", "expected"),
    [
        ("%fsdp break ", "", ["add", "list", "clear", "on", "off", "--help", "--rank", "--when", "--json"]),
        ("%fsdp break add all", "all", ["all_gather", "all_reduce", "all_to_all"]),
        ("%fsdp break add all_gather:bl", "bl", ["blocks.0"]),
        ("%fsdp break add all_gather:bl", "all_gather:bl", ["all_gather:blocks.0"]),
        ("%fsdp step --until opt", "opt", ["optimizer"]),
        ("%fsdp step --until forward:", "", ["blocks.0", "(root)"]),
        ("%fsdp inspect bl", "bl", ["blocks.0.weight"]),
        ("%fsdp next c", "c", ["collective"]),
    ],
)
def test_candidates(before, symbol, expected):
    assert candidates(before, symbol, names) == expected


def test_tab_completes_events_units_and_parameters(stoppable):
    workbench = stoppable.shell.magics_manager.registry["FsdpMagics"].workbench
    assert stoppable.complete("%fsdp break add all_g") == ["all_gather"]
    block = next(name for name in workbench.units() if name.startswith("bl"))
    assert block in stoppable.complete("%fsdp break add all_gather:bl")
    assert workbench.parameters()[0] in stoppable.complete(f"%fsdp inspect {workbench.parameters()[0][:3]}")


def test_a_stopped_step_returns_with_a_sentence_and_continues(stoppable):
    shown = stoppable.ok("%fsdp step --until backward\nreached = True").shown
    assert "4 ranks stopped before backward of " in shown[-1]["text/plain"]
    assert stoppable.shell.user_ns["reached"]
    assert "first %fsdp continue" in stoppable.run("%fsdp step").out
    assert "4 ranks held" in stoppable.ok("%fsdp where").shown[0]["text/plain"]
    assert "MainThread" in stoppable.ok("%fsdp where --stacks").shown[0]["text/plain"]
    assert stoppable.ok("%%fsdp -t 0\nhi").out == "0: hi\n"
    assert "stopped before" in stoppable.ok("%fsdp next").shown[-1]["text/plain"]
    cell = stoppable.ok("%fsdp continue")
    assert "1 step" in cell.shown[-1]["text/plain"]


def test_output_is_shown_at_a_stop_and_a_missed_event_is_named(stoppable):
    stoppable.fake.script["step"] = prints("hello\n", then=inside)
    assert stoppable.ok("%fsdp step --until backward").out.count("hello\n--- 4 ranks agree\n") == 1
    assert "hello" not in stoppable.ok("%fsdp continue").out
    assert "; all_reduce did not occur" in stoppable.ok("%fsdp step --until all_reduce").shown[-1]["text/plain"]


def test_status_shows_where_ranks_are_stopped(stoppable):
    def first_line(line):
        return stoppable.ok(f"%fsdp {line}").shown[-1]["text/plain"].splitlines()[0]

    assert first_line("status") == "4 ranks running"
    stopped = first_line("step 2 --until forward:blocks.0")
    assert "4 ranks stopped before forward of blocks.0" in stopped
    assert first_line("status") == stopped
    stoppable.ok("%fsdp continue")
    assert first_line("status") == "4 ranks running"


def test_eval_that_raises_is_one_line_and_the_stop_stays(stoppable):
    stoppable.ok("%fsdp step --until backward")
    assert "x['a'] differs between" in stoppable.ok("%fsdp eval x['a']").shown[0]["text/plain"]
    for gate in stoppable.fake.gates:
        gate.jobs = lambda rank, job: failed("ZeroDivisionError", "division by zero")
    cell = stoppable.run("%fsdp eval 1 / 0 -t 1")
    assert isinstance(cell.error, RankError)
    assert cell.out.splitlines()[0] == "RankError: rank 1 raised ZeroDivisionError: division by zero"
    assert "4 ranks held" in stoppable.ok("%fsdp where").shown[0]["text/plain"]
    assert "idle again" in stoppable.ok("%fsdp abort").shown[0]["text/plain"]


def test_breakpoints(stoppable):
    stoppable.ok("%fsdp break add forward --rank 2")
    stoppable.ok("%fsdp break add optimizer --when 'step > 1'")
    assert "2 breakpoints" in stoppable.ok("%fsdp break list").shown[0]["text/plain"]
    assert "(off: %fsdp break on 2)" in stoppable.ok("%fsdp break off 2").shown[0]["text/plain"]
    assert "off" not in stoppable.ok("%fsdp break on").shown[0]["text/plain"]
    assert "there is no breakpoint 7; breakpoints: 1, 2" in stoppable.run("%fsdp break off 7").out
    assert "optimizer" in stoppable.ok("%fsdp break clear 1").shown[0]["text/plain"]
    assert "no breakpoints" in stoppable.ok("%fsdp break clear\n%fsdp break list").shown[-1]["text/plain"]
    assert "nearest first: forward" in stoppable.run("%fsdp break add farward").out


def test_the_next_command_reports_ended_background_steps(stoppable):
    assert "runs in the background" in stoppable.ok("%fsdp step --background").shown[0]["text/plain"]
    workbench = stoppable.shell.magics_manager.registry["FsdpMagics"].workbench
    wait_until(lambda: workbench._session.request is None and workbench._session._news)
    assert stoppable.ok("%fsdp status").out.startswith("in the background, %fsdp step --background: 1 step")
    assert "in the background" not in stoppable.ok("%fsdp status").out


def test_commands_while_nothing_is_stopped(stoppable):
    for word in ("next", "continue", "eval x"):
        reported = f"{word.partition(' ')[0]}: no step is stopped; stop one with %fsdp step --until"
        assert reported in stoppable.run(f"%fsdp {word}").out
    for word in ("pause", "abort"):
        assert f"nothing to {word}: no step is running" in stoppable.run(f"%fsdp {word}").out


def test_back(stoppable):
    stoppable.fake.script["step"] = stoppable.fake.trains(3)
    stoppable.ok("%fsdp step 3")
    assert "before the newest" in stoppable.ok("%fsdp back 5").shown[0]["text/plain"]
    assert "at the newest event" in stoppable.ok("%fsdp back 0").shown[0]["text/plain"]


def test_background_steps_continue_in_the_background(stoppable):
    workbench = stoppable.shell.magics_manager.registry["FsdpMagics"].workbench
    stoppable.ok("%fsdp step --until backward --background")
    wait_until(lambda: workbench._session._news)
    cell = stoppable.ok("%fsdp continue")
    assert "runs in the background" in cell.shown[-1]["text/plain"]
    wait_until(lambda: workbench._session._news)
    assert "1 step" in stoppable.ok("%fsdp status").out
    stoppable.ok("%fsdp step --until backward --background")
    wait_until(lambda: workbench._session._news)
    assert "1 step" in stoppable.ok("%fsdp continue --foreground").shown[-1]["text/plain"]


def test_a_foreground_step_continues_in_the_background(stoppable):
    workbench = stoppable.shell.magics_manager.registry["FsdpMagics"].workbench
    stoppable.ok("%fsdp step --until backward")
    assert "runs in the background" in stoppable.ok("%fsdp continue --background").shown[-1]["text/plain"]
    wait_until(lambda: workbench._session._news)
    assert "1 step" in stoppable.ok("%fsdp status").out
