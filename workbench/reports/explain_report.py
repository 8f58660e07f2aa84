"""The report of ``%fsdp explain``."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field

import plotly.graph_objects as go

from workbench.base.fault import Fault
from workbench.base.glossary import meanings
from workbench.events import Kind, UnitState
from workbench.replay.event_marks import EventMark
from workbench.replay.exposed_waits import WaitReason
from workbench.replay.peak_savings import Knob
from workbench.replay.step_parts import Group, Part
from workbench.replay.unit_history import UnitCause
from workbench.reports.fault_report import FaultReport
from workbench.views.mark_buttons import Marks, marked

Evidence = Mapping[str, EventMark | None]
"""Lines of evidence in order, each with the events that it names, or None where no picture shows them."""


def marks_in(evidence: Evidence) -> Marks:
    """Return the events that lines of evidence name, by the line."""
    return {line: mark for line, mark in evidence.items() if mark is not None}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The view that shows what an explanation says.

    Attributes:
        view: name of the view.
        options: its options.
    """

    view: str
    options: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The line that draws it: ``%fsdp timeline --step 3``."""
        return " ".join([f"%fsdp {self.view}", *(f"--{name} {value}" for name, value in self.options.items())])


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """Where the time of a step went on one rank.

    Attributes:
        rank: the rank.
        step_ns: its time without holds, the sum of ``parts_ns``.
        groups_ns: compute, transfers and copies, waiting for a slower rank, and host.
        parts_ns: the same in detail.
        waited_for_ns: time that it waited for each rank that was last, by rank.
        peak_bytes: most bytes in use in the step.
    """

    rank: int
    step_ns: int
    groups_ns: Mapping[Group, int]
    parts_ns: Mapping[Part, int]
    waited_for_ns: Mapping[int, int]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class WaitCause:
    """Exposed waits of a step with one cause.

    Attributes:
        unit: name of the unit; None: none.
        kind: kind of collective.
        in_backward: whether it was issued in backward.
        cause: why compute waited.
        late_rank: the rank that issued it last, for a late rank; else None.
        ranks: the ranks that waited.
        calls: the most waits of one of them.
        wait_ns: time waited, mean over all ranks.
        most_ns: time waited by the rank that waited most.
        transfer_ns: mean time of a transfer once all ranks had joined.
        num_bytes: payload of one.
    """

    unit: str | None
    kind: Kind
    in_backward: bool
    cause: WaitReason
    late_rank: int | None
    ranks: tuple[int, ...]
    calls: int
    wait_ns: float
    most_ns: int
    transfer_ns: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class PeakSaving:
    """What would lower a peak, by formula.

    Attributes:
        knob: the setting.
        line: what to type: an ``%fsdp`` line or a line of code.
        saved_bytes: how much lower the peak is.
        peak_bytes: the peak with it.
        is_bound: whether this is the most that it saves.
        more_calls: collectives that a step has in addition.
        more_bytes: their payload.
        more_ns: what they take if nothing overlaps with them; 0: unknown.
    """

    knob: Knob
    line: str
    saved_bytes: int
    peak_bytes: int
    is_bound: bool
    more_calls: int
    more_bytes: int
    more_ns: int


@dataclass(frozen=True, kw_only=True)
class UnitExplanation:
    """The state of a unit on some ranks, and the events that led to it.

    Attributes:
        unit: name of the unit.
        ranks: the ranks.
        state: state of its parameters.
        causes: what led to it, the oldest first.
        steps: the step of each; None: outside any.
    """

    unit: str
    ranks: tuple[int, ...]
    state: UnitState
    causes: tuple[UnitCause, ...]
    steps: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class ExplainReport(FaultReport):
    """An explanation, with the faults that were found on the way.

    Attributes:
        subject: what is explained; empty: what matters most.
        step: the step that the numbers are of; None: none.
        answer: verdict, evidence and what to type.
        picture: the view that shows it; None: none does.
        ranks: where the time of the step went; empty if the answer needs no times.
        waits: its exposed waits, the longest first; likewise.
        savings: what would lower its peak.
        units: state of a unit, the most common first.
        marks: the events that lines of evidence name, by the line.
        terms: of the glossary, which the report explains: those that the session first meets here.
    """

    internal = ("marks", "terms")

    subject: str
    step: int | None
    answer: Fault
    picture: Picture | None = None
    ranks: tuple[RankParts, ...] = ()
    waits: tuple[WaitCause, ...] = ()
    savings: tuple[PeakSaving, ...] = ()
    units: tuple[UnitExplanation, ...] = ()
    marks: Marks = field(default_factory=dict)
    terms: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The verdict of the answer."""
        return self.answer.verdict

    @property
    def problem(self) -> str:
        """The headline, if the answer is a fault."""
        return self.headline if self.answer in self.faults else ""

    def facts(self) -> list[tuple[str, str]]:
        """Return evidence and fix of the answer, further faults, the line of the picture, and what is missing."""
        found = self.answer.facts()
        for fault in self.faults:
            if fault != self.answer:
                found += [("also", fault.verdict), *fault.facts()]
        found += [("picture", self.picture.line)] if self.picture is not None else []
        return [*found, *(("not decided", reason) for reason in self.abstained), *meanings(self.terms)]


def linked(report: ExplainReport, figure: go.Figure) -> dict[str, str]:
    """Return an explanation by MIME type, each line of evidence a button for its mark in the figure shown below it."""
    places = marked(figure)

    def text(line: str) -> str:
        if line not in places:
            return html.escape(line)
        press, words = _PRESS.format(place=places[line]), f"{html.escape(line)} [{places[line]}]"
        return f'<button type="button" style="{_LINK}" onclick="{press}">{words}</button>'

    return report._repr_mimebundle_() | {"text/html": report.as_html(text)}


_LINK = (
    "padding:0;border:0;background:none;font:inherit;color:var(--jp-content-link-color,inherit);"
    "text-decoration:underline;text-align:left;cursor:pointer"
)
_PRESS = (
    "for(let at=this.parentElement;at;at=at.parentElement){{"
    "const graph=[...at.querySelectorAll('.js-plotly-plot')].find((each)=>this.compareDocumentPosition(each)===4);"
    "if(graph){{graph.querySelectorAll('.updatemenu-button')[{place}]?.dispatchEvent(new MouseEvent('click'));"
    "graph.scrollIntoView({{block:'nearest'}});break;}}}}"
)
"""Presses a button of the next figure. No text becomes part of the script, and no front end has to know it."""
