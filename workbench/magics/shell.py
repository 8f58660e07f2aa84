"""The magics ``%fsdp`` and ``%%fsdp`` in an IPython shell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from IPython.core.completer import IPCompleter
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from workbench.cluster.ipp_launch import launchers
from workbench.errors import UsageError, WorkbenchError
from workbench.events import unit_words
from workbench.magics.command_lines import (
    CELL,
    WORDS,
    parse,
    parse_line,
    split,
)
from workbench.magics.completion import matcher_for
from workbench.magics.display_output import emit, result_is_dropped, say, show
from workbench.magics.notebook import Notebook, is_behind
from workbench.magics.parser import HelpAsked
from workbench.protocol.arguments import Names
from workbench.protocol.breakpoints import EVENTS
from workbench.protocol.commands import Attach, Cell, Command, Continue, Next, Start, Step
from workbench.reports.pause_results import StopReport
from workbench.reports.results import CellReport
from workbench.reports.stop_positions import live_units, param_names
from workbench.session.trace_selectors import LAST
from workbench.session.variable_check import everywhere, unit_paths
from workbench.widgets.progress import ProgressDisplay
from workbench.widgets.stall_line import StallLine
from workbench.workbench import Workbench

_KNOWN_HERE: dict[Names, Callable[[], Sequence[str]]] = {"events": lambda: EVENTS, "launchers": launchers}
"""Names known without contacting the ranks."""


@magics_class
class FsdpMagics(Magics):
    """The magics of a notebook.

    Args:
        shell: the shell that gets the magics.
        make: makes the workbench; takes the arguments of :class:`~workbench.workbench.Workbench`.

    Attributes:
        notebook: owns the workbench, and runs the commands.
    """

    def __init__(self, shell: InteractiveShell, make: Callable[..., Workbench] = Workbench) -> None:
        super().__init__(shell)
        self._shell = shell
        self.notebook = Notebook(make, lambda name: name in shell.user_ns)
        self._matcher = matcher_for(self._lookup)
        self._completer.custom_matchers.append(self._matcher)

    @property
    def _completer(self) -> IPCompleter:
        completer: IPCompleter = self._shell.Completer
        return completer

    @no_var_expand
    @line_cell_magic
    def fsdp(self, line: str, cell: str | None = None) -> Any:  # noqa: ANN401 - a report, a figure, or nothing
        """Shard, train and inspect models on several ranks; ``%fsdp help`` lists the commands."""
        try:
            if cell is not None:
                return self._run_cell(line, cell)
            value = self._run_line(line)
        except HelpAsked as asked:
            say(str(asked))
            return None
        if value is None or not result_is_dropped(sys._getframe()):
            return value
        show(value)
        return None

    def close(self) -> None:
        """Close the notebook, and remove the completion."""
        if self._matcher in self._completer.custom_matchers:
            self._completer.custom_matchers.remove(self._matcher)
        self.notebook.close()

    def _run_line(self, line: str) -> Any:  # noqa: ANN401
        command = parse_line(line, self._variable)
        self._tell_news()
        if not isinstance(command, (Start, Attach)):
            return self.notebook.do(command, "cell", self._do, say)
        with closing(StallLine()) as below:
            return self.notebook.do(command, "cell", self._do, say, below.update)

    def _run_cell(self, line: str, cell: str) -> None:
        args = split(line)
        if args and args[0] in WORDS:
            raise UsageError(f"{CELL} runs the cell's code on the ranks; on a line of its own write: %fsdp {line}")
        ranks = cast("Cell", parse(CELL, args, self._variable)).ranks
        self._tell_news()
        with closing(StallLine()) as below:
            report = self.notebook.running().run_cell(
                cell, ranks=ranks, on_output=below.before(emit), on_standing=below.update
            )
        if isinstance(report, StopReport):
            show(report)

    def _do(self, workbench: Workbench, command: Command) -> Any:  # noqa: ANN401
        if is_behind(workbench, command):
            return workbench.do(command, on_output=emit)
        if not isinstance(command, (Step, Continue, Next)):
            with closing(StallLine()) as below:
                return workbench.do(command, on_output=below.before(emit), on_standing=below.update)
        bar = ProgressDisplay(command.count if isinstance(command, Step) else 0)
        try:
            report = workbench.do(command, on_progress=bar.update, on_output=emit, on_standing=bar.remark)
        except WorkbenchError as error:
            bar.close(str(error))
            raise
        if isinstance(report, StopReport):
            bar.pause(report.headline)
        elif not isinstance(report, CellReport):
            bar.close()
        return report

    def _tell_news(self) -> None:
        """Show what ended in the background since the last call."""
        workbench = self.notebook.workbench
        for said in workbench.news() if workbench is not None else ():
            say(said)

    # ---- names

    def _variable(self, name: str) -> str:
        """Return a notebook variable as text; an iterable, such as ranks, is joined with commas."""
        if name not in self._shell.user_ns:
            raise UsageError(
                f"there is no notebook variable {name!r} to replace {{{name}}}; for the text itself write "
                f"{{{{{name}}}}}"
            )
        value = self._shell.user_ns[name]
        is_several = isinstance(value, Iterable) and not isinstance(value, str)
        return ",".join(map(str, value)) if is_several else str(value)

    def _lookup(self, kind: Names) -> Sequence[str]:
        """Return the names of a kind: on the ranks, files, or fixed ones."""
        if kind in _KNOWN_HERE:
            return _KNOWN_HERE[kind]()
        if kind in {"traces", "records", "files"}:
            suffixes = {".trace", ".json", ".html"} if kind == "files" else {".trace"}
            files = sorted(path.name for path in Path.cwd().iterdir() if path.suffix in suffixes)
            return [LAST, *files] if kind == "traces" else files
        workbench = self.notebook.workbench
        return [] if workbench is None else _names_of(workbench, kind)


def _names_of(workbench: Workbench, kind: Names) -> Sequence[str]:
    """Return the names of a kind on the ranks, or in their trace."""
    header = workbench.pulse().trace.header  # waits only briefly for a busy rank
    units = live_units(header)
    if kind == "units":
        return [unit_words(unit.name) for unit in units]
    if kind == "fqns":
        return param_names(header)
    if kind == "parts":
        return [*everywhere(workbench.names(), "modules"), *unit_paths(workbench.models(), units)]
    return everywhere(workbench.names(), kind)


def register(shell: InteractiveShell, make: Callable[..., Workbench] = Workbench) -> FsdpMagics:
    """Add the magics and their completion to ``shell``; return the existing ones if it has them."""
    there = shell.magics_manager.registry.get(FsdpMagics.__name__)
    if there is not None:
        return there  # type: ignore[no-any-return]
    magics = FsdpMagics(shell, make)
    shell.register_magics(magics)
    return magics


def unregister(shell: InteractiveShell) -> None:
    """Stop the ranks and remove the magics, if they are registered."""
    manager = shell.magics_manager
    magics = manager.registry.pop(FsdpMagics.__name__, None)
    if magics is None:
        return
    for kind in ("line", "cell"):
        manager.magics[kind].pop("fsdp", None)
    magics.close()
