"""What a training step is called, everywhere: by its number in the job, counted from 0.

That is the index of ``for step in range(n)``, the ``step`` of a row, and what ``--step``, ``last:3..5`` and a
breakpoint's ``step`` mean. A number of steps is another thing and is never written so: ``"3 of 10 steps"``.
"""

from __future__ import annotations


def step_name(number: int, last: int | None = None) -> str:
    """Return what a step is called, or several in a row up to ``last``; nothing outside of any step.

    Example: ``step_name(3) == "step 3"``, ``step_name(3, 5) == "steps 3-5"``, ``step_name(-1) == ""``.
    """
    if number < 0:
        return ""
    return f"step {number}" if last is None or last <= number else f"steps {number}-{last}"
