"""The parts of ipyparallel and ipykernel that _ipyparallel.py uses still exist."""

import asyncio
import inspect
import subprocess
import sys
from types import SimpleNamespace

import ipykernel.ipkernel
import ipykernel.kernelbase
import ipyparallel
import pytest
import zmq
from ipykernel.iostream import OutStream
from ipyparallel.client.futures import MessageFuture
from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.kernel import IPythonParallelKernel
from jupyter_client.session import Session

from workbench.cluster import _ipyparallel
from workbench.errors import ClusterError


def test_this_version_is_accepted():
    _ipyparallel.check_version()


@pytest.mark.parametrize("version", [(8, 8, 0), (10, 0, 0)])
def test_another_version_is_refused(monkeypatch, version):
    monkeypatch.setattr(ipyparallel, "version_info", version)
    with pytest.raises(ClusterError, match=r"9.2 is required: pip install 'ipyparallel>=9.2,<10'"):
        _ipyparallel.check_version()


def test_a_client_that_sends_differently_is_refused(monkeypatch):
    monkeypatch.setattr(ipyparallel.Client, "_send", lambda self, socket, message: None)
    with pytest.raises(ClusterError, match="is required"):
        _ipyparallel.check_version()


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (ipyparallel.Client._setup_streams, ["_control_stream", "_mux_stream"]),
        (ipyparallel.Client._dispatch_single_reply, ["self._futures.get(msg_id)"]),
        (ipyparallel.Client._io_main, ["self._io_loop = "]),
        (ipyparallel.Client.__init__, ["self._config = cfg", "'notification'", "self._ssh = bool("]),
        (IPEngine.init_connector, ["def connect(s, url, ", "return connect, maybe_tunnel"]),
        (IPEngine.load_connection_file, ["self.registration_url = "]),
        (IPEngine.start_heartbeat, ["self.hb_check_period = hb_period + 500"]),
        (ipyparallel.Client._update_engines, ["self._engines[eid] = v"]),
        (ipyparallel.Client.create_message_futures, ["msg_future.output = output"]),
        (MessageFuture.__init__, ["self.iopub_callbacks = []"]),
        (OutStream._setup_stream_redirects, ["self._original_stdstream_copy = os.dup("]),
        (
            IPythonParallelKernel.process_control,
            [
                "self.session.feed_identities(msg, copy=False)",
                "self.session.deserialize(msg, content=True, copy=False)",
                "self.control_handlers.get(msg_type, None)",
                "handler(self.control_stream, idents, msg)",
            ],
        ),
        (IPythonParallelKernel.dispatch_control, ["await self.process_control(msg)"]),
        (ipykernel.kernelbase.Kernel.execute_request, ['content.get("stop_on_error", True)']),
    ],
)
def test_private_names_mean_what_they_meant(function, names):
    source = inspect.getsource(inspect.unwrap(function))
    assert [word for word in names if word not in source] == []


def test_an_engine_with_a_number_but_no_name_has_not_registered():
    wire = object.__new__(_ipyparallel.Wire)
    wire._client = SimpleNamespace(ids=[0, 1], _engines={1: "engine b"})
    assert wire.engines() == {"engine b": 1}


def test_the_repair_of_await_is_still_needed():
    source = inspect.getsource(ipykernel.ipkernel.IPythonKernel.do_execute)
    assert "self.shell_channel_thread.parent_thread" in source


class FakeKernel:
    """The parts of a kernel that its control channel needs; ``served`` and ``processed`` list the messages."""

    def __init__(self):
        self.session, self.control_stream = Session(key=b"known to both"), "stream"
        self.served, self.processed = [], []
        self.control_handlers = {_ipyparallel.REQUEST: self.serve}

    async def serve(self, stream, idents, request):
        self.served.append((stream, idents, request["content"]))

    async def process_control(self, message):
        self.processed.append(message)


def frames(session, kind):
    """Return a message of ``session`` in the form in which a socket delivers it."""
    sent = session.serialize(session.msg(kind, {"word": "look"}), ident=b"who asks")
    return [zmq.Frame(part) for part in sent]


def test_control_requests_are_served_directly_and_others_as_usual():
    kernel = FakeKernel()
    _ipyparallel._serve_without_ado(kernel)
    other = frames(kernel.session, "interrupt_request")
    for message in (frames(kernel.session, _ipyparallel.REQUEST), other):
        asyncio.run(kernel.process_control(message))
    assert [(stream, content) for stream, _, content in kernel.served] == [("stream", {"word": "look"})]
    assert [bytes(ident) for ident in kernel.served[0][1]] == [b"who asks"]
    assert kernel.processed == [other]


def test_a_request_with_a_wrong_signature_is_not_served():
    kernel = FakeKernel()
    _ipyparallel._serve_without_ado(kernel)
    with pytest.raises(ValueError, match="Invalid Signature"):
        asyncio.run(kernel.process_control(frames(Session(key=b"known to one"), _ipyparallel.REQUEST)))
    assert kernel.served == []


def test_the_reaper_is_light():
    script = "import sys, workbench.cluster.reaper; print(sorted({'torch', 'ipyparallel', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "[]\n"
