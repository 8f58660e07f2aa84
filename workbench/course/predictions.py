"""``predict``: a prediction that is locked before the run, and shown beside what was measured.

While it is open, views that would show the answer refuse. A lock holds as long as the kernel: to run the cell with
``predict`` again keeps it.

Everything is an output of the cell, as HTML with a plain-text twin. A widget to type into is added where a notebook has
one; ``lock`` does the same everywhere.
"""

from __future__ import annotations

import html
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base.codec import sent_number
from workbench.base.text_formats import format_share
from workbench.course.call_checks import number_of_calls
from workbench.course.checks import RECORD_VERSION
from workbench.course.finding import and_list
from workbench.course.notebook_output import find_workbench, publish, recorded
from workbench.errors import UsageError
from workbench.reports.report import Report
from workbench.widgets.progress import in_notebook

PREDICTION_MIME = "application/vnd.fsdp-workbench.prediction+json"
"""Type of the record of a prediction in an output of a notebook."""

QUESTION_MIME = "application/vnd.fsdp-workbench.question+json"
"""Type of the record of a question in the output that asks it."""

UNATTENDED = "WORKBENCH_UNATTENDED"
"""Environment variable: nobody is there to lock a prediction."""

NO_PREDICTION = "; no prediction"
"""End of the headline of a report without a prediction."""

Answer = float | int | str
"""A number, or one of the choices."""


@dataclass(frozen=True, kw_only=True)
class PredictionReport(Report):
    """A prediction beside what was measured.

    Attributes:
        name: of the prediction.
        question: what was asked.
        unit: unit of the number; empty for none.
        predicted: the locked answer; None: there is none.
        measured: what was measured or planned.
        because: why it is so.
        is_planned: whether it was planned.
        seen: views that would show the answer, and that were drawn before it was locked.
    """

    name: str
    question: str
    unit: str = ""
    predicted: float | str | None
    measured: float | str
    because: str = ""
    is_planned: bool = False
    seen: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """Prediction and measurement in one sentence."""
        found = "the answer is" if isinstance(self.measured, str) else "planned" if self.is_planned else "measured"
        found = f"{found} {_with_unit(self.measured, self.unit)}"
        if self.predicted is None:
            return f"{self.name}: {found}{NO_PREDICTION}"
        seen = f", after {and_list([f'%fsdp {view}' for view in self.seen])}" if self.seen else ""
        return f"{self.name}: predicted {_with_unit(self.predicted, self.unit)}{seen}, {found}: {self.distance}"

    @property
    def distance(self) -> str:
        """How far the prediction is from what was measured, in words; empty without a prediction."""
        if self.predicted is None:
            return ""
        if self.predicted == self.measured:
            return "exactly right"
        if isinstance(self.predicted, str) or isinstance(self.measured, str):
            return "not right"
        difference = self.predicted - self.measured
        if math.isclose(self.predicted, self.measured, rel_tol=1e-9):
            return "exactly right"
        away = f"{_number(abs(difference))} too {'high' if difference > 0 else 'low'}"
        if not self.measured or not math.isfinite(difference):
            return away
        ratio = self.predicted / self.measured
        times = f", {ratio:.3g} times the answer" if ratio > 0 and not 0.5 <= ratio <= 2 else ""
        return f"{away} ({format_share(abs(difference / self.measured))}{times})"

    def facts(self) -> list[tuple[str, str]]:
        """Return the question and the reason."""
        return [("question", self.question), *([("because", self.because)] if self.because else [])]

    def record(self) -> dict[str, Any]:
        """Return the record that the notebook keeps, as data that JSON can hold."""
        return {
            "version": RECORD_VERSION,
            "name": self.name,
            "question": self.question,
            "unit": self.unit,
            "predicted": _sent(self.predicted),
            "measured": _sent(self.measured),
            "distance": self.distance,
            "seen": list(self.seen),
        }


class Prediction:
    """A question, and the answer once it is locked; made by :func:`predict`."""

    def __init__(
        self, name: str, question: str, unit: str, choices: tuple[str, ...], shown_by: tuple[str, ...] = ()
    ) -> None:
        self.name, self.question, self.unit, self.choices = name, question, unit, choices
        self._shown_by = shown_by
        self._variable = _assigned_to(name)
        self._answer, self._seen = _LOCKED.get((name, question), (None, ()))
        self._is_skipped = False
        self._handle: Any = None

    def __repr__(self) -> str:
        question = f"Predict: {self.question}"
        if self._answer is not None:
            return f"{question}\nlocked: {_with_unit(self._answer, self.unit)}"
        answers = f" ({' | '.join(self.choices)})" if self.choices else f" (in {self.unit})" if self.unit else ""
        return f"{question}{answers}\nLock it with: {self._example}"

    @property
    def _example(self) -> str:
        return f"{self._variable}.lock({repr(self.choices[0]) if self.choices else 'NUMBER'})"

    def _why_not(self, view: str) -> str:
        """Return why a view must not be shown now; empty if it may."""
        if self._answer is not None or self._is_skipped or view not in (self._shown_by or (view,)):
            return ""
        if view in _NAMED_ONLY and not self._shown_by:
            return ""
        return (
            f"lock your guess first: {view} may show the answer to {self.name!r}. {self.question} Answer above and "
            f"press Lock, or run: {self._example}. To look without a guess: {self._variable}.skip()"
        )

    def skip(self) -> None:
        """Do without a prediction: views are shown again, and the record says that there was none."""
        self._is_skipped = True

    @property
    def answer(self) -> Answer | None:
        """The locked answer; None while there is none."""
        return self._answer

    def lock(self, answer: Answer) -> None:
        """Lock the prediction; it cannot be changed afterwards.

        Args:
            answer: a finite number, or one of the choices.

        Raises:
            UsageError: it is locked already, or this is no possible answer.
        """
        if self._answer is not None:
            raise UsageError(
                f"the prediction {self.name!r} is locked at {_with_unit(self._answer, self.unit)}, and stays as it is"
            )
        self._answer, self._seen = self._checked(answer), _seen(self._shown_by)
        _LOCKED[self.name, self.question] = self._answer, self._seen
        self._show()

    def _checked(self, answer: Answer) -> Answer:
        if self.choices:
            if answer not in self.choices:
                raise UsageError(f"{answer!r} is not one of the choices of {self.name!r}: {', '.join(self.choices)}")
            return answer
        if isinstance(answer, bool) or not isinstance(answer, int | float) or not math.isfinite(answer):
            raise UsageError(f"the prediction {self.name!r} is a number, not {answer!r}: {self._example}")
        return answer

    def reveal(
        self, measured: Answer | None = None, because: str = "", *, of: str = "", is_planned: bool = False
    ) -> None:
        """Show the prediction beside what was measured, or planned.

        Args:
            measured: the measured number, or the right choice; None: it is read off the newest step by ``of``.
            because: why it is so.
            is_planned: the number is one of a plan.
            of: collectives that rank 0 issued, by kind, or kind and unit: ``"all_gather:blocks.1"``.

        Raises:
            UsageError: the prediction is not locked, and this is not an unattended run; or there is no such number.
        """
        if self._answer is None and not self._is_skipped and not os.environ.get(UNATTENDED):
            raise UsageError(
                f"first predict, then look: the prediction {self.name!r} is not locked. {self.question} Answer above "
                f"and press Lock, or run: {self._example}"
            )
        if measured is None:
            measured = number_of_calls(recorded(), of)
        plain = measured if isinstance(measured, str) else _plain(measured)
        report = PredictionReport(
            name=self.name,
            question=self.question,
            unit=self.unit,
            predicted=self._answer,
            measured=plain,
            because=because,
            is_planned=is_planned,
            seen=self._seen,
        )
        publish(report, {PREDICTION_MIME: report.record()})

    # ---- display

    def _ask(self) -> None:
        """Show the question, with a field to type into if the notebook can show one and a reader is there."""
        if os.environ.get(UNATTENDED):
            self._show({})
            return
        workbench = find_workbench()
        if workbench is not None:  # one question is open at a time
            workbench.open_question = self._why_not
        self._show(self._widget() if self._answer is None else {})

    def _show(self, widget: dict[str, Any] | None = None) -> None:
        text = repr(self)
        if not in_notebook():
            sys.stdout.write(f"{text}\n")
            return
        from IPython.display import display  # noqa: PLC0415 - a script needs no IPython

        first, _, rest = text.partition("\n")
        page = f"<div><strong>{html.escape(first)}</strong><br>{html.escape(rest)}</div>"
        record = {"version": RECORD_VERSION, "name": self.name, "question": self.question, "unit": self.unit}
        record |= {"choices": list(self.choices)}
        bundle = {"text/plain": text, "text/html": page, QUESTION_MIME: record, **(widget or {})}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)

    def _widget(self) -> dict[str, Any]:
        """Return the part of the output that a front end with widgets shows; empty outside a notebook."""
        if not in_notebook():
            return {}
        import ipywidgets  # noqa: PLC0415 - a script needs no widgets

        wide = ipywidgets.Layout(width="max-content")
        field = (
            ipywidgets.RadioButtons(options=self.choices, value=None, layout=wide)
            if self.choices
            else ipywidgets.Text(placeholder="a number", layout=ipywidgets.Layout(width="12em"))
        )
        button, note = ipywidgets.Button(description="Lock"), ipywidgets.HTML()

        def locks(_: object) -> None:
            try:
                self.lock(field.value if self.choices else _typed(field.value))
            except UsageError as error:
                note.value = html.escape(str(error))

        button.on_click(locks)
        field.on_msg(lambda _, content, __: locks(None) if content.get("event") == "submit" else None)  # the Enter key
        unit = [ipywidgets.Label(self.unit, layout=wide)] if self.unit and not self.choices else []
        question = ipywidgets.HTML(f"<strong>Predict: {html.escape(self.question)}</strong>")
        box = ipywidgets.VBox([question, ipywidgets.HBox([field, *unit, button]), note])
        found: dict[str, Any] = box._repr_mimebundle_()
        return {mime: value for mime, value in found.items() if mime.endswith("+json")}


_LOCKED: dict[tuple[str, str], tuple[Answer | None, tuple[str, ...]]] = {}
"""Locked answers by name and question of the prediction, and the views that were drawn before."""

_NAMED_ONLY = ("where", "check")
"""What refuses only where a prediction names it: where tells why a cell hangs, whatever is asked."""

_CHANGES = ("step", "run", "shard", "reshard", "unshard", "open", "start", "continue")
"""Commands after which the views show something else."""


def _seen(views: Sequence[str]) -> tuple[str, ...]:
    """Return which of some views were drawn since the last command that changed what they show."""
    workbench = find_workbench()
    found: list[str] = []
    for past in [] if workbench is None else workbench.history().commands:
        word = past.line.split()[1]
        if word in _CHANGES:
            found = []
        elif word in views and "--json" not in past.line and word not in found:
            found.append(word)
    return tuple(found)


def predict(
    name: str, question: str, *, unit: str = "", choices: Sequence[str] = (), shown_by: Sequence[str] = ()
) -> Prediction:
    """Ask for a prediction, and return it: lock it, then run, then ``reveal`` what was measured.

    Run again, it has the answer that was locked first.

    Args:
        name: of the prediction.
        question: what to predict, as a sentence.
        unit: unit of the number, such as ``"calls"``.
        choices: possible answers; none: a number.
        shown_by: views that show the answer, such as ``"states"``: they refuse until it is locked, and the result says
            if they were drawn before. Empty: all views refuse. ``"where"`` and ``"check"``, the check of an exercise,
            refuse only if they are named.

    Raises:
        UsageError: there is no name or no question, or only one choice.
    """
    if not name or not question:
        raise UsageError('a prediction needs a name and a question: predict("gathers", "How many all-gathers?")')
    if len(choices) == 1 or isinstance(choices, str):
        raise UsageError(f"the prediction {name!r} has choices {choices!r}: give at least two, or none for a number")
    prediction = Prediction(name, question, unit, tuple(map(str, choices)), tuple(shown_by))
    prediction._ask()
    return prediction


def _assigned_to(name: str) -> str:
    """Return the variable that the running cell assigns the prediction of this name to; ``guess`` if it is unknown."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    inputs = [] if shell is None else shell.user_ns.get("In", [])
    literal = rf"[\"']{re.escape(name)}[\"']"
    found = re.search(rf"(\w+)\s*=\s*(?:\w+\.)*predict\(\s*{literal}", inputs[-1] if inputs else "")
    return found[1] if found else "guess"


def _typed(text: str) -> Answer:
    """Return the number that was typed; other text as it is, which is then refused."""
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _plain(number: float) -> Answer:
    """Return a number of any library as one of Python's."""
    return int(number) if float(number).is_integer() else float(number)


def _sent(answer: Answer | None) -> Answer | None:
    """Return an answer as data that JSON can hold."""
    return sent_number(answer) if isinstance(answer, float) else answer


def _with_unit(answer: Answer | None, unit: str) -> str:
    if answer is None or isinstance(answer, str):
        return answer or ""
    return f"{_number(answer)}{'' if unit in {'', '%'} else ' '}{unit}"


def _number(number: float) -> str:
    whole = math.isfinite(number) and float(number).is_integer()
    return f"{int(number):,}" if whole else f"{number:,.4g}"
