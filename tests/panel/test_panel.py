"""The answers of a panel, on a fake cluster."""

import json
import math
import threading
from dataclasses import replace
from typing import get_args

import pytest

from tests.helpers.fake_cluster import (
    SHARD_RESULT,
    FakeCluster,
    example_model,
    gives,
    inside,
    raises,
    ran,
    step_result,
)
from tests.helpers.live_view import state_at
from tests.helpers.simulated_job import with_loss
from tests.helpers.trace_strategies import example_trace
from tests.helpers.waiting import wait_until
from tests.panel.conftest import FakeComm
from tests.replay.test_shards import make_flat, make_unit
from workbench.base.codec import decode, encode
from workbench.errors import Interrupted, UsageError
from workbench.events import Category
from workbench.live.messages import VERSION, Answer, RestPreview, TrainingSummary
from workbench.live.panel_state import params_of, preview, units_of
from workbench.magics.command_lines import parse_line
from workbench.panel.client import Client
from workbench.replay.collectives import closed_form, ring_bytes
from workbench.replay.shards import at_rest, shards, totals
from workbench.replay.training import summary
from workbench.session.snapshot import ClusterSnapshot
from workbench.trace.columns import Trace
from workbench.trace.schema import ClockReading, Header, HostClock
from workbench.views.theme import PLOTLY_MIME

BAD_NAME = "</script><img src=x onerror=alert(1)>\"'"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (VERSION, ""),
        (VERSION - 1, "install workbench 0.2.0 where JupyterLab runs, and reload this page"),
        (VERSION + 1, "install the same workbench where the kernel runs, and restart the kernel"),
    ],
)
def test_mismatched_versions_are_reported_with_a_remedy(browser, version, message):
    welcome = browser.ask("hello", version=version, extension="7.8.9")
    assert (welcome["version"], message in welcome["problem"]) == (VERSION, True)
    if message:
        assert f"(extension 7.8.9) uses protocol version {version}" in welcome["problem"]
        assert f"(workbench 0.2.0) version {VERSION}" in welcome["problem"]
        assert browser.look()["text"] == "the first message must be hello, with a matching protocol version"
    else:
        assert browser.look()["word"] == "state"


def test_hello_must_be_the_first_message(browser):
    comm = FakeComm()
    panel = Client(browser.workbench, comm, version="0.2.0")
    comm.receive({"word": "look", "number": 3})
    assert comm.sent[0][0] == {
        "word": "refused",
        "number": 3,
        "text": "the first message must be hello, with a matching protocol version",
        "view": "",
    }
    panel.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "unknown question None"),
        ("look", "unknown question None"),
        ([], "unknown question None"),
        ({"word": "dance", "number": 7}, "unknown question 'dance'; known: hello, look"),
        ({"word": ["look"], "number": 7}, "unknown question ['look']"),
        ({"word": "look"}, "lacks ['number']"),
        ({"word": "look", "number": "7"}, "number is '7', expected int"),
        ({"word": "look", "number": 7, "wait": 1}, "wait is 1, expected bool"),
        ({"word": "look", "number": 7, "more": 1}, "unknown ['more']"),
        ({"word": "find params", "number": 7, "unit": 1 << 70}, "a number of 71 bits"),
        ({"word": "do", "number": 7, "command": None}, "unknown command None"),
        ({"word": "do", "number": 7, "command": {"word": "shrad"}}, "unknown command 'shrad'; known: start"),
        ({"word": "do", "number": 7, "command": {"word": "shard"}}, "lacks ['model']"),
        ({"word": "do", "number": 7, "command": {"word": "shard", "model": 4}}, "model is 4, expected str"),
        (
            {"word": "do", "number": 7, "command": {"word": "shard", "model": BAD_NAME}},
            "model is a variable on the ranks",
        ),
        ({"word": "do", "number": 7, "command": {"word": "step", "count": 0}}, "at least 1, not 0"),
        ({"word": "do", "number": 7, "command": {"word": "help", "topic": "a\nb"}}, "a command is one line"),
        ({"word": "spell", "number": 7, "command": {"word": "open", "path": "a\u2028b"}}, "a command is one line"),
        (
            {"word": "do", "number": 7, "command": {"word": "back", "n": -1}},
            "expected a whole number, 0 for the newest",
        ),
        ({"word": "do", "number": 7, "command": {"word": "start", "num_ranks": 0}}, "at least 1, got '0'"),
        ({"word": "do", "number": 7, "command": "step\nstop"}, "a command is one line"),
        ({"word": "do", "number": 7, "command": "shrad model"}, "shrad"),
        ({"word": "do", "number": 7, "command": {"word": "dashboard"}}, "the panel opens its own dashboard"),
        ({"word": "do", "number": 7, "command": {"word": "timeline", "canvas": True}}, "its own dashboard"),
        ({"word": "spell", "number": 7, "command": {"word": "next", "what": "day"}}, "next takes one of"),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(started, data, message):
    before, num_sent = list(started.fake.log), len(started.comm.sent)
    started.comm.receive(data)
    (answer,) = [sent for sent, _ in started.comm.sent[num_sent:]]
    assert (answer["word"], message in answer["text"]) == ("refused", True), answer["text"]
    assert answer["number"] == (7 if isinstance(data, dict) and data.get("number") == 7 else -1)
    assert started.fake.log == before
    assert len(started.workbench.history().commands) == 1  # the start


def test_before_there_are_ranks(browser):
    state = browser.look()
    assert (state["cluster"]["is_running"], state["ranks"], state["units"], state["request"]) == (False, [], [], None)
    assert state["said"] == "No ranks are running and nothing is recorded. Start ranks with %fsdp start -n 4."
    assert state["training"] == {
        "step": -1,
        "loss": None,
        "loss_step": -1,
        "steps_per_s": None,
        "tokens_per_s": None,
    }
    answer = browser.do("shard", model="model")
    assert (answer["is_error"], answer["line"]) == (True, "%fsdp shard model")
    assert "Start them with %fsdp start" in answer["text"]


def test_whether_ranks_have_a_train_step_is_found_with_their_models(started):
    assert started.ask("find models")["has_step"]
    started.fake.variables[3] = ("model",)
    assert not started.ask("find models")["has_step"]


def test_before_any_reply_missing_models_are_not_reported(started):
    started.fake.silent = set(range(4))
    refused = started.ask("find models")
    assert refused["word"] == "refused"
    assert refused["text"] == "No rank has answered yet. Models are shown once a rank answers."
    started.fake.silent = {0, 1, 2}
    assert [model["ranks"] for model in started.ask("find models")["models"]] == [[3]]


def test_the_loss_is_sent_with_its_step():
    whole = example_trace(num_ranks=2, steps=3)
    ends = {rank: int(whole.slice(step=2).rank(rank).start.seq) + 1 for rank in range(2)}  # step 2 has just begun
    trace = Trace(whole.header, tuple(r.cut(r.start.seq, ends[r.rank]) for r in whole.ranks))
    found = state_at(ClusterSnapshot(trace=trace)).training
    assert (found.step, found.loss_step) == (2, 1)
    assert found.loss == summary(whole).losses[1]


def test_a_cancelled_start_is_not_a_failure(browser, monkeypatch):
    def start(_cluster, *_given):
        raise Interrupted("The start was cancelled: no ranks are running")

    monkeypatch.setattr(FakeCluster, "start", start)
    answer = browser.do("start")
    assert (answer["text"], answer["is_error"]) == ("The start was cancelled: no ranks are running", False)


def test_the_recorded_or_opened_trace_is_named(started, tmp_path):
    assert not started.look()["is_recorded"]
    started.fake.sharded()
    for rank in started.fake.ranks:
        rank.recorded = rank.step_ends[0]
    wait_until(lambda: started.look()["is_recorded"])
    assert started.look()["record"] == ""
    path = tmp_path / "kept.trace"
    assert not started.do("export", path=str(path))["is_error"]
    started.do("stop")
    assert not started.do("open", path=str(path))["is_error"]
    state = started.look()
    assert (state["cluster"]["is_running"], state["is_recorded"], state["record"]) == (False, True, "kept.trace")
    assert [unit["name"] for unit in state["units"]] == ["(root)", "blocks.0", "blocks.1"]


def test_clocks_other_than_rank_0s_are_sent():
    found = example_trace(num_ranks=3, steps=1)
    clock = HostClock(ranks=(1, 2), readings=(ClockReading(t_ns=0, offset_ns=-5_000_000, error_ns=40_000),))
    trace = Trace(replace(found.header, clocks=(clock,)), found.ranks)
    (shown,) = state_at(ClusterSnapshot(trace=trace), num_ranks=3).clocks
    assert (shown.ranks, shown.error_ns) == ((1, 2), 40_000)
    assert shown.text == "its clock is 5.00 ms behind rank 0's, ± 40.0 µs"


@pytest.mark.parametrize(("loss", "sent"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_a_loss_that_is_not_finite_is_sent_as_text(loss, sent):
    trace = with_loss(example_trace(num_ranks=2, steps=2), 1, loss)
    state = state_at(ClusterSnapshot(trace=trace))
    assert state.training.loss == sent
    json.dumps(encode(state), allow_nan=False)  # as Jupyter packs it, without its fallback
    assert decode(TrainingSummary, encode(state.training), "training") == state.training


def test_ranks_units_and_memory_are_sent(started):
    started.fake.sharded()
    for rank in started.fake.ranks:
        rank.recorded = rank.step_ends[0]
    state = started.look()
    assert [(r["rank"], r["health"]) for r in state["ranks"]] == [(rank, "idle") for rank in range(4)]
    assert [unit["name"] for unit in state["units"]] == ["(root)", "blocks.0", "blocks.1"]
    assert all(unit["bytes_at_rest"] > 0 for unit in state["units"])
    assert [group["ranks"] for group in state["unit_states"]] == [[0, 1, 2, 3]]
    assert len(state["unit_states"][0]["states"]) == len(state["units"])
    trace = started.workbench.trace
    for rank in state["ranks"]:
        rows = trace.rank(rank["rank"]).rows
        assert len(rank["num_bytes"]) == len(Category)
        assert rank["num_bytes"] == [int(rows["num_bytes"][rows["category"] == c].sum()) for c in Category]
        assert rank["peak_bytes"] >= rank["in_use"]
        assert rank["peak"]
    assert state["training"]["step"] == 0
    assert state["training"]["steps_per_s"] > 0
    root = state["units"][0]
    params = started.ask("find params", unit=root["index"])["params"]
    assert sum(param["bytes_at_rest"] for param in params) == root["bytes_at_rest"]
    assert started.ask("find params", unit=999)["params"] == []


def test_a_flat_parameter_is_sent_with_its_parts_on_each_rank():
    flat = make_flat((3, 4), 2)
    header = Header(units=(make_unit(flat), make_unit(replace(flat, fqn="gone"), index=1, retired=True)), world_size=2)
    (unit,) = units_of(header)
    assert (unit.num_params, unit.is_flat, unit.bytes_padding) == (2, True, 4)
    whole, first, second = params_of(header, 0)
    assert (whole.fqn, whole.flat, whole.shape, whole.rows_per_rank) == ("_flat_param", "", (7,), (4, 3))
    assert (first.fqn, first.flat, first.shape, first.rows_per_rank) == ("p0", "_flat_param", (3,), (3, 0))
    assert (second.fqn, second.flat, second.shape, second.rows_per_rank) == ("p1", "_flat_param", (4,), (1, 3))
    assert [param.bytes_at_rest for param in (whole, first, second)] == [16, 12, 12]
    assert params_of(header, 1) == ()
    parts = (flat.parts[0], replace(flat.parts[1], global_shape=(8,)))
    split = Header(units=(make_unit(replace(flat, parts=parts, global_shape=(11,))),), world_size=4)
    whole, first, second = params_of(split, 0)  # tensor parallelism has sharded the second one
    assert [param.shape for param in (whole, first, second)] == [(11,), (3,), (8,)]
    assert [param.bytes_unsharded for param in (whole, first, second)] == [44, 12, 32]
    assert second.rows_per_rank == (1, 3)


def test_a_long_poll_gets_news_and_units_once(started):
    assert started.look()["units"] == []
    started.fake.sharded()
    answers = []
    wait_until(lambda: answers.append(started.look(wait=True)["units"]) or answers[-1])
    assert len(answers[-1]) == 3
    assert started.look(wait=True)["units"] is None
    assert len(started.look()["units"]) == 3


def test_while_ranks_are_started_or_stopped_the_state_is_reported(started, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def stop(_cluster, stop=FakeCluster.stop):
        begun.set()
        assert go_on.wait(60)
        stop(_cluster)

    def exchange():
        return started.look(wait=True)["cluster"]["exchange"]

    assert exchange() == ""
    with monkeypatch.context() as patched:
        patched.setattr(FakeCluster, "stop", stop)
        started.comm.receive({"word": "do", "number": 50, "command": {"word": "stop"}})
        assert begun.wait(60)
        state = started.look()
        cluster = state["cluster"]
        assert (cluster["is_running"], cluster["exchange"]) == (False, "stop")
        assert state["said"] == "The ranks are stopping; the trace is kept."
        assert "being started or stopped" in started.do("start")["text"]
        assert exchange() == "stop"  # the refused command is not under way
        go_on.set()
        wait_until(lambda: exchange() == "")
    seen = []

    def start(_cluster, *given, start=FakeCluster.start):
        seen.append(started.look())
        start(_cluster, *given)
        seen.append(started.look())

    monkeypatch.setattr(FakeCluster, "start", start)
    started.do("start")
    assert [(state["cluster"]["is_running"], state["cluster"]["exchange"]) for state in seen] == [(False, "start")] * 2
    assert [state["cluster"]["waits_for"] for state in seen] == ["", "they are being started"]
    assert [state["said"] for state in seen] == ["Starting or attaching ranks.", "They are being started."]
    wait_until(lambda: started.look()["cluster"]["waits_for"] == "")


def test_a_dead_rank_has_its_cause(started):
    started.fake.lose(2)
    state = started.look(wait=True)
    assert [(r["health"], r["where"]) for r in state["ranks"]][2] == ("gone", "died: the process was killed by SIGKILL")
    assert "No further step can run" in state["said"]


def test_a_command_gives_a_cells_output_and_is_in_the_history(started):
    started.fake.script["shard"] = gives(SHARD_RESULT)
    answer = started.do("shard", model="model", wrap=["Block"], mesh="2x2")
    assert answer["text"].startswith("model: 3 units on 4 ranks")
    assert (answer["line"], answer["is_error"]) == ("%fsdp shard model --wrap Block --mesh 2x2", False)
    assert "text/html" in answer["data"]
    lines = [past["line"] for past in started.ask("recall")["commands"]]
    assert lines == ["%fsdp start", "%fsdp shard model --wrap Block --mesh 2x2"]
    assert {past["source"] for past in started.ask("recall")["commands"]} == {"panel"}
    assert started.ask("spell", command={"word": "break", "action": "off", "event": "1"})["line"] == "%fsdp break off 1"
    assert started.ask("spell", command={"word": "open", "path": "-{a}"})["line"] == "%fsdp open -- '-{{a}}'"


def test_models_are_offered_with_their_sizes(started):
    started.fake.modules[3] = ["teacher"]
    model, teacher = started.ask("find models")["models"]
    assert (model["name"], model["ranks"], model["suggested"]) == ("model", [0, 1, 2], ["Block"])
    assert model["classes"] == [{"name": "Block", "count": 2, "num_elements": 900}]
    assert (teacher["name"], teacher["ranks"]) == ("teacher", [3])
    started.fake.modules = {rank: [] for rank in range(4)}
    assert "build one in a %%fsdp cell" in started.ask("find models")["text"]


def test_a_preview_uses_the_closed_form_and_changes_nothing(started):
    log = list(started.fake.log)
    found = started.ask("try", command={"word": "shard", "model": "model", "wrap": ["Block"]})
    header = started.fake.job.header
    forms = closed_form(header)
    assert (found["line"], found["problem"]) == ("%fsdp shard model --wrap Block", "")
    assert (found["bytes_unsharded"], found["bytes_ignored"]) == (totals(shards(header)).bytes_unsharded, 0)
    assert sum(sent["calls"] for sent in found["sent"]) == sum(form.calls for form in forms)
    assert found["sent_bytes"] == round(sum(ring_bytes(f.kind, f.num_bytes, f.num_ranks) for f in forms))
    for rank in range(4):
        (held,) = [held for held in found["at_rest"] if rank in held["ranks"]]
        expected = at_rest(header, rank)
        assert (held["params"], held["grads"], held["adam"]) == (expected.params, expected.grads, expected.adam)
    assert started.fake.log == log


def test_ignoring_every_parameter_keeps_all_unsharded():
    found = preview(1, "%fsdp shard model --ignore '*'", (), 2, (example_model("model"),), "model")
    whole = example_model("model").num_bytes
    assert whole > 0
    assert (found.units, found.sent, found.bytes_unsharded, found.bytes_ignored) == ((), (), whole, whole)
    assert found.at_rest == (RestPreview(ranks=(0, 1), params=whole, grads=0, adam=0),)


def test_a_reshard_is_tried_as_well(started):
    assert "nothing is sharded yet" in started.ask("try", command={"word": "reshard", "model": "model"})["problem"]
    started.fake.sharded()
    started.look()
    found = started.ask("try", command={"word": "reshard", "model": "model", "mesh": "2x2"})
    assert (found["line"], found["problem"]) == ("%fsdp reshard model --mesh 2x2", "")
    assert found["units"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            {"word": "shard", "model": "model", "wrap": ["Blcok"]},
            "the model has no module of class Blcok; its classes are: Block (2)",
        ),
        ({"word": "shard", "model": "net"}, "no rank has a model named 'net'"),
        (
            {"word": "shard", "model": "model", "mesh": "3"},
            "mesh 3 does not match the number of ranks, 4; these fit: 4, 2x2",
        ),
        ({"word": "step"}, "only shard and reshard can be previewed, not step"),
    ],
)
def test_a_preview_reports_invalid_policies(started, command, message):
    assert message in started.ask("try", command=command)["problem"]


def test_a_figure_is_the_same_as_in_a_notebook(started):
    started.fake.sharded()
    answer = started.do("layout")
    assert "application/vnd.plotly.v1+json" in answer["data"]
    assert answer["text"].startswith("Each of 4 ranks keeps")
    one = started.do("layout", unit="(root)")
    assert one["line"] == "%fsdp layout --unit '(root)'"
    assert "of the parameters of (root)" in one["text"]
    assert "there is no unit 'rot'; the units, nearest first: (root)" in started.do("layout", unit="rot")["text"]


def trained(started, steps=3):
    started.fake.sharded()
    started.fake.script["step"] = started.fake.trains(steps)
    started.do("step", count=steps)
    wait_until(lambda: started.look()["ended"] is not None)


def test_an_explanation_is_a_text_with_the_figure_that_shows_it(started):
    trained(started)
    answer = started.do("explain", subject="step")
    assert (answer["line"], answer["is_error"]) == ("%fsdp explain step", False)
    assert answer["text"].startswith("step 2 took ")
    assert answer["data"]["text/plain"] == answer["text"]
    assert "step 2 took " in answer["data"]["text/html"]
    figure, drawn = answer["data"][PLOTLY_MIME], started.do("timeline", step=2)["data"][PLOTLY_MIME]
    assert figure["data"] == drawn["data"]
    buttons = figure["layout"]["updatemenus"][0]["buttons"]
    assert answer["data"]["text/html"].count("<button") == len(buttons) - 1 == 4  # a rank each


def test_a_line_is_parsed_as_in_a_cell(started):
    trained(started)
    answer = started.ask("do", command="explain rank 1 --step 1")
    assert answer["line"] == "%fsdp explain rank 1 --step 1"
    assert answer["text"].startswith("step 1 took ")
    assert started.ask("spell", command="explain 'rank' 1")["line"] == "%fsdp explain rank 1"
    assert started.ask("do", command="explain -h")["line"] == "%fsdp help explain"


def test_a_background_step_stops_at_a_breakpoint_that_can_be_turned_off(started):
    started.fake.sharded()
    started.fake.script["step"] = inside
    assert "breakpoint 1: backward" in started.do("break", action="add", event="backward")["text"]
    answer = started.do("step", count=3)
    assert answer["line"] == "%fsdp step 3 --background"
    assert "runs in the background" in answer["text"]

    def stopped():
        request = started.look()["request"]
        return request is not None and request["is_stopped"]

    wait_until(stopped)
    state = started.look()
    assert state["request"]["line"] == "%fsdp step 3 --background"
    assert state["request"]["reasons"] == ["breakpoint 1: backward"]
    assert {rank["health"] for rank in state["ranks"]} == {"held"}
    assert {rank["where"] for rank in state["ranks"]} == {"before backward of (root), step 0"}
    assert state["breakpoints"] == [{"id": 1, "text": "backward", "is_on": True}]
    started.do("break", action="off", event="1")
    assert started.look()["breakpoints"] == [{"id": 1, "text": "backward", "is_on": False}]
    busy = started.do("shard", model="model")
    assert busy["is_error"]
    assert "%fsdp step 3 --background is stopped" in busy["text"]
    assert "runs in the background" in started.do("continue")["text"]
    wait_until(lambda: started.look()["ended"] is not None)
    state = started.look()
    assert state["request"] is None
    assert (state["ended"]["line"], state["ended"]["is_error"]) == ("%fsdp step 3 --background", False)
    assert (state["ended"]["count"], state["ended"]["text"][:6]) == (1, "1 step")


def test_a_script_runs_in_the_background_with_its_arguments(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    started.fake.script["run"] = ran()
    answer = started.ask("do", command="run train.py --lr 1e-3 'a b'")
    assert (answer["line"], answer["is_error"]) == ("%fsdp run --background train.py --lr 1e-3 'a b'", False)
    assert "runs in the background" in answer["text"]
    wait_until(lambda: started.look()["ended"] is not None)
    assert started.look()["ended"]["is_error"] is False
    assert "train.py" in started.look()["ended"]["line"]


def test_a_script_that_cannot_run_is_refused_with_the_sentence_of_the_magic(browser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def sentence(line):
        with pytest.raises(UsageError) as caught:
            browser.workbench.do(parse_line(line))
        return str(caught.value)

    none = browser.ask("do", command="run train.py")
    assert (none["text"], none["is_error"]) == (sentence("run train.py"), True)
    assert "Start them with %fsdp start" in none["text"]
    browser.do("start", num_ranks=2)
    missing = browser.ask("do", command="run train.py")
    assert (missing["text"], missing["is_error"]) == (sentence("run train.py"), True)
    assert f"there is no script train.py in {tmp_path}" in missing["text"]
    (tmp_path / "train.py").touch()
    browser.fake.sharded()
    browser.fake.script["step"] = inside
    browser.do("break", action="add", event="backward")
    browser.do("step")
    wait_until(lambda: (browser.look()["request"] or {}).get("is_stopped"))
    busy = browser.ask("do", command="run train.py")
    assert (busy["text"], busy["is_error"]) == (sentence("run train.py"), True)
    assert "%fsdp step --background is stopped" in busy["text"]
    assert "the following arguments are required: FILE" in browser.ask("do", command="run")["text"]
    browser.do("abort")


def test_steps_with_a_nan_loss_end_as_failures(started):
    started.fake.sharded()
    started.fake.script["step"] = gives(step_result(2) | {"losses": [1.0, math.nan]})
    started.do("step", count=2)
    wait_until(lambda: started.look()["ended"] is not None)
    ended = started.look()["ended"]
    assert "loss is NaN from step 1 on, on every rank" in ended["text"]
    assert ended["is_error"]


def test_an_error_on_a_rank_is_reported_and_stays_in_the_state(started):
    started.fake.sharded()
    started.fake.script["verify"] = raises("ValueError", BAD_NAME)
    answer = started.do("verify")
    assert answer["is_error"]
    assert BAD_NAME in answer["text"]
    assert answer["data"] == {}
    assert BAD_NAME in started.look()["ended"]["text"]


def test_every_answer_is_what_its_declaration_says(started):
    started.fake.sharded()
    started.look(wait=True)
    started.do("layout")
    started.ask("find params", unit=0)
    started.ask("recall")
    started.ask("spell", command={"word": "status"})
    started.comm.receive({})
    known = {answer.word: answer for answer in get_args(Answer)}
    words = set()
    for data, _ in started.comm.sent:
        word = data["word"]
        words.add(word)
        assert encode(decode(known[word], json.loads(json.dumps(data)), "answer")) == data
    assert words >= {"welcome", "state", "said", "params", "recalled", "line", "refused"}


def test_a_state_of_many_units_and_ranks_is_small_once_the_units_are_known():
    trace = example_trace(num_ranks=8, num_units=512, steps=1)
    pulse = ClusterSnapshot(trace=trace, running=True, states=dict.fromkeys(range(8), "running"))
    first = state_at(pulse, num_ranks=8)
    again = state_at(pulse, num_ranks=8, known=first.units)
    assert len(first.units) == 512
    assert len(json.dumps(encode(first))) < 256 * 1024
    assert again.units is None
    assert len(json.dumps(encode(again))) < 16 * 1024


def test_nothing_is_left_of_a_panel_that_was_closed(started):
    started.comm.receive({"word": "look", "number": 99, "wait": True})
    started.panel.close()
    assert not [t for t in threading.enumerate() if "panel" in t.name or "waits" in t.name]
    count = len(started.comm.sent)
    started.comm.receive({"word": "look", "number": 100})
    assert len(started.comm.sent) == count
