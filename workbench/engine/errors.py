"""Exceptions of the engine that Python has no better word for.

::

    RuntimeError
    |-- StepAborted          this rank was told to give up what it was waiting for
    |-- CollectiveFailed     a collective ended in an error (a peer died or left)
    `-- RanksDisagreeError   ranks built different models
"""

from __future__ import annotations


class StepAborted(RuntimeError):
    """A wait was cancelled from outside; the message is the reason given."""


class CollectiveFailed(RuntimeError):
    """A collective ended in an error: a peer died, left, or the group was torn down."""


class RanksDisagreeError(RuntimeError):
    """Ranks that should hold the same units do not; the message names the first difference and the ranks."""
