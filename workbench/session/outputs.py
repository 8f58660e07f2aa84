"""Forwarding of the ranks' output: as it arrives while the ranks agree, in tabs where they differ."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any
from uuid import uuid4

from workbench.cluster.pending_replies import Answer, Output, OutputKind, PendingReplies
from workbench.reports import per_rank_tabs
from workbench.reports.per_rank_tabs import CLEARED, Pane, RankOutput

GRACE_S = 0.25
"""How long the output of one rank waits for that of the other ranks, in seconds."""

DISPLAY_GRACE_S = 2.0
"""The same for a display: the first figure of a process takes long, and cannot be moved into the tabs afterwards."""

RENEW_S = 0.2
"""Minimum time between two updates of the tabs, in seconds."""

CHARS_A_SECOND = 500_000
"""Limit of forwarded characters of tabs per second: large tabs are updated less often."""

COMPARED_CHARS = 4_000
"""Characters that are compared at once."""

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
"""A widget of a rank, which no front end can reach."""

WIDGET_NOTE = "(widgets of ranks are text: make them in a cell without %%fsdp)"
"""Follows the text of a widget."""

OnOutput = Callable[[Output], None]


def text_of(outputs: Iterable[Output]) -> str:
    """Return outputs as plain text; drafts, updates and clears are ignored, but for what ends drafts."""
    parts = []
    for output in outputs:
        if output.kind in {"stdout", "stderr"}:
            parts.append(output.text)
        elif output.ends_drafts or (output.kind in {"display", "result"} and not output.is_draft):
            parts.append(str(output.data.get("text/plain", "")) + "\n")
    return "".join(parts)


def _is_text(output: Output) -> bool:
    """Return whether the output consists of text only."""
    if output.kind in {"display", "result"} and not output.display_id:
        return output.data.keys() == {"text/plain"}
    return output.kind in {"stdout", "stderr"}


def without_widget(output: Output) -> Output:
    """Return a widget as its text and what to do instead; anything else as it is."""
    if WIDGET_MIME not in output.data:
        return output
    data = {mime: value for mime, value in output.data.items() if mime != WIDGET_MIME}
    return replace(output, data=data | {"text/plain": f"{data.get('text/plain', 'a widget')} {WIDGET_NOTE}"})


def written_at_once(texts: Mapping[int, str], on_output: OnOutput) -> str:
    """Forward finished texts of several ranks as :class:`Stream` does; return their differences as text."""
    answers = {rank: Answer(outputs=[Output("stdout", text=text)]) for rank, text in texts.items()}
    return Stream(PendingReplies(answers), min(texts)).finish(on_output, also_agreement=True)


class _Text:
    """A growing text, stored in pieces; reading a part takes time in the length of the part only."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._ends.append(len(self) + len(text))

    def part(self, begin: int, end: int) -> str:
        """Return the characters from ``begin`` up to and excluding ``end``."""
        first = bisect_right(self._ends, begin)
        last = bisect_right(self._ends, max(end - 1, begin)) + 1
        start = self._ends[first - 1] if first else 0
        return "".join(self._pieces[first:last])[begin - start : end - start]

    def line_start(self, place: int) -> int:
        """Return the begin of the line that contains ``place``."""
        begin = place
        while begin > 0:
            before = max(0, begin - 1000)
            found = self.part(before, begin).rfind("\n")
            if found >= 0:
                return before + found + 1
            begin = before
        return 0

    def line_end(self, place: int) -> int:
        """Return the end of the line that contains ``place``, after its newline; the end of the text without one."""
        while place < len(self):
            found = self.part(place, place + 1000).find("\n")
            if found >= 0:
                return place + found + 1
            place += 1000
        return len(self)


@dataclass
class _Rank:
    """Output of one rank.

    Attributes:
        text: its whole text.
        num_seen: number of its outputs in ``text``.
        newline: begin of the newest line.
        base: begin of the current part; text before it was compared once and for all.
        agreed: characters of the current part that match the first rank's output.
        matched: characters of the first rank's current part that they match.
        marks: ``(matched, agreed)`` after each line that both ranks redrew, each at its own pace.
        drawing_until: time until which a line that differs may still be completed, which is compared when it ends;
            -inf: there is none, inf: both ranks redraw it.
        displays: place, name and output of each display that stays as it is.
        slots: number of each display that can be updated, in order, by its id.
        contents: name of what such a display shows now, by its number.
    """

    text: _Text = field(default_factory=_Text)
    num_seen: int = 0
    newline: int = 0
    base: int = 0
    agreed: int = 0
    matched: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)
    drawing_until: float = -inf
    displays: list[tuple[int, str, Output]] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    contents: dict[int, str] = field(default_factory=dict)

    @property
    def is_drawing(self) -> bool:
        return self.drawing_until > -inf

    @property
    def has_written(self) -> bool:
        return bool(self.part(0, len(self)).replace(CLEARED, "").strip())

    def __len__(self) -> int:
        return len(self.text) - self.base

    def part(self, begin: int, end: int) -> str:
        return self.text.part(self.base + begin, self.base + end)

    def add(self, text: str) -> None:
        newline = text.rfind("\n")
        if newline >= 0:
            self.newline = len(self.text) + newline + 1
        self.text.add(text)

    def begin(self, base: int) -> None:
        self.base, self.agreed, self.matched, self.marks, self.drawing_until = base, 0, 0, [], -inf

    def place_of(self, place: int) -> int:
        """Return the position in this rank's part that corresponds to ``place`` in the first rank's part."""
        matched, agreed = max((mark for mark in self.marks if mark[0] <= place), default=(0, 0))
        return agreed + place - matched

    def shown(self, begin: int, without: Iterable[str]) -> str:
        """Return the current part from ``begin`` on, with what its displays show now, ``without`` some of them."""
        text = self.part(begin, len(self))
        for name in without:
            text = text.replace(per_rank_tabs.token(name), "", 1)
        for slot, name in self.contents.items():
            text = text.replace(per_rank_tabs.token(f"slot {slot}"), per_rank_tabs.token(name))
        return text

    def line(self, place: int) -> tuple[str, int]:
        """Return the line of the current part that contains ``place``, and its end."""
        begin = max(self.text.line_start(self.base + place), self.base)
        end = self.text.line_end(self.base + place)
        return self.text.part(begin, end), end - self.base

    def is_redrawn(self, place: int) -> bool:
        """Return whether the line that contains ``place`` has a carriage return up to there."""
        begin = max(self.text.line_start(self.base + place), self.base)
        return "\r" in self.text.part(begin, self.base + place + 1)


@dataclass
class _Tabs:
    """The two displays of :mod:`workbench.reports.per_rank_tabs`.

    Attributes:
        name: prefix of both display ids.
        num_outputs: number of outputs of each rank in the lower display, or None before the displays are shown.
    """

    name: str = field(default_factory=lambda: f"wb-{uuid4().hex[:12]}")
    num_outputs: tuple[int, ...] | None = None

    def display(self, what: str, page: str, text: str, *, is_draft: bool) -> Output:
        data = {"text/html": page, "text/plain": text}
        kind: OutputKind = "display" if self.num_outputs is None else "update"
        return Output(kind, data=data, display_id=f"{self.name}-{what}", is_draft=is_draft, ends_drafts=not is_draft)


class Stream:
    """Forwards the output of ranks: as it arrives while they agree, in tabs from the first differing line on.

    Output that the other ranks have not written yet is forwarded after :data:`GRACE_S`. A stop and the end report
    whether all ranks wrote the same. Figures and other displays are compared by their whole content.

    Args:
        pending: the request.
        rank: the first rank, whose output is forwarded.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, pending: PendingReplies, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pending, self._first, self._clock = pending, rank, clock
        self._ranks = {number: _Rank() for number in pending.ranks}
        self._lead = self._ranks[rank]
        self._held: deque[tuple[Output, int, int, float]] = deque()  # first rank: output, begin, end, arrival time
        self._displays: dict[str, dict[str, Any]] = {}  # of all ranks, by name
        self._places: dict[int, int] = {}  # first rank: place of each display that can be updated
        self._lifted: dict[int, str] = {}  # names of displays below the tabs, by their number in the current part
        self._above_tabs: set[str] = set()  # first rank: ids of such displays that were forwarded
        self._apart_at: int | None = None
        self._apart: frozenset[int] = frozenset()
        self._num_handed = 0  # characters of the first rank's current part
        self._tabs = _Tabs()
        self._renew_at = 0.0

    # ---- while the ranks run

    def num_outputs(self) -> int:
        """Return the number of outputs of all ranks so far."""
        return sum(len(self._pending.outputs(rank)) for rank in self._pending.ranks)

    def forward(self, on_output: OnOutput) -> None:
        """Forward new output."""
        self._read_outputs()
        self._hand_on(on_output, self._is_settled)
        if self._apart_at is not None:
            self._lift(on_output)
            self._renew(on_output)

    def _read_outputs(self) -> None:
        """Read the new output of all ranks and compare it."""
        for number, rank in self._ranks.items():
            for output in map(without_widget, self._pending.outputs(number, rank.num_seen)):
                rank.num_seen += 1
                begin = len(rank)
                rank.add(self._as_text(rank, output))
                if rank is self._lead:
                    self._held.append((output, begin, len(rank), self._clock()))
        self._lead.agreed = self._lead.matched = len(self._lead)
        for number in self._ranks.keys() - self._apart - {self._first}:
            self._compare(number, self._ranks[number])

    def _as_text(self, rank: _Rank, output: Output) -> str:
        """Return an output as it is compared: text, or the token of a display."""
        if output.kind == "clear":
            return CLEARED
        if _is_text(output):
            return text_of([output])
        if output.kind == "update" and output.display_id not in rank.slots:
            return ""
        name = per_rank_tabs.name_of(output.data)
        self._displays.setdefault(name, output.data)
        if not output.display_id:
            rank.displays.append((len(rank.text), name, output))
            return per_rank_tabs.token(name)
        slot = rank.slots.setdefault(output.display_id, len(rank.slots))
        rank.contents[slot] = name
        if output.kind == "update":
            return ""
        if rank is self._lead:
            self._places.setdefault(slot, len(rank.text))
        return per_rank_tabs.token(f"slot {slot}")

    def _compare(self, number: int, rank: _Rank, *, is_over: bool = False) -> None:
        """Update how far ``rank`` agrees with the first rank; ``is_over``: all ranks are done, all lines complete."""
        lead = self._lead
        has_ended = rank.newline > rank.base + rank.agreed and lead.newline > lead.base + rank.matched
        if self._clock() < rank.drawing_until and not (has_ended or is_over):
            return
        while True:
            rest = min(len(rank) - rank.agreed, len(lead) - rank.matched)
            length = min(rest, COMPARED_CHARS)
            theirs, ours = rank.part(rank.agreed, rank.agreed + length), lead.part(rank.matched, rank.matched + length)
            same = length
            if theirs != ours:
                same = next(place for place, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
            rank.agreed, rank.matched = rank.agreed + same, rank.matched + same
            if same == length < rest:
                continue
            is_rest = same == length  # one of the two has written no more so far
            if is_rest and not (is_over and len(rank) - rank.agreed != len(lead) - rank.matched):
                return
            if not self._line_agrees(rank, is_over=is_over):
                if not (is_rest or rank.is_drawing):
                    self._part(rank.matched, {number})
                return

    def _line_agrees(self, rank: _Rank, *, is_over: bool) -> bool:
        """Skip a line that differs in what differs between any two processes; return whether it was one.

        Ranks redraw a progress bar at different times, and show different durations in it; log lines have the time and
        the process id. Such a line can be compared when both ranks have completed it.
        """
        lead = self._lead
        (theirs, their_end), (ours, our_end) = rank.line(rank.agreed), lead.line(rank.matched)
        if not is_over and not (theirs.endswith("\n") and ours.endswith("\n")):
            if rank.is_redrawn(rank.agreed) and lead.is_redrawn(rank.matched):
                rank.drawing_until = inf
            elif not rank.is_drawing:
                rank.drawing_until = self._clock() + GRACE_S
            elif self._clock() >= rank.drawing_until:
                rank.drawing_until = -inf
            return False
        rank.drawing_until = -inf
        if per_rank_tabs.drawn(theirs) != per_rank_tabs.drawn(ours):
            return False
        rank.agreed, rank.matched = their_end, our_end
        rank.marks.append((our_end, their_end))
        return True

    def _part(self, place: int, ranks: Iterable[int]) -> None:
        """Record that ``ranks`` differ from the first rank from ``place`` on."""
        begin = max(self._lead.text.line_start(self._lead.base + place) - self._lead.base, 0)
        self._apart_at = begin if self._apart_at is None else min(begin, self._apart_at)
        self._apart |= frozenset(ranks)

    def _is_settled(self, end: int, since_s: float) -> bool:
        """Return whether output up to ``end`` need not wait for other ranks any more."""
        behind = (number for number, rank in self._ranks.items() if rank.matched < end)
        return self._clock() >= since_s + GRACE_S or all(map(self._pending.done, behind))

    def _hand_on(self, on_output: OnOutput, is_settled: Callable[[int, float], bool]) -> None:
        while self._held:
            output, begin, end, since_s = self._held[0]
            more_s = 0.0 if _is_text(output) else DISPLAY_GRACE_S - GRACE_S
            if self._apart_at is None and not is_settled(end, since_s + more_s):
                return
            self._held.popleft()
            shown = self._outside(output, begin, end)
            if shown is not None:
                self._num_handed = end
            if shown is not None:
                on_output(shown)
            if output.kind == "clear":
                self._tabs = _Tabs()  # the displays were cleared too

    def _outside(self, output: Output, begin: int, end: int) -> Output | None:
        """Return the part of the first rank's output that belongs above the tabs; None: nothing."""
        if output.kind == "update" and output.display_id in self._above_tabs:
            return output
        above = end if self._apart_at is None or output.kind == "clear" else self._above(self._apart_at)
        if begin >= above and (output.kind == "update" or begin < end):
            return None
        if end <= above:
            self._above_tabs.update({output.display_id} - {""})
            return output
        return replace(output, text=output.text[: above - begin]) if output.text else output

    def _above(self, apart_at: int) -> int:
        """Return the end of the text above the tabs; a line that is redrawn there is completed there."""
        lead, last = self._lead, self._num_handed - 1
        if last < apart_at or lead.part(last, last + 1) == "\n" or not lead.is_redrawn(last):
            return apart_at
        return lead.line(last)[1]

    def _lift(self, on_output: OnOutput) -> None:
        """Forward displays that are the same on all ranks though text before them differs: once, below the tabs."""
        parts = [[each for each in rank.displays if each[0] >= rank.base] for rank in self._ranks.values()]
        ours = [each for each in self._lead.displays if each[0] >= self._lead.base]
        for number, (one, *others) in enumerate(zip(ours, *parts, strict=False)):
            place, name, output = one
            is_in_tabs = place - self._lead.base >= self._num_handed and number not in self._lifted
            if is_in_tabs and all(other == name for _, other, _ in others):
                self._lifted[number] = name
                on_output(output)

    def _renew(self, on_output: OnOutput) -> None:
        """Update the tabs if there is new output and the last update is old enough."""
        if self._clock() >= self._renew_at and self._tabs.num_outputs != self._num_seen():
            self._show(on_output, self._panes(), self._apart, is_draft=True)

    def _num_seen(self) -> tuple[int, ...]:
        return tuple(rank.num_seen for rank in self._ranks.values())

    def _panes(self) -> tuple[Pane, ...]:
        return per_rank_tabs.panes_of(self._written(), self._first, self._displays)

    def _show(self, on_output: OnOutput, panes: Sequence[Pane], marked: frozenset[int], *, is_draft: bool) -> None:
        tabs, name, first = self._tabs, self._tabs.name, self._first
        if tabs.num_outputs is None:
            page = per_rank_tabs.tabs_page(name, (first, *(number for number in self._ranks if number != first)))
            on_output(tabs.display("tabs", page, per_rank_tabs.TABS, is_draft=True))
        page, text = (
            per_rank_tabs.panes_page(name, panes, marked, is_live=is_draft),
            per_rank_tabs.as_text(panes).rstrip("\n"),
        )
        on_output(tabs.display("panes", page, text, is_draft=is_draft))
        tabs.num_outputs = self._num_seen()
        self._renew_at = self._clock() + RENEW_S + len(page) / CHARS_A_SECOND

    def _written(self) -> Mapping[int, RankOutput]:
        begin, limit = self._apart_at or 0, per_rank_tabs.kept_chars(len(self._ranks))
        lifted = tuple(self._lifted.values())
        return {
            number: RankOutput(text=rank.shown(max(own, len(rank) - limit), lifted), is_cut=len(rank) - limit > own)
            for number, rank in self._ranks.items()
            for own in (rank.place_of(begin),)
        }

    # ---- when the ranks are stopped

    def pause(self, on_output: OnOutput) -> None:
        """Forward the rest and the differences so far.

        A rank that stopped earlier in the same output does not differ; the rest of the others' output is compared
        later.
        """
        self._read_outputs()
        for number, rank in self._ranks.items():
            if rank.is_drawing and rank.drawing_until != inf:  # a line that waits for its end
                rank.drawing_until = self._clock()
                self._compare(number, rank)
        ranks = self._ranks.values()
        is_behind = self._apart_at is None and all(rank.is_drawing or len(rank) == rank.agreed for rank in ranks)
        if not is_behind:
            self.finish(on_output, also_agreement=True)
            return
        self._hand_on(on_output, lambda end, since_s: True)
        shortest = min(rank.matched for rank in ranks)
        if any(rank.is_drawing or rank.marks for rank in ranks):  # positions within a redrawn line do not correspond
            shortest = max(self._lead.text.line_start(self._lead.base + shortest) - self._lead.base, 0)
        if self._lead.part(0, shortest).strip():
            self._say(on_output, per_rank_tabs.agreement(len(self._ranks)))
        self._begin({number: rank.base + rank.place_of(shortest) for number, rank in self._ranks.items()})

    def finish(self, on_output: OnOutput, *, also_agreement: bool) -> str:
        """Forward the rest and the differences of the ranks; return the differences as text."""
        self._read_outputs()
        if self._apart_at is None:
            self._part_at_the_end()
        self._hand_on(on_output, lambda end, since_s: True)
        if self._apart_at is None:
            remarks = self._how_they_agree() if also_agreement or self._silent() else ""
            self._say(on_output, remarks)
        else:
            self._lift(on_output)
            panes = self._panes()
            self._show(on_output, panes, per_rank_tabs.apart(panes), is_draft=False)
            remarks = per_rank_tabs.as_text(panes)
        self._begin({number: len(rank.text) for number, rank in self._ranks.items()})
        return remarks

    def _part_at_the_end(self) -> None:
        """Record ranks that wrote less or more than the first; no difference if only the first one wrote."""
        for number in self._ranks.keys() - {self._first}:
            self._compare(number, self._ranks[number], is_over=True)
            self._compare_displays(number, self._ranks[number])
        lead, ranks = self._lead, self._ranks.values()
        rests = [(rank.part(rank.agreed, len(rank)), lead.part(rank.matched, len(lead))) for rank in ranks]
        if any(theirs.strip() != ours.strip() for theirs, ours in rests) and not self._silent():
            self._part(min(rank.matched for rank in ranks), ())

    def _compare_displays(self, number: int, rank: _Rank) -> None:
        """Compare what displays that can be updated show at the end."""
        for slot, place in self._places.items():
            ours = self._lead.contents[slot]
            if place >= self._lead.base and rank.contents.get(slot, ours) != ours:
                self._part(place - self._lead.base, {number})

    def _silent(self) -> tuple[int, ...]:
        """Return all other ranks if only the first one wrote anything, else none."""
        others = [number for number in self._ranks if number != self._first]
        wrote = any(self._ranks[number].has_written for number in others)
        return () if wrote or not self._lead.has_written else tuple(others)

    def _how_they_agree(self) -> str:
        if self._silent():
            return per_rank_tabs.alone(self._first, self._silent())
        is_said = len(self._ranks) > 1 and self._lead.has_written
        return per_rank_tabs.agreement(len(self._ranks)) if is_said else ""

    @staticmethod
    def _say(on_output: OnOutput, text: str) -> None:
        if text:
            on_output(Output("stdout", text=text))

    def _begin(self, bases: Mapping[int, int]) -> None:
        """Begin a new part at ``bases``; text before it is not compared again."""
        for number, rank in self._ranks.items():
            rank.begin(bases[number])
        self._apart_at, self._apart, self._tabs, self._renew_at = None, frozenset(), _Tabs(), 0.0
        self._num_handed, self._lifted = 0, {}
