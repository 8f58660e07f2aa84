import pytest

from workbench.cluster.pending_replies import Answer, Output, PendingReplies
from workbench.session import output_log
from workbench.session.output_log import OutputLog

HTML = Output("display", data={"text/html": "<b>x</b>", "text/plain": "a\nb"})
UPDATE = Output("update", data={"text/plain": "c"}, display_id="d")


def lines(report):
    return [(line.ranks, line.kind, line.text, line.step) for line in report.lines]


@pytest.fixture
def log():
    return OutputLog(2, clock=lambda: 7.0)


def logged(log, *outputs, other=()):
    """Return a log after ``outputs`` of rank 0 and those of rank 1."""
    log.follow(PendingReplies({0: Answer(outputs=[*outputs]), 1: Answer(outputs=[*other])}))()
    return log


def out(text, *steps, kind="stdout"):
    return Output(kind, text=text, steps=steps)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([out("a\n\nb"), out("c\n")], [("stdout", "a", None), ("stdout", "", None), ("stdout", "bc", None)]),
        ([out("a"), out("e\n", kind="stderr"), out("b\n")], [("stdout", "ab", None), ("stderr", "e", None)]),
        ([out("x\ny\n", (2, 4)), out("z\n")], [("stdout", "x", None), ("stdout", "y", 4), ("stdout", "z", 4)]),
        ([out("10%"), out("\r50%\r"), out("99%")], [("stdout", "99%", None)]),
        ([out("long\r"), out("s\r\n")], [("stdout", "song", None)]),
        ([out("\x1b[3"), out("1mred\x1b[0m \x07<b>\n")], [("stdout", "red <b>", None)]),
        ([HTML, UPDATE], [("display", "a", None), ("display", "b", None)]),
        ([out("a\u2028b\x0cc\n")], [("stdout", "a\u2028bc", None)]),
        ([out("x" * 5000), out("y\n")], [("stdout", f"{'x' * 4000}... 1001 more characters", None)]),
    ],
    ids=["lines", "streams", "steps", "a bar", "overwritten", "escapes", "a display", "line ends", "a long line"],
)
def test_the_text_of_a_rank_becomes_lines(log, outputs, expected):
    assert lines(logged(log, *outputs).report(0)) == [((0,), *line) for line in expected]


def test_lines_of_several_ranks_are_one_and_each_rank_keeps_its_order(log):
    logged(log, out("a\nb\na\n"), other=[out("a\nx\nb\nb\n")])
    texts = [(line.ranks, line.text) for line in log.report().lines]
    assert texts == [((0, 1), "a"), ((0,), "b"), ((0,), "a"), ((1,), "x"), ((1,), "b"), ((1,), "b")]
    for rank, own in enumerate((["a", "b", "a"], ["a", "x", "b", "b"])):
        assert [line.text for line in log.report().lines if rank in line.ranks] == own
        assert [line.text for line in log.report(rank).lines] == own


def test_the_same_line_in_another_step_is_another(log):
    logged(log, out("a\n", (0, 1)), other=[out("a\n", (0, 2))])
    assert lines(log.report()) == [((0,), "stdout", "a", 1), ((1,), "stdout", "a", 2)]


def test_a_request_begins_outside_steps_and_its_new_output_follows(log):
    outputs = [out("a\n", (0, 3))]
    take = log.follow(PendingReplies({0: Answer(outputs=outputs)}))
    take()
    outputs.append(out("b\n"))
    take()
    take()
    logged(log, out("c\n"))
    assert lines(log.report(0)) == [((0,), "stdout", text, step) for text, step in (("a", 3), ("b", 3), ("c", None))]
    assert log.version == 3


def test_notices_are_among_the_lines_of_each_rank(log):
    logged(log, out("a\n"))
    log.note("%fsdp step: failed\nfor a reason", is_error=True)
    log.write(1, "inside")
    notices = [((), "error", "%fsdp step: failed", None), ((), "error", "for a reason", None)]
    assert lines(log.report(0)) == [((0,), "stdout", "a", None), *notices]
    assert lines(log.report(1)) == [*notices, ((1,), "stdout", "inside", None)]


def test_only_the_newest_lines_are_kept_and_shown(log, monkeypatch):
    monkeypatch.setattr(output_log, "MAX_LINES", 5)
    logged(log, out("".join(f"{number}\n" for number in range(9)) + "open"), other=[out("x\n")])
    found = log.report(count=3)
    assert ([line.text for line in found.lines], found.is_cut, found.num_dropped) == (["8", "open", "x"], True, 5)
    everything = log.report()
    assert (len(everything.lines), everything.is_cut) == (6, False)


def test_memory_is_bounded_for_each_rank(monkeypatch):
    monkeypatch.setattr(output_log, "MAX_BYTES", 3 * 2 * (output_log.LINE_BYTES + 10))
    log = logged(OutputLog(2), *(out(f"{number:09}\n") for number in range(100)), other=[out("mine\n")])
    assert [line.text for line in log.report().lines] == ["000000098", "000000099", "mine"]


def test_an_open_line_that_was_dropped_begins_anew(log, monkeypatch):
    monkeypatch.setattr(output_log, "MAX_LINES", 2)
    logged(log, out("bar", kind="stderr"), out("1\n2\n"), out("end\n", kind="stderr"))
    assert [line.text for line in log.report().lines] == ["2", "end"]


def test_without_ranks_there_is_no_output():
    assert OutputLog(0).report(3).headline == "no output of rank 3"
