"""What _control.py uses of ipyparallel and ipykernel is still there."""

import inspect
import subprocess
import sys

import ipykernel.ipkernel
import ipykernel.kernelbase
import ipyparallel
import pytest
from ipyparallel.client.futures import MessageFuture
from ipyparallel.engine.kernel import IPythonParallelKernel

from workbench.cluster import _control
from workbench.errors import ClusterError


def test_this_version_is_accepted():
    _control.check_version()


@pytest.mark.parametrize("version", [(8, 8, 0), (10, 0, 0)])
def test_another_version_is_refused(monkeypatch, version):
    monkeypatch.setattr(ipyparallel, "version_info", version)
    with pytest.raises(ClusterError, match=r"9.2 is needed: pip install 'ipyparallel>=9.2,<10'"):
        _control.check_version()


def test_a_client_that_sends_differently_is_refused(monkeypatch):
    monkeypatch.setattr(ipyparallel.Client, "_send", lambda self, socket, message: None)
    with pytest.raises(ClusterError, match="is needed"):
        _control.check_version()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (ipyparallel.Client._setup_streams, ["_control_stream", "_mux_stream"]),
        (ipyparallel.Client._dispatch_single_reply, ["self._futures.get(msg_id)"]),
        (ipyparallel.Client._io_main, ["self._io_loop = "]),
        (ipyparallel.Client._update_engines, ["self._engines[eid] = v"]),
        (ipyparallel.Client.create_message_futures, ["msg_future.output = output"]),
        (MessageFuture.__init__, ["self.iopub_callbacks = []"]),
        (IPythonParallelKernel.process_control, ["self.control_handlers.get(msg_type, None)"]),
        (ipykernel.kernelbase.Kernel.execute_request, ['content.get("stop_on_error", True)']),
    ],
)
def test_private_names_mean_what_they_did(function, words):
    source = inspect.getsource(inspect.unwrap(function))
    assert [word for word in words if word not in source] == []


def test_the_repair_of_await_is_still_needed():
    source = inspect.getsource(ipykernel.ipkernel.IPythonKernel.do_execute)
    assert "self.shell_channel_thread.parent_thread" in source


def test_the_reaper_is_light():
    script = "import sys, workbench.cluster.reaper; print(sorted({'torch', 'ipyparallel', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "[]\n"
