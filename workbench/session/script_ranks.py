"""Ranks of this machine for one script of the command line: processes started without Jupyter, which end with it."""

from __future__ import annotations

import codecs
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self, TypeVar, cast

from workbench.base.codec import decode, encode
from workbench.base.open_files import check_open_files
from workbench.base.ports import LOOPBACK, LOOPBACK_INTERFACE
from workbench.base.text_formats import plural
from workbench.cluster.pending_replies import Answer, Output, PendingReplies
from workbench.errors import Interrupted, UsageError, WorkbenchError
from workbench.protocol.commands import Command, Lint, Run, Verify, to_dict
from workbench.protocol.rank_messages import Drain, ListModels, ListNames, ModelInfo, Names, RecordSummary
from workbench.protocol.starting import Boot, Connect, HostInfo
from workbench.reports.failures import Failure, to_error
from workbench.reports.lint_report import LintReport
from workbench.reports.report import Report
from workbench.reports.report_makers import REPORT_MAKERS
from workbench.reports.verify_report import VerifyReport
from workbench.session.outputs import OnOutput, Stream
from workbench.session.variable_check import check, with_script
from workbench.trace import header_from_dict

TICK_S = 0.1
GRACE_S = 2.0
"""How long other ranks may take to answer once one has failed: most raise the same, others wait for it."""

END_S = 10.0
"""How long a rank may take to end once it has no more to do."""

_FILES, _FILES_PER_RANK = 40, 6  # of a process with pipes or connections to so many ranks, at most

_PROGRAM = "__import__('{}', fromlist=['main']).main({}, {})"  # leaves no name in __main__

C = TypeVar("C", bound=Command)


@dataclass
class _RankProcess:
    """The process of a rank, the ends of its pipes, and what it has answered and written.

    Attributes:
        reply: the answer to the current request; None: it is at work.
        unread: the begin of an answer.
    """

    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    answers: int
    written: Answer = field(default_factory=Answer)
    reply: dict[str, Any] | None = None
    unread: str = ""


class ScriptRanks:
    """Ranks of this machine, on CPUs unless a subclass says otherwise, from the start of the block to its end.

    Args:
        num_ranks: number of ranks.
        on_output: called with the script's output as it arrives, as that of ``%fsdp run``.

    Attributes:
        main: the module whose ``main`` a rank's process runs.
        device: kind of the ranks' devices.
    """

    main = "workbench.runtime.piped_rank"
    device = "cpu"

    def __init__(self, num_ranks: int, on_output: OnOutput) -> None:
        if num_ranks < 1:
            raise UsageError(f"the number of ranks is at least 1, not {num_ranks}")
        check_open_files(_FILES + _FILES_PER_RANK * num_ranks, plural(num_ranks, "rank"), "this terminal")
        self._num_ranks, self._on_output = num_ranks, on_output
        self._ranks: dict[int, _RankProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._stream: Stream | None = None

    def __enter__(self) -> Self:
        try:
            for number in range(self._num_ranks):
                self._start(number)
            self._stream = Stream(PendingReplies({number: rank.written for number, rank in self._ranks.items()}), 0)
            self._connect()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end(at_once=kind is not None)

    def _connect(self) -> None:
        here = HostInfo(name="here", identity="this host", address=LOOPBACK, interface=LOOPBACK_INTERFACE)
        of_one = {
            "world_size": self._num_ranks,
            "local_world_size": self._num_ranks,
            "device": self.device,
            "host": here,
        }
        boots = [encode(Boot(rank=rank, local_rank=rank, **of_one)) for rank in self._ranks]  # type: ignore[arg-type]
        address = self._call("boot", *boots)[0]
        self._call("connect", encode(Connect(address=decode(Boot.reply, address, "address"))))

    def take_our_engine(self) -> None:
        """Let what the script imports from torch's FSDP be the workbench's engine."""
        self._call("take_our_engine", None)

    def run_script(self, script: str, args: Sequence[str], *, module: bool = False) -> None:
        """Run ``script`` to its end, as ``%fsdp run`` does.

        Raises:
            UsageError: there is no such script.
            RankError, RankDied, Interrupted: it failed, or was interrupted.
        """
        self._call("execute", to_dict(run_of(script, args, module=module)))
        cast(Stream, self._stream).finish(self._on_output, also_agreement=True)
        self._stream = None

    def models(self) -> dict[int, tuple[ModelInfo, ...]]:
        """Return the models that the script has left, by rank."""
        return dict(enumerate(self._ask(ListModels())))

    def lint(self) -> LintReport:
        """Return the faults of the sharded models that the script has left."""
        return cast(LintReport, self._report(Lint()))

    def verify(self, model: str, fn: str, *, repeat: bool) -> VerifyReport:
        """Compare a step of the script's function ``fn`` with that of an unsharded copy of ``model``.

        Args:
            model: the variable that holds it; empty: the only one.
            fn: the function.
            repeat: run the sharded step twice instead, and compare all bits.

        Raises:
            UsageError: there is no such model or function.
        """
        return cast(VerifyReport, self._report(_made(lambda: Verify(model, fn, repeat=repeat))))

    def _report(self, command: Command) -> Report:
        names: dict[int, Names] = dict(enumerate(self._ask(ListNames())))
        known = {rank: RecordSummary() for rank in self._ranks}
        header = header_from_dict(self._call("ask", encode(Drain(known=known)))[0]["header"])
        check(command, names, header, self._num_ranks, lambda _: False)
        replies = self._call("execute", to_dict(command))
        return REPORT_MAKERS[type(command)]([decode(type(command).reply, reply, "reply") for reply in replies])

    def _ask(self, request: ListModels | ListNames) -> list[Any]:
        return [decode(type(request).reply, answer, "answer") for answer in self._call("ask", encode(request))]

    # ---- processes

    def _start(self, number: int) -> None:
        (read_request, write_request), (read_answer, write_answer) = os.pipe(), os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM.format(self.main, read_request, write_answer)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(read_request, write_answer),
                process_group=0,  # Ctrl-C of a terminal is for this process, which ends them
            )
        finally:
            os.close(read_request)
            os.close(write_answer)
        rank = self._ranks[number] = _RankProcess(process, os.fdopen(write_request, "wb", buffering=0), read_answer)
        for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr"), (read_answer, "")):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
            self._selector.register(cast("int", stream), selectors.EVENT_READ, (rank, name, decoder))

    def _end(self, *, at_once: bool = True) -> None:
        """End the ranks, and every process that they have started."""
        for rank in self._ranks.values():
            rank.requests.close()
        until = time.monotonic() + (0 if at_once else END_S)
        for rank in self._ranks.values():
            with rank.process as process:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(until - time.monotonic(), 0))
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            os.close(rank.answers)
        self._selector.close()

    # ---- requests

    def _call(self, function: str, *given: Any) -> list[Any]:  # noqa: ANN401 - JSON data
        """Return what ``function`` returns on each rank, called with its own of ``given``, or with the only one.

        Raises:
            UsageError: the workbench refuses what is asked for.
            RankError, RankDied, Interrupted: a rank failed, or the user interrupted.
        """
        for number, rank in self._ranks.items():
            rank.reply = None
            request = {"function": function, "given": given[number if len(given) > 1 else 0]}
            with suppress(BrokenPipeError):  # its end is noticed below
                rank.requests.write(f"{json.dumps(request)}\n".encode())
        failures: dict[int, Failure] = {}
        patience = None
        try:
            while any(rank.reply is None for rank in self._ranks.values()):
                self._read(TICK_S)
                for number, rank in self._ranks.items():
                    if number not in failures and (failure := _failure(number, rank)) is not None:
                        failures[number] = failure
                        patience = patience or time.monotonic() + GRACE_S
                if patience is not None and time.monotonic() > patience:
                    break
        except KeyboardInterrupt:
            raise Interrupted("interrupted: the ranks have ended") from None
        while self._read(0):
            pass
        if failures:
            if self._stream is not None:
                self._stream.finish(self._on_output, also_agreement=False)
            raise _error_of(list(failures.values()))
        return [cast("dict[str, Any]", rank.reply)["value"] for rank in self._ranks.values()]

    def _read(self, timeout_s: float) -> int:
        """Read what ranks have written and answered; return from how many pipes."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            rank, name, decoder = key.data
            data = os.read(key.fd, 1 << 16)
            text = decoder.decode(data)
            if not data:
                self._selector.unregister(key.fileobj)
            elif name:
                rank.written.outputs.append(Output(name, text=text))
            else:
                answer, end, rank.unread = (rank.unread + text).partition("\n")
                rank.reply, rank.unread = (json.loads(answer), "") if end else (rank.reply, answer)
        if self._stream is not None:
            self._stream.forward(self._on_output)
        return len(ready)


def run_of(script: str, args: Sequence[str], *, module: bool = False) -> Run:
    """Return the command that runs a script: also before ranks start, to refuse at once what is not there.

    Raises:
        UsageError: there is no such script.
    """
    return with_script(_made(lambda: Run(script, args, module=module)))


def _made(command: Callable[[], C]) -> C:
    """Return a command.

    Raises:
        UsageError: it rejects what it is given.
    """
    try:
        return command()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _error_of(failures: Sequence[Failure]) -> WorkbenchError:
    """Return the error to raise for failures: a refusal of the workbench itself as it is."""
    first = failures[0]
    return UsageError(first.evalue) if first.ename == UsageError.__name__ else to_error(failures, {}, next_thing="")


def _failure(number: int, rank: _RankProcess) -> Failure | None:
    """Return how a rank has failed; None if it has not."""
    if rank.reply is None and (code := rank.process.poll()) is not None:
        rank.reply = {}
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Failure(rank=number, evalue=f"rank {number} died: the process {how}", died=True)
    error = (rank.reply or {}).get("error")
    return None if error is None else Failure(rank=number, **error)
