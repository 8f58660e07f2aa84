"""The ranks' output where it differs: as text and pictures, in tabs that need no script. Pure.

In a rank's text, a display (a figure, HTML, a table) is a *token*, a line that names its content. Displays that show
the same have equal tokens, so ranks are compared as text alone.

There are two displays. The upper one holds the tabs, which are radio buttons; it is never updated, so the user's choice
stays. The lower one holds a pane for each text and is updated as ranks write. Its style sheet decides which panes are
visible and which tabs are marked, in a saved notebook and on an exported page too. Where a page accepts no style
sheets, all panes are shown one below the other under their labels.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.base.text_formats import plural
from workbench.replay.grouping import by_value, label

PANE_CHARS = 20_000
"""Characters kept of one rank's output; the newest."""

ALL_CHARS = 160_000
"""Characters kept of all ranks' output together, but at least :data:`FEW_CHARS` per rank."""

FEW_CHARS = 2_500

ALL_DISPLAY_CHARS = 8_000_000
"""Characters kept of the displays of all panes together; of older ones, the text remains."""

TABS = "--- ranks differ:"
"""Replaces the tabs in plain text."""

NOTHING = "(no output)"
CUT = "... earlier output is left out"

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
_SPEED = re.compile(r"\[(?:\d+:)+\d+(?:<[^,\]]*)?, *[^,\]]*")
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TIME = r"(?:\d{4}-\d\d-\d\d[ T]|\b)\d\d:\d\d:\d\d(?:[.,]\d+)?"
_OF_A_PROCESS = re.compile(
    rf"^\[rank\d+\]: ?|(?<=\b[A-Z]\d{{4}} ){_TIME} +\d+|{_TIME}|ipykernel_\d+[/\\]\d+\.py|\bat 0x[0-9a-f]{{6,}}|"
    r"\(pid=\d+\)",
    re.MULTILINE,
)
_ID = re.compile(r"""\bid=(["'])([^"']+)\1""")
_WORD = re.compile(r"[\w:.-]+")
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b")
_TOKEN = re.compile("\ue000([^\ue000\ue001\n]+)\ue001\n?")

Bundle = Mapping[str, Any]
"""A display: value per MIME type."""


@dataclass(frozen=True, kw_only=True)
class RankOutput:
    """One rank's output from the point where ranks differ.

    Attributes:
        text: the newest part, as written.
        is_cut: whether earlier text was dropped.
    """

    text: str
    is_cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Pane:
    """The output of one or several ranks.

    Attributes:
        ranks: ranks with this output, ascending.
        text: as a terminal would show it, with a token for each display.
        displays: the displays of all ranks by the name in their token.
    """

    ranks: tuple[int, ...]
    text: str
    displays: Mapping[str, Bundle] = field(default_factory=dict, repr=False)


def kept_chars(num_ranks: int) -> int:
    """Return how many characters are kept of each rank's output."""
    return max(FEW_CHARS, min(PANE_CHARS, ALL_CHARS // max(num_ranks, 1)))


def screen(text: str) -> str:
    r"""Return what a terminal shows of ``text``, without colours: ``"1 %\r50 %\n"`` -> ``"50 %\n"``."""
    plain = _ESCAPES.sub("", text).replace("\r\n", "\n")
    lines = [_overwritten(line) for line in plain.split("\n")] if "\r" in plain or "\b" in plain else [plain]
    return _UNSEEN.sub("", "\n".join(lines))


def _overwritten(line: str) -> str:
    """Return the visible text of a line with carriage returns and backspaces."""
    shown = ""
    for part in line.split("\r"):
        kept = _typed(part) if "\b" in part else part
        shown = kept + shown[len(kept) :]
    return shown


def _typed(text: str) -> str:
    letters: list[str] = []
    place = 0
    for letter in text:
        if letter == "\b":
            place = max(0, place - 1)
        else:
            letters[place : place + 1] = letter
            place += 1
    return "".join(letters)


def drawn(text: str) -> str:
    r"""Return what a terminal shows of ``text``, without what always differs between processes.

    That is time and speed of tqdm's bars, and in log lines, warnings and representations of objects the rank's prefix,
    the time, the process id, the temporary file of a cell, and addresses.

    Example: ``" 50%|#  | 1/2 [00:01<00:01,  1.2s/it, loss=3]\r100%|###| 2/2 [00:02<00:00,  1.1s/it, loss=2]"`` ->
    ``"100%|###| 2/2 [, loss=2]"``.
    """
    shown = _OF_A_PROCESS.sub("", _SPEED.sub("[", screen(text)))
    return "\n".join(line.rstrip() for line in shown.split("\n"))


def panes_of(
    written: Mapping[int, RankOutput], first: int, displays: Mapping[str, Bundle] | None = None
) -> tuple[Pane, ...]:
    """Return a pane for each text: that of rank ``first``, then the others in rank order."""
    order = sorted(written, key=lambda rank: (rank != first, rank))
    groups = by_value((rank, drawn(_shown(written[rank]))) for rank in order)
    return tuple(
        Pane(ranks=tuple(sorted(ranks)), text=_shown(written[ranks[0]]), displays=displays or {})
        for ranks in groups.values()
    )


def _shown(written: RankOutput) -> str:
    text = written.text.partition("\n")[2] if written.is_cut and "\n" in written.text else written.text
    _, cleared, text = text.rpartition(CLEARED)
    is_cut = written.is_cut and not cleared
    return (f"{CUT}\n" if is_cut else "") + screen(text).rstrip("\n")


# ---- displays


def token(name: str) -> str:
    """Return the line that stands for a display in the text of a rank."""
    return f"\ue000{name}\ue001\n"


CLEARED = token("cleared")
"""Where a rank cleared its output."""


def name_of(data: Bundle) -> str:
    """Return the name of a display, equal for displays that show the same.

    Ids within markup are names, which libraries draw at random.
    """
    text = json.dumps(data, sort_keys=True, default=str, ensure_ascii=False).replace('\\"', '"').replace("\\n", "\n")
    ids = {found: f"#{place}" for place, found in enumerate(dict.fromkeys(id_ for _, id_ in _ID.findall(text)))}
    if ids:
        text = _WORD.sub(lambda found: ids.get(found[0], found[0]), text)
    return hashlib.sha256(_UUID.sub("", drawn(text)).encode(errors="replace")).hexdigest()[:16]


def _pieces(pane: Pane) -> Iterator[str | Bundle]:
    """Yield the texts and displays of a pane, in order."""
    for place, piece in enumerate(_TOKEN.split(pane.text)):
        if place % 2:
            yield pane.displays.get(piece, {})
        elif piece:
            yield piece


def _text_of(pieces: Iterator[str | Bundle]) -> str:
    return "".join(each if isinstance(each, str) else f"{_plain(each)}\n" for each in pieces).rstrip("\n")


def _plain(data: Bundle) -> str:
    """Return a display as text."""
    if "application/json" in data:
        return json.dumps(data["application/json"], indent=1, ensure_ascii=False)
    return str(data.get("text/markdown", data.get("text/plain", "<display>")))


def apart(panes: Sequence[Pane]) -> frozenset[int]:
    """Return the ranks whose text differs from the first pane's."""
    return frozenset(rank for pane in panes[1:] for rank in pane.ranks)


# ---- as text


def agreement(num_ranks: int) -> str:
    """Return the line below output that all ranks share."""
    return f"--- {plural(num_ranks, 'rank')} agree\n"


def alone(rank: int, silent: Collection[int]) -> str:
    """Return the line below output that only one rank wrote."""
    return f"--- above: rank {rank}; {label(silent)} wrote nothing\n"


def as_text(panes: Sequence[Pane]) -> str:
    r"""Return the panes one below the other, such as ``"--- ranks 0-1:\na\n--- rank 2:\nb\n"``."""
    return "".join(f"--- {label(pane.ranks)}:\n{_text_of(_pieces(pane)) or NOTHING}\n" for pane in panes)


# ---- as a page

_TABS = """<style>
#NAME-tabs {border: 0; margin: 0 0 0 8px; padding: 2px 0 0; min-width: 0; display: flex; flex-wrap: wrap; gap: 2px;
  font: 13px/1.6 var(--jp-ui-font-family, var(--vscode-font-family, sans-serif)); color: inherit}
#NAME-tabs legend {position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)}
#NAME-tabs label {position: relative; cursor: pointer; padding: 0 9px;
  border: 1px solid rgba(128, 128, 128, 0.4); border-radius: 3px}
#NAME-tabs input {position: absolute; inset: 0; width: 100%; height: 100%; margin: 0; opacity: 0; cursor: pointer}
#NAME-tabs label:hover {background: rgba(128, 128, 128, 0.14)}
#NAME-tabs label:has(:checked) {background: rgba(128, 128, 128, 0.28); font-weight: 600}
#NAME-tabs label:has(:focus-visible) {outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px}
</style>"""
_PANES = """<style>
#NAME-panes {margin-left: 8px; font-size: 13px; color: inherit}
#NAME-panes > section {margin: 4px 0 8px; border-left: 2px solid rgba(128, 128, 128, 0.4); padding-left: 8px}
#NAME-panes > section > div {opacity: 0.75;
  font: 11px/1.5 var(--jp-ui-font-family, var(--vscode-font-family, sans-serif))}
#NAME-panes > section > img {display: block; max-width: 100%; height: auto}
#NAME-panes > section > .wb-html {overflow: auto}
#NAME-panes > section > pre {margin: 0; padding: 0; background: none; border: 0; color: inherit; max-height: 36em;
  overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: var(--jp-code-font-size, 13px)/1.35
    var(--jp-code-font-family, var(--vscode-editor-font-family, monospace))}
:has(#NAME-all:checked) ~ * #NAME-panes > section > pre {max-height: 15em}
RULES
</style>"""
_MARK = """ {content: "≠"; content: "≠" / "differs from the first";
  color: var(--jp-warn-color0, #c2570c); font-weight: 700; margin-left: 4px}"""


def tabs_page(name: str, ranks: Sequence[int]) -> str:
    """Return the tabs as HTML: one per rank in the given order, then one for all.

    Args:
        name: prefix of the element ids, unique to this display.
        ranks: the first one is selected initially.
    """
    tabs = [_tab(name, f"r{rank}", f"rank {rank}", rank == ranks[0]) for rank in ranks]
    tabs.append(_tab(name, "all", "all", is_chosen=False))
    style = _TABS.replace("NAME", name)
    return f'{style}<fieldset id="{name}-tabs"><legend>output of the ranks</legend>{"".join(tabs)}</fieldset>'


def _tab(name: str, key: str, text: str, is_chosen: bool) -> str:
    checked = " checked" if is_chosen else ""
    # the attribute makes arrow keys move between tabs, not between JupyterLab's cells
    attributes = f'type="radio" name="{name}" id="{name}-{key}" data-lm-suppress-shortcuts="true"{checked}'
    return f"<label><input {attributes}><span>{text}</span></label>"


def panes_page(name: str, panes: Sequence[Pane], marked: Collection[int], *, is_live: bool) -> str:
    """Return the panes as HTML, with style rules that show the selected one and mark the tabs of some ranks.

    Args:
        name: that of the tabs.
        panes: those of all ranks.
        marked: ranks that differ from the first one.
        is_live: whether more output will follow; each pane then shows its end.
    """
    # the displays of a cell are siblings; with body:has(), a browser would restyle the whole page at each change
    rules = [f":has(#{name}-r{r}:checked) ~ * #{name}-panes > :not(.r{r}) {{display: none}}" for r in _ranks(panes)]
    if marked:
        rules.append(", ".join(f"label:has(> #{name}-r{rank})::after" for rank in sorted(marked)) + _MARK)
    if is_live:  # a reversed column stays scrolled to its end as it grows
        rules.append(f"#{name}-panes > section > pre {{display: flex; flex-direction: column-reverse}}")
    if any(pane.displays for pane in panes):  # pictures are compared side by side
        rules.append(f":has(#{name}-all:checked) ~ * #{name}-panes {{display: flex; flex-wrap: wrap; gap: 0 12px}}")
        rules.append(f"#{name}-panes > section {{min-width: 0}}")
        rules.append(f":has(#{name}-all:checked) ~ * #{name}-panes > section {{flex: 1 1 20em}}")
    style = _PANES.replace("NAME", name).replace("RULES", "\n".join(rules))
    sections = "".join(_section(pane, ALL_DISPLAY_CHARS // len(panes)) for pane in panes)
    return f'{style}<div id="{name}-panes">{sections}</div>'


def _ranks(panes: Sequence[Pane]) -> list[int]:
    return sorted(rank for pane in panes for rank in pane.ranks)


def _section(pane: Pane, room: int) -> str:
    """Return a pane as HTML; its displays get ``room`` characters, the newest first."""
    classes = " ".join(f"r{rank}" for rank in pane.ranks)
    parts: list[str] = []
    for piece in reversed([*_pieces(pane)] or [NOTHING]):
        shown = "" if isinstance(piece, str) else _picture(piece)
        room -= len(shown)
        text = piece if isinstance(piece, str) else _plain(piece)
        parts.append(shown if shown and room >= 0 else f"<pre><span>{html.escape(text.rstrip())}</span></pre>")
    return f'<section class="{classes}"><div>{label(pane.ranks)}</div>{"".join(reversed(parts))}</section>'


def _picture(data: Bundle) -> str:
    """Return a display as HTML; empty if only its text can be shown."""
    if "text/html" in data:
        return f"<div class='wb-html'>{data['text/html']}</div>"
    if "text/latex" in data:
        return f"<div class='wb-html'>{html.escape(str(data['text/latex']))}</div>"
    for mime in ("image/svg+xml", "image/png", "image/jpeg", "image/gif", "image/webp"):
        if mime in data:
            value = str(data[mime])
            encoded = base64.b64encode(value.encode()).decode() if mime == "image/svg+xml" else "".join(value.split())
            alt = html.escape(str(data.get("text/plain", mime)), quote=True)
            return f'<img src="data:{mime};base64,{encoded}" alt="{alt}">'
    return ""
