"""The magics ``%fsdp`` and ``%%fsdp`` in an IPython shell."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from IPython.core.completer import IPCompleter
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from workbench.commands import Command, Continue, Next, Step
from workbench.errors import UsageError, WorkbenchError
from workbench.events import unit_words
from workbench.magics.complete import matcher_for
from workbench.magics.parser import HelpAsked, Kind
from workbench.magics.show import emit, result_is_dropped, say, show
from workbench.magics.words import (
    CELL,
    WORDS,
    overview,
    parse,
    parse_line,
    parser_for,
    split,
    to_command,
)
from workbench.session.breakpoints import EVENTS
from workbench.session.names import everywhere
from workbench.session.places import live_units
from workbench.session.reports import CellReport, Report
from workbench.session.sides import LAST
from workbench.session.stop_reports import StopReport
from workbench.views import VIEWS
from workbench.widgets.progress import ProgressDisplay
from workbench.widgets.standing import StandingLine
from workbench.workbench import RankSettings, Workbench

_NAME = re.compile(r"\{(\w+)\}")


@magics_class
class FsdpMagics(Magics):
    """Holds the one workbench of a notebook.

    Args:
        shell: where the magics are.
        make: makes the workbench; takes the arguments of :class:`~workbench.workbench.Workbench`.

    Attributes:
        workbench: there is one from the first ``%fsdp start`` on; what it recorded outlives ``%fsdp stop``.
    """

    def __init__(self, shell: InteractiveShell, make: Callable[..., Workbench] = Workbench) -> None:
        super().__init__(shell)
        self._shell = shell
        self.workbench: Workbench | None = None
        self._only: Workbench | None = None
        self._make = make
        self._matcher = matcher_for(self._lookup)
        self._completer.custom_matchers.append(self._matcher)

    @property
    def _completer(self) -> IPCompleter:
        completer: IPCompleter = self._shell.Completer
        return completer

    @no_var_expand
    @line_cell_magic
    def fsdp(self, line: str, cell: str | None = None) -> Any:  # noqa: ANN401 - a report, a figure, or nothing
        """Shard, train and look at models on several ranks; ``%fsdp help`` lists the words."""
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
        """Stop what was started, and complete no more."""
        if self._matcher in self._completer.custom_matchers:
            self._completer.custom_matchers.remove(self._matcher)
        self._stop_ranks()

    def _stop_ranks(self) -> None:
        if self.workbench is not None:
            self.workbench.stop()

    def _run_line(self, line: str) -> Any:  # noqa: ANN401
        name, args = parse_line(line, self._expand)
        self._tell_news()
        if name in _OWN_WORDS:
            return _OWN_WORDS[name](self, args)
        if vars(args).pop("canvas", False):
            return self._canvas(args)
        workbench = self._running()
        command = to_command(name, args)
        if command is not None:
            return self._do(workbench, command)
        if name == "break":
            clear = args.action == "clear"
            return workbench.break_clear(int(args.event) if args.event else None) if clear else workbench.break_list()
        if name in VIEWS:
            return workbench.view(name, **vars(args))
        return workbench.export(args.file, steps=args.steps)

    def _run_cell(self, line: str, cell: str) -> None:
        args = split(line)
        if args and args[0] in WORDS:
            raise UsageError(f"{CELL} runs the cell's code on the ranks; on a line of its own write: %fsdp {line}")
        ranks = parse(CELL, args, self._expand).targets
        self._tell_news()
        with closing(StandingLine()) as below:
            report = self._running().run_cell(cell, ranks=ranks, on_output=below.before(emit), on_standing=below.update)
        if isinstance(report, StopReport):
            show(report)

    def _do(self, workbench: Workbench, command: Command) -> Report:
        if _is_behind(workbench, command):
            return workbench.do(command, on_output=emit)
        if not isinstance(command, (Step, Continue, Next)):
            with closing(StandingLine()) as below:
                return workbench.do(command, on_output=below.before(emit), on_standing=below.update)
        bar = ProgressDisplay(command.count if isinstance(command, Step) else 0)
        try:
            report = self._go_on(workbench, command, bar)
        except WorkbenchError as error:
            bar.close(str(error))
            raise
        if isinstance(report, StopReport):
            bar.pause(report.headline)
        elif not isinstance(report, CellReport):
            bar.close()
        return report

    @staticmethod
    def _go_on(workbench: Workbench, command: Command, bar: ProgressDisplay) -> Report:
        if isinstance(command, Continue):
            return workbench.resume(background=False, on_progress=bar.update, on_output=emit, on_standing=bar.remark)
        if isinstance(command, Next):
            return workbench.next(command.what, on_progress=bar.update, on_output=emit, on_standing=bar.remark)
        return workbench.do(command, on_progress=bar.update, on_output=emit, on_standing=bar.remark)

    def _tell_news(self) -> None:
        """Say what ended in the background since the last word."""
        for said in self.workbench.news() if self.workbench is not None else ():
            say(said)

    def _running(self) -> Workbench:
        if self.workbench is None:
            raise UsageError("there are no ranks yet: first %fsdp start -n 4")
        return self.workbench

    # ---- words that ask the ranks nothing

    def _start(self, args: Namespace) -> Report:
        wanted: RankSettings = {"num_ranks": args.num_ranks, "device": args.device, "profile": args.profile}
        workbench = self._shown()
        if workbench.running and workbench.settings == wanted and not workbench.losses:
            say("the ranks run already and keep their variables; for fresh ones: %fsdp stop, then %fsdp start")
            return workbench.status()
        report = workbench.start(**wanted)
        self.workbench = workbench
        return report

    def _shown(self) -> Workbench:
        """Return the workbench, also before there are ranks: what is opened now shows those that are started later."""
        if self._only is None:
            self._only = self._make(in_notebook=self._in_notebook)
        return self._only

    def _status(self, _: Namespace) -> Report:
        return self._running().status()

    def _dashboard(self, _: Namespace) -> Any:  # noqa: ANN401 - a widget
        return self._shown().dashboard()

    def _canvas(self, args: Namespace) -> Any:  # noqa: ANN401 - a widget
        if vars(args):
            raise UsageError("%fsdp timeline --canvas shows all of the run: no other flag goes with it")
        return self._shown().canvas()

    def _stop(self, _: Namespace) -> None:
        was_running = self.workbench is not None and self.workbench.running
        self._stop_ranks()
        say("stopped; what was recorded is still there to look at" if was_running else "no ranks are running")

    def _where(self, args: Namespace) -> Report:
        return self._running().where(stacks=args.stacks)

    def _back(self, args: Namespace) -> Report:
        return self._running().back(args.n)

    def _compare(self, args: Namespace) -> Any:  # noqa: ANN401 - a figure
        return self._shown().compare(args.a, args.b, rank=args.rank, talk="talk" in args and args.talk)

    def _help(self, args: Namespace) -> None:
        if args.topic in WORDS:
            say(parser_for(args.topic).format_help())
        elif args.topic:
            parse_line(args.topic)  # raises with the nearest match
        else:
            say(overview())

    # ---- names

    def _in_notebook(self, name: str) -> bool:
        return name in self._shell.user_ns

    def _expand(self, text: str) -> str:
        """Replace ``{name}`` by the notebook's variable: a number, or several ranks."""

        def value_of(found: re.Match[str]) -> str:
            if found[1] not in self._shell.user_ns:
                raise UsageError(f"{found[0]} is replaced by a variable of this notebook, and there is no {found[1]!r}")
            value = self._shell.user_ns[found[1]]
            return (
                ",".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
            )

        return _NAME.sub(value_of, text)

    def _lookup(self, kind: Kind) -> Sequence[str]:
        """Return names on the ranks; a model alone brings the paths of its units along."""
        if kind == "events":
            return EVENTS
        if kind in {"traces", "files"}:
            suffixes = {".trace"} if kind == "traces" else {".trace", ".json", ".html"}
            files = sorted(path.name for path in Path.cwd().iterdir() if path.suffix in suffixes)
            return [LAST, *files] if kind == "traces" else files
        if self.workbench is None:
            return []
        units = live_units(self.workbench.pulse().trace.header)  # which waits for a busy rank a moment only
        if kind == "units":
            return [unit_words(unit.name) for unit in units]
        if kind == "fqns":
            return [param.fqn for unit in units for param in unit.params]
        names = everywhere(self.workbench.names(), kind)
        if kind == "modules" and len(names) == 1:
            names += [f"{names[0]}.{unit.name}" for unit in units if unit.name]
        return names


def _is_behind(workbench: Workbench, command: Command) -> bool:
    """Whether the notebook goes on while the ranks do ``command``."""
    if isinstance(command, Continue):
        return workbench.is_background and not command.foreground
    return isinstance(command, Step) and command.background


_OWN_WORDS: dict[str, Callable[[FsdpMagics, Namespace], Any]] = {
    "start": FsdpMagics._start,
    "status": FsdpMagics._status,
    "dashboard": FsdpMagics._dashboard,
    "stop": FsdpMagics._stop,
    "help": FsdpMagics._help,
    "where": FsdpMagics._where,
    "back": FsdpMagics._back,
    "compare": FsdpMagics._compare,
}


def register(shell: InteractiveShell, make: Callable[..., Workbench] = Workbench) -> FsdpMagics:
    """Add the magics and their completion to ``shell``; a second time gives those that are there."""
    there = shell.magics_manager.registry.get(FsdpMagics.__name__)
    if there is not None:
        return there  # type: ignore[no-any-return]
    magics = FsdpMagics(shell, make)
    shell.register_magics(magics)
    return magics


def unregister(shell: InteractiveShell) -> None:
    """Stop the ranks and take the magics away; nothing happens if they are not there."""
    manager = shell.magics_manager
    magics = manager.registry.pop(FsdpMagics.__name__, None)
    if magics is None:
        return
    for kind in ("line", "cell"):
        manager.magics[kind].pop("fsdp", None)
    magics.close()
