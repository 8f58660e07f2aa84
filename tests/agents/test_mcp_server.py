"""The calls of tools, on a fake cluster: wrong ones, calls that do not end, output, pictures."""

import asyncio
import base64
import threading

import pytest

from tests.helpers import json_schema
from tests.helpers.fake_cluster import FakeCluster, blocks, gives, prints, step_result, writes
from tests.helpers.recorded_run import record
from tests.helpers.trace_strategies import example_trace
from tests.helpers.waiting import wait_until
from workbench.agents import mcp_server, screenshot, tool_calls
from workbench.agents.mcp_server import ToolServer
from workbench.cluster import local_launch
from workbench.cluster.pending_replies import Output
from workbench.trace import save
from workbench.workbench import Workbench


class Tools(ToolServer):
    """A server on a fake cluster, available as ``fake``."""

    def __init__(self, *, control=True):
        super().__init__(control=control, make=lambda: Workbench(2, cluster_factory=self._make))

    def _make(self, **settings):
        self.fake = FakeCluster(**settings)
        self.fake.sharded()
        return self.fake

    def result(self, name, **arguments):
        return asyncio.run(self.call(name, arguments))

    def document(self, name, **arguments):
        result = self.result(name, **arguments)
        assert result.is_error == (result.structured_content["error"] is not None)
        assert json_schema.read(result.content[0].text) == result.structured_content
        return json_schema.check(result.structured_content)

    def refused(self, name, **arguments):
        return self.document(name, **arguments)["error"]["message"]


@pytest.fixture
def tools():
    made = Tools()
    made.document("start", num_ranks=2)
    yield made
    made.close()


@pytest.fixture
def viewer():
    made = Tools(control=False)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("statsu", {}, "there is no tool 'statsu', did you mean 'states' or 'status'?"),
        ("dashboard", {}, "there is no tool 'dashboard'"),
        ("x" * 999, {}, f"there is no tool '{'x' * mcp_server.MAX_NAME}'"),
        ("step", {"cuont": 3}, "step has no argument 'cuont', did you mean 'count'? it takes count, fn,"),
        ("step", {"count": "3"}, "command 'step'.count is '3', expected int"),
        ("step", {"count": 0}, "the number of steps is a whole number of at least 1, not 0"),
        ("step", {"wait_s": 601}, "wait_s is a number of seconds from 0 to 600, not 601"),
        ("step", {"wait_s": True}, "wait_s is a number of seconds from 0 to 600, not True"),
        ("inspect", {}, "inspect needs fqn: a parameter, such as"),
        ("cell", {"code": 3}, "cell takes code, a text, and ranks, a list of numbers such as [0, 1]"),
        ("cell", {"code": "1", "ranks": ["0"]}, "cell takes code, a text, and ranks"),
        ("cell", {"code": "1", "ranks": [7]}, "there is no rank 7"),
        ("where", {"folder": "/nowhere"}, "cannot read /nowhere: No such file or directory"),
        ("wait", {}, "nothing to wait for: every call has ended and returned its result"),
        ("start", {"device": "tpu"}, "there is no 'tpu'"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(tools, name, arguments, why):
    assert why in tools.refused(name, **arguments)


def test_without_control_it_only_views(viewer):
    for name in ("start", "step", "cell", "run", "export", "abort"):
        assert viewer.refused(name) == (
            f"{name} changes ranks or writes files, and this server only views: workbench mcp --control"
        )
    assert "--look leaves them alone" in viewer.refused("attach", file="/nowhere", take=True)
    assert viewer.workbench.running is False
    hints = {tool.name: tool.annotations.read_only_hint for tool in asyncio.run(viewer._list(None, None)).tools}
    assert hints == dict.fromkeys(viewer.tools, True)


def test_an_attach_without_a_cluster_names_those_that_are_here(viewer, tmp_path, monkeypatch):
    monkeypatch.setattr(local_launch.tempfile, "gettempdir", lambda: str(tmp_path))
    file = tmp_path / "fsdp-workbench-x" / "profile" / "security" / "ipcontroller-client.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    found = viewer.document("attach", cluster_id="none")
    assert found["notices"] == [f"started here with %fsdp start: file {file}"]


def test_without_control_it_attaches_only_by_private_files(viewer, tmp_path):
    file = tmp_path / "ipcontroller-client.json"
    file.write_text("{}")
    file.chmod(0o640)
    assert f"{file} is not readable by you alone" in viewer.refused("attach", file=str(file))
    file.chmod(0o600)
    assert "is not ipyparallel's connection file" in viewer.refused("attach", file=str(file))
    assert "command 'attach'.file is 3, expected str" in viewer.refused("attach", file=3)


def test_a_recorded_run_needs_no_ranks(viewer, tmp_path):
    record(tmp_path)
    found = viewer.document("where", folder=str(tmp_path))
    assert (found["type"], found["report"]["headline"]) == ("RunWhereReport", "the run continues, at step 1")


def test_a_call_that_does_not_end_goes_on_and_others_are_answered(tools):
    tools.fake.script["step"] = blocks
    found = tools.document("step", wait_s=0)
    assert (found["type"], found["error"]) == (None, None)
    assert found["notices"][0].startswith("step has not ended yet: wait, or abort it")
    assert tools.document("wait", wait_s=0)["notices"] == found["notices"]
    assert "%fsdp step runs: %fsdp pause stops inside it" in tools.refused("step")
    assert tools.document("where")["type"] == "WhereReport"
    aborted = tools.document("abort")
    assert aborted["report"]["headline"].startswith("Aborted. The ranks are idle again")
    found = tools.document("wait")
    assert (found["command"], found["error"]["type"]) == ("step", "Interrupted")
    assert "nothing to wait for" in tools.refused("wait")


def test_other_replies_say_that_a_call_has_ended(tools):
    go_on = threading.Event()
    call = tool_calls.ToolCall("step", lambda _: f"{go_on.wait()}")
    tools._calls.begin(call)
    assert tools.document("faults")["notices"] == []
    go_on.set()
    wait_until(call.ended.done)
    assert tools.document("faults")["notices"] == ["step has ended: wait returns its result"]
    assert tools.document("wait")["notices"] == ["True"]


def test_the_number_of_open_calls_is_limited(tools):
    go_on = threading.Event()
    for _ in range(tool_calls.MAX_CALLS):
        tools._calls.begin(tool_calls.ToolCall("step", lambda _: go_on.wait() and None))
    assert tools.refused("where") == "8 calls have no result yet: first wait, or abort"
    go_on.set()
    for _ in range(tool_calls.MAX_CALLS):
        tools.document("wait")


def test_a_fault_of_the_workbench_is_a_document_too(tools, monkeypatch):
    monkeypatch.setattr(tools.workbench, "report", lambda *_, **__: 1 / 0)
    assert tools.document("where")["error"]["type"] == "ZeroDivisionError"


def test_the_end_of_what_ranks_print_follows(tools):
    lines = Output("stdout", text="x" * 20_000 + "end\n")
    tools.fake.script["step"] = writes(lines, then=gives(step_result(1)))
    texts = [each.text for each in tools.result("step").content]
    assert len(texts) == 2
    assert texts[1].startswith("The ranks have printed:\nx")
    assert "xend\n" in texts[1][-100:]
    assert len(texts[1]) < tool_calls.MAX_OUTPUT + 100
    tools.fake.script["cell"] = prints("once\n")
    (only,) = tools.result("cell", code="print('once')").content  # its report has the texts
    assert only.text.count("once") == 2


def test_commands_are_in_the_history(tools):
    tools.document("faults")
    assert [past["line"] for past in tools.document("history")["report"]["commands"]] == [
        "%fsdp start -n 2",
        "%fsdp faults",
        "%fsdp history",
    ]


@pytest.fixture
def opened(viewer, tmp_path):
    save(example_trace(), tmp_path / "run.trace")
    viewer.document("open", path=str(tmp_path / "run.trace"))
    return viewer


def pictures(result):
    return [base64.b64decode(each.data) for each in result.content if each.type == "image"]


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("name", ["memory", "explain"])
def test_a_picture_is_a_png(opened, name, monkeypatch):
    from tests.helpers import browser

    monkeypatch.setenv(screenshot.VARIABLE, browser.find_chromium())
    assert pictures(opened.result(name)) == []
    (png,) = pictures(opened.result(name, picture=True, wait_s=200))
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(png[16:20]) == screenshot.WIDTH
    assert len(png) > 10_000  # not an empty page


@pytest.mark.parametrize(
    ("program", "why"),
    [("/nowhere", "no picture: it takes Chromium or Chrome"), ("/bin/false", "no picture: /bin/false did not draw it")],
)
def test_without_a_browser_the_numbers_come_alone(opened, program, why, monkeypatch):
    monkeypatch.setenv(screenshot.VARIABLE, program)
    result = opened.result("memory", picture=True, wait_s=200)
    assert pictures(result) == []
    found = result.structured_content
    assert (found["type"], found["error"]) == ("MemoryReport", None)
    assert why in found["notices"][0]
