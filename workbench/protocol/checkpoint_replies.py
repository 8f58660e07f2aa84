"""A rank's replies to ``save`` and ``load``, and the result of ``verify --resume``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SaveReply:
    """A checkpoint that is whole.

    Attributes:
        folder: its folder.
        step: number of steps that led to it.
        num_bytes: bytes that this rank wrote.
        blocked_s: time in seconds that training waited for it on this rank.
        variables: the variables that are in it.
        notes: what is not in it, a sentence each.
        models: the models that ``verify`` knows.
    """

    folder: str
    step: int
    num_bytes: int
    blocked_s: float
    variables: tuple[str, ...]
    notes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoadReply:
    """A checkpoint that was loaded.

    Attributes:
        folder: its folder.
        step: number of steps that led to it; None: unknown.
        saved_ranks: number of ranks that saved it.
        variables: the variables that have its state now.
        notes: what stays as it is, a sentence each.
    """

    folder: str
    step: int | None
    saved_ranks: int
    variables: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ResumeCheck:
    """A step from the current state compared with the same step from a checkpoint of it, on one rank.

    Attributes:
        folder: the checkpoint.
        saved_step: number of steps that led to it.
        step: number of steps of the training now.
        first_param: the first parameter that differs after the step; empty: none does.
        relative: norm of its difference relative to its norm.
        different: how the state after the load differs from the live one, the first few entries, a sentence each.
        fresh: optimizers that start from nothing although they have taken steps.
        not_held: optimizers that the step uses and the checkpoint does not hold.
        changed: variables that the step changes and a checkpoint does not hold.
        has_changed: whether the step changes a parameter or buffer.
        dropout: the first module that drops by random numbers that all ranks saved alike.
        detached: entries of the models' state dicts that share no memory with a parameter or buffer.
        notes: what the load left as it was, a sentence each.
    """

    folder: str
    saved_step: int
    step: int
    first_param: str = ""
    relative: float = 0.0
    different: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    not_held: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    has_changed: bool = True
    dropout: str = ""
    detached: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
