"""Names of training steps in all texts: by their number in the job, counted from 0.

This number is the index of ``for step in range(n)``, the ``step`` of a row, and what ``--step``, ``last:3..5`` and a
breakpoint's ``step`` refer to. A count of steps is written differently: ``"3 of 10 steps"``.
"""

from __future__ import annotations


def step_name(number: int, last: int | None = None) -> str:
    """Return the name of a step, or of the steps from ``number`` to ``last``; empty outside any step.

    Example: ``step_name(3) == "step 3"``, ``step_name(3, 5) == "steps 3-5"``, ``step_name(-1) == ""``.
    """
    if number < 0:
        return ""
    return f"step {number}" if last is None or last <= number else f"steps {number}-{last}"
