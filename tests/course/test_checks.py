"""``check``: its text, its record, and its error."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from workbench.course import CheckFailed, CheckFinding, check, checks
from workbench.course import notebook_output as outputs
from workbench.course.checks import CHECK_MIME, REVEAL, CheckReport
from workbench.course.finding import and_list, fails, holds
from workbench.errors import UsageError

GOOD, BAD = holds("all is <well>"), fails("5, not 9", "it keeps <b>", "", "for ever")


@pytest.fixture
def shown(monkeypatch):
    """What is displayed in a notebook."""
    found = []
    monkeypatch.setattr(outputs, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: found.append(bundle))
    return found


def test_findings_are_sentences_and_truth_values():
    assert (str(GOOD), str(BAD)) == ("ok: all is <well>", "FAILED: 5, not 9: it keeps <b>; for ever")
    assert (bool(GOOD), bool(BAD)) == (True, False)


@pytest.mark.parametrize(
    ("texts", "joined"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (list("abc"), "a, b and c")]
)
def test_lists_in_sentences(texts, joined):
    assert and_list(texts) == joined


def test_a_check_that_passes_is_shown_and_kept(shown):
    check("gathers", GOOD, points=2)
    (bundle,) = shown
    assert bundle["text/plain"] == "passed: gathers\n  ok  all is <well>"
    assert "all is &lt;well&gt;" in bundle["text/html"]
    assert bundle[CHECK_MIME] == {
        "version": 1,
        "name": "gathers",
        "points": 2,
        "passed": True,
        "findings": [{"ok": True, "sentence": "all is <well>"}],
    }


def test_a_check_that_fails_is_shown_kept_and_raised(shown):
    with pytest.raises(CheckFailed) as raised:
        check("gathers", GOOD, BAD)
    assert str(raised.value) == "FAILED: gathers (1 of 2 findings)\n- 5, not 9: it keeps <b>; for ever"
    assert isinstance(raised.value, AssertionError)
    (bundle,) = shown
    assert bundle["text/plain"].splitlines()[1:] == [
        "  wrong  5, not 9: it keeps <b>; for ever",
        "  ok     all is <well>",
    ]
    assert bundle[CHECK_MIME]["passed"] is False
    assert "&lt;b&gt;" in bundle["text/html"]


def test_a_teacher_sees_the_answer(shown, monkeypatch):
    hidden = replace(BAD, answer="9")
    for reveals in ("", "1"):
        monkeypatch.setenv(REVEAL, reveals)
        with pytest.raises(CheckFailed, match=r"the answer: 9$" if reveals else r"for ever$"):
            check("gathers", hidden)
    assert "answer" not in shown[0][CHECK_MIME]["findings"][0]


def test_outside_a_notebook_a_check_is_text(capsys):
    check("gathers", [GOOD, (each for each in [GOOD])])
    assert capsys.readouterr().out == "passed: gathers\n  ok  all is <well>\n  ok  all is <well>\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("", GOOD), "a check needs a name"),
        ((GOOD,), "a check needs a name"),
        (("empty",), "has no finding, so it checks nothing"),
        (("empty", []), "has no finding, so it checks nothing"),
        (("bool", True), "check takes findings, such as counts"),
        (("text", "ok"), "not str ok"),
    ],
)
def test_a_check_of_nothing_is_an_error(arguments, why):
    with pytest.raises(UsageError, match=why):
        check(*arguments)


def test_the_report_has_the_headline_as_its_problem():
    assert CheckReport(name="a", points=1, findings=(BAD,)).problem == "FAILED: a (1 of 1 finding)"
    assert CheckReport(name="a", points=1, findings=(GOOD,)).problem == ""
    assert CheckFinding(ok=True, sentence="x") == holds("x")


SMALL, LARGE = replace(GOOD, measured=("peak", 5)), replace(BAD, measured=("bytes sent", 9.0))


@pytest.mark.parametrize(
    ("findings", "parts", "score"),
    [
        ((GOOD,), (SMALL, SMALL), 4),
        ((GOOD,), (SMALL, LARGE), 2),
        ((GOOD,), (LARGE, LARGE), 0),
        ((BAD,), (SMALL, SMALL), 0),
        ((), (SMALL, LARGE), 2),
    ],
)
def test_parts_give_partial_credit_if_all_else_is_right(shown, findings, parts, score):
    with nullcontext() if score == 4 else pytest.raises(CheckFailed):
        check("budget", *findings, parts=parts, points=4)
    (bundle,) = shown
    record = bundle[CHECK_MIME]
    assert (record["score"], record["passed"]) == (score, score == 4)
    assert record["measured"] == dict(each.measured for each in parts)
    assert score == 4 or f"{score} of 4 points" in bundle["text/plain"]


def test_a_check_waits_for_a_prediction_that_names_it(shown, monkeypatch):
    asks = SimpleNamespace(open_question=lambda view: f"lock your guess first: {view}")
    monkeypatch.setattr(checks, "find_workbench", lambda: asks)
    with pytest.raises(UsageError, match="lock your guess first: check"):
        check("gathers", GOOD)
    assert shown == []
