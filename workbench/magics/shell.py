"""The magics ``%fsdp`` and ``%%fsdp`` in an IPython shell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
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
    has_json,
    help_text,
    parse,
    parse_line,
    split,
)
from workbench.magics.completion import matcher_for
from workbench.magics.display_output import emit, log, publish, result_is_dropped, say, show
from workbench.magics.parser import HelpAsked
from workbench.protocol.arguments import Names
from workbench.protocol.breakpoints import EVENTS
from workbench.protocol.commands import Cell, Command, Continue, Example, Help, Next, Run, Step
from workbench.protocol.example import EXAMPLE, INSERTED
from workbench.reports.explain_report import ExplainReport, linked
from workbench.reports.explanations import ANSWERS
from workbench.reports.json_document import document, to_line
from workbench.reports.output_report import CellReport
from workbench.reports.pause_reports import StopReport
from workbench.reports.sharding_reports import ShardReport
from workbench.reports.status_report import StartReport
from workbench.reports.step_reports import RunReport, StepReport
from workbench.reports.stop_positions import live_units, param_names
from workbench.session.trace_selectors import LAST
from workbench.session.variable_check import everywhere, unit_paths
from workbench.views.theme import Figure
from workbench.widgets.progress import ProgressDisplay, StallLine, in_notebook
from workbench.workbench import OnNotice, Workbench

_KNOWN_HERE: dict[Names, Callable[[], Sequence[str]]] = {"events": lambda: (*EVENTS, "nan"), "launchers": launchers}
"""Names known without contacting the ranks."""

_SUFFIXES: dict[Names, frozenset[str]] = {
    "traces": frozenset({".trace"}),
    "records": frozenset({".trace"}),
    "files": frozenset({".trace", ".json", ".html"}),
    "scripts": frozenset({".py"}),
}
"""Suffixes of the files that complete an argument."""


@magics_class
class FsdpMagics(Magics):
    """The magics of a notebook.

    Args:
        shell: the shell that gets the magics.
        make: makes the workbench; takes the arguments of :class:`~workbench.workbench.Workbench`.

    Attributes:
        workbench: of the notebook; also before ranks exist, so that views opened then show ranks that start later.
        on_close: registers a function to be called when the magics close, before the ranks stop.
    """

    def __init__(self, shell: InteractiveShell, make: Callable[..., Workbench] = Workbench) -> None:
        super().__init__(shell)
        self._shell = shell
        self.workbench = make(in_notebook=lambda name: name in shell.user_ns)
        self._last = ExitStack()
        self._advised: set[type] = set()  # reports that said what to type next
        self.on_close = self._last.callback
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
        if has_json(line):
            return self._as_json(line, cell)
        try:
            value = self._run_line(line) if cell is None else self._run_cell(line, cell)
        except HelpAsked as help_:
            value = str(help_)
        if isinstance(value, str):
            say(value)
            return None
        if value is None or not result_is_dropped(sys._getframe()):
            return value
        figure = self.workbench.picture(value)
        if figure is None:
            show(value)
        else:
            publish(linked(value, figure) if isinstance(value, ExplainReport) else value._repr_mimebundle_())
            show(figure)
        self._say_where_pictures_are(value if figure is None else figure)
        return None

    def _say_where_pictures_are(self, shown: object) -> None:
        """Say once how to see a figure, if its title was shown alone: in a terminal."""
        if isinstance(shown, Figure) and Figure not in self._advised and not in_notebook():
            self._advised.add(Figure)
            say("the picture, and all other views: %fsdp export page.html")

    def _as_json(self, line: str, cell: str | None) -> dict[str, Any] | None:
        """Print the document of a line or a cell; return it instead if the caller uses the result."""
        word = CELL if cell is not None else (line.split() or [Help.word])[0]
        notices: list[str] = []
        try:
            report = self._report_of(line, notices.append) if cell is None else self._cell_report(line, cell, notices)
        except HelpAsked as help_:
            report = str(help_)
        except Exception as error:
            if result_is_dropped(sys._getframe()):
                say(to_line(document(word, error=error, notices=notices)))
            raise
        if isinstance(report, str):
            notices.append(report)
            report = None
        found = document(word, report, notices=notices)
        if not result_is_dropped(sys._getframe()):
            return found
        say(to_line(found))
        return None

    def _report_of(self, line: str, on_notice: OnNotice) -> Any:  # noqa: ANN401 - a report, a sentence, or nothing
        command = parse_line(line, self._variable)
        for sentence in self.workbench.news():
            on_notice(sentence)
        self.workbench.note(command, "cell")
        if isinstance(command, Help):
            return help_text(command)
        return self.workbench.report(command, on_notice=on_notice, on_output=log)

    def _cell_report(self, line: str, cell: str, notices: list[str]) -> CellReport | StopReport:
        ranks = self._ranks_of_cell(line)
        notices += self.workbench.news()
        return self.workbench.run_cell(cell, ranks=ranks)

    def close(self) -> None:
        """Detach from attached ranks or stop those started here, and remove the completion."""
        if self._matcher in self._completer.custom_matchers:
            self._completer.custom_matchers.remove(self._matcher)
        with closing(self.workbench):
            self._last.close()

    def _run_line(self, line: str) -> Any:  # noqa: ANN401
        command = parse_line(line, self._variable)
        self._tell_news()
        self.workbench.note(command, "cell")
        if isinstance(command, Help):
            return help_text(command)
        if isinstance(command, Example):
            return self._example()
        do = partial(self.workbench.do, command, on_notice=say)
        if self._is_behind(command):
            return do(on_output=emit)
        if not isinstance(command, (Step, Continue, Next)):
            with closing(StallLine()) as below:
                return self._with_next(do(on_output=below.before(emit), on_standing=below.update, on_wait=below.update))
        bar = ProgressDisplay(command.count if isinstance(command, Step) else 0)
        try:
            report = do(on_progress=bar.update, on_output=emit, on_standing=bar.remark)
        except WorkbenchError as error:
            bar.close(str(error))
            raise
        if isinstance(report, StopReport):
            bar.pause(report.headline)
        elif not isinstance(report, (CellReport, RunReport)):
            bar.close()
        return self._with_next(report)

    def _example(self) -> str:
        """Insert the example below the cell, and return a sentence about it; in a terminal, return the example."""
        if not in_notebook():
            return EXAMPLE
        self._shell.set_next_input(EXAMPLE.rstrip("\n"))
        return INSERTED

    def _with_next(self, report: Any) -> Any:  # noqa: ANN401 - any result of a command
        """Return a report with what to type next, unless that was done before."""
        kind = type(report)
        if kind not in {StartReport, ShardReport, StepReport} or kind in self._advised or report.problem:
            return report
        advice = self.workbench.next_line
        if not advice:
            return report
        self._advised.add(kind)
        return replace(report, next=advice)

    def _is_behind(self, command: Command) -> bool:
        """Return whether ``command`` returns at once and runs in the background."""
        if isinstance(command, Continue):
            return command.background or (self.workbench.is_background and not command.foreground)
        return isinstance(command, (Step, Run)) and command.background

    def _run_cell(self, line: str, cell: str) -> Any:  # noqa: ANN401
        ranks = self._ranks_of_cell(line)
        self._tell_news()
        with closing(StallLine()) as below:
            report = self.workbench.run_cell(cell, ranks=ranks, on_output=below.before(emit), on_standing=below.update)
        if isinstance(report, StopReport):
            show(report)

    def _ranks_of_cell(self, line: str) -> Sequence[int] | None:
        """Return the ranks that the line above a cell names; None: all."""
        args = split(line)
        if args and args[0] in WORDS:
            raise UsageError(f"{CELL} runs the cell's code on the ranks; on a line of its own write: %fsdp {line}")
        return cast("Cell", parse(CELL, args, self._variable)).ranks

    def _tell_news(self) -> None:
        """Show what ended in the background since the last call."""
        for sentence in self.workbench.news():
            say(sentence)

    # ---- names

    def _variable(self, name: str) -> str:
        """Return a notebook variable as text; an iterable, such as ranks, is joined with commas."""
        if name not in self._shell.user_ns:
            raise UsageError(
                f"there is no notebook variable {name!r} for {{{name}}}; for a literal {{{name}}} write {{{{{name}}}}}"
            )
        value = self._shell.user_ns[name]
        is_several = isinstance(value, Iterable) and not isinstance(value, str)
        return ",".join(map(str, value)) if is_several else str(value)

    def _lookup(self, kind: Names) -> Sequence[str]:
        """Return the names of a kind: on the ranks, files, or fixed ones."""
        if kind in _KNOWN_HERE:
            return _KNOWN_HERE[kind]()
        if kind in _SUFFIXES:
            files = sorted(path.name for path in Path.cwd().iterdir() if path.suffix in _SUFFIXES[kind])
            return [LAST, *files] if kind == "traces" else files
        return _names_of(self.workbench, kind)


def _names_of(workbench: Workbench, kind: Names) -> Sequence[str]:
    """Return the names of a kind on the ranks, or in their trace."""
    header = workbench.pulse().trace.header  # waits only briefly for a busy rank
    units = live_units(header)
    if kind == "units":
        return [unit_words(unit.name) for unit in units]
    if kind == "explained":
        return [*ANSWERS, *(unit_words(unit.name) for unit in units), "rank", "unit"]
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
