"""Everything private of ipyparallel and ipykernel that the cluster uses, on both ends of the wire.

On the engine's end :func:`install` opens the side door: requests of type ``workbench_request`` on the control channel,
which the engine serves in its own "Control" thread, one at a time, even while the main thread is busy. It also reports
the line at which a cell failed. :func:`call` runs a function by its name.

On the kernel's end :class:`Wire` sends both kinds of requests to one engine each, and :class:`Exchange` waits for a
front-door request's reply *and* its last output, which arrive on different sockets.

Private here means: ``Client._send``, its sockets, addresses, IO loop, futures and callbacks;
``MessageFuture.iopub_callbacks``; ``Kernel.control_handlers`` and ``Kernel.process_control``; of ``IPEngine`` how it
connects. :func:`check_version` and a test notice when they change.
"""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ipyparallel
import zmq
from ipyparallel.error import RemoteError

from workbench.cluster.child_output import ChildOutput
from workbench.cluster.controller_heartbeat import GRACE_S, HeartbeatMonitor, end_when_alone, end_with_main_thread
from workbench.cluster.host_liveness import HostMonitor
from workbench.cluster.pending_replies import Answer, Output, OutputKind, settle
from workbench.cluster.remote_errors import cell_line, let_go, render, report, undisturbed
from workbench.codec import decode
from workbench.errors import ClusterError, RankError
from workbench.protocol.starting import Address

REQUEST, REPLY, INTERRUPT, HOLD = "workbench_request", "workbench_reply", "workbench_interrupt", "workbench_hold"
SILENT = "workbench_silent"
INSTALL = f"{__name__}:install"
ERROR_MIME = "application/vnd.workbench.error+json"

# how long the side door waits until the main thread, which computes in Python, lets it have the interpreter: once and
# again for every request, and so less than the 5 ms that Python waits by itself
_SWITCH_S = 0.001

# between a request's reply and its last output (either may be first); longer only when one of them was lost
_STRAGGLER_S = 3.0

# parameters of Client._send that are used below
_SEND_PARAMETERS = {"socket", "msg_type", "content", "ident", "track_outstanding", "message_future_hook"}


def check_version() -> None:
    """Check that the ipyparallel installed is one this file was written for.

    Raises:
        ClusterError: it is another one.
    """
    send = getattr(ipyparallel.Client, "_send", None)
    known = send is not None and inspect.signature(send).parameters.keys() >= _SEND_PARAMETERS
    if ipyparallel.version_info[0] != 9 or not known:
        raise ClusterError(
            f"ipyparallel {ipyparallel.__version__} is installed, 9.2 is needed: pip install 'ipyparallel>=9.2,<10'"
        )


# --------------------------------------------------------------------- on the engine


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that ``"module:function"`` names, importing its module."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def call(name: str, args: Sequence[Any]) -> dict[str, Any]:
    """Call the function ``name`` with ``args``; return ``{"value": ...}`` or ``{"error": ...}`` (:func:`report`)."""
    try:
        return {"value": resolve(name)(*args)}
    except BaseException as error:  # noqa: BLE001 - whatever it raises, an interrupt too, is the answer
        with undisturbed():
            shell = _kernel().shell
            answer = {"error": report(error, shell, render(error, shell))}
            let_go(error)
            return answer
    finally:
        _put_streams_back()
        if standing["children"] is not None:
            standing["children"].take()


def _put_streams_back() -> None:
    """Give this engine its stdout and stderr back where the user's code has left something that cannot be flushed.

    ipyparallel flushes both before it sends a reply: with ``sys.stdout = None`` or a closed file it would send none.
    A stream of the user's that works stays.
    """
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except Exception:  # noqa: BLE001 - whatever the user's object raises
            setattr(sys, name, standing[name])


standing: dict[str, Any] = {"world": None, "lookout": None, "children": None, "stdout": None, "stderr": None}
"""What an engine keeps while it is a rank: its :class:`~workbench.protocol.starting.World` as data, the
:class:`~workbench.cluster.host_liveness.HostMonitor` for other hosts, the
:class:`~workbench.cluster.child_output.ChildOutput`, and the streams that publish what it prints. Each is None until
this engine is first a rank; the world is None again when it no longer is one, and the lookout where it watches no other
host."""


def install(handler_name: str, world: dict[str, Any], hosts: dict[str, Any]) -> None:
    """Open the side door of this engine.

    Args:
        handler_name: ``"module:function"`` that takes the request (JSON data) and returns the reply (JSON data) and
            what goes beside it. It is called in the control thread and must not block.
        world: what this engine is part of now.
        hosts: by name, which it looks at whether they are there, and where: an
            :class:`~workbench.protocol.starting.Address` each, as data.
    """
    kernel = _kernel()
    handler = resolve(handler_name)
    _leave()
    standing["world"] = world
    if hosts:
        standing["lookout"] = HostMonitor({name: decode(Address, at, name) for name, at in hosts.items()})

    def serving(handle: Callable[..., Any]) -> Callable[..., Any]:
        async def serve(stream: Any, ident: Any, parent: dict[str, Any]) -> None:  # noqa: ANN401 - ipykernel's own
            content, buffers = _serve(handle, parent["content"])
            try:
                kernel.session.send(stream, REPLY, content, parent, ident=ident, buffers=buffers)
            except (TypeError, ValueError) as error:  # not plain data: tell the one who asked, who would wait in vain
                kernel.session.send(stream, REPLY, {"error": report(error, kernel.shell)}, parent, ident=ident)

        return serve

    is_first = REQUEST not in kernel.control_handlers
    served = {REQUEST: handler, INTERRUPT: _interrupt, HOLD: _hold, SILENT: _silent}
    kernel.control_handlers.update({kind: serving(handle) for kind, handle in served.items()})
    if is_first:  # it may have been a rank before
        _adapt(kernel)


def _adapt(kernel: Any) -> None:  # noqa: ANN401 - untyped in ipyparallel
    """Have an engine's kernel do what a rank's must."""
    sys.setswitchinterval(_SWITCH_S)
    _serve_without_ado(kernel)
    standing["children"] = children = ChildOutput()
    standing["stdout"], standing["stderr"] = sys.stdout, sys.stderr
    kernel.shell.events.register("post_run_cell", lambda _: _put_streams_back())
    kernel.shell.events.register("post_run_cell", lambda _: children.take())
    kernel.shell.events.register("post_run_cell", _publish_error)
    _repair_await(kernel)
    _end_when_alone()
    threading.Thread(target=end_with_main_thread, args=(GRACE_S,), name="workbench: end", daemon=True).start()


def _end_when_alone() -> None:
    """Have a rank end by itself once its controller was not heard for as long as ipyparallel lets an engine go on.

    ipyparallel's own check is made in the main thread, and so not while that is busy: a rank that waits for others in a
    collective would stay for ever. And what it listens to is a process that outlives the controller's.
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
    threading.Thread(target=end_when_alone, args=args, name="workbench: alone", daemon=True).start()


def _interrupt(_: dict[str, Any]) -> tuple[None, list[memoryview]]:
    """Send SIGINT to the main thread of this process."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    # a cell that awaits is cancelled by a callback that ipykernel's handler adds without waking the loop
    _kernel().io_loop.add_callback(lambda: None)
    return None, []


def _hold(asked: dict[str, Any]) -> tuple[Any, list[memoryview]]:
    """Return the world that this engine is part of, after what was asked: one who holds it, or that nobody does.

    ``{}``: nothing is asked. ``{"holder": H, "take": False}``: H holds it if nobody else does; ``take``: all the same.
    ``{"holder": None, "take": True}``: nobody does. ``{"leave": True}``: it is no rank any more.
    """
    world = standing["world"]
    if asked.get("leave"):
        _leave()
    elif world is not None and "holder" in asked and (world["holder"] is None or asked["take"]):
        world["holder"] = asked["holder"]
    return standing["world"], []


def _leave() -> None:
    """Be no rank any more."""
    standing["world"] = None
    if standing["lookout"] is not None:
        standing["lookout"].close()
        standing["lookout"] = None


def _silent(_: dict[str, Any]) -> tuple[Sequence[str], list[memoryview]]:
    """Return the names of the hosts of which nothing is heard here."""
    lookout = standing["lookout"]
    return ([] if lookout is None else lookout.silent), []


def _serve_without_ado(kernel: Any) -> None:  # noqa: ANN401 - untyped in ipyparallel
    """Serve requests of the side door without telling everybody that the kernel is busy and idle again.

    ipykernel does so around every control message, and flushes stdout and stderr: four messages to another thread, two
    of them published. Nobody listens, and ranks that are asked ten times a second train meanwhile: this halves the CPU
    time of a request.
    """
    session, process = kernel.session, kernel.process_control

    async def process_control(message: Any) -> None:  # noqa: ANN401 - frames of ZeroMQ
        idents, frames = session.feed_identities(message, copy=False)
        header = bytes(frames[1])
        kind = next((kind for kind in (REQUEST, SILENT) if kind.encode() in header), None)
        if kind is None:
            await process(message)
            return
        request = session.deserialize(frames, content=True, copy=False)  # raises if it is not signed
        await kernel.control_handlers[kind](kernel.control_stream, idents, request)

    kernel.process_control = process_control


class _NoShellThread:
    """What an engine's kernel has instead of a shell channel thread."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


def _repair_await(kernel: Any) -> None:  # noqa: ANN401 - untyped in ipyparallel
    """Let cells use a top-level ``await``.

    ipykernel 7 asks its shell channel thread for its parent before it runs such a cell. An engine has no such thread:
    the question fails, and the request is never answered.
    """
    if kernel.shell_channel_thread is None:
        type(kernel)._supports_kernel_subshells = False  # a property that would now say True
        kernel.shell_channel_thread = _NoShellThread()


def _serve(handler: Callable[..., Any], request: dict[str, Any]) -> tuple[dict[str, Any], list[memoryview]]:
    try:
        content, buffers = handler(request)
    except Exception as error:  # noqa: BLE001 - whatever it is must reach the one who asked
        return {"error": report(error, _kernel().shell)}, []
    return {"content": content}, buffers


def _publish_error(result: Any) -> None:  # noqa: ANN401 - IPython's ExecutionResult
    error = None if result is None else result.error_before_exec or result.error_in_exec
    if error is not None:
        shell = _kernel().shell
        shell.display_pub.publish({ERROR_MIME: {"line": cell_line(error, shell)}})  # the rest comes with the reply
        let_go(error)  # IPython has shown it


def _kernel() -> Any:  # noqa: ANN401 - untyped in ipyparallel
    from ipyparallel.engine.kernel import IPythonParallelKernel  # noqa: PLC0415 - only an engine has one

    return IPythonParallelKernel.instance()


# --------------------------------------------------------------------- on the kernel


class Wire:
    """The connection to a cluster's engines; an engine is named by its session id.

    Args:
        connection_file: the controller's connection file for clients.
        timeout_s: how long in seconds the controller may take to answer.
        on_gone: called, in the client's IO thread, with an engine that the controller has found gone.
        on_silence: called, in a thread of its own, once nothing is heard of the controller any more; None: it is known
            otherwise.

    Raises:
        TimeoutError: it did not answer.
        ClusterError: another version of ipyparallel is installed.
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
        # through a tunnel it is the tunnel that would be heard
        self._listener = None
        if on_silence is not None and not self._client._ssh:
            self._listener = HeartbeatMonitor(self._client._config["notification"], self._client, on_silence)

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "unregister":
            self._on_gone(str(event["uuid"]))

    def engines(self) -> dict[str, int]:
        """Return the ipyparallel engine id of every engine that has registered, by session id."""
        # not Client.ids: the IO thread adds to it first
        return {str(engine): number for number, engine in dict(self._client._engines).items()}

    def call(self, engine: str, name: str, args: Sequence[Any], exchange: Exchange) -> None:
        """Run ``name`` with ``args`` in the engine's main thread."""
        self._apply(engine, call, [name, args], exchange)

    def evaluate(self, engine: str, program: str, expression: str, exchange: Exchange) -> None:
        """Run ``program`` in the engine's main thread, in a namespace of its own; the value is that of ``expression``.

        Both are texts, so the engine need not have the workbench.
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
            "stop_on_error": False,  # else a cell sent right after one that failed is dropped by the engine
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
        """Return what receives the reply and the outputs of one front-door request."""
        before = self._num_interrupts[rank]
        return Exchange(self._client._io_loop, rank, answer, lambda: self._num_interrupts[rank] > before)

    def ask(self, engine: str, rank: int, kind: str, request: dict[str, Any], future: Future[Any]) -> str:
        """Put ``request`` through the engine's side door; ``future`` gets its reply. Returns the message's id.

        Args:
            engine: its session id.
            rank: which it is; for messages.
            kind: :data:`REQUEST` or another that :func:`install` serves.
            request: JSON data.
            future: completes with the reply and what comes beside it, or with the exception.
        """
        client = self._client
        self._num_interrupts[rank] += kind == INTERRUPT
        message = client._send(client._control_stream, kind, content=request, ident=engine.encode())
        message.add_done_callback(lambda done: settle(future, _side_outcome(rank, done.result())))
        return str(message.msg_id)

    def later(self, delay_s: float, do: Callable[[], object]) -> None:
        """Have ``do`` called in the client's IO thread, if it still runs by then."""
        loop = self._client._io_loop
        loop.add_callback(loop.call_later, delay_s, do)

    def forget(self, message_id: str) -> None:
        """Stop waiting for the reply to a side-door request."""
        self._client._futures.pop(message_id, None)

    def shut_down_engines(self) -> None:
        """Have every engine end its process, as soon as it has done what it does; nothing is waited for."""
        self._client.shutdown(block=False)

    def close(self) -> None:
        """Close the connection; what was not sent yet is dropped."""
        if self._listener is not None:
            self._listener.close()
        self._client.close(linger=0)


class Exchange:
    """One front-door request to one rank: over when its reply and its last output are here.

    Its methods run in the client's IO thread. If one of the two is lost, the other one ends it a moment after the last
    sign of life. A SIGINT between two bytecodes of the engine's own can lose a reply: that is a KeyboardInterrupt.

    Args:
        loop: the client's.
        rank: whose request it is.
        answer: receives both.
        was_interrupted: tells whether the rank was sent SIGINT since.
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

    def attach(self, message: Any) -> None:  # noqa: ANN401 - ipyparallel's MessageFuture
        """Listen to the request's outputs and reply, before it is sent."""
        message.iopub_callbacks.append(self._on_output)
        message.output.add_done_callback(lambda _: self._on_last_output())
        message.add_done_callback(lambda done: self._on_reply(done.result()))

    def _on_reply(self, reply: Any) -> None:  # noqa: ANN401 - ExecuteReply, RemoteError or a value
        if isinstance(reply, RemoteError) and reply.ename == "EngineError" and not reply.engine_info:
            return  # the client's own word for an engine that is gone: the cluster is told next, and says more
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
        if self._num_messages != num_messages:
            self._loop.call_later(_STRAGGLER_S, self._give_up_unless_heard, self._num_messages)
            return
        if self._is_replied:
            self._finish()
        elif self._was_interrupted():
            self._reply = {"error": {"ename": "KeyboardInterrupt", "evalue": "", "traceback": "", "line": None}}
            self._finish()
        else:
            settle(self._answer.future, ClusterError(f"rank {self._rank} has ended its request without a reply"))

    def _finish(self) -> None:
        settle(self._answer.future, _front_outcome(self._rank, self._reply, self._report))


def as_output(kind: str, content: dict[str, Any]) -> Output | None:
    """Return a message of the Jupyter protocol as an :class:`Output`; None for one that is not an output."""
    if kind == "stream":
        return Output("stderr" if content["name"] == "stderr" else "stdout", text=content["text"])
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
    """Return the value that a rank's reply carries, or the exception."""
    if isinstance(reply, RemoteError):
        text = {"ename": reply.ename, "evalue": reply.evalue, "traceback": reply.traceback}
        return as_error(rank, {"line": cell_report.get("line"), **text})
    if isinstance(reply, Exception):
        return ClusterError(f"rank {rank} did not run the request: {reply}")
    if isinstance(reply, dict) and "error" in reply:
        return as_error(rank, reply["error"])
    return reply["value"] if isinstance(reply, dict) else None


def _side_outcome(rank: int, message: dict[str, Any]) -> tuple[Any, Sequence[memoryview]] | RankError:
    """Return the data of a reply and what came beside it, or the exception."""
    content = message["content"]
    if "error" in content:
        return as_error(rank, content["error"])
    return content["content"], message["buffers"]


def as_error(rank: int, reported: dict[str, Any]) -> RankError:
    """Return what :func:`report` said about an exception on ``rank`` as an exception of ours."""
    what = ": ".join(part for part in (reported["ename"], reported["evalue"]) if part)
    where = f"rank {rank}" if reported["line"] is None else f"rank {rank}, line {reported['line']}"
    return RankError(f"{where}: {what}", rank=rank, **reported)
