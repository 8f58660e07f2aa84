"""What to type next, for every stage from no ranks to a trained model: one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

AND_THEN = ", then "
"""Between two lines to type."""

_STEP = "%fsdp step 5"
_CELL = "in a %%fsdp cell"


@dataclass(frozen=True, kw_only=True)
class SessionStage:
    """How far a session is.

    Attributes:
        is_running: whether there are ranks.
        is_viewed: whether another notebook controls them.
        is_busy: whether a request is under way.
        is_stopped: whether that is stopped inside a step.
        has_lost: whether a rank is lost, and others live.
        is_stuck: whether the ranks must be started anew.
        model: variable of the largest model; empty: there is none.
        is_sharded: whether one is sharded, or replicated.
        has_optimizer: whether a variable is an optimizer of it.
        has_function: whether there is a ``train_step()``.
        left: the line of steps that a heal left to do; empty: there are none.
        is_healed: whether ranks were just replaced.
        has_failed: whether the newest ``step`` raised.
        has_stepped: whether a step is recorded since the newest ``shard``.
        has_looked: whether a view or an explanation was shown.
    """

    is_running: bool = True
    is_viewed: bool = False
    is_busy: bool = False
    is_stopped: bool = False
    has_lost: bool = False
    is_stuck: bool = False
    model: str = ""
    is_sharded: bool = False
    has_optimizer: bool = False
    has_function: bool = False
    left: str = ""
    is_healed: bool = False
    has_failed: bool = False
    has_stepped: bool = False
    has_looked: bool = False


NEXT: tuple[tuple[Callable[[SessionStage], bool], str], ...] = (
    (lambda at: not at.is_running, "%fsdp start -n 2"),
    (lambda at: at.is_viewed, ""),
    (lambda at: at.has_lost, "%fsdp heal"),
    (lambda at: at.is_stuck, "%fsdp stop, then %fsdp start"),
    (lambda at: at.is_stopped, "%fsdp continue, %fsdp next or %fsdp abort"),
    (lambda at: at.is_busy, ""),
    (lambda at: bool(at.left), "{left}"),
    (lambda at: not at.model, f"a model {_CELL}, such as that of %fsdp example"),
    (lambda at: not at.is_sharded, "%fsdp shard {model}"),
    (lambda at: at.has_failed and not at.is_healed, f"correct the code and run its cell again, then {_STEP}"),
    (lambda at: at.is_healed and at.has_stepped and at.has_function, _STEP),
    (lambda at: at.has_stepped and not at.has_looked, "%fsdp explain, for what matters most, or %fsdp dashboard"),
    (lambda at: at.has_stepped, ""),
    (
        lambda at: not at.has_function and not at.has_optimizer,
        f"an optimizer of {{model}} and train_step() {_CELL}, then {_STEP}",
    ),
    (lambda at: not at.has_function, f"train_step() {_CELL}, then {_STEP}"),
    (lambda at: not at.has_optimizer, f"an optimizer of {{model}} {_CELL}, unless train_step() makes it; then {_STEP}"),
    (lambda at: True, _STEP),
)
"""Whether a stage lacks or is something, and what to type then; the first row that holds counts. ``""``: nothing."""


def next_line(stage: SessionStage) -> str:
    """Return what to type next; empty: nothing more than what was done before."""
    return next(line for holds, line in NEXT if holds(stage)).format(model=stage.model, left=stage.left)
