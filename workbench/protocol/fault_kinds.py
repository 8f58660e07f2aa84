"""The faults that ``%fsdp fault`` injects, what shows each, and the reply of a rank that has injected one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.errors import did_you_mean
from workbench.events import unit_words

RANDOM = "random"
"""Draws a fault that is named only when it is removed."""

REMOVE = "off"
"""Removes the fault."""

SAVE = "save FOLDER"
"""The line whose error names the faults of checkpoints."""

_BACK = "a killed rank comes back with %fsdp heal, or %fsdp stop, then %fsdp start"


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """A fault that can be injected.

    Attributes:
        name: its name after ``%fsdp fault``.
        about: what it does, with ``{rank}``, ``{unit}`` and ``{ms}``.
        shown_by: the instrument that names it: a ``%fsdp`` line, or ``the error``.
        rules: rules of the faults with which that instrument names it, or the type of the error.
        steps: steps to take before the instrument is asked; 0: none.
        spoils: whether steps with it train wrong values, which its removal replaces by those before the fault.
        lasting: what its removal does not undo; empty: nothing.
        is_drawn: whether ``random`` may draw it.
    """

    name: str
    about: str
    shown_by: str
    rules: tuple[str, ...]
    steps: int = 0
    spoils: bool = False
    lasting: str = ""
    is_drawn: bool = True

    @property
    def summary(self) -> str:
        """What it does, with the placeholders of the line."""
        return self.about.format(rank="R", unit="UNIT", ms="MS")


def _kinds(*kinds: FaultKind) -> Mapping[str, FaultKind]:
    return {kind.name: kind for kind in kinds}


KINDS = _kinds(
    FaultKind(
        name="straggler",
        about="rank {rank} sleeps {ms} ms in every forward of unit {unit}",
        shown_by="explain step",
        rules=("slow-rank",),
        steps=16,
    ),
    FaultKind(
        name="skip-collective",
        about="rank {rank} leaves out an all-reduce that all other ranks issue before each forward",
        shown_by="where",
        rules=("other-collective", "crossed-groups"),
        steps=1,
    ),
    FaultKind(
        name="wrong-order",
        about="rank {rank} gathers unit {unit} before the units that all other ranks gather first",
        shown_by="where",
        rules=("wrong-order", "other-payload", "other-collective", "RanksDisagreeError"),
        steps=1,
        spoils=True,
    ),
    FaultKind(
        name="uneven-batches",
        about="rank {rank} has no more batches: its train_step returns at once",
        shown_by="where",
        rules=("uneven-batches",),
        steps=1,
    ),
    FaultKind(
        name="wrong-scale",
        about="gradients are summed over the ranks instead of averaged",
        shown_by="verify",
        rules=("wrong-scale",),
        spoils=True,
    ),
    FaultKind(
        name="partial-norm",
        about="each rank clips its gradients by the norm of its own rows instead of the norm of all rows",
        shown_by="verify",
        rules=("partial-norm",),
        spoils=True,
    ),
    FaultKind(
        name="no-sync-left-on",
        about="gradient synchronisation of unit {unit} stays off: its gradients are never reduced",
        shown_by="verify",
        rules=("no-sync-left-on",),
        spoils=True,
    ),
    FaultKind(
        name="stale-optimizer",
        about="the optimizer holds the parameters from before sharding, so its steps do not train the model",
        shown_by="lint",
        rules=("optimizer-before-shard",),
        spoils=True,
    ),
    FaultKind(
        name="untouched-buffer",
        about="unit {unit} has a buffer that to_empty allocated and nothing has written since",
        shown_by="lint",
        rules=("never-written",),
    ),
    FaultKind(
        name="same-data",
        about="the DataLoaders draw the same rows on every rank: a RandomSampler instead of a DistributedSampler",
        shown_by="lint",
        rules=("same-data",),
    ),
    FaultKind(
        name="bf16-master",
        about="parameters and optimizer state are bfloat16, without a float32 copy",
        shown_by="lint",
        rules=("low-precision-master",),
        spoils=True,
    ),
    FaultKind(
        name="drifting-replica",
        about="rank {rank} has other values of unit {unit} than the other replicas",
        shown_by="lint",
        rules=("replicas-differ",),
        spoils=True,
    ),
    FaultKind(
        name="nan",
        about="the output of unit {unit} is NaN on rank {rank}",
        shown_by="verify",
        rules=("not-finite",),
        spoils=True,
    ),
    FaultKind(
        name="kill",
        about="rank {rank} is killed (SIGKILL) in the next forward of unit {unit}",
        shown_by="the error",
        rules=("RankDied",),
        steps=1,
        lasting=_BACK,
        is_drawn=False,
    ),
    FaultKind(
        name="oom",
        about="rank {rank} runs out of memory in every forward of unit {unit}",
        shown_by="the error",
        rules=("OutOfMemoryError",),
        steps=1,
        is_drawn=False,
    ),
    FaultKind(
        name="disk-full",
        about="the disk of rank {rank} is full when it saves a checkpoint",
        shown_by=SAVE,
        rules=("UsageError",),
        is_drawn=False,
    ),
    FaultKind(
        name="kill-during-save",
        about="rank {rank} is killed (SIGKILL) while it writes a checkpoint",
        shown_by=SAVE,
        rules=("RankDied",),
        lasting=_BACK,
        is_drawn=False,
    ),
)
"""All faults, by name, in the order of the list."""

NAMES = (*KINDS, RANDOM, REMOVE)
"""What follows ``%fsdp fault``."""


def check_name(name: str) -> None:
    """Raise ValueError unless ``name`` is a fault, ``random`` or ``off``; the message names the nearest."""
    if name not in NAMES:
        near = did_you_mean(name, NAMES) or f": they are {', '.join(NAMES)}"
        raise ValueError(f"there is no fault {name!r}{near}")


@dataclass(frozen=True, kw_only=True)
class FaultReply:
    """A fault that a rank has injected or removed.

    Attributes:
        name: its name.
        rank: the rank that has it.
        unit: the unit that has it; empty: the root.
        ms: milliseconds that it sleeps.
        is_on: whether it was injected; else removed.
        is_hidden: whether it was drawn, so that it is named only when it is removed.
        notes: what its removal could not undo, a sentence each.
    """

    name: str
    rank: int
    unit: str
    ms: int
    is_on: bool
    is_hidden: bool = False
    notes: tuple[str, ...] = ()

    @property
    def shown_name(self) -> str:
        """Its name; ``random`` while it is hidden."""
        return RANDOM if self.is_hidden and self.is_on else self.name

    @property
    def words(self) -> str:
        """What it does, as text."""
        return KINDS[self.name].about.format(rank=self.rank, unit=unit_words(self.unit), ms=self.ms)
