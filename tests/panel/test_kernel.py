"""Panels and dashboards in a real kernel, on a fake cluster: over comms as a browser opens them."""

import uuid

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from tests.helpers.package_source import REPO
from workbench.base import ports
from workbench.live.messages import TARGET, VERSION
from workbench.panel.comm_target import MAX_COMMS

FAKE = """
from tests.helpers.fake_cluster import FakeCluster
fakes = []
def factory(*args, **settings):
    fakes.append(FakeCluster(*args, **settings))
    return fakes[-1]
get_ipython().magics_manager.registry["FsdpMagics"].workbench._factory = factory
"""
LEFT = """
import comm, threading
print("left:", len(comm.get_comm_manager().comms), sorted(set(comm.get_comm_manager().targets) & TARGETS),
      [t.name for t in threading.enumerate() if "waits" in t.name or "panel" in t.name])
""".replace("TARGETS", repr({TARGET}))


class Kernel:
    """A kernel, and a browser's requests to it; with ``subshell``, they are answered while a cell runs."""

    def __init__(self, client):
        self.client = client
        self.subshell = None

    def send(self, kind, **content):
        message = self.client.session.msg(kind, content)
        message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def open(self, target):
        comm_id = uuid.uuid4().hex
        self.send("comm_open", comm_id=comm_id, target_name=target, data={})
        return comm_id

    def ask(self, comm_id, data, is_answer=lambda answer: True):
        """Return the next message of a comm that answers ``data``."""
        self.send("comm_msg", comm_id=comm_id, data=data)
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            mine = message["content"].get("comm_id") == comm_id
            if mine and message["msg_type"] == "comm_close":
                return None
            if mine and is_answer(message["content"]["data"]):
                return message["content"]["data"]

    def panel(self, target=TARGET):
        comm_id = self.open(target)
        welcome = self.ask(comm_id, {"word": "hello", "number": 0, "version": VERSION, "extension": "0.2.0"})
        assert welcome["problem"] == ""
        return comm_id

    def question(self, comm_id, word, number=1, **fields):
        question = {"word": word, "number": number, **fields}
        return self.ask(comm_id, question, lambda answer: answer["number"] == number)

    def run(self, code):
        texts = []

        def keep(message):
            content = message["content"]
            if message["msg_type"] in {"stream", "display_data", "execute_result"}:
                texts.append(content.get("text") or f"{content['data']['text/plain']}\n")

        reply = self.client.execute_interactive(code, output_hook=keep, timeout=120)["content"]
        assert reply["status"] == "ok", reply
        return "".join(texts)


@pytest.fixture
def kernel():
    manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **ports.of_a_kernel())
    manager.start_kernel(cwd=str(REPO))
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield Kernel(client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def test_from_load_to_unload(kernel):
    comm_id = kernel.open(TARGET)
    assert kernel.ask(comm_id, {"word": "look", "number": 1}) is None  # closed: there is no panel before %load_ext
    kernel.run(f"%load_ext workbench\n{FAKE}")
    first, second = kernel.panel(), kernel.panel()
    answer = kernel.question(first, "do", command={"word": "start", "num_ranks": 2})
    assert (answer["line"], answer["is_error"]) == ("%fsdp start -n 2", False)
    for panel in (first, second):
        assert [rank["health"] for rank in kernel.question(panel, "look")["ranks"]] == ["idle", "idle"]
    assert "2 ranks" in kernel.run("%fsdp status")
    assert "%fsdp start -n 2" in kernel.run("%fsdp history")

    reloaded = [kernel.panel() for _ in range(MAX_COMMS)]  # each replaces the previous one without closing it
    assert kernel.question(reloaded[-1], "look")["cluster"]["is_running"]
    assert kernel.run(LEFT).startswith(f"left: {MAX_COMMS} ")
    dashboard = kernel.open(TARGET)
    welcome = kernel.ask(dashboard, {"word": "hello", "number": 0, "version": VERSION, "extension": "0.2.0"})
    assert welcome["dashboard"]["buttons"] == ["step", "pause", "next", "continue", "abort", "break", "fault"]
    assert kernel.ask(dashboard, {"view": "a", "word": "feed"})["word"] == "feed"
    for wrong in ("feed", {"view": "a", "word": "beside"}, {"view": "a", "word": "at", "t_us": "soon"}):
        assert kernel.ask(dashboard, wrong)["word"] == "refused"
    kernel.send("comm_close", comm_id=dashboard, data={})

    kernel.run("%reload_ext workbench")
    assert kernel.run(LEFT) == f"left: 0 {[TARGET]} []\n"
    panel = kernel.panel()
    assert kernel.question(panel, "look")["cluster"]["is_running"] is False
    kernel.run("%unload_ext workbench")
    assert kernel.run(LEFT) == "left: 0 [] []\n"


def test_while_a_cell_runs_questions_are_answered(kernel):
    kernel.run(f"%load_ext workbench\n{FAKE}\n%fsdp start -n 2\nimport threading\ngo_on = threading.Event()")
    kernel.client.control_channel.send(message := kernel.client.session.msg("create_subshell_request", {}))
    reply = kernel.client.get_control_msg(timeout=60)
    assert reply["parent_header"]["msg_id"] == message["header"]["msg_id"]
    panel = kernel.panel()
    cell = kernel.client.execute("print('begun', flush=True); assert go_on.wait(60)")
    while kernel.client.get_iopub_msg(timeout=60)["content"].get("text") != "begun\n":
        pass
    kernel.subshell = reply["content"]["subshell_id"]
    assert len(kernel.question(panel, "look")["ranks"]) == 2
    assert kernel.question(panel, "look", number=2, wait=True)["word"] == "state"
    assert kernel.question(panel, "spell", command={"word": "pause"})["line"] == "%fsdp pause"
    kernel.send("execute_request", code="go_on.set()", silent=True)
    while True:
        done = kernel.client.get_shell_msg(timeout=60)
        if done["parent_header"]["msg_id"] == cell:
            break
    assert done["content"]["status"] == "ok"
