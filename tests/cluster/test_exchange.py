"""A shell-channel request whose reply and last output arrive in any order, or not at all; needs no ranks."""

import json
from concurrent.futures import Future

import pytest
from ipyparallel.error import EngineError, RemoteError

from workbench.cluster._ipyparallel import _REPLY_LIMITS, ERROR_MIME, Exchange, Wire, as_output
from workbench.cluster.pending_replies import Answer, Output
from workbench.errors import ClusterError, RankError


class FakeLoop:
    """An event loop whose time the test advances."""

    def __init__(self):
        self.later = []

    def call_later(self, seconds, function, *args):
        assert seconds > 0
        self.later.append((function, args))

    def let_time_pass(self):
        due, self.later = self.later, []
        for function, args in due:
            function(*args)


class FakeMessage(Future):
    """What ipyparallel returns for a sent request."""

    def __init__(self):
        super().__init__()
        self.output = Future()
        self.iopub_callbacks = []

    def publish(self, kind, content):
        for callback in self.iopub_callbacks:
            callback({"header": {"msg_type": kind}, "content": content})


class Request:
    def __init__(self):
        self.loop, self.answer, self.message = FakeLoop(), Answer(), FakeMessage()
        self.was_interrupted = False
        Exchange(self.loop, 3, self.answer, lambda: self.was_interrupted).attach(self.message)


@pytest.fixture
def request_():
    return Request()


def reply(request_):
    request_.message.set_result({"value": 5})


def fall_idle(request_):
    request_.message.output.set_result(None)


@pytest.mark.parametrize("order", [(reply, fall_idle), (fall_idle, reply)])
def test_it_is_over_when_both_are_there_in_any_order(request_, order):
    for arrive in order:
        assert not request_.answer.future.done()
        arrive(request_)
    assert request_.answer.future.result(0) == 5
    request_.loop.let_time_pass()
    assert request_.loop.later == []


def test_outputs_between_the_two_are_kept_and_waited_for(request_):
    reply(request_)
    request_.message.publish("stream", {"name": "stdout", "text": "late"})
    request_.loop.let_time_pass()
    assert not request_.answer.future.done()
    request_.loop.let_time_pass()  # no further output arrived
    assert request_.answer.future.result(0) == 5
    assert request_.answer.outputs == [Output("stdout", text="late")]


def test_a_reply_lost_without_an_interrupt_does_not_count_as_one(request_):
    fall_idle(request_)
    for _ in range(_REPLY_LIMITS):
        assert not request_.answer.future.done()  # a busy machine passes it on late
        request_.loop.let_time_pass()
    with pytest.raises(ClusterError, match=r"^rank 3 ended its request without a reply$"):
        request_.answer.future.result(0)


def test_a_reply_that_an_interrupt_has_swallowed_is_an_interrupt(request_):
    request_.was_interrupted = True
    fall_idle(request_)
    request_.loop.let_time_pass()
    error = request_.answer.future.exception(0)
    assert isinstance(error, RankError)
    assert (error.rank, error.ename, str(error)) == (3, "KeyboardInterrupt", "rank 3: KeyboardInterrupt")


def test_the_line_of_an_error_comes_with_the_outputs(request_):
    request_.message.publish("display_data", {"data": {ERROR_MIME: {"line": 12}}})
    request_.message.set_result(RemoteError("ValueError", "no", "the traceback", {}))
    fall_idle(request_)
    error = request_.answer.future.exception(0)
    assert str(error) == "rank 3, line 12: ValueError: no"
    assert (error.line, error.traceback) == (12, "the traceback")
    assert request_.answer.outputs == []


def test_a_request_that_ipyparallel_could_not_run_is_an_error(request_):
    request_.message.set_result(EngineError("lost"))
    fall_idle(request_)
    with pytest.raises(ClusterError, match="rank 3 did not run the request: lost"):
        request_.answer.future.result(0)


@pytest.mark.parametrize("kind", ["status", "execute_input", "error", "comm_open"])
def test_messages_that_are_not_output_are_ignored(kind):
    assert as_output(kind, {}) is None


def test_an_unresponsive_controller_is_not_waited_for_forever(tmp_path):
    ports = ("control", "task", "mux", "iopub", "notification", "registration", "broadcast")
    file = tmp_path / "client.json"
    info = {"interface": "tcp://127.0.0.1", "location": "127.0.0.1", "ssh": "", "task_scheme": "leastload", "key": "k"}
    coding = {"pack": "json", "unpack": "json", "signature_scheme": "hmac-sha256"}
    file.write_text(json.dumps({**info, **coding, **dict.fromkeys(ports, 1)}))
    with pytest.raises(TimeoutError):
        Wire(file, 0.01, lambda engine: None)
