"""A comm that answers its browser while a cell runs."""

from __future__ import annotations

from typing import Any


def answer_while_busy(comm: Any) -> None:  # noqa: ANN401 - a comm of ipykernel, or none
    """Have messages of the browser served in its subshell, where it has one, also after this side has sent something.

    ipykernel 7 else serves them where the comm last sent from: in the main thread, which is busy while a cell runs.
    The attribute is private to it; without it the browser waits for the cell to end. Callbacks then run in another
    thread.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _data, default: default
