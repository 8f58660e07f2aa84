"""Exceptions of the engine for errors without a suitable built-in class.

::

    RuntimeError
    |-- StepAborted          a wait on this rank was cancelled
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
