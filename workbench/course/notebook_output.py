"""Outputs of predictions and checks, and the ``%fsdp`` session of the notebook that they are about."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base.text_formats import format_bytes
from workbench.course.finding import CheckFinding, fails, holds
from workbench.course.run_steps import unended_step, with_failed_step
from workbench.course.value_checks import RankValues
from workbench.errors import RankError, UsageError
from workbench.events import MOVES, Edge, Kind
from workbench.replay.spans import of_kind
from workbench.reports.report import Report
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import KeyFrame
from workbench.widgets.progress import in_notebook

_NO_SESSION = "this notebook has no %fsdp: run %load_ext workbench first"
_MARK = "workbench.course value: "

_PRINT = f"""\
import json as _json
_as_list = lambda found: found.tolist() if hasattr(found, "tolist") else list(found)
print({_MARK!r} + _json.dumps(_value, default=_as_list))
del _json, _value, _as_list
"""


def publish(report: Report, record: Mapping[str, Any]) -> None:
    """Show a report, with its ``record`` in the same output of a notebook; elsewhere write its text."""
    if not in_notebook():
        sys.stdout.write(f"{report}\n")
        return
    from IPython.display import display  # noqa: PLC0415 - a script needs no IPython

    display({**report._repr_mimebundle_(), **record}, raw=True)  # type: ignore[no-untyped-call]


def recorded(source: str = "") -> Trace:
    """Return what the ranks of this notebook's ``%fsdp`` have recorded so far, or the trace that it shows.

    Args:
        source: keep only the events and bytes of the units of one source, such as the name given to ``OwnUnits``,
            where several engines ran; empty: all.

    Raises:
        UsageError: the extension is not loaded, or there is no such source.
    """
    workbench = _workbench()
    found: Trace = workbench.trace
    failed = getattr(workbench, "failed_step", "")
    found = only_source(found, source) if source else found
    return with_failed_step(found, failed) if failed else found


def from_ranks(expression: str) -> RankValues:
    """Return the value of a Python expression on each rank, by rank.

    If the newest step has not ended on all ranks, the values are those of an older one, or None where the expression
    raises: findings about them fail.

    Args:
        expression: of numbers, texts, lists, dicts, tensors and arrays; the last two become lists. NaN is kept.

    Raises:
        UsageError: the extension is not loaded, or no ranks run.
        RankError: the expression raised, or its value cannot be sent.
    """
    workbench, problem = _workbench(), unended_step(recorded())
    try:
        report = workbench.run_cell(f"_value = (\n{expression}\n)\n{_PRINT}")
    except RankError:
        if not problem:
            raise
        found = RankValues(dict.fromkeys(range(workbench.num_ranks)))
    else:
        found = RankValues({rank: _sent(text) for rank, text in sorted(report.texts.items())})
    found.problem = problem
    return found


def held(step: str = "train_step", *, at_rest: float, in_step: float) -> CheckFinding:
    """Run one more step on the ranks, and return whether the tensors of each process stay within two limits.

    All tensors count that a rank holds, also those that no engine announces.

    Args:
        step: name of the step function on the ranks.
        at_rest: bytes that may be there when the step has ended.
        in_step: bytes by which they may rise in the step.

    Raises:
        UsageError: the extension is not loaded, or no ranks run.
    """
    try:
        found = from_ranks(f"__import__('workbench.watch').watch.tensor_bytes({step})")
    except RankError as error:
        return fails(f"one more step raised {error.ename} on rank {error.rank}: {error.evalue}")
    if found.problem:
        return fails(found.problem)
    rank = max(found, key=lambda each: found[each]["after"])
    after = found[rank]["after"]
    if after > at_rest:
        return fails(
            f"after a step, all tensors of rank {rank} have {format_bytes(after)}, more than {format_bytes(at_rest)}",
            "it holds more than its shards, its part of the optimizer's state and what was there before: full "
            "parameters that are never freed, or copies of them",
        )
    rank = max(found, key=lambda each: found[each]["peak"] - found[each]["before"])
    rise = found[rank]["peak"] - found[rank]["before"]
    if rise > in_step:
        return fails(
            f"in a step, the tensors of rank {rank} rise by {format_bytes(rise)}, more than {format_bytes(in_step)}",
            "more units are whole at once than have to be, or something keeps copies of them",
        )
    return holds(
        f"in a step, all tensors of a rank rise by at most {format_bytes(rise)}, to {format_bytes(after)} after it"
    )


def _sent(text: str) -> Any:  # noqa: ANN401 - the value
    (line,) = (line for line in text.splitlines() if line.startswith(_MARK))
    return json.loads(line.removeprefix(_MARK))


def find_workbench() -> Any:  # noqa: ANN401 - the Workbench of the magics, which this layer does not import
    """Return the Workbench of the notebook's ``%fsdp``; None without one."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    find = getattr(shell, "find_line_magic", lambda name: None)
    magic = find("fsdp")
    return None if magic is None else magic.__self__.workbench


def _workbench() -> Any:  # noqa: ANN401 - likewise
    found = find_workbench()
    if found is None:
        raise UsageError(_NO_SESSION)
    return found


def only_source(trace: Trace, source: str) -> Trace:
    """Return a trace with the events of the units of one source only, renumbered.

    Bytes count if they belong to one of these units; so the optimizer's state, which belongs to none, does not. Steps
    in which no such unit has an event are left out, except the newest if it ran no unit at all, or has not ended.

    Args:
        trace: the whole trace: the bytes of units that were made before its first row are unknown.
        source: name of the source; ``""`` for the workbench's engine.

    Raises:
        UsageError: there is no such source.
    """
    units = trace.header.units
    known = {unit.engine for unit in units}
    if source not in known:
        names = ", ".join(sorted(name or "the workbench's engine" for name in known)) or "none"
        raise UsageError(f"the trace has no units of {source!r}; it has those of: {names}")
    mine = np.array([*(unit.engine == source for unit in units), False])  # the last entry is for -1
    described = tuple(unit if own else replace(unit, retired=True) for unit, own in zip(units, mine, strict=False))
    return Trace(replace(trace.header, units=described), tuple(_only(rank, mine) for rank in trace.ranks))


def _only(rank: RankTrace, mine: NDArray[np.bool_]) -> RankTrace:
    rows = rank.rows
    own = mine[np.where(rows["unit"] < len(mine) - 1, rows["unit"], -1)]
    of_none = (rows["unit"] < 0) & ~of_kind(rows, MOVES)
    begun = rows["step"][(rows["kind"] == Kind.STEP) & (rows["edge"] == Edge.BEGIN)]
    newest = rows[np.isin(rows["step"], begun[-1:])]
    counts_anyway = (
        not (newest["unit"] >= 0).any() or not ((newest["kind"] == Kind.STEP) & (newest["edge"] == Edge.END)).any()
    )
    steps = [-1, *np.unique(rows["step"][own]), *(begun[-1:] if counts_anyway else [])]
    kept = rows[own | (of_none & np.isin(rows["step"], steps))].copy()
    kept["seq"] = rank.start.seq + np.arange(len(kept))
    states = {unit: state for unit, state in rank.start.unit_states.items() if mine[unit]}
    reducing = {unit: count for unit, count in rank.start.reducing.items() if mine[unit]}
    start = KeyFrame(seq=rank.start.seq, unit_states=states, reducing=reducing)
    return RankTrace(rank.rank, kept, start, rank.lost)
