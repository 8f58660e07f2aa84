"""An exercise on a fault that a student has to name: who draws which, and whether the name is right."""

from __future__ import annotations

import zlib
from dataclasses import replace

from workbench.course.finding import CheckFinding, fails, holds, not_an_answer
from workbench.course.notebook_output import find_workbench
from workbench.errors import did_you_mean
from workbench.protocol.fault_kinds import KINDS, FaultReply


def student_seed(name: str, default: int = 0) -> int:
    """Return a seed that depends on a student's name, so that not all students have the same fault.

    Args:
        name: of the student; case and spaces do not matter.
        default: the seed without a name.
    """
    own = "".join(name.split()).casefold()
    return zlib.crc32(own.encode()) if own else default


def named_fault(answer: str) -> CheckFinding:
    """Return whether an answer names the fault that was injected last; a wrong one leaves it on."""
    if not isinstance(answer, str) or not answer.strip():
        return not_an_answer(answer, "the fault", "its name, such as 'straggler'; %fsdp faults lists them")
    name = answer.strip().casefold()
    if name not in KINDS:
        near = did_you_mean(name, tuple(KINDS))
        return fails(f"there is no fault {answer!r}{near or ''}", "%fsdp faults lists them")
    drawn, is_on = _newest()
    if drawn is None:
        return fails("no fault was injected", "run the cell with %fsdp fault random")
    if not is_on and drawn not in _NAMED:
        return fails("the fault was removed, which names it, before the answer", "draw another one, by another --seed")
    if name == drawn.name:
        _NAMED.append(drawn)
        return holds(f"it is {drawn.name}: {drawn.words}")
    finding = fails(
        f"it is not {name}",
        "it is still on: compare what each instrument says with the list of %fsdp faults, which has what names each",
    )
    return replace(finding, answer=f"{drawn.name}: {drawn.words}")


_NAMED: list[FaultReply] = []
"""Faults that were named rightly, which may be removed then."""


def _newest() -> tuple[FaultReply | None, bool]:
    """Return the fault that was injected last, and whether it is still on; None without one."""
    workbench = find_workbench()
    entries = () if workbench is None else workbench.program.entries
    replies = [reply for entry in entries if isinstance(reply := getattr(entry, "reply", None), FaultReply)]
    drawn = next((each for each in reversed(replies) if each.is_on), None)
    return drawn, bool(replies) and replies[-1].is_on
