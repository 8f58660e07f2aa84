"""From failures on ranks to one exception that says why, where, and what to do next. Pure.

A *consequence* is an exception that a rank raised because another rank failed, or because it was told to stop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.crash import is_file_of_a_cell
from workbench.errors import RankDied, RankError, WorkbenchError, without_colours
from workbench.events import unit_words
from workbench.replay import grouping
from workbench.replay.grouping import by_value, label
from workbench.trace.step_names import step_name

IDLE = "the ranks are idle again and keep their variables"
RESTART = "%fsdp stop, then %fsdp start"
HEAL = "%fsdp heal replaces what is lost"

_CONSEQUENCES = {"StepAborted", "CollectiveFailed"}
_CLOSED = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|Socket closed", re.I)
_CELL_FRAME = re.compile(r"^Cell In\[\d+\], line (?P<line>\d+)(?:, in (?P<function>[\w.<>]+))?", re.M)
_COLOURS = r"(?:\x1b\[[0-9;]*m)*"
_CELL_NUMBER = re.compile(rf"^({_COLOURS}Cell{_COLOURS}) ({_COLOURS})In\[\d+\]", re.M)
_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n(?:    .*\n)*', re.M)
_FIRST_FRAME = re.compile(r"^(?=(?:\x1b\[[0-9;]*m)*File )", re.M)
_HOW = re.compile(r"\bSIG[A-Z0-9]+\b|\bexit code \d+")
_MACHINERY = re.compile(r"[/\\]workbench[/\\](runtime|cluster)[/\\]")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: the rank.
        ename: class name of its exception; ``""`` if its process is gone.
        evalue: its message; for a process that is gone, how it ended.
        traceback: as rendered on the rank, in Python's or IPython's format, maybe in colour.
        line: line in the user's cell or script; None if unknown.
        script: name of the script's file; empty: the line is that of a cell.
        died: whether its process is gone.
    """

    rank: int
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    line: int | None = None
    script: str = ""
    died: bool = False

    @property
    def is_consequence(self) -> bool:
        """Whether the failure is a consequence of another one."""
        return not self.died and (
            self.ename in _CONSEQUENCES or (self.ename.endswith("Error") and bool(_CLOSED.search(self.evalue)))
        )

    def __str__(self) -> str:
        if self.died:
            return self.evalue or "its process is gone"
        return f"{self.ename}: {self.evalue}".rstrip(": ")


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """State of a rank after a failure; None where the rank does not report it.

    Attributes:
        step: training step, -1 outside any.
        phase: of the step.
        unit: name of the unit at work.
        optimizer_steps: optimizer steps since the rank started.
        unfinished: collectives begun but not ended.
        left_gradients: whether the failed step left sharded gradients that did not exist before.
    """

    step: int | None = None
    phase: str | None = None
    unit: str | None = None
    optimizer_steps: int | None = None
    unfinished: int | None = None
    left_gradients: bool = False

    def without_training_state(self) -> Aftermath:
        """Return the same without what it says of the state of a model, where no later step builds on that."""
        return replace(self, optimizer_steps=None, left_gradients=False)

    def __str__(self) -> str:
        parts = []
        if self.step is not None and self.step >= 0:
            parts.append(step_name(self.step))
        if self.phase and self.phase != "idle":
            parts.append(self.phase)
        if self.unit is not None and parts:  # else the newest row is of a model that was removed
            parts.append(f"unit {unit_words(self.unit)}")
        return ", ".join(parts)


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Return the root cause: the first failure that is not a consequence, or else the first failure.

    Args:
        failures: at least one, in the order they arrived.
    """
    causes = [f for f in failures if not f.is_consequence]
    return (causes or list(failures))[0]


def to_error(failures: Sequence[Failure], positions: Mapping[int, Aftermath], *, next_thing: str) -> WorkbenchError:
    """Return the exception to raise for ``failures``.

    Args:
        failures: at least one, in the order they arrived.
        positions: state after the failure of the ranks that answered.
        next_thing: a sentence on what the user can do now; empty: to correct the code; not used if a rank died.
    """
    cause = first_cause(failures)
    dead = tuple(sorted(f.rank for f in failures if f.died))
    if cause.died:
        advice = [death_sentence(dead, sorted(positions)), *_split_optimizer(positions)]
        return _advised(RankDied("\n".join([str(cause), *advice]), ranks=dead), advice)
    alike = sorted((f for f in failures if str(f) == str(cause)), key=lambda f: f.rank)
    cause, also = alike[0], tuple(f.rank for f in alike[1:])
    lines = [f"rank {cause.rank} raised {cause}{_place(cause, positions)}"]
    if also:
        lines.append(f"same error on {label(also)}")
    lines += [f"{label([f.rank])}: {f}" for f in failures if f not in alike and not f.died and not f.is_consequence]
    again = f"{IDLE}: correct {f'{cause.script} and run it' if cause.script else 'the code and run its cell'} again"
    advice = [death_sentence(dead, sorted(positions))] if dead else [*left_behind(positions), next_thing or again]
    error = RankError(
        "\n".join([*lines, *advice]),
        rank=cause.rank,
        ename=cause.ename,
        evalue=cause.evalue,
        traceback=shorten_traceback(cause.traceback),
        also=also,
        line=cause.line,
        script=cause.script,
    )
    return _advised(error, advice)


def _advised(error: WorkbenchError, advice: Sequence[str]) -> WorkbenchError:
    error.advice = "\n".join(advice)
    return error


def losses_in_words(losses: Mapping[int, str]) -> str:
    """Return how ranks were lost, grouped by cause: ``rank 1 died: the process was killed by SIGKILL ...``.

    Args:
        losses: by rank, as returned by :meth:`workbench.cluster.Cluster.losses`.
    """
    return "; ".join(f"{label(own)} {how}" for how, own in by_value(losses).items())


def death_sentence(dead: Sequence[int], living: Sequence[int]) -> str:
    """Return what the user can do when the processes of ``dead`` ranks are gone."""
    heals = f"{HEAL}, or " if living else ""
    return f"without {label(dead)} no step is possible: {heals}{what_is_left(living)}"


def what_is_left(usable: Sequence[int]) -> str:
    """Return what the user can do when no step is possible any more and only ``usable`` ranks still run cells."""
    if usable:
        left = f"{label(usable)} can still run cells with %%fsdp -t {ranges(usable)}"
    else:
        left = "views and %fsdp export still show what was recorded"
    return f"{RESTART}; {left}"


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks in the format of ``-t``: ``(0, 2, 3, 4)`` -> ``"0,2-4"``."""
    return grouping.ranges(ranks).replace(" ", "")


def death_in_short(how: str) -> str:
    """Return a short form of how a rank was lost: ``"died (SIGKILL)"``.

    Args:
        how: as returned by :meth:`workbench.cluster.Cluster.losses`.
    """
    verb, _, why = how.partition(":")
    found = _HOW.search(why)
    return f"{verb} ({found[0]})" if found else verb


def shorten_traceback(text: str) -> str:
    """Return a rank's traceback without the workbench's own frames; colours are kept.

    Cell numbers are removed: they are the rank's own count, not the notebook's.

    In Python's format each frame is an indented paragraph; in IPython's, empty lines separate frames.
    """
    text = _CELL_NUMBER.sub(r"\1\2", text)
    text = _FRAME.sub(lambda frame: "" if _MACHINERY.search(frame["path"]) else frame[0], text)
    heading, *frames = _FIRST_FRAME.split(text, maxsplit=1)
    blocks = "".join(frames).split("\n\n")
    return heading + "\n\n".join(block for block in blocks if not _is_machinery(block))


def _is_machinery(block: str) -> bool:
    first_line = without_colours(block).partition("\n")[0]
    return first_line.startswith("File ") and bool(_MACHINERY.search(first_line))


def place_of(failure: Failure) -> str:
    """Return where in the user's code it happened, ``"line 3, in train_step"``; ``""`` if unknown."""
    if failure.script:
        return f"line {failure.line} of {failure.script}"
    text = without_colours(failure.traceback)
    frames = [*_CELL_FRAME.finditer(text), *(f for f in _FRAME.finditer(text) if is_file_of_a_cell(f["path"]))]
    function = frames[-1]["function"] if frames else None
    # prefer the line from the rank: after a "finally", IPython's rendering has the line of that
    line = failure.line if failure.line is not None or not frames else int(frames[-1]["line"])
    if line is None:
        return ""
    return f"line {line}, in {function}" if function and function != "<module>" else f"line {line} of the cell"


def _place(cause: Failure, positions: Mapping[int, Aftermath]) -> str:
    found = [place_of(cause), str(positions.get(cause.rank, ""))]
    places = "; ".join(place for place in found if place)
    return f" ({places})" if places else ""


def left_behind(positions: Mapping[int, Aftermath]) -> list[str]:
    """Return sentences on what an unfinished step left behind that makes later steps wrong; usually none."""
    return [*_split_optimizer(positions), *_left_gradients(positions)]


def _left_gradients(positions: Mapping[int, Aftermath]) -> list[str]:
    ranks = [rank for rank, position in sorted(positions.items()) if position.left_gradients]
    if not ranks:
        return []
    return [
        f"gradients of that step remain on {label(ranks)}, and the next backward adds to them. If your step does not "
        "begin with the optimizer's zero_grad(), call it in a %%fsdp cell"
    ]


def _split_optimizer(positions: Mapping[int, Aftermath]) -> list[str]:
    """Return a sentence if only some ranks ran the optimizer's step; usually none."""
    counts = {rank: p.optimizer_steps for rank, p in positions.items() if p.optimizer_steps is not None}
    if len(set(counts.values())) < 2:
        return []
    most = max(counts.values())
    ahead = [rank for rank, count in counts.items() if count == most]
    behind = [rank for rank, count in counts.items() if count < most]
    return [
        f"the optimizer's step was applied on {label(ahead)} but not on {label(behind)}: their parameters no longer "
        "match; build the model again, or load a checkpoint"
    ]
