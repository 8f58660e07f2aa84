"""The ranks' output where it differs: as text, and as tabs that need no script. Pure.

There are two displays. The upper one holds the tabs, which are radio buttons; it is never updated, so the user's choice
stays. The lower one holds a pane for each text and is updated as ranks write. Its style sheet decides which panes are
visible and which tabs are marked, in a saved notebook and on an exported page too. Where a page accepts no style
sheets, all panes are shown one below the other under their labels.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from workbench.base.text_formats import plural
from workbench.replay.grouping import by_value, label

PANE_CHARS = 20_000
"""Characters kept of one rank's output; the newest."""

ALL_CHARS = 160_000
"""Characters kept of all ranks' output together, but at least :data:`FEW_CHARS` per rank."""

FEW_CHARS = 2_500

TABS = "--- ranks differ:"
"""Replaces the tabs in plain text."""

NOTHING = "(no output)"
CUT = "... earlier output is left out"

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
_SPEED = re.compile(r"\[(?:\d+:)+\d+(?:<[^,\]]*)?, *[^,\]]*")
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


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
        text: as a terminal would show it.
    """

    ranks: tuple[int, ...]
    text: str


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
    r"""Return what a terminal shows of ``text``, without time and speed of tqdm's bars, in which ranks always differ.

    Example: ``" 50%|#  | 1/2 [00:01<00:01,  1.2s/it, loss=3]\r100%|##| 2/2 [00:02<00:00,  1.1s/it, loss=2]"`` ->
    ``"100%|##| 2/2 [, loss=2]"``.
    """
    return "\n".join(line.rstrip() for line in _SPEED.sub("[", screen(text)).split("\n"))


def panes_of(written: Mapping[int, RankOutput], first: int) -> tuple[Pane, ...]:
    """Return a pane for each text: that of rank ``first``, then the others in rank order."""
    order = sorted(written, key=lambda rank: (rank != first, rank))
    groups = by_value((rank, drawn(_shown(written[rank]))) for rank in order)
    return tuple(Pane(ranks=tuple(sorted(ranks)), text=_shown(written[ranks[0]])) for ranks in groups.values())


def _shown(written: RankOutput) -> str:
    text = written.text.partition("\n")[2] if written.is_cut and "\n" in written.text else written.text
    return (f"{CUT}\n" if written.is_cut else "") + screen(text).rstrip("\n")


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
    return "".join(f"--- {label(pane.ranks)}:\n{pane.text or NOTHING}\n" for pane in panes)


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
    style = _PANES.replace("NAME", name).replace("RULES", "\n".join(rules))
    return f'{style}<div id="{name}-panes">{"".join(map(_section, panes))}</div>'


def _ranks(panes: Sequence[Pane]) -> list[int]:
    return sorted(rank for pane in panes for rank in pane.ranks)


def _section(pane: Pane) -> str:
    classes = " ".join(f"r{rank}" for rank in pane.ranks)
    text = html.escape(pane.text or NOTHING)
    return f'<section class="{classes}"><div>{label(pane.ranks)}</div><pre><span>{text}</span></pre></section>'
