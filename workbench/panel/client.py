"""One client in the browser: the comm of a panel, or of a dashboard beside the notebook, and the answers on it.

Questions are served in the main thread, or in a subshell's thread while a cell runs. Long polls and commands run in
threads of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, get_args

from workbench.base.codec import decode_named, encode
from workbench.errors import Interrupted, UsageError, WorkbenchError
from workbench.live.live_trace import MAX_AGE_S
from workbench.live.long_poll import Send
from workbench.live.messages import (
    OUTPUT_LINES,
    VERSION,
    ClusterState,
    CommandHistory,
    CommandLine,
    CommandOutput,
    FindModels,
    FindParams,
    FormatCommand,
    GetHistory,
    GetOutput,
    GetState,
    Hello,
    Models,
    OutputTail,
    PanelAnswer,
    Params,
    Preview,
    PreviewCommand,
    RunCommand,
    UnitInfo,
    ViewQuestion,
    Welcome,
    read_question,
    refusal,
)
from workbench.live.panel_state import models_of, panel_state, params_of, preview
from workbench.live.server import Views
from workbench.magics.command_lines import WORDS, help_text, parse_line
from workbench.magics.display_output import emit
from workbench.magics.parser import HelpAsked
from workbench.protocol.commands import (
    Command,
    Continue,
    Dashboard,
    Help,
    Next,
    Reshard,
    Run,
    Shard,
    Step,
    to_text,
)
from workbench.reports.explain_report import linked
from workbench.widgets.subshell import answer_while_busy
from workbench.workbench import Workbench

_VIEW = "panel"  # a comm has one view


class CommLike(Protocol):
    """The part of a comm that is needed here."""

    def send(self, data: dict[str, Any], *, buffers: list[bytes] | None = None) -> None:
        """Send a message to the browser."""

    def on_msg(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call ``callback`` with every message from the browser."""

    def on_close(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call ``callback`` when the browser has closed the comm."""

    def close(self) -> None:
        """Close the comm."""


class Client:
    """Answers the questions on one comm.

    Args:
        workbench: runs the commands.
        comm: just opened by the browser.
        version: version of the Python package.
    """

    def __init__(self, workbench: Workbench, comm: CommLike, *, version: str) -> None:
        self._workbench, self._comm, self._version = workbench, comm, version
        self._views = Views(workbench, self._send)
        self._is_welcome = self._is_closed = False
        self._units: tuple[UnitInfo, ...] | None = None
        self._answers: dict[type, Callable[[Any], PanelAnswer | None]] = {
            **{
                Hello: self._welcome,
                GetState: self._answer_state,
                FindModels: self._find_models,
                PreviewCommand: self._try,
            },
            **{FindParams: self._find_params, FormatCommand: _spell, RunCommand: self._begin, GetHistory: self._recall},
            GetOutput: self._output,
        }
        answer_while_busy(comm)
        comm.on_msg(self._receive)

    def close(self) -> None:
        """Stop answering; a running command continues, and its thread ends with it."""
        self._is_closed = True
        self._views.close()

    def _receive(self, message: dict[str, Any]) -> None:
        data = message["content"]["data"]
        try:
            question = read_question(data)
            if not (self._is_welcome or isinstance(question, Hello)):
                raise UsageError("the first message must be hello, with a matching protocol version")
            if isinstance(question, get_args(ViewQuestion)):
                self._views.ask(question)
                return
            answer = self._answers[type(question)](question)  # None: it is sent later
        except (WorkbenchError, ValueError) as error:
            answer = refusal(data, error)
        if answer is not None:
            self._tell(answer)

    def _answer_state(self, question: GetState) -> PanelAnswer | None:
        if question.wait:
            self._views.waiting.ask(_VIEW, partial(self._news, question.number))
            return None
        self._units = None
        self._views.live.poll(self._workbench)
        return self._state(question.number)

    def _find_models(self, question: FindModels) -> PanelAnswer:
        workbench = self._workbench
        by_rank = workbench.models()
        if workbench.running and not by_rank:  # they may have models all the same
            raise UsageError("No rank has answered yet. Models are shown once a rank answers.")
        found = models_of(by_rank)
        names = workbench.names().values()
        has_step = bool(names) and all(Step().fn in own.variables for own in names)
        text = "" if found else "The ranks have no model: build one in a %%fsdp cell."
        return Models(number=question.number, models=found, has_step=has_step, text=text)

    def _try(self, question: PreviewCommand) -> PanelAnswer:
        command = read_command(question.command)
        line = line_of(command)
        if not isinstance(command, (Shard, Reshard)):
            problem = f"only shard and reshard can be previewed, not {command.word}"
            return Preview(number=question.number, line=line, problem=problem)
        workbench = self._workbench
        try:
            units = workbench.preview(command)
        except WorkbenchError as error:
            return Preview(number=question.number, line=line, problem=str(error))
        models = next(iter(workbench.models().values()), ())
        return preview(question.number, line, units, workbench.num_ranks, models, command.model)

    def _find_params(self, question: FindParams) -> PanelAnswer:
        pulse = self._views.live.poll(self._workbench, MAX_AGE_S)
        found = params_of(pulse.trace.header, question.unit)
        return Params(number=question.number, unit=question.unit, params=found)

    def _recall(self, question: GetHistory) -> PanelAnswer:
        return CommandHistory(number=question.number, commands=self._workbench.history().commands)

    def _output(self, question: GetOutput) -> PanelAnswer:
        found = self._workbench.output(rank=question.rank, lines=OUTPUT_LINES)
        return OutputTail(number=question.number, lines=found.lines, is_cut=found.is_cut)

    def _welcome(self, hello: Hello) -> Welcome:
        problem = _misfit(hello, self._version)
        self._is_welcome = not problem
        return Welcome(
            number=hello.number,
            version=VERSION,
            workbench=self._version,
            dashboard=self._views.initial,
            problem=problem,
        )

    def _tell(self, answer: PanelAnswer) -> None:
        self._send(encode(answer), None)

    def _send(self, data: dict[str, Any], buffers: list[bytes] | None) -> None:
        if not self._is_closed:
            self._comm.send(data, buffers=buffers)

    # ---- state

    def _news(self, number: int) -> Send:
        answer = self._state(number)
        return partial(self._tell, answer)

    def _state(self, number: int) -> PanelAnswer:
        workbench = self._workbench
        given = workbench.settings
        cluster = ClusterState(
            num_ranks=given["num_ranks"],
            device=given["device"],
            profile=given["profile"] or "",
            exchange=workbench.exchange,  # read after the pulse: missing ranks are stopped or stopping
            outlives=workbench.outlives,
            held_by=workbench.held_by,
            one_job=workbench.one_job,
            cores=workbench.cores,
        )
        state = panel_state(number, self._views.live, cluster, self._units)
        self._units = state.units if state.units is not None else self._units
        return state

    # ---- commands

    def _begin(self, question: RunCommand) -> None:
        """Run a command in a thread of its own: it may take long, and the panel keeps asking."""
        command = read_command(question.command)
        if isinstance(command, Dashboard) or getattr(command, "canvas", False):
            raise UsageError("the panel opens its own dashboard; for one in the notebook, run this line in a cell")
        if isinstance(command, (Step, Run)):
            command = replace(command, background=True)
        name, args = f"panel: {command.word}", (question.number, command)
        threading.Thread(target=self._do, args=args, name=name, daemon=True).start()

    def _do(self, number: int, command: Command) -> None:
        line, remarks = line_of(command), list[str]()
        try:
            result = self._run(command, remarks.append)
            if isinstance(result, str):
                remarks.append(result)
                result = None
            data = {} if result is None else self._bundle(result)
            text, is_error = "\n".join([*remarks, *([data["text/plain"]] if data else [])]), False
        except Interrupted as given_up:  # as requested
            data, text, is_error = {}, str(given_up), False
        except WorkbenchError as error:
            data, text, is_error = {}, str(error), True
        except Exception as error:  # noqa: BLE001 - a thread has no caller to raise to
            data, text, is_error = {}, f"{type(error).__name__}: {error}", True
        self._tell(CommandOutput(number=number, line=line, text=text, is_error=is_error, data=data))

    def _bundle(self, result: Any) -> dict[str, Any]:  # noqa: ANN401 - a report or a figure
        """Return ``result`` by MIME type, an explanation with the figure that shows it."""
        figure = self._workbench.picture(result)
        if figure is None:
            return dict(result._repr_mimebundle_())
        return {**figure._repr_mimebundle_(), **linked(result, figure)}

    def _run(self, command: Command, on_notice: Callable[[str], None]) -> Any:  # noqa: ANN401 - depends on the command
        """Run a command, ``continue`` and ``next`` in the background: the notebook stays free."""
        self._workbench.note(command, "panel")
        match command:
            case Help():
                return help_text(command)
            case Continue():
                return self._workbench.resume(background=True)
            case Next(what=what):
                return self._workbench.next(what, background=True)
        return self._workbench.do(command, on_output=emit, on_notice=on_notice)


def read_command(data: Any) -> Command:  # noqa: ANN401 - any JSON may come
    """Return ``data``, a command or the text of its line, parsed from its line; missing arguments have their defaults.

    Raises:
        UsageError: there is no such command, its arguments are invalid, or they do not fit on one line.
    """
    line = data if isinstance(data, str) else to_text(_decoded(data))
    if len(line.splitlines()) > 1:  # any of Python's line breaks ends the magic's line
        raise UsageError("a command is one line, but an argument has a line break")
    try:
        return parse_line(line)
    except HelpAsked:
        return Help(topic=line.split()[0])


def _decoded(data: Any) -> Command:  # noqa: ANN401 - any JSON may come
    try:
        command: Command = decode_named(WORDS, data, "command", fill=True)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return command


def line_of(command: Command) -> str:
    """Return the line to type for ``command``, without arguments at their defaults."""
    return f"%fsdp {to_text(command)}"


def _spell(question: FormatCommand) -> PanelAnswer:
    return CommandLine(number=question.number, line=line_of(read_command(question.command)))


def _misfit(hello: Hello, version: str) -> str:
    """Return what to do if the versions of both sides do not match; empty if they do."""
    if hello.version == VERSION:
        return ""
    panel = f"the panel (extension {hello.extension}) uses protocol version {hello.version}"
    both = f"{panel}, the notebook's kernel (workbench {version}) version {VERSION}"
    if hello.version < VERSION:
        return f"{both}: install workbench {version} where JupyterLab runs, and reload this page"
    return f"{both}: install the same workbench where the kernel runs, and restart the kernel"
