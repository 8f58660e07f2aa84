"""Calls and cells in the main thread of the ranks."""

import pytest

from tests.cluster.conftest import RUNTIME, texts, wait_until_held
from tests.helpers.fake_rank import Release, Variable
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster.processes import THREAD_VARIABLES, usable_cores
from workbench.errors import RankError, UsageError

pytestmark = pytest.mark.cluster


def test_a_function_is_called_by_name_on_every_rank(cluster):
    pending = cluster.apply(f"{RUNTIME}:echo", 1, {"b": [2]})
    assert pending.results(PATIENCE_S) == dict.fromkeys(range(3), (1, {"b": [2]}))


def test_only_the_selected_ranks_get_the_request(cluster):
    assert cluster.apply(f"{RUNTIME}:echo", ranks=[2, 0, 2]).ranks == (0, 2)
    assert cluster.run_cell("pass", ranks=(1,)).ranks == (1,)


@pytest.mark.parametrize(("ranks", "message"), [([3], "no rank 3: the ranks are 0 to 2"), ([], "no rank was selected")])
def test_ranks_that_do_not_exist_are_refused(cluster, ranks, message):
    with pytest.raises(UsageError, match=message):
        cluster.run_cell("pass", ranks=ranks)


def test_every_rank_knows_its_number(cluster):
    pending = cluster.run_cell("print(rank, world_size, device)")
    pending.results(PATIENCE_S)
    assert [texts(pending, rank) for rank in range(3)] == [f"{rank} 3 cpu\n" for rank in range(3)]
    assert [info.rank for info in cluster.rank_info] == [0, 1, 2]
    assert len({info.pid for info in cluster.rank_info}) == 3


def test_ranks_share_the_cores(cluster):
    share = str(max(1, usable_cores() // 3))
    assert cluster.apply(f"{RUNTIME}:environment", *THREAD_VARIABLES).results(PATIENCE_S)[1] == [share] * len(
        THREAD_VARIABLES
    )


def test_outputs_keep_their_kind_and_order(cluster):
    code = """
import sys
from IPython.display import HTML, clear_output, display
for stream, text in (sys.stdout, "out\\n"), (sys.stderr, "err\\n"):
    stream.write(text)  # one piece; print would write two, which may be sent apart
    stream.flush()
handle = display(HTML("<b>1</b>"), display_id="figure")
handle.update(HTML("<b>2</b>"))
clear_output(wait=True)
rank + 40
"""
    pending = cluster.run_cell(code)
    pending.results(PATIENCE_S)
    outputs = pending.outputs(2)
    assert [output.kind for output in outputs] == ["stdout", "stderr", "display", "update", "clear", "result"]
    assert [output.text for output in outputs[:2]] == ["out\n", "err\n"]
    assert [output.data["text/html"] for output in outputs[2:4]] == ["<b>1</b>", "<b>2</b>"]
    assert {output.display_id for output in outputs[2:4]} == {"figure"}
    assert outputs[-1].data == {"text/plain": "42"}


def test_output_arrives_while_the_cell_runs(cluster):
    pending = cluster.run_cell(f"from {RUNTIME} import hold\nprint('holding', flush=True)\nhold()", ranks=[0])
    wait_until(lambda: texts(pending, 0) == "holding\n")
    assert not pending.done(0)
    release(cluster, 0)
    assert pending.wait(PATIENCE_S)


def release(cluster, *ranks):
    wait_until_held(cluster, ranks)
    cluster.ask(Release(), ranks)


def test_names_live_from_cell_to_cell(cluster):
    cluster.run_cell("kept = rank * 10").results(PATIENCE_S)
    pending = cluster.run_cell("print(kept)")
    pending.results(PATIENCE_S)
    assert texts(pending, 2) == "20\n"


def test_an_error_in_a_cell_shows_where(cluster):
    pending = cluster.run_cell("def inverse(x):\n    return 1 / x\n\n\ninverse(rank)")
    assert pending.wait(PATIENCE_S)
    error = pending.error(0)
    assert isinstance(error, RankError)
    assert (error.rank, error.ename, error.evalue, error.line) == (0, "ZeroDivisionError", "division by zero", 2)
    assert "inverse" in error.traceback
    assert str(error) == "rank 0, line 2: ZeroDivisionError: division by zero"
    assert pending.error(1) is pending.error(2) is None
    with pytest.raises(RankError):
        pending.results()


def test_a_syntax_error_shows_where(cluster):
    error = cluster.run_cell("fine = 1\n\nnot fine = 2", ranks=[1])
    assert error.wait(PATIENCE_S)
    assert (error.error(1).ename, error.error(1).line) == ("SyntaxError", 3)


def test_a_cell_runs_right_after_one_that_failed(cluster):
    for _ in range(10):
        failed, fine = cluster.run_cell("1 / 0"), cluster.run_cell("print('ran')")
        assert fine.wait(PATIENCE_S)
        assert all(isinstance(failed.error(rank), RankError) for rank in range(3))
        assert [texts(fine, rank) for rank in range(3)] == ["ran\n"] * 3


def test_an_error_in_a_called_function_comes_from_the_rank_that_raised(cluster):
    pending = cluster.apply(f"{RUNTIME}:fail", 1)
    assert pending.wait(PATIENCE_S)
    assert pending.result(0) == "fine"
    error = pending.error(1)
    assert (error.rank, error.ename, error.evalue, error.line) == (1, "ZeroDivisionError", "on purpose", None)
    assert "fake_rank.py" in error.traceback
    assert "_ipyparallel.py" not in error.traceback


def test_an_error_below_a_called_function_names_the_line_of_the_cell(cluster):
    cluster.run_cell("def train_step():\n    '''step'''\n    raise KeyError(rank)").results(PATIENCE_S)
    pending = cluster.apply(f"{RUNTIME}:call_user_function", "train_step")
    assert pending.wait(PATIENCE_S)
    assert [(pending.error(rank).evalue, pending.error(rank).line) for rank in range(3)] == [
        ("0", 3),
        ("1", 3),
        ("2", 3),
    ]


LOSES = """
import sys
closed = open("/dev/null", "w")
closed.close()
def lose():
    sys.stdout, sys.stderr = LOST
"""


@pytest.mark.parametrize("lost", ["None, None", "closed, closed"])
def test_user_code_that_takes_the_streams_away_is_answered_and_later_output_is_shown(cluster, lost):
    cluster.run_cell(LOSES.replace("LOST", lost)).results(PATIENCE_S)
    assert cluster.apply(f"{RUNTIME}:call_user_function", "lose").results(PATIENCE_S) == dict.fromkeys(range(3))
    cluster.run_cell("lose()").results(PATIENCE_S)
    assert cluster.apply(f"{RUNTIME}:echo", 1).results(PATIENCE_S)[1] == (1,)
    pending = cluster.run_cell("print('shown')")
    pending.results(PATIENCE_S)
    assert texts(pending, 2) == "shown\n"


def test_a_stream_of_the_users_that_works_stays(cluster):
    cluster.run_cell("import io, sys\nkept, sys.stdout = sys.stdout, io.StringIO()").results(PATIENCE_S)
    cluster.run_cell("print('aside')\nsaid, sys.stdout = sys.stdout.getvalue(), kept").results(PATIENCE_S)
    pending = cluster.run_cell("print(said)")
    pending.results(PATIENCE_S)
    assert texts(pending, 0) == "aside\n\n"


HOLDING = """
import weakref
class Thing: pass
things = weakref.WeakSet()
def hold(number):
    thing = Thing()
    things.add(thing)
    if number:
        hold(number - 1)
    raise ValueError("on purpose")
def fail():
    try:
        hold(2)
    except ValueError as error:
        raise error from KeyError("itself", error)
"""


@pytest.mark.parametrize("how", ["call", "cell"])
def test_a_reported_failure_keeps_no_references(cluster, how):
    cluster.run_cell(HOLDING).results(PATIENCE_S)
    doing = cluster.apply(f"{RUNTIME}:call_user_function", "fail") if how == "call" else cluster.run_cell("fail()")
    assert doing.wait(PATIENCE_S)
    assert doing.error(0).evalue == "on purpose"
    assert "thing = Thing()" in doing.error(0).traceback
    counted = cluster.run_cell("print(len(things))")
    assert counted.wait(PATIENCE_S)
    assert [texts(counted, rank) for rank in range(3)] == ["0\n"] * 3


LATE = """
import os, signal
class Late(Exception):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGINT)
        return "too late"
def end_late():
    raise Late
"""


def test_an_interrupt_does_not_end_the_report_of_an_error(cluster):
    cluster.run_cell(LATE).results(PATIENCE_S)
    pending = cluster.apply(f"{RUNTIME}:call_user_function", "end_late")
    assert pending.wait(PATIENCE_S)
    assert [pending.error(rank).evalue for rank in range(3)] == ["too late"] * 3


def test_equal_errors_of_all_ranks_are_one(cluster):
    with pytest.raises(RankError, match="on purpose") as caught:
        cluster.apply(f"{RUNTIME}:fail").results(PATIENCE_S)
    assert (caught.value.rank, caught.value.also) == (0, (1, 2))


@pytest.mark.parametrize("name", ["no.such.module:f", f"{RUNTIME}:no_such_function"])
def test_an_undefined_name_is_an_error_of_the_rank(cluster, name):
    pending = cluster.apply(name, ranks=[0])
    assert pending.wait(PATIENCE_S)
    assert pending.error(0).ename in ("ModuleNotFoundError", "AttributeError")


def test_cells_may_await(cluster):
    pending = cluster.run_cell("import asyncio\nawait asyncio.sleep(0)\nprint('awaited')")
    pending.results(PATIENCE_S)
    assert texts(pending, 1) == "awaited\n"


def test_a_cell_that_asks_for_input_is_an_error(cluster):
    pending = cluster.run_cell("input('who?')", ranks=[0])
    assert pending.wait(PATIENCE_S)
    assert pending.error(0).ename == "StdinNotImplementedError"


@pytest.mark.parametrize("code", ["while True: inside = True", "inside = True; threading.Event().wait()"])
def test_an_interrupt_ends_a_cell_on_the_ranks_named(cluster, code):
    cluster.run_cell("inside = False").results(PATIENCE_S)
    pending = cluster.run_cell(f"import threading\n{code}")
    ask = Variable("inside")
    wait_until(lambda: all(cluster.ask(ask, timeout_s=PATIENCE_S).values()))
    cluster.interrupt([0, 2])
    wait_until(lambda: pending.done(0) and pending.done(2))
    assert [pending.error(rank).ename for rank in (0, 2)] == ["KeyboardInterrupt"] * 2
    assert pending.error(0).line == 2
    assert not pending.done(1)
    cluster.interrupt([1])
    assert pending.wait(PATIENCE_S)


def test_an_interrupt_ends_a_cell_that_awaits(cluster):
    pending = cluster.run_cell("import asyncio\nprint('begun', flush=True)\nawait asyncio.Event().wait()", ranks=[0])
    wait_until(lambda: texts(pending, 0) == "begun\n")
    cluster.interrupt()
    assert pending.wait(PATIENCE_S)
    assert pending.error(0).ename in ("CancelledError", "KeyboardInterrupt")


def test_an_interrupt_ends_a_call(cluster):
    pending = cluster.apply(f"{RUNTIME}:hold")
    wait_until_held(cluster)
    cluster.interrupt()
    assert pending.wait(PATIENCE_S)
    assert {pending.error(rank).ename for rank in range(3)} == {"KeyboardInterrupt"}


def test_an_interrupt_of_idle_ranks_is_ignored(cluster):
    cluster.interrupt()
    assert cluster.apply(f"{RUNTIME}:echo").results(PATIENCE_S) == dict.fromkeys(range(3), ())
    assert cluster.alive() == (True, True, True)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Odd:\n    def __repr__(self):\n        raise ValueError('mine')\nOdd()", "line 3: ValueError: mine"),
        ("exit()", "UsageError: exit\\(\\) would end the ranks: %fsdp stop ends them"),
        ("quit", "UsageError: exit\\(\\) would end the ranks"),
        ("raise ValueError('a\\ud800b')", r"ValueError: a\\ud800b$"),
        ("raise ValueError('x' * 100_000)", "80,000 characters left out"),
    ],
)
def test_an_odd_end_of_a_cell_is_named_and_the_ranks_stay(cluster, code, message):
    with pytest.raises(RankError, match=message) as caught:
        cluster.run_cell(code).results(PATIENCE_S)
    assert len(str(caught.value)) < 50_000
    after = cluster.run_cell("print('well')")
    after.results(PATIENCE_S)
    assert texts(after, 0) == "well\n"


def test_a_lone_surrogate_is_shown_as_its_escape(cluster):
    found = cluster.run_cell("from IPython.display import display, HTML\nprint('a\\ud800b'); display(HTML('\\udfff'))")
    found.results(PATIENCE_S)
    printed, shown = found.outputs(0)
    assert printed.text == "a\\ud800b\n"
    assert shown.data["text/html"] == "\\udfff"
