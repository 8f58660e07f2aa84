"""All uses of private parts of ipyparallel and ipykernel, on the engine and on the kernel.

On the engine, :func:`install` adds requests of type ``workbench_request`` to the control channel, which the engine
serves in its "Control" thread, one at a time, even while the main thread is busy. It also reports the line at which a
cell failed. :func:`call` runs a function by its name.

On the kernel, :class:`Wire` sends requests to single engines on both channels, and :class:`Exchange` waits for the
reply *and* the last output of a request on the shell channel, which arrive on different sockets.

The private parts are: ``Client._send``, its sockets, addresses, IO loop, futures and callbacks;
``MessageFuture.iopub_callbacks``; ``OutStream._original_stdstream_copy``; ``Kernel.control_handlers`` and
``Kernel.process_control``; how ``IPEngine`` connects. :func:`check_version` and a test detect changes in them.
"""

from __future__ import annotations

import faulthandler
import inspect
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import ipyparallel
import zmq
from ipyparallel.error import RemoteError

from workbench.base.codec import decode
from workbench.cluster.child_output import ChildOutput
from workbench.cluster.controller_heartbeat import GRACE_S, HeartbeatMonitor, end_when_alone, end_with_main_thread
from workbench.cluster.host_liveness import HostMonitor
from workbench.cluster.pending_replies import Answer, Output, OutputKind, settle
from workbench.cluster.remote_errors import let_go, render, report, undisturbed, user_line
from workbench.cluster.step_marks import StepMarks, without_marks
from workbench.errors import ClusterError, RankError, UsageError, printable, shortened
from workbench.protocol.starting import Address, crash_file

REQUEST, REPLY, INTERRUPT, HOLD = "workbench_request", "workbench_reply", "workbench_interrupt", "workbench_hold"
SILENT = "workbench_silent"
INSTALL = f"{__name__}:install"
ERROR_MIME = "application/vnd.workbench.error+json"

# how long the control thread waits for the interpreter while the main thread runs Python code; every request waits
# repeatedly, so it is less than Python's default of 5 ms
_SWITCH_S = 0.001

# limit between a request's reply and its last output, in either order; after it one of them counts as lost
_STRAGGLER_S = 3.0

# such limits until a reply counts as lost that no interrupt can have swallowed: a busy machine passes it on late
_REPLY_LIMITS = 10

# parameters of Client._send used below
_SEND_PARAMETERS = {"socket", "msg_type", "content", "ident", "track_outstanding", "message_future_hook"}


def check_version() -> None:
    """Check that this file supports the installed ipyparallel.

    Raises:
        ClusterError: it does not.
    """
    send = getattr(ipyparallel.Client, "_send", None)
    known = send is not None and inspect.signature(send).parameters.keys() >= _SEND_PARAMETERS
    if ipyparallel.version_info[0] != 9 or not known:
        raise ClusterError(
            f"ipyparallel {ipyparallel.__version__} is installed, but 9.2 is required: "
            "pip install 'ipyparallel>=9.2,<10'"
        )


# --------------------------------------------------------------------- on the engine


def call(name: str, args: Sequence[Any]) -> dict[str, Any]:
    """Call the function ``name`` with ``args``; return ``{"value": ...}`` or ``{"error": ...}`` (:func:`report`)."""
    try:
        return {"value": resolve_name(name)(*args)}
    except BaseException as error:  # noqa: BLE001 - any exception, an interrupt too, is the reply
        with undisturbed():
            shell = _kernel().shell
            answer = {"error": report(error, shell, render(error, shell))}
            let_go(error, shell)
            return answer
    finally:
        _put_streams_back()
        if standing["children"] is not None:
            standing["children"].take()


def _put_streams_back() -> None:
    """Restore the engine's stdout and stderr where the user's code left an object that cannot be flushed.

    ipyparallel flushes both before it sends a reply; with ``sys.stdout = None`` or a closed file it would send none. A
    working stream of the user's is kept.
    """
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except Exception:  # noqa: BLE001 - the user's object may raise anything
            setattr(sys, name, standing[name])


standing: dict[str, Any] = dict.fromkeys(("world", "lookout", "children", "stdout", "stderr", "has_log", "crashes"))
"""State of an engine as a rank: its :class:`~workbench.protocol.starting.World` as data, the
:class:`~workbench.cluster.host_liveness.HostMonitor` of other hosts, the
:class:`~workbench.cluster.child_output.ChildOutput`, the streams that publish its output, whether it has a log, and
else the descriptor of the file for its stacks. Each is None until the engine first is a rank. The world and the
descriptor are None again when it no longer is one; the lookout is None when it monitors no host."""


def install(handler_name: str, world: dict[str, Any], hosts: dict[str, Any]) -> None:
    """Serve the workbench's requests on the control channel of this engine.

    Args:
        handler_name: ``"module:function"`` that takes the request (JSON data) and returns the reply (JSON data) and
            its binary buffers. It is called in the control thread and must not block. A function ``current_step`` of
            its module returns the training step, for marks in what this process writes; without one there are none.
        world: the world that this engine now belongs to.
        hosts: the hosts to monitor, by name: an :class:`~workbench.protocol.starting.Address` each, as data.
    """
    kernel = _kernel()
    handler = resolve_name(handler_name)
    _leave()
    standing["world"] = world
    if hosts:
        standing["lookout"] = HostMonitor({name: decode(Address, at, name) for name, at in hosts.items()})

    def serving(handle: Callable[..., Any]) -> Callable[..., Any]:
        async def serve(stream: Any, ident: Any, parent: dict[str, Any]) -> None:  # noqa: ANN401 - ipykernel's own
            content, buffers = _serve(handle, parent["content"])
            try:
                kernel.session.send(stream, REPLY, content, parent, ident=ident, buffers=buffers)
            except (TypeError, ValueError) as error:  # not plain data: the caller needs a reply
                kernel.session.send(stream, REPLY, {"error": report(error, kernel.shell)}, parent, ident=ident)

        return serve

    is_first = REQUEST not in kernel.control_handlers
    served = {REQUEST: handler, INTERRUPT: _interrupt, HOLD: _hold, SILENT: _silent}
    kernel.control_handlers.update({kind: serving(handle) for kind, handle in served.items()})
    if is_first:  # the engine may have been a rank before
        _adapt(kernel)
        step = getattr(sys.modules[handler.__module__], "current_step", None)
        if step is not None:
            StepMarks(sys.stdout, step)
            StepMarks(sys.stderr, step)
    if not standing["has_log"]:
        _note_crashes()


def _adapt(kernel: Any) -> None:  # noqa: ANN401 - untyped in ipyparallel
    """Set up an engine's kernel for a rank."""
    sys.setswitchinterval(_SWITCH_S)
    _serve_without_ado(kernel)
    log = _freed_log()
    standing["children"] = children = ChildOutput(log)
    standing["has_log"] = log is not None
    faulthandler.enable(2)  # which is now the log, where this process has one
    standing["stdout"], standing["stderr"] = sys.stdout, sys.stderr
    kernel.shell.events.register("post_run_cell", lambda _: _put_streams_back())
    kernel.shell.events.register("post_run_cell", lambda _: children.take())
    kernel.shell.events.register("post_run_cell", _publish_error)
    kernel.session.pack = _sendable(kernel.session.pack)
    kernel.shell.ask_exit = _refuse_exit
    _note_errors_of_display(kernel.shell)
    _repair_await(kernel)
    _end_when_alone()
    threading.Thread(target=end_with_main_thread, args=(GRACE_S,), name="workbench: end", daemon=True).start()


def _note_crashes() -> None:
    """Write the stacks of this process into a file of its host when C code ends it.

    Without a log, stderr is a pipe that this process itself reads.
    """
    path = crash_file()
    with suppress(OSError):  # such as a full disk: there is no place for them
        path.unlink(missing_ok=True)  # of a process that had the same id
        standing["crashes"] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        faulthandler.enable(standing["crashes"])


def _freed_log() -> int | None:
    """Return the descriptor of this engine's log, for the text of C code alone.

    Except under pytest, ipykernel has replaced stdout and stderr by pipes, and copies their text to the log. It no
    longer copies stdout. Returns None where there are no such pipes, or the engine writes its own messages to the log.
    """
    from ipyparallel.engine.app import IPEngine  # noqa: PLC0415 - only an engine has one

    if IPEngine.instance().log_level < logging.ERROR:
        return None
    logs = [getattr(stream, "_original_stdstream_copy", None) for stream in (sys.stdout, sys.stderr)]
    if logs[0] is not None and logs[1] is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, logs[0])  # else the log's reader would show it again
        os.close(nowhere)
    return logs[1]


def _sendable(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a ``pack`` that cuts the messages of exceptions, and sends lone surrogates as their escapes."""

    def packed(content: Any) -> bytes:  # noqa: ANN401 - JSON data
        if isinstance(content, dict) and isinstance(content.get("evalue"), str):
            content = {**content, "evalue": shortened(content["evalue"])}
        try:
            return pack(content)
        except UnicodeEncodeError:
            return pack(_all_printable(content))

    return packed


def _all_printable(data: Any) -> Any:  # noqa: ANN401 - JSON data
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {_all_printable(key): _all_printable(value) for key, value in data.items()}
    return [_all_printable(each) for each in data] if isinstance(data, list | tuple) else data


def _refuse_exit() -> None:
    """Replace what ``exit()`` does in a cell: it would end this rank, a moment after the cell's success."""
    raise UsageError("exit() would end the ranks: %fsdp stop ends them; return, or raise an exception, to end a cell")


def _note_errors_of_display(shell: Any) -> None:  # noqa: ANN401 - untyped in ipykernel
    """Publish an exception that displaying a value raised: the reply of the cell does not name it."""
    show = shell._showtraceback

    def showtraceback(etype: type[BaseException], evalue: BaseException, lines: list[str]) -> None:
        show(etype, evalue, lines)
        if getattr(shell, "_last_traceback_during_displayhook", False):
            shell.display_pub.publish({ERROR_MIME: report(evalue, shell, "\n".join(lines))})

    shell._showtraceback = showtraceback


def _end_when_alone() -> None:
    """Make a rank end itself when its controller is silent for as long as ipyparallel allows an engine.

    ipyparallel's own check runs in the main thread, so a rank that waits in a collective would stay for ever. It also
    listens to a process that outlives the controller's.
    """
    from ipyparallel.engine.app import IPEngine  # noqa: PLC0415 - only an engine has one

    engine = IPEngine.instance()
    if engine.max_heartbeat_misses <= 0:
        return
    connect, _ = engine.init_connector()
    args = (
        engine.context.socket(zmq.DEALER),
        lambda socket: connect(socket, engine.registration_url),
        engine.max_heartbeat_misses * engine.hb_check_period / 1000,
        lambda: standing["world"] is not None,
    )
    threading.Thread(target=end_when_alone, args=args, name="workbench: controller heartbeat", daemon=True).start()


def _interrupt(_: dict[str, Any]) -> tuple[None, list[memoryview]]:
    """Send SIGINT to the main thread of this process."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    # ipykernel's handler cancels an awaiting cell by a callback, but does not wake the loop
    _kernel().io_loop.add_callback(lambda: None)
    return None, []


def _hold(request: dict[str, Any]) -> tuple[Any, list[memoryview]]:
    """Apply a hold request and return the world of this engine afterwards.

    ``{}`` changes nothing. ``{"holder": H, "take": False}`` makes H the holder if there is none; with ``take`` even if
    there is one. ``{"holder": None, "take": True}`` releases the engine. ``{"leave": True}``: it is no rank any more.
    """
    world = standing["world"]
    if request.get("leave"):
        _leave()
    elif world is not None and "holder" in request and (world["holder"] is None or request["take"]):
        world["holder"] = request["holder"]
    return standing["world"], []


def _leave() -> None:
    """Stop being a rank: drop the world and the monitor of other hosts."""
    standing["world"] = None
    if standing["lookout"] is not None:
        standing["lookout"].close()
        standing["lookout"] = None
    if standing["crashes"] is not None:
        faulthandler.enable(2)
        os.close(standing["crashes"])
        standing["crashes"] = None
        crash_file().unlink(missing_ok=True)


def _silent(_: dict[str, Any]) -> tuple[Sequence[str], list[memoryview]]:
    """Return the names of the silent hosts."""
    lookout = standing["lookout"]
    return ([] if lookout is None else lookout.silent), []


def _serve_without_ado(kernel: Any) -> None:  # noqa: ANN401 - untyped in ipyparallel
    """Serve requests on the control channel without publishing the kernel's busy and idle status.

    ipykernel publishes it around every control message and flushes stdout and stderr, which takes four messages to
    another thread. Nothing reads them, and ranks get ten requests a second while they train: this halves the CPU time
    of a request.
    """
    session, process = kernel.session, kernel.process_control

    async def process_control(message: Any) -> None:  # noqa: ANN401 - frames of ZeroMQ
        idents, frames = session.feed_identities(message, copy=False)
        header = bytes(frames[1])
        kind = next((kind for kind in (REQUEST, SILENT) if kind.encode() in header), None)
        if kind is None:
            await process(message)
            return
        request = session.deserialize(frames, content=True, copy=False)  # raises on a wrong signature
        await kernel.control_handlers[kind](kernel.control_stream, idents, request)

    kernel.process_control = process_control


class _NoShellThread:
    """Stand-in for the shell channel thread that an engine's kernel lacks."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


def _repair_await(kernel: Any) -> None:  # noqa: ANN401 - untyped in ipyparallel
    """Let cells use a top-level ``await``.

    ipykernel 7 reads ``parent_thread`` of its shell channel thread before it runs such a cell. An engine has no such
    thread, so the access fails and the request is never answered.
    """
    if kernel.shell_channel_thread is None:
        type(kernel)._supports_kernel_subshells = False  # a property that would now say True
        kernel.shell_channel_thread = _NoShellThread()


def _serve(handler: Callable[..., Any], request: dict[str, Any]) -> tuple[dict[str, Any], list[memoryview]]:
    try:
        content, buffers = handler(request)
    except Exception as error:  # noqa: BLE001 - any exception is the reply
        return {"error": report(error, _kernel().shell)}, []
    return {"content": content}, buffers


def _publish_error(result: Any) -> None:  # noqa: ANN401 - IPython's ExecutionResult
    error = None if result is None else result.error_before_exec or result.error_in_exec
    if error is not None:
        shell = _kernel().shell
        shell.display_pub.publish({ERROR_MIME: user_line(error, shell)})  # the reply has the rest
        let_go(error, shell)  # IPython has rendered it


def _kernel() -> Any:  # noqa: ANN401 - untyped in ipyparallel
    from ipyparallel.engine.kernel import IPythonParallelKernel  # noqa: PLC0415 - only an engine has one

    return IPythonParallelKernel.instance()


# --------------------------------------------------------------------- on the kernel


class Wire:
    """The connection to a cluster's engines; an engine is identified by its session id.

    Args:
        connection_file: the controller's connection file for clients.
        timeout_s: timeout of the connection to the controller, in seconds.
        on_gone: called in the client's IO thread with each engine that the controller reports gone.
        on_silence: called in a separate thread when the controller's heartbeats stop; None: they are not monitored.

    Raises:
        TimeoutError: the controller did not answer.
        ClusterError: the installed ipyparallel is not supported.
    """

    def __init__(
        self,
        connection_file: Path,
        timeout_s: float,
        on_gone: Callable[[str], None],
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        check_version()
        self._client = ipyparallel.Client(str(connection_file), timeout=timeout_s)
        self._on_gone = on_gone
        self._client._registration_callbacks.append(self._note)
        self._num_interrupts = Counter[int]()  # by rank
        # through a tunnel the heartbeats would be the tunnel's
        self._listener = None
        if on_silence is not None and not self._client._ssh:
            self._listener = HeartbeatMonitor(self._client._config["notification"], self._client, on_silence)

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "unregister":
            self._on_gone(str(event["uuid"]))

    def engines(self) -> dict[str, int]:
        """Return the ipyparallel engine id of every engine that has registered, by session id."""
        # not Client.ids, which the IO thread fills first
        return {str(engine): number for number, engine in dict(self._client._engines).items()}

    def call(self, engine: str, name: str, args: Sequence[Any], exchange: Exchange) -> None:
        """Run ``name`` with ``args`` in the engine's main thread."""
        self._apply(engine, call, [name, args], exchange)

    def evaluate(self, engine: str, program: str, expression: str, exchange: Exchange) -> None:
        """Run ``program`` in the engine's main thread, in a fresh namespace; the reply is the value of ``expression``.

        Both are sent as text, so the engine need not have the workbench.
        """
        names = {"program": program, "expression": expression, "__name__": "program of a notebook"}
        run = "[exec(program, globals()), {'value': eval(expression, globals())}][1]"
        self._apply(engine, eval, [run, names], exchange)

    def _apply(self, engine: str, function: Callable[..., Any], args: list[Any], exchange: Exchange) -> None:
        client = self._client
        client.send_apply_request(
            client._mux_stream, function, args, ident=engine.encode(), message_future_hook=exchange.attach
        )

    def cell(self, engine: str, code: str, exchange: Exchange) -> None:
        """Run ``code`` as a cell in the engine's main thread."""
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,  # else the engine drops a cell sent right after a failed one
        }
        client = self._client
        client._send(
            client._mux_stream,
            "execute_request",
            content=content,
            ident=engine.encode(),
            track_outstanding=True,
            message_future_hook=exchange.attach,
        )

    def exchange(self, rank: int, answer: Answer) -> Exchange:
        """Return the receiver of the reply and the outputs of one request on the shell channel."""
        before = self._num_interrupts[rank]
        return Exchange(self._client._io_loop, rank, answer, lambda: self._num_interrupts[rank] > before)

    def ask(self, engine: str, rank: int, kind: str, request: dict[str, Any], future: Future[Any]) -> str:
        """Send ``request`` on the engine's control channel and return the message id.

        Args:
            engine: its session id.
            rank: its rank, for error messages.
            kind: :data:`REQUEST` or another message type that :func:`install` serves.
            request: JSON data.
            future: completes with the reply and its binary buffers, or with the exception.
        """
        client = self._client
        self._num_interrupts[rank] += kind == INTERRUPT
        message = client._send(client._control_stream, kind, content=request, ident=engine.encode())
        message.add_done_callback(lambda done: settle(future, _side_outcome(rank, done.result())))
        return str(message.msg_id)

    def later(self, delay_s: float, do: Callable[[], object]) -> None:
        """Call ``do`` in the client's IO thread after ``delay_s`` seconds, if the thread still runs."""
        loop = self._client._io_loop
        loop.add_callback(loop.call_later, delay_s, do)

    def forget(self, message_id: str) -> None:
        """Stop waiting for the reply to a request on the control channel."""
        self._client._futures.pop(message_id, None)

    def shut_down_engines(self) -> None:
        """Have every engine end its process after its current request, without waiting."""
        self._client.shutdown(block=False)

    def close(self) -> None:
        """Close the connection; unsent messages are dropped."""
        if self._listener is not None:
            self._listener.close()
        self._client.close(linger=0)


class Exchange:
    """One request to one rank on the shell channel; complete when its reply and its last output have arrived.

    Its methods run in the client's IO thread. If one of the two is lost, the other one completes it, a moment after the
    newest message. A SIGINT in the engine's own code can lose a reply, which then counts as a KeyboardInterrupt.

    Args:
        loop: the client's IO loop.
        rank: the rank.
        answer: receives reply and outputs.
        was_interrupted: returns whether the rank was sent SIGINT since the request.
    """

    def __init__(self, loop: Any, rank: int, answer: Answer, was_interrupted: Callable[[], bool]) -> None:  # noqa: ANN401 - tornado's IOLoop
        self._loop = loop
        self._rank = rank
        self._answer = answer
        self._was_interrupted = was_interrupted
        self._reply: Any = None
        self._report: dict[str, Any] = {}
        self._is_replied = self._is_idle = False
        self._num_messages = 0
        self._limits_left = _REPLY_LIMITS

    def attach(self, message: Any) -> None:  # noqa: ANN401 - ipyparallel's MessageFuture
        """Listen to the request's outputs and reply, before it is sent."""
        message.iopub_callbacks.append(self._on_output)
        message.output.add_done_callback(lambda _: self._on_last_output())
        message.add_done_callback(lambda done: self._on_reply(done.result()))

    def _on_reply(self, reply: Any) -> None:  # noqa: ANN401 - ExecuteReply, RemoteError or a value
        if isinstance(reply, RemoteError) and reply.ename == "EngineError" and not reply.engine_info:
            return  # the client's error for a lost engine; the cluster reports it with more detail
        self._reply, self._is_replied = reply, True
        self._advance()

    def _on_last_output(self) -> None:
        self._is_idle = True
        self._advance()

    def _on_output(self, message: dict[str, Any]) -> None:
        self._num_messages += 1
        kind, content = message["header"]["msg_type"], message["content"]
        if ERROR_MIME in content.get("data", {}):
            self._report = content["data"][ERROR_MIME]
        elif (output := as_output(kind, content)) is not None:
            self._answer.outputs.append(output)

    def _advance(self) -> None:
        if self._is_replied and self._is_idle:
            self._finish()
        elif self._is_replied or self._is_idle:
            self._loop.call_later(_STRAGGLER_S, self._give_up_unless_heard, self._num_messages)

    def _give_up_unless_heard(self, num_messages: int) -> None:
        if self._answer.future.done():
            return
        self._limits_left -= 1
        may_come = not (self._is_replied or self._was_interrupted()) and self._limits_left > 0
        if may_come or self._num_messages != num_messages:
            self._loop.call_later(_STRAGGLER_S, self._give_up_unless_heard, self._num_messages)
            return
        if self._is_replied:
            self._finish()
        elif self._was_interrupted():
            self._reply = {"error": {"ename": "KeyboardInterrupt", "evalue": "", "traceback": "", "line": None}}
            self._finish()
        else:
            settle(self._answer.future, ClusterError(f"rank {self._rank} ended its request without a reply"))

    def _finish(self) -> None:
        settle(self._answer.future, _front_outcome(self._rank, self._reply, self._report))


def as_output(kind: str, content: dict[str, Any]) -> Output | None:
    """Return a Jupyter message as an :class:`Output`; None if it is not an output."""
    if kind == "stream":
        text, steps = without_marks(content["text"])
        return Output("stderr" if content["name"] == "stderr" else "stdout", text=text, steps=steps)
    kinds: dict[str, OutputKind] = {
        "display_data": "display",
        "update_display_data": "update",
        "execute_result": "result",
        "clear_output": "clear",
    }
    if kind not in kinds:
        return None
    return Output(
        kinds[kind],
        data=content.get("data", {}),
        metadata=content.get("metadata", {}),
        display_id=content.get("transient", {}).get("display_id", ""),
    )


def _front_outcome(rank: int, reply: Any, cell_report: dict[str, Any]) -> Any:  # noqa: ANN401 - any value
    """Return the value of a rank's reply, or the exception."""
    if isinstance(reply, RemoteError):
        text = {"ename": reply.ename, "evalue": reply.evalue, "traceback": reply.traceback}
        return as_error(rank, {"line": None, **text, **cell_report})
    if isinstance(reply, Exception):
        return ClusterError(f"rank {rank} did not run the request: {reply}")
    if isinstance(reply, dict) and "error" in reply:
        return as_error(rank, reply["error"])
    return reply["value"] if isinstance(reply, dict) else None


def _side_outcome(rank: int, message: dict[str, Any]) -> tuple[Any, Sequence[memoryview]] | RankError:
    """Return the data and the binary buffers of a reply, or the exception."""
    content = message["content"]
    if "error" in content:
        return as_error(rank, content["error"])
    return content["content"], message["buffers"]


def as_error(rank: int, reported: dict[str, Any]) -> RankError:
    """Return a :func:`report` of an exception on ``rank`` as a :class:`~workbench.errors.RankError`."""
    what = ": ".join(part for part in (reported["ename"], reported["evalue"]) if part)
    where = f"rank {rank}" if reported["line"] is None else f"rank {rank}, line {reported['line']}"
    return RankError(f"{where}: {what}", rank=rank, **reported)
