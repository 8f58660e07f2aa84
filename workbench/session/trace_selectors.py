"""The arguments of ``%fsdp compare`` and ``export``: a side is a trace, or some steps of one.

::

    SIDE   = SOURCE | SOURCE:STEPS | STEPS    a trace file, or ``last``: the trace so far, which STEPS alone mean too
    STEPS  = N | N..M | N.. | ..M                 one step, or from one to another, both included; -1: the newest one
                                                  that has ended

``run.trace``, ``last``, ``last:3..5``, ``run.trace:7``, ``last:-3..``, ``3..5``. A file whose name reads as steps is
written ``./5``.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.errors import TraceError, UsageError, did_you_mean
from workbench.importers import file_formats
from workbench.replay.grouping import by_value, ranges
from workbench.replay.spans import unfinished
from workbench.trace import load, steps
from workbench.trace.columns import Trace
from workbench.trace.read_recording import RecordingReader, is_recording
from workbench.trace.step_names import step_name

LAST = "last"
_STEPS = r"-?\d+|-?\d+\.\.(?:-?\d+)?|\.\.-?\d+"
_SIDE = re.compile(rf"(?:(?P<source>.+?)(?::(?P<part>{_STEPS}))?)")


def side(text: str | os.PathLike[str] | Trace, last: Callable[[], Trace]) -> tuple[str, Trace]:
    """Return the name of a side, for people, and its trace.

    Args:
        text: a SIDE as in the head of this file, or a Trace.
        last: returns the trace so far.

    Raises:
        UsageError: the file does not exist or is no trace, nothing was recorded, or the trace lacks the steps.
    """
    if isinstance(text, Trace):
        return "a trace", text
    source, part = _split(os.fspath(text))
    trace = last() if source == LAST else opened(source, "compare takes a trace file, 'last', or steps such as 3..5")
    if source == LAST and not trace.num_rows:
        raise UsageError("nothing is recorded yet: 'last' is the trace so far; first %fsdp shard MODEL, %fsdp step 3")
    name = "this run" if source == LAST else Path(source).name
    if not part:
        return name, trace
    spoken, found = some_steps(trace, part)
    return f"{name}, {spoken}", found


def sides(
    a: str | os.PathLike[str] | Trace, b: str | os.PathLike[str] | Trace, last: Callable[[], Trace]
) -> tuple[tuple[str, Trace], tuple[str, Trace]]:
    """Return both sides of a comparison as :func:`side` does.

    If the first is the beginning of the second, only the steps that came later count of the second: those of both are
    the same by definition.

    Raises:
        UsageError: as :func:`side`, or the second has nothing but what the first has.
    """
    (name_a, first), (name_b, second) = side(a, last), side(b, last)
    if not _is_beginning(first, second):
        return (name_a, first), (name_b, second)
    newest = max(steps(first), default=-1)
    later = [step for step in steps(second) if step > newest]
    if not later:
        raise UsageError(f"{name_b} has no step after those of {name_a}: train some, %fsdp step 3, then compare again")
    spoken = step_name(later[0]) if len(later) == 1 else f"steps {ranges(later)}"
    return (name_a, first), (f"{name_b.partition(',')[0]}, {spoken}", second.slice(first=later[0], last=later[-1]))


def _is_beginning(first: Trace, second: Trace) -> bool:
    """Return whether the second trace has the events of the first, at the same times, and others after them."""
    there = {rank.rank: rank for rank in second.ranks}
    found = False
    for rank in first.ranks:
        other = there.get(rank.rank)
        if other is None or other.end_seq <= rank.end_seq:
            return False
        begin = max(rank.start.seq, other.start.seq)
        mine, same = (rows[rows["seq"] >= begin] for rows in (rank.rows, other.rows))
        if not np.array_equal(mine["t_ns"], same["t_ns"][: len(mine)]):
            return False
        found = found or len(mine) > 0
    return found


def policies(
    first_steps: Sequence[int], last: Callable[[], Trace], *, is_live: bool = True
) -> tuple[tuple[str, Trace], tuple[str, Trace]]:
    """Return the steps under the last two policies of the trace so far, each without its first step if it has more.

    Args:
        first_steps: numbers of the first step under each policy, in the order in which they were applied.
        last: returns the trace so far.
        is_live: whether ranks run, so that there can be steps under another policy.

    Raises:
        UsageError: there are no two policies with steps.
    """
    trace = last()
    bounds = sorted({*first_steps})
    under = [
        [step for step in steps(trace) if begin <= step < end]
        for begin, end in itertools.pairwise([*bounds, sys.maxsize])
    ]
    used = [numbers for numbers in under if numbers][-2:]
    if len(used) < 2:
        known = f"steps ran under {'one' if used else 'none'}" if is_live or used else "that of no step is recorded"
        more = "%fsdp reshard MODEL, %fsdp step 3, or " if is_live else ""
        raise UsageError(f"compare alone shows the last two policies, and {known}: {more}name two sides: compare A B")
    first, second = (f"{numbers[min(1, len(numbers) - 1)]}..{numbers[-1]}" for numbers in used)
    return side(first, lambda: trace), side(second, lambda: trace)


def some_steps(trace: Trace, text: str) -> tuple[str, Trace]:
    """Return the name of some steps of ``trace``, for people, and the trace of these steps with the state before them.

    Args:
        trace: the trace.
        text: STEPS as in the head of this file.

    Raises:
        UsageError: ``text`` names no steps, or the trace lacks them.
    """
    if not re.fullmatch(_STEPS, text):
        raise UsageError(f"steps are written 5, 3..5, 3.., ..5 or -3.. (the newest three), not {text!r}")
    known = steps(trace)
    without_end = {step: how for step in known if (how := unfinished(trace, step))}
    ended = [step for step in known if step not in without_end] or known
    first, dots, end = text.partition("..")
    bounds = _number(first, ended), _number(end if dots else first, ended)
    cut = _cut(trace, known, *bounds)
    numbers = steps(cut)
    name = step_name(numbers[0]) if len(numbers) == 1 else f"steps {ranges(numbers)}"
    cases = by_value((step, how) for step, how in without_end.items() if step in numbers)
    words = [how if len(numbers) == 1 else f"{ranges(which)} {how}" for how, which in cases.items()]
    return f"{name} ({', '.join(words)})" if words else name, cut


def _split(text: str) -> tuple[str, str]:
    """Return ``(source, steps)``: ``"last:3..5" -> ("last", "3..5")``, ``"4" -> ("last", "4")``."""
    if re.fullmatch(_STEPS, text):
        return LAST, text
    found = _SIDE.fullmatch(text)
    if found is None:
        raise UsageError("compare takes a trace file, 'last', or steps such as 3..5; got an empty string")
    return found["source"], found["part"] or ""


def file_at(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file, with ``~`` expanded.

    Raises:
        UsageError: the name is invalid.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        raise UsageError(f"{text!r} is not a file name")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # no such user
        raise UsageError(f"{text!r} is not a file name: {error}") from error


def opened(path: str | os.PathLike[str], if_missing: str = "") -> Trace:
    """Return the trace in a file or folder; :func:`opened_with_notes` says in which.

    Args:
        path: path of the file, or of the folder.
        if_missing: text appended to the message if the file does not exist, a sentence with a small first letter.

    Raises:
        UsageError: the file does not exist or is no trace; the message says why.
    """
    return opened_with_notes(path, if_missing).trace


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a file or a folder has.

    Attributes:
        trace: the trace.
        notes: what it lacks, as sentences.
        recording: reads what the run writes from now on; None: the file or folder is no recording, which would grow.
        is_live: whether the run of the recording still writes.
    """

    trace: Trace
    notes: tuple[str, ...] = ()
    recording: RecordingReader | None = None
    is_live: bool = False


def opened_with_notes(path: str | os.PathLike[str], if_missing: str = "") -> Opened:
    """Return the trace in a file or folder, and what it lacks.

    Besides traces and folders of recordings, it opens profiles of ``torch.profiler`` and dumps of the Flight Recorder:
    one file, a folder with one for each rank, or a pattern of their names, ``out/rank*.json.gz``.

    Arguments and errors as for :func:`opened`.
    """
    file = file_at(path)
    try:
        if file.is_dir():
            return _opened_folder(file)
        others = file_formats.sorted_by_format(_matching(file) or [file] * file_formats.is_foreign(file))
        return _of_tools(others) if others else Opened(trace=load(file))
    except FileNotFoundError:
        there = sorted(other.name for other in file.parent.glob("*.trace"))
        hint = did_you_mean(file.name, there, cutoff=0.6)
        more = f"{' ' if hint else '; '}{if_missing}" if if_missing else ""
        raise UsageError(f"there is no file {os.fspath(path)!r}{hint}{more}") from None
    except TraceError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _opened_folder(folder: Path) -> Opened:
    """Return the recording in a folder, or what is in the files of other tools there if it has none."""
    others = {} if is_recording(folder) else file_formats.in_folder(folder)
    if others:
        return _of_tools(others)
    reader = RecordingReader(folder)
    recording = reader.read()
    is_live = recording.is_alive(time.time_ns())
    return Opened(trace=recording.trace, notes=recording.notes, recording=reader, is_live=is_live)


def _of_tools(files: dict[file_formats.FileFormat, list[Path]]) -> Opened:
    trace, notes = file_formats.read(files)
    return Opened(trace=trace, notes=notes)


def _matching(pattern: Path) -> list[Path]:
    """Return the files whose names match the last part of a path, if it is a pattern and not itself a file."""
    if not set(pattern.name) & set("*?[") or pattern.exists():
        return []
    return sorted(path for path in pattern.parent.glob(pattern.name) if path.is_file())


def _number(text: str, known: Sequence[int]) -> int | None:
    """Return ``text`` as a step number, negatives as indices of ``known``, None if empty: ``("-1", [3, 4]) -> 4``."""
    number = int(text) if text else None
    if number is None or number >= 0 or -number > len(known):
        return number
    return known[number]


def _cut(trace: Trace, known: Sequence[int], first: int | None, last: int | None) -> Trace:
    """Return the steps ``first`` to ``last`` of a trace whose steps are ``known``.

    Raises:
        UsageError: the trace has no steps, or lacks ``first`` or ``last``.
    """
    if first is not None and last is not None and first > last:
        raise UsageError(f"steps {first}..{last} run backwards; write {last}..{first}")
    missing = [step for step in (first, last) if step is not None and step not in known]
    if missing or not known:
        what = f"no step {missing[0]}" if missing else "no steps"
        raise UsageError(f"the trace has {what}; its steps are: {ranges(known) or 'none yet'}")
    return trace.slice(first=first, last=last)
