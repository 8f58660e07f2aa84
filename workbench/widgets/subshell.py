"""A comm that answers its browser while a cell runs."""

from __future__ import annotations

from typing import Any


def answer_while_busy(comm: Any) -> None:  # noqa: ANN401 - a comm of ipykernel, or none
    """Serve the browser's messages in its subshell, if it has one, even after this side has sent something.

    By default ipykernel 7 serves them where the comm last sent from: in the main thread, which is busy while a cell
    runs. The attribute is private to ipykernel; without it the browser waits for the cell to end. In a subshell,
    callbacks run in another thread.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _data, default: default
