"""``predict``: asked, locked once, and shown beside what was measured."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import jupyterlab, open_notebook
from tests.helpers.simulated_job import Setup, simulate
from workbench.course import notebook_output as outputs
from workbench.course import predict, predictions
from workbench.course.predictions import PREDICTION_MIME, QUESTION_MIME, UNATTENDED, PredictionReport
from workbench.errors import UsageError
from workbench.session.snapshot import ClusterSnapshot
from workbench.workbench import Workbench


@pytest.fixture(autouse=True)
def nothing_is_locked(monkeypatch):
    monkeypatch.setattr(predictions, "_LOCKED", {})


@pytest.fixture
def workbench(monkeypatch):
    """A Workbench that shows a recording, with the commands of its history as ``typed``."""
    found = Workbench()
    found._last = ClusterSnapshot(trace=simulate(Setup()))
    found.typed = []

    def commands():
        return SimpleNamespace(commands=[SimpleNamespace(line=f"%fsdp {line}") for line in found.typed])

    monkeypatch.setattr(found, "history", commands)
    for module in (outputs, predictions):
        monkeypatch.setattr(module, "find_workbench", lambda: found)
    monkeypatch.delenv(UNATTENDED, raising=False)
    return found


LOOKS = (
    lambda workbench: workbench.view("states"),
    lambda workbench: workbench.numbers("comms"),
    lambda workbench: workbench.explain("peak"),
    lambda workbench: workbench.dashboard(),
    lambda workbench: workbench.inspect("a.weight"),
)


@pytest.mark.parametrize("look", LOOKS)
def test_no_view_shows_the_answer_before_it_is_locked(look, workbench):
    ask()
    with pytest.raises(UsageError, match=r"lock your guess first: .* run: guess.lock\(NUMBER\)\. .*guess.skip\(\)"):
        look(workbench)
    with pytest.raises(UsageError, match="No ranks are running"):
        workbench.where()  # it tells why a cell hangs


def test_views_are_shown_again_once_it_is_locked_or_skipped(workbench, shown):
    guess = ask(shown_by=["states"])
    assert workbench.numbers("comms"), "it does not show the answer"
    guess.skip()
    assert workbench.numbers("states")
    guess.reveal(9)
    assert shown[-1][PREDICTION_MIME]["predicted"] is None
    other = ask(shown_by=["comms", "where"])
    with pytest.raises(UsageError, match="lock your guess first: where may show"):
        workbench.where()
    other.lock(9)
    assert workbench.numbers("comms")


def test_to_run_the_cell_again_keeps_the_first_lock(workbench, shown):
    ask().lock(9)
    again = ask()
    assert (again.answer, "locked: 9 calls" in shown[-1]["text/plain"]) == (9, True)
    with pytest.raises(UsageError, match="stays as it is"):
        again.lock(5)
    assert predict("gathers", "Another question?").answer is None


def test_what_was_drawn_before_is_said_beside_the_distance(workbench, shown):
    workbench.typed = ["states", "step 3", "layout", "comms --json", "comms"]
    guess = ask(shown_by=["states", "comms"])
    guess.lock(9)
    workbench.typed += ["states"]
    guess.reveal(9)
    assert shown[-1]["text/plain"].startswith(
        "gathers: predicted 9 calls, after %fsdp comms, measured 9 calls: exactly"
    )
    assert shown[-1][PREDICTION_MIME]["seen"] == ["comms"]


def test_the_number_of_collectives_is_read_off_the_newest_step(workbench, shown):
    guess = ask()
    guess.lock(2)
    guess.reveal(of="all_gather:blocks.1")
    assert "measured 2 calls: exactly right" in shown[-1]["text/plain"]
    guess.reveal(of="all_gather")
    assert "measured 7 calls" in shown[-1]["text/plain"]


def test_nobody_is_asked_in_an_unattended_run(workbench, monkeypatch):
    monkeypatch.setenv(UNATTENDED, "1")
    ask()
    assert workbench.numbers("states")


WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def shown(monkeypatch):
    """What is displayed in a notebook; an update takes the place of the display."""
    found = []

    class Handle:
        def __init__(self):
            self.place = len(found) - 1

        def update(self, bundle, raw):
            found[self.place] = bundle

    def display(bundle, raw, display_id=False):
        found.append(bundle)
        return Handle() if display_id else None

    for module in (outputs, predictions):
        monkeypatch.setattr(module, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    return found


def ask(**options):
    return predict("gathers", "How many <b>?", unit="calls", **options)


def test_the_question_has_a_widget_and_a_text(shown):
    ask()
    (bundle,) = shown
    assert bundle["text/plain"] == "Predict: How many <b>? (in calls)\nLock it with: guess.lock(NUMBER)"
    assert "How many &lt;b&gt;?" in bundle["text/html"]
    assert WIDGET in bundle


def test_once_it_is_locked_the_answer_takes_the_place_of_the_widget(shown):
    guess = ask()
    guess.lock(9)
    assert shown == [
        {
            "text/plain": "Predict: How many <b>?\nlocked: 9 calls",
            "text/html": "<div><strong>Predict: How many &lt;b&gt;?</strong><br>locked: 9 calls</div>",
            QUESTION_MIME: {
                "version": 1,
                "name": "gathers",
                "question": "How many <b>?",
                "unit": "calls",
                "choices": [],
            },
        }
    ]
    assert guess.answer == 9


def test_a_locked_prediction_does_not_change(shown):
    guess = ask()
    guess.lock(9)
    with pytest.raises(UsageError, match="the prediction 'gathers' is locked at 9 calls, and stays as it is"):
        guess.lock(10)
    assert guess.answer == 9


@pytest.mark.parametrize("answer", ["nine", True, math.nan, math.inf, None, [9]])
def test_a_prediction_is_a_number(answer):
    """The example has no number: a reader would take it for a hint."""
    with pytest.raises(UsageError, match=r"the prediction 'gathers' is a number, not .*lock\(NUMBER\)$"):
        ask().lock(answer)


def test_a_choice_is_one_of_them(shown):
    guess = predict("which", "Which?", choices=["first", "second"])
    assert shown[0]["text/plain"].endswith("(first | second)\nLock it with: guess.lock('first')")
    with pytest.raises(UsageError, match="'third' is not one of the choices of 'which': first, second"):
        guess.lock("third")
    guess.lock("second")
    guess.reveal("first")
    assert shown[1]["text/plain"].startswith("which: predicted second, the answer is first: not right")


def test_what_was_measured_is_not_shown_before(shown, monkeypatch):
    monkeypatch.delenv(UNATTENDED, raising=False)
    with pytest.raises(UsageError, match=r"first predict, then look: .* run: guess.lock\(NUMBER\)"):
        ask().reveal(11)
    with pytest.raises(UsageError, match=r"guess.lock\('a'\)"):
        predict("which", "Which?", choices=["a", "b"]).reveal("a")
    assert len(shown) == 2


@pytest.mark.parametrize(
    ("cell", "variable"),
    [
        ("calls = predict('gathers', 'How many?')", "calls"),
        ("x = 1\nmine=course.predict(\n    \"gathers\", 'How many?')", "mine"),
        ("other = predict('bytes', '?'); calls = predict('gathers', '?')", "calls"),
        ("predict('gathers', '?')", "guess"),
        ("calls = predict(name, '?')", "guess"),
    ],
)
def test_the_line_to_type_has_the_variable_of_the_cell(cell, variable, shown, monkeypatch):
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(user_ns={"In": ["", cell]}))
    ask()
    assert shown[0]["text/plain"].endswith(f"Lock it with: {variable}.lock(NUMBER)")


def test_an_unattended_run_has_no_widget_and_needs_no_prediction(shown, monkeypatch):
    monkeypatch.setenv(UNATTENDED, "1")
    ask().reveal(11, because="x < y")
    question, answer = shown
    assert WIDGET not in question
    assert answer["text/plain"].splitlines()[0] == "gathers: measured 11 calls; no prediction"
    assert answer[PREDICTION_MIME]["predicted"] is None


def test_the_prediction_is_shown_beside_what_was_measured_and_kept(shown):
    guess = ask()
    guess.lock(9)
    guess.reveal(np.int64(11), because="x < y")
    bundle = shown[1]
    assert bundle["text/plain"].splitlines() == [
        "gathers: predicted 9 calls, measured 11 calls: 2 too low (18%)",
        "  question  How many <b>?",
        "  because   x < y",
    ]
    assert "x &lt; y" in bundle["text/html"]
    assert bundle[PREDICTION_MIME] == {
        "version": 1,
        "name": "gathers",
        "question": "How many <b>?",
        "unit": "calls",
        "predicted": 9,
        "measured": 11,
        "distance": "2 too low (18%)",
        "seen": [],
    }


@pytest.mark.parametrize(
    ("predicted", "measured", "distance"),
    [
        (9, 9, "exactly right"),
        (0.1 + 0.2, 0.3, "exactly right"),
        (12, 10, "2 too high (20%)"),
        (1000, 10, "990 too high (9900%, 100 times the answer)"),
        (1, 0, "1 too high"),
        (1, math.inf, "inf too low"),
        (0, 5, "5 too low (100%)"),
        ("a", "a", "exactly right"),
        (3, "a", "not right"),
    ],
)
def test_the_distance_is_said_in_words(predicted, measured, distance):
    report = PredictionReport(name="a", question="b", predicted=predicted, measured=measured)
    assert report.distance == distance


@pytest.mark.parametrize(("unit", "text"), [("", "3"), ("%", "3%"), ("KiB", "3 KiB")])
@pytest.mark.parametrize(("is_planned", "found"), [(False, "measured"), (True, "planned")])
def test_a_number_has_its_unit_as_english_writes_it_and_says_where_it_is_from(unit, text, is_planned, found):
    report = PredictionReport(name="a", question="b", predicted=3, measured=3, unit=unit, is_planned=is_planned)
    assert report.headline == f"a: predicted {text}, {found} {text}: exactly right"


def test_a_number_that_json_cannot_hold_is_kept_as_text():
    report = PredictionReport(name="a", question="b", predicted=1, measured=math.nan)
    assert report.record()["measured"] == "nan"


@pytest.mark.parametrize(
    ("name", "question", "choices", "why"),
    [
        ("", "How?", (), "needs a name and a question"),
        ("a", "", (), "needs a name and a question"),
        ("a", "How?", ["one"], "give at least two"),
        ("a", "How?", "one", "give at least two"),
    ],
)
def test_a_question_needs_its_parts(name, question, choices, why):
    with pytest.raises(UsageError, match=why):
        predict(name, question, choices=choices)


def test_outside_a_notebook_everything_is_text(capsys):
    guess = ask()
    guess.lock(9)
    guess.reveal(9)
    assert capsys.readouterr().out.splitlines() == [
        "Predict: How many <b>? (in calls)",
        "Lock it with: guess.lock(NUMBER)",
        "Predict: How many <b>?",
        "locked: 9 calls",
        "gathers: predicted 9 calls, measured 9 calls: exactly right",
        "  question  How many <b>?",
    ]


def test_shown_again_it_says_how_to_lock_it_and_then_what_is_locked():
    guess = ask()
    assert repr(guess) == "Predict: How many <b>? (in calls)\nLock it with: guess.lock(NUMBER)"
    guess.lock(9)
    assert repr(guess) == "Predict: How many <b>?\nlocked: 9 calls"


def widget_of(monkeypatch):
    """Return a prediction's field, button and note."""
    made = {}
    import ipywidgets

    for name in ("Text", "Button", "HTML"):
        kind = getattr(ipywidgets, name)
        monkeypatch.setattr(
            ipywidgets,
            name,
            lambda *args, _kind=kind, _name=name, **options: made.setdefault(_name, _kind(*args, **options)),
        )
    return made


def test_the_button_and_the_enter_key_lock_what_was_typed_or_say_why_not(shown, monkeypatch):
    made = widget_of(monkeypatch)
    guess = ask()
    made["Text"].value = "<nine>"
    made["Button"].click()
    assert guess.answer is None
    assert "&lt;nine&gt;" in made["HTML"].value
    made["Text"].value = " 1_000.5 "
    made["Text"]._handle_custom_msg({"event": "submit"}, [])  # the Enter key
    assert guess.answer == 1000.5


CELLS = [
    "from workbench.course import predict",
    "guess = predict('gathers', 'How many all-gathers?', unit='calls')",
    "which = predict('which', 'Which rank is slow?', choices=['rank 0', 'rank 1'])",
    "guess.reveal(11, because='each unit is gathered twice')",
    "which.reveal('rank 1')",
]


RUN_FROM_CELL_3 = """() => {
    window.jupyterapp.shell.currentWidget.content.activeCellIndex = 3;
    return window.jupyterapp.commands.execute("notebook:run-all-below");
}"""


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.lasting_browser
@pytest.mark.timeout(600)
def test_predictions_are_locked_with_enter_and_the_mouse_in_jupyterlab(tmp_path, chromium):
    with jupyterlab(tmp_path, CELLS, panel=built_panel()) as url, open_notebook(url, chromium) as lab:
        lab.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
        field = lab.cell(1).locator("input")
        field.fill("9")
        field.press("Enter")
        lab.cell(1).get_by_text("locked: 9 calls").wait_for()
        lab.cell(2).get_by_text("rank 1", exact=True).click()
        lab.cell(2).get_by_role("button", name="Lock").click()
        lab.cell(2).get_by_text("locked: rank 1").wait_for()
        assert lab.cell(1).locator("input").count() == 0
        lab.page.evaluate(RUN_FROM_CELL_3)
        lab.cell(3).get_by_text("gathers: predicted 9 calls, measured 11 calls: 2 too low (18%)").wait_for()
        lab.cell(4).get_by_text("which: predicted rank 1, the answer is rank 1: exactly right").wait_for()
