"""Display of results in a notebook or a terminal: reports, figures, and the output of ranks."""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from IPython.display import clear_output, display

from workbench.cluster.pending_replies import Output
from workbench.session.outputs import text_of
from workbench.widgets.progress import in_notebook

_DROPPING = ("POP_TOP", "PRINT_EXPR", "CALL_INTRINSIC_1")  # the latter two: the last line of an interactive cell


def show(value: Any) -> None:  # noqa: ANN401 - any result of a command
    """Display ``value``, a figure or a report, like a cell's result."""
    display(value)  # type: ignore[no-untyped-call] # IPython has no types


def publish(data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, **more: Any) -> None:  # noqa: ANN401
    """Display a MIME bundle; ``more`` goes to IPython's ``display``."""
    display(dict(data), raw=True, metadata=dict(metadata or {}), **more)  # type: ignore[no-untyped-call]


def emit(output: Output) -> None:
    """Show a piece of a rank's output as if this notebook had produced it."""
    if output.is_draft and not in_notebook():
        return  # a terminal cannot replace drafts
    if output.kind in {"stdout", "stderr"}:
        stream = sys.stderr if output.kind == "stderr" else sys.stdout
        stream.write(output.text)
        stream.flush()
    elif output.kind == "clear":
        clear_output(wait=True)  # type: ignore[no-untyped-call]
    else:
        named = {"display_id": output.display_id} if output.display_id else {}
        publish(output.data, output.metadata, update=output.kind == "update", **named)


def log(output: Output) -> None:
    """Write the text of a piece of a rank's output to standard error, where it does not mix with JSON."""
    sys.stderr.write(text_of([output]))
    sys.stderr.flush()


def say(text: str) -> None:
    """Write ``text`` where the cell's output goes."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def result_is_dropped(frame: FrameType | None) -> bool:
    """Whether the user's line that called a magic drops its result.

    IPython shows only the value of a cell's last line. The result of a magic on a line of its own must be shown
    anywhere, but that of ``fig = %fsdp memory`` must not: the instruction after the call tells the two apart.

    Args:
        frame: of the magic function or anything it called.
    """
    while frame is not None and frame.f_code.co_name not in {"run_line_magic", "run_cell_magic"}:
        frame = frame.f_back
    caller = frame.f_back if frame is not None else None
    if caller is None:
        return False
    later = (i.opname for i in dis.get_instructions(caller.f_code) if i.offset > caller.f_lasti)
    return next(later, "") in _DROPPING
