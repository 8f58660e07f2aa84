import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from tests.helpers.fake_cluster import (
    KILLED,
    LINT_RESULT,
    SHARD_RESULT,
    FakeCluster,
    blocks,
    computes,
    dies,
    gives,
    prints,
    raises,
    returns,
    step_result,
    writes,
)
from tests.helpers.figure_checks import subtitle, title
from tests.helpers.simulated_job import Setup, simulate
from tests.helpers.waiting import wait_until
from tests.replay.test_collectives import resharded_at
from workbench.base.codec import encode
from workbench.base.fault import Fault
from workbench.cluster.pending_replies import Output, PendingReplies, settle
from workbench.errors import ClusterError, Interrupted, RankDied, RankError, UsageError
from workbench.protocol.commands import START_TIMEOUT_S, Reshard, Shard, Step, UnmanagedState, Verify
from workbench.protocol.rank_messages import CellLine, GiveUp
from workbench.reports.explain_report import ExplainReport, Picture
from workbench.session import session, stall_notice, waiter
from workbench.trace import steps
from workbench.trace.columns import Trace
from workbench.trace.file import load, save
from workbench.trace.schema import BufferSum
from workbench.views.mark_buttons import marked
from workbench.workbench import Workbench


class Bench(Workbench):
    """A workbench on a fake cluster, available as ``fake``."""

    def __init__(self, num_ranks=4, **more):
        super().__init__(num_ranks, cluster_factory=self._make, **more)

    def _make(self, **settings):
        self.fake = FakeCluster(**settings)
        return self.fake

    def sent(self, what):
        return [entry for entry in self.fake.log if entry[0] == what]


@pytest.fixture
def wb():
    with Bench() as bench:
        yield bench


@pytest.fixture
def trained(wb):
    """A workbench whose model is sharded, and whose next step command takes three steps."""
    wb.fake.sharded()
    wb.fake.script["step"] = wb.fake.trains(3)
    return wb


# ---- start, stop, status


def test_start_and_stop_reach_the_cluster_once():
    bench = Bench(2, device="cpu", profile="p", engines="ssh", interface="eth0")
    report = bench.start()
    assert (report.num_ranks, report.devices) == (2, ("cpu", "cpu"))
    assert bench.fake.num_ranks == 2
    given = {"device": "cpu", "profile": "p", "engines": "ssh", "interface": "eth0"}
    assert bench.fake.settings == {**given, "start_timeout_s": START_TIMEOUT_S}
    with pytest.raises(UsageError, match="2 ranks are already running: %fsdp stop first"):
        bench.start()
    bench.stop()
    bench.stop()
    assert bench.fake.log == [("start",), ("stop",)]
    assert not bench.running


def test_warnings_of_ranks_at_the_start_are_shown_once():
    class Talks(FakeCluster):
        @property
        def rank_info(self):
            return [replace(info, notice="torch <9> was not tried") for info in super().rank_info]

    report = Workbench(2, cluster_factory=Talks).start()
    assert str(report).count("torch <9> was not tried") == 1
    assert "torch &lt;9&gt; was not tried" in report._repr_html_()


class BrokenCluster(FakeCluster):
    def start(self, on_wait):
        raise ClusterError("no")


def test_a_cluster_that_does_not_start_leaves_nothing():
    bench = Workbench(2, cluster_factory=BrokenCluster)
    with pytest.raises(ClusterError):
        bench.start()
    assert not bench.running
    assert bench.trace == Trace.empty()


@pytest.mark.parametrize("end", ["stop", "close"])
def test_ctrl_c_during_a_stop_waits_for_its_end_and_reports_it(wb, monkeypatch, end):
    monkeypatch.setattr(wb._session, "close", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted, match="but no ranks are left in this notebook; the trace is kept"):
        getattr(wb, end)()
    assert wb.fake.log[-1] == ("stop",)
    assert not wb.running


def test_ranks_are_stopped_despite_earlier_errors(wb, monkeypatch):
    def refuse(**_):
        raise ClusterError("no")

    monkeypatch.setattr(wb._session, "close", refuse)
    monkeypatch.setattr(wb._session, "drain", refuse)
    with pytest.raises(ClusterError, match="no"):
        wb.stop()
    assert wb.fake.log[-1] == ("stop",)
    assert not wb.running


def test_ranks_that_are_all_lost_are_replaced(trained):
    trained.step(3)
    first, recorded = trained.fake, trained.trace.num_rows
    for rank in range(4):
        first.lose(rank)
    assert "ranks 0-3 of 4 died: %fsdp stop, then %fsdp start" in str(trained.status())
    assert "died: the process was killed by SIGKILL" in str(trained.status())
    assert trained.status().num_rows == recorded
    assert trained.memory().data
    with pytest.raises(RankDied, match=r"^ranks 0-3 died: the process was killed by SIGKILL"):
        trained.step()
    trained.start(num_ranks=2)
    assert first.log[-1] == ("stop",)
    assert (trained.num_ranks, trained.fake.num_ranks, trained.losses) == (2, 2, {})


def test_while_some_live_a_start_names_the_dead(wb):
    wb.fake.lose(1)
    with pytest.raises(UsageError, match=r"rank 1 died: the process was killed by SIGKILL; .* %fsdp stop first"):
        wb.start()
    assert wb.running


def test_a_start_that_fails_changes_nothing(trained):
    trained.step(3)
    trained.stop()
    recorded = trained.trace.num_rows
    trained._factory = BrokenCluster
    with pytest.raises(ClusterError):
        trained.start(num_ranks=2)
    assert (trained.num_ranks, trained.trace.num_rows) == (4, recorded)


def test_the_trace_outlives_the_ranks(trained):
    trained.step(3)
    trace = trained.trace
    trained.stop()
    assert trained.trace == trace
    assert trace.num_rows > 0
    assert "no ranks are running" in str(trained.status())
    trained.start()
    assert trained.trace.num_rows == 0


def troubled(header):
    """Return a header that reports parts of a model ``m`` that the engine does not manage."""
    ranks = [replace(each, buffers=(BufferSum(name="m.mean", crc32=each.rank),)) for each in header.ranks]
    return replace(header, unmanaged=("m.scale",), hooks=("m.weight",), ranks=tuple(ranks))


def test_status_reports_unmanaged_parameters(trained, tmp_path):
    assert trained.status().notes == ()
    trace = trained.trace
    save(Trace(troubled(trace.header), trace.ranks), tmp_path / "a.trace")
    status = Workbench.open(tmp_path / "a.trace").status()
    assert [note.partition(".")[0] for note in status.notes] == [
        "in no unit, so their gradients are not averaged: scale",
        "register_hook is never called on a sharded parameter: weight",
        "buffers differ between ranks: mean",
    ]
    assert all(note in str(status) for note in status.notes)


def test_status_shows_busy_ranks_and_gives_idle_ranks_more_time(trained, monkeypatch):
    asked, ask = [], trained.fake.ask

    def noted(request, ranks=None, timeout_s=2.0):
        asked.append((request.word, ranks, timeout_s))
        return ask(request, ranks, timeout_s)

    trained.fake.script["step"] = [returns, returns, computes, computes]
    trained.step(background=True)
    wait_until(lambda: trained._session.request.watch.running == {2, 3})
    trained.fake.silent = {1, 3}
    monkeypatch.setattr(trained.fake, "ask", noted)
    assert [rank.doing for rank in trained.status().ranks] == ["idle", "", "idle", "busy"]
    assert [call for call in asked if call[0] == "locate"] == [("locate", [1], waiter.PATIENT_S)]
    trained.fake.silent = set()
    trained.abort()


def test_a_plan_needs_the_answer_of_a_rank(wb):
    command = Shard(model="model", wrap=("Block",))
    assert wb.preview(command) == wb.fake.job.header.units
    with pytest.raises(UsageError, match=r"^the model has no module of class Blcok; its classes are: Block \(2\)$"):
        wb.preview(replace(command, wrap=("Blcok",)))
    wb.fake.silent = {0}
    with pytest.raises(UsageError, match=r"^no rank has answered: see %fsdp where$"):
        wb.preview(command)


def test_status_lists_ranks_and_models(wb):
    wb.fake.silent = {3}
    text = str(wb.status())
    assert "4 ranks running" in text
    assert "cpu on <here>, pid 102; idle" in text
    assert "pid 103; no answer" in text
    assert "nothing yet: %fsdp shard MODEL" in text
    assert "&lt;here&gt;" in wb.status()._repr_html_()
    wb.fake.dead = {2}
    assert "rank 2 of 4 died: %fsdp heal, or %fsdp stop, then %fsdp start" in str(wb.status())


# ---- commands


def test_shard_sends_the_command_and_reports(wb):
    wb.fake.script["shard"] = [gives({**SHARD_RESULT, "bytes_at_rest": 1000 + 8 * (r == 0)}) for r in range(4)]
    report = wb.shard("model", wrap=["Block"], reshard_after_forward="false", ignore=["*.bias"])
    sent = Shard(model="model", wrap=("Block",), reshard_after_forward="false", ignore=("*.bias",))
    assert wb.sent("execute") == [("execute", sent)]
    assert report.bytes_at_rest == (1008, 1000, 1000, 1000)
    assert "model: 3 units on 4 ranks, 1,000 elements in 10 parameters" in str(report)


@pytest.mark.parametrize("mesh", ["2x2", [2, 2], (2, 2)])
def test_every_policy_is_sent(wb, mesh):
    policy = {"reshard_after_forward": "true", "mp": "bf16,reduce=fp32", "offload": True, "prefetch": 2}
    wb.fake.script["shard"] = gives({**SHARD_RESULT, "policy": ["2 copies", "computes in bfloat16"]})
    report = wb.shard("model", wrap="Block", mesh=mesh, **policy)
    assert wb.sent("execute")[0][1] == Shard(model="model", wrap=("Block",), mesh=(2, 2), **policy)
    assert "policy           2 copies; computes in bfloat16" in str(report)


def test_reshard_reports_that_nothing_is_to_change(trained):
    trained.fake.script["reshard"] = gives({**SHARD_RESULT, "optimizers": 1, "is_changed": False})
    report = trained.reshard("model")
    sentence = "nothing to change, model: 3 units on 4 ranks, 1,000 elements in 10 parameters"
    assert (report.is_changed, report.headline) == (False, sentence)


def test_reshard_sends_only_what_changes(trained):
    trained.fake.script["reshard"] = gives({**SHARD_RESULT, "optimizers": 2})
    report = trained.reshard("model", reshard_after_forward=2, mesh=4)
    (sent,) = trained.sent("execute")
    assert sent[1] == Reshard(model="model", reshard_after_forward=2, mesh=(4,))
    assert "resharded in place, model: 3 units on 4 ranks" in str(report)
    assert "state of 2 optimizers carried over" in str(report)


def test_unshard_and_verify_report(trained):
    trained.fake.script["unshard"] = gives({"model": "model", "num_params": 10, "optimizers": 1})
    assert "state of 1 optimizer carried over" in str(trained.unshard("model"))
    result = {
        "num_params": 10,
        "max_abs_diff": 1e-7,
        "max_rel_diff": 1e-6,
        "worst_param": "head.weight",
        "loss_sharded": 4.5,
        "loss_reference": 4.5,
        "equal_bits": 8,
        "ok": True,
        "tolerance": "rtol 0.001, atol 1e-05",
        "not_finite": [],
        "buffers_not_finite": [],
        "since": None,
        "unmanaged": encode(UnmanagedState()),
        "differences": None,
        "replicas": [],
        "left_out": [],
        "counters": [],
        "reset": [],
        "uneven": [],
        "uneven_copies": [],
        "resume": None,
        "copy": [],
        "settings": {},
        "optimizer_steps": 1,
        "num_inputs": 8,
        "random_crc32": 0,
        "initial_rate": 0.0,
        "arguments": [],
        "repetition": None,
        "undecided": [],
    }
    worse = {**result, "max_abs_diff": 0.5, "max_rel_diff": 0.5, "worst_param": "<b>", "ok": False, "loss_sharded": 5.5}
    trained.fake.script["verify"] = [gives(result)] * 3 + [gives(worse)]
    report = trained.verify()
    assert not report.ok
    assert (report.max_abs_diff, report.worst_param, report.loss_sharded) == (0.5, "<b>", 4.75)
    assert "NOT the same" in str(report)
    assert "&lt;b&gt;" in report._repr_html_()


def test_step_follows_the_trace_and_ends_complete(trained):
    seen = []
    report = trained.step(3, on_progress=seen.append)
    assert report.steps_done == 3
    assert str(report) == "3 steps, loss 4.5 -> 4.3, 250 ms a step (median)"
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert (seen[-1].done, seen[-1].total, seen[-1].step) == (3, 3, 2)
    assert seen[-1].loss == pytest.approx(1.5 + 3.0 * 0.818731 + 0.015, abs=1e-4)
    assert seen[-1].step_ns > 0
    job = trained.fake.job
    assert [len(r.rows) for r in trained.trace.ranks] == [rank.step_ends[-1] for rank in trained.fake.ranks]
    assert trained.trace.header.units == job.header.units


def test_ranks_that_do_not_answer_at_the_end_of_a_command_are_asked_before_the_next_one(wb):
    wb.fake.silent = {0, 1, 2, 3}  # on a busy machine
    wb.fake.script["shard"] = gives(SHARD_RESULT)
    wb.fake.sharded()
    wb.shard("model", wrap="Block")
    wb.fake.silent, wb.fake.script["step"] = set(), wb.fake.trains(3)
    assert wb.step().steps_done == 3


def test_do_takes_the_command_itself(trained):
    assert trained.do(Step(count=3)).steps_done == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda wb: wb.step(), "nothing is sharded yet, so there is nothing to step: first %fsdp shard model"),
        (lambda wb: wb.verify(), "nothing is sharded yet, so there is nothing to verify: first %fsdp shard model"),
        (lambda wb: wb.shard("modle"), "no rank has a model named 'modle': did you mean 'model'? the ranks have model"),
        (lambda wb: wb.unshard("nothing"), "no rank has a model named 'nothing': the ranks have model"),
        (lambda wb: wb.shard("a b"), "model is a variable on the ranks, such as model or model.blocks, not 'a b'"),
        (lambda wb: wb.step(0), "the number of steps is a whole number of at least 1, not 0"),
        (lambda wb: wb.shard("model", wrap=[3]), "wrap takes names of module classes such as Block, not 3"),
        (
            lambda wb: wb.shard("model", mesh="2x3"),
            "%fsdp shard: mesh 2x3 = 6 does not match the number of ranks, 4; these fit: 4, 2x2, 4x1",
        ),
        (
            lambda wb: wb.reshard("model", mesh=2),
            "%fsdp reshard: mesh 2 does not match the number of ranks, 4; these fit: 4, 2x2, 4x1",
        ),
        (
            lambda wb: wb.shard("model", mesh=2.5),
            (
                "mesh is hosts (one replica per host), a number of shard ranks, or "
                "replicas x shard ranks, such as 4 or 2x2, not '2.5'"
            ),
        ),
        (
            lambda wb: wb.shard("model", reshard_after_forward=3),
            (
                "%fsdp shard: reshard_after_forward 3 does not split the 4 shard ranks "
                "into equal, smaller groups; these fit: 2; or auto, true, false"
            ),
        ),
        (
            lambda wb: wb.shard("model", mesh="2x2", reshard_after_forward=2),
            (
                "%fsdp shard: reshard_after_forward 2 does not split the 2 shard ranks "
                "into equal, smaller groups; these fit: no number; auto, true, false"
            ),
        ),
        (
            lambda wb: wb.shard("model", mp="half"),
            (
                "mp is a dtype, with reduce= and output= if they differ, such as bf16 "
                "or bf16,reduce=fp32,output=fp32; off means none, also for one of "
                "them: reduce=off; the dtypes are bf16, fp16, fp32, fp64; keep=*.norm* leaves "
                "the parameters of these names in their own dtype; got 'half'"
            ),
        ),
        (lambda wb: wb.unshard("model", speed=3), "unshard() has no argument 'speed'; the arguments are: model"),
        (
            lambda wb: wb.reshard("model", reshard_after=True),
            (
                "reshard() has no argument 'reshard_after', did you mean 'reshard_after_forward'? the arguments are: "
                "model, wrap, mesh, reshard_after_forward, api, strategy, orig_params, mp, offload, prefetch"
            ),
        ),
        (lambda wb: wb.shard(), "shard(): missing a required argument: 'model'"),
        (lambda wb: wb.unshard("model", "other"), "unshard(): too many positional arguments"),
        (
            lambda wb: wb.reshard("model"),
            "nothing is sharded yet, so there is nothing to reshard: first %fsdp shard model",
        ),
        (lambda wb: wb.shard(3), "model is a variable on the ranks, such as model or model.blocks, not 3"),
        (lambda wb: wb.run_cell("x", ranks=[7]), "there is no rank 7: the ranks are 0 to 3"),
        (lambda wb: wb.run_cell("x", ranks=[]), "no rank was selected: the ranks are 0 to 3"),
        (
            lambda wb: wb.view("memroy"),
            (
                "there is no view 'memroy'; did you mean 'memory'? the "
                "views are: layout, memory, timeline, states, comms, "
                "training"
            ),
        ),
        (
            lambda wb: wb.export("run.xyz"),
            (
                "'run.xyz' has no known format; the name must end in one of: .trace "
                "(all events that are kept, to open again with %fsdp open), .json (for "
                "https://ui.perfetto.dev), .html (opens in any browser, without a "
                "network), .py (a script for torchrun)"
            ),
        ),
        (
            lambda wb: wb.export("/does/not/exist/run.json"),
            "cannot write /does/not/exist/run.json: there is no folder /does/not/exist",
        ),
    ],
)
def test_bad_requests_give_a_remedy_and_reach_no_rank(wb, call, message):
    with pytest.raises(UsageError) as caught:
        call(wb)
    assert str(caught.value) == message
    assert wb.sent("execute") == wb.sent("cell") == []


def test_a_method_that_is_not_there_is_told_which_are(wb):
    with pytest.raises(UsageError, match=r"^there is no method 'dance'; methods: abort, .*, where$"):
        wb.help("dance")


def test_a_name_on_some_ranks_is_found_before_any_rank_starts(trained):
    trained.fake.variables[2] = []
    with pytest.raises(UsageError, match="'train_step' is on ranks 0-1, 3, not on rank 2"):
        trained.step()
    trained.fake.modules[1] = trained.fake.variables[1] = []
    with pytest.raises(UsageError, match="'model' is on ranks 0, 3, not on ranks 1-2"):
        trained.shard("model.blocks")
    assert trained.sent("execute") == []


def test_a_name_that_only_the_notebook_has():
    with Bench(2, in_notebook=lambda name: name == "net") as bench, pytest.raises(UsageError, match="in this notebook"):
        bench.shard("net")


@pytest.mark.parametrize("call", [lambda wb: wb.step(), lambda wb: wb.shard("m"), lambda wb: wb.run_cell("1")])
def test_before_a_start_commands_are_refused(call):
    with pytest.raises(UsageError, match="Start them with %fsdp start -n 4"):
        call(Bench())


# ---- cells and their output


def test_the_first_target_streams_and_the_rest_is_compared(wb):
    wb.fake.script["cell"] = [prints("hello\n"), prints("hello\n"), prints("other\n"), prints("hello\n")]
    outputs = []
    report = wb.run_cell("print('hello')", on_output=outputs.append)
    assert outputs[0].data["text/plain"] == "--- ranks differ:"
    assert outputs[-1].data["text/plain"] == report.remarks.rstrip("\n")
    assert report.remarks == "--- ranks 0-1, 3:\nhello\n--- rank 2:\nother\n"
    assert report.texts == {0: "hello\n", 1: "hello\n", 2: "other\n", 3: "hello\n"}
    assert "ran on ranks 0-3" in str(report)


def test_a_cell_on_some_ranks_runs_only_there(wb):
    wb.fake.script["cell"] = prints("x")
    assert set(wb.run_cell("1", ranks=[3, 1, 3]).texts) == {1, 3}
    assert wb.sent("cell") == [("cell", "1", (1, 3))]


def test_results_count_as_output_and_silence_is_silent(wb):
    result = Output("result", data={"text/plain": "42", "text/html": "<b>42</b>"})
    wb.fake.script["cell"] = [writes(result)] * 3 + [writes(Output("display", data={"text/plain": "43"}))]
    assert wb.run_cell("42").remarks == "--- ranks 0-2:\n42\n--- rank 3:\n43\n"
    wb.fake.script["cell"] = gives(None)
    assert wb.run_cell("pass").remarks == ""


def test_an_error_keeps_the_output_of_the_failing_rank(wb):
    wb.fake.script["cell"] = [prints("a\n"), prints("b\n", raises("ValueError")), prints("a\n"), prints("a\n")]
    outputs = []
    with pytest.raises(RankError):
        wb.run_cell("x", on_output=outputs.append)
    assert outputs[-1].data["text/plain"] == "--- ranks 0, 2-3:\na\n--- rank 1:\nb"


# ---- failures


def test_a_rank_that_raises_frees_the_others_and_all_are_ready_again(trained):
    cause = raises("ZeroDivisionError", "division by zero", line=3)
    trained.fake.script["step"] = [blocks, blocks, cause, blocks]
    with pytest.raises(RankError) as caught:
        trained.step()
    assert str(caught.value).splitlines()[0] == "rank 2 raised ZeroDivisionError: division by zero (line 3 of the cell)"
    assert "idle again" in str(caught.value)
    assert (caught.value.rank, caught.value.ename) == (2, "ZeroDivisionError")
    assert caught.value.traceback == "ZeroDivisionError!\n"
    reason = "rank 2: ZeroDivisionError: division by zero"
    assert trained.sent("give up") == [("give up", GiveUp(reason=reason), (0, 1, 3))]
    assert len(trained.sent("recover")) == 1
    trained.fake.script["step"] = gives(step_result(1))
    assert trained.step().steps_done == 1
    assert len(trained.sent("recover")) == 1


def test_the_place_in_the_step_is_read_off_the_trace(trained):
    trained.fake.script["step"] = [raises("KeyError", "'x'"), blocks, blocks, blocks]
    before_backward = 1
    rank = trained.fake.ranks[0]
    rows = rank.whole.rows
    place = next(i for i in range(len(rows)) if rows["kind"][i] == before_backward and rows["unit"][i] == 1)
    trained.fake.on_drain = lambda: setattr(rank, "recorded", place + 1 if trained.sent("execute") else 0)
    with pytest.raises(RankError) as caught:
        trained.step()
    assert "(step 0, forward, unit blocks.1)" in str(caught.value)


def test_a_cell_that_fails_on_every_rank_needs_no_recovery(wb):
    wb.fake.script["cell"] = raises("NameError", "name 'x' is not defined")
    with pytest.raises(RankError) as caught:
        wb.run_cell("x")
    assert "same error on ranks 1-3" in str(caught.value)
    assert caught.value.also == (1, 2, 3)
    assert wb.sent("give up") == wb.sent("recover") == []


def raises_with_work_left(cluster, rank, answer):
    cluster.unfinished[rank] = 1
    raises("ValueError")(cluster, rank, answer)


@pytest.mark.parametrize(
    "acts",
    [[gives(None), raises("ValueError"), gives(None), gives(None)], [raises_with_work_left] * 4],
    ids=["some went on", "a collective is unfinished"],
)
def test_it_recovers_when_some_rank_may_be_behind(wb, acts):
    wb.fake.script["cell"] = acts
    for _ in range(2):
        with pytest.raises(RankError):
            wb.run_cell("x")
    (_, first), (_, second) = wb.sent("recover")
    assert first != second  # the name under which the ranks meet again


def test_it_recovers_after_a_failed_cell_that_trained(wb):
    wb.fake.sharded()
    wb.fake.script["cell"] = raises("ValueError")
    ready = iter([0])
    wb.fake.on_drain = lambda: next(ready, None) is None and [setattr(r, "recorded", 10) for r in wb.fake.ranks]
    with pytest.raises(RankError):
        wb.run_cell("train()")
    assert len(wb.sent("recover")) == 1


def test_ranks_whose_optimizer_stepped_alone_are_named(trained):
    def steps_then_blocks(cluster, rank, answer):
        cluster.optimizer_steps[rank] += 1
        blocks(cluster, rank, answer)

    trained.fake.optimizer_steps = {0: 5, 1: 4, 2: 4, 3: 4}  # earlier differences do not count for this command
    trained.fake.script["step"] = [steps_then_blocks, steps_then_blocks, raises("ValueError"), blocks]
    with pytest.raises(RankError, match="applied on ranks 0-1 but not on ranks 2-3"):
        trained.step()


def test_a_refusal_of_ranks_is_a_usage_error(wb):
    wb.fake.script["shard"] = raises("UsageError", "the model has no module of class Blok; its classes are: Block (2)")
    with pytest.raises(UsageError, match=r"^the model has no module of class Blok"):
        wb.shard("model", wrap=["Blok"])
    wb.fake.script["shard"] = [raises("UsageError", "sharded already"), *[blocks] * 3]
    with pytest.raises(UsageError, match=r"^rank 0: sharded already$"):
        wb.shard("model")
    wb.fake.script["recover"] = [raises("AssertionError", "no group"), *[blocks] * 3]
    with pytest.raises(UsageError, match=r"^rank 0: sharded already\nthe ranks could not rebuild their process groups"):
        wb.shard("model")


def test_a_dead_rank_frees_the_others_which_still_run_cells(trained):
    trained.fake.script["step"] = [blocks, dies, blocks, blocks]
    with pytest.raises(RankDied) as caught:
        trained.step()
    assert caught.value.ranks == (1,)
    assert "killed by SIGKILL" in str(caught.value)
    assert "%fsdp stop, then %fsdp start" in str(caught.value)
    assert "%%fsdp -t 0,2-3" in str(caught.value)
    assert trained.where().ranks[1].cells() == ("1", "gone", "", "", "", KILLED, "")
    assert [entry[2] for entry in trained.sent("give up")] == [(0, 2, 3)]
    assert trained.sent("recover") == []
    trained.fake.script["cell"] = prints("still here")
    assert trained.run_cell("x", ranks=[0, 2, 3]).remarks == "--- 3 ranks agree\n"
    for call in (trained.step, lambda: trained.run_cell("x"), lambda: trained.run_cell("x", ranks=[1])):
        with pytest.raises(RankDied, match=r"^rank 1 died: "):
            call()


def test_while_ranks_are_being_stopped_views_see_all_that_was_recorded(trained, monkeypatch):
    """A trace without rows would make a live view forget its cursor and zoom."""
    trained.step(3)
    recorded, seen, session = trained.trace.num_rows, [], trained._session
    close = session.close

    def look():
        seen.append((trained.pulse().exchange, trained.pulse().trace.num_rows, trained.trace.num_rows))
        close()

    monkeypatch.setattr(session, "close", look)
    trained.stop()
    assert seen == [("stop", recorded, recorded)]
    assert recorded > 0


def test_a_wrong_time_of_stalls_is_refused_before_ranks_start(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STALL_S", "never")
    wb = Bench()
    with pytest.raises(UsageError, match="WORKBENCH_STALL_S='never'"):
        wb.start()
    monkeypatch.setenv("WORKBENCH_STALL_S", "0.1")
    wb.start()
    assert wb.running
    wb.stop()


def test_a_stop_frees_the_ranks_though_the_thread_of_their_step_ends_first(trained, monkeypatch):
    """The ranks of an attached cluster would block for ever."""
    trained.fake.script["step"] = [computes, returns, returns, returns]
    trained.step(background=True)
    session = trained._session
    monkeypatch.setattr(session, "_catch_up", session.request.thread.join)  # as if the ranks answered slowly
    trained.stop()
    assert [entry[2] for entry in trained.sent("shut")] == [(0,)]


def test_a_cluster_that_is_stopped_meanwhile_is_named(trained):
    trained.fake.script["step"] = gives(ClusterError("rank was stopped"))
    with pytest.raises(RankError, match="ClusterError: rank was stopped"):
        trained.step()


def test_a_failed_recovery_names_the_culprit_and_every_line_gives_a_remedy(trained):
    trained.fake.script["step"] = [blocks, raises("ValueError", "my mistake"), blocks, blocks]
    trained.fake.script["recover"] = [blocks, raises("AssertionError", "no group"), blocks, blocks]
    with pytest.raises(RankError) as caught:
        trained.step()
    obstacle = (
        "the ranks could not rebuild their process groups (rank 1 raised AssertionError: no group): "
        "%fsdp stop, then %fsdp start; "
        "ranks 0-3 can still run cells with %%fsdp -t 0-3"
    )
    assert str(caught.value).splitlines()[0] == "rank 1 raised ValueError: my mistake"
    assert str(caught.value).splitlines()[-1] == obstacle
    assert "idle again" not in str(caught.value)
    assert trained.sent("give up")[-1][1] == GiveUp(reason="the ranks could not rebuild their process groups")
    for refused in (trained.step, lambda: trained.run_cell("x")):
        with pytest.raises(ClusterError) as later:
            refused()
        assert str(later.value) == obstacle
    assert len(trained.sent("recover")) == 3  # each tries again
    assert trained.status().headline == obstacle
    assert trained.where().headline == f"4 ranks idle; {obstacle}"
    trained.fake.script["cell"] = prints("still here")
    for named in ([0], [0, 1, 2, 3]):
        assert trained.run_cell("x", ranks=named).texts == dict.fromkeys(named, "still here")
    trained.fake.script["cell"] = raises("ValueError", "another")
    with pytest.raises(RankError, match="another") as caught:
        trained.run_cell("x", ranks=[0])
    assert "idle again" not in str(caught.value)
    assert len(trained.sent("recover")) == 3
    trained.fake.script["recover"], trained.fake.script["cell"] = gives({}), prints("well")
    assert trained.run_cell("x").texts == dict.fromkeys(range(4), "well")
    assert trained.status().obstacle == ""


def test_a_recovery_names_the_missing_rank(trained, monkeypatch):
    monkeypatch.setattr(session, "RECOVER_S", 0.01)
    monkeypatch.setattr(session, "PATIENT_S", 0.01)
    trained.fake.script["step"] = [raises("ValueError", "my mistake"), blocks, blocks, blocks]
    trained.fake.script["recover"] = [blocks, blocks, lambda cluster, rank, answer: None, blocks]
    trained.fake.lines[2] = CellLine(line=3, function="forward", text="while True: pass")
    with pytest.raises(RankError) as caught:
        trained.step()
    assert "process groups (rank 2 has run for 0 s, in while True: pass at line 3 of forward)" in str(caught.value)
    with pytest.raises(ClusterError, match="could not rebuild their process groups"):
        trained.run_cell("x", ranks=[2])  # it would wait there


def test_a_step_that_was_abandoned_blocks_the_next_one_until_it_has_ended(trained):
    hanging = []
    trained.fake.script["cell"] = [blocks, lambda cluster, rank, answer: hanging.append(answer), blocks, blocks]
    press_ctrl_c_on_drain(trained.fake, 3)
    with pytest.raises(
        Interrupted,
        match=r"rank 1 still runs, and the notebook no longer waits: %fsdp stop.*%%fsdp -t 0,2-3",
    ):
        trained.run_cell("x")
    with pytest.raises(ClusterError, match="rank 1 still runs"):
        trained.step()
    assert trained.sent("recover") == []
    settle(hanging[0].future, None)
    trained.fake.script["step"] = trained.fake.trains(1)
    trained.step()
    assert len(trained.sent("recover")) == 1


def test_a_death_is_reported_immediately_and_the_others_are_interrupted(trained, monkeypatch):
    monkeypatch.setattr(waiter, "SIGNAL_AFTER_DEATH_S", 0.3)
    trained.fake.script["step"] = [computes, dies, computes, computes]
    sentences = []
    with pytest.raises(RankDied):
        trained.do(Step(), on_standing=sentences.append)
    assert sentences[0].startswith("rank 1 died (SIGKILL); ranks 0, 2-3 have run for 0 s")
    assert trained.sent("interrupt") == [("interrupt", (0, 2, 3))]


def test_a_cause_beside_a_dead_rank_has_the_lines_of_those_that_wait(trained, monkeypatch):
    monkeypatch.setattr(waiter, "SIGNAL_AFTER_DEATH_S", 0.3)
    asked, frames = [], ("train.py:7 in main: dist.all_reduce(x)",)
    monkeypatch.setattr(session, "parted", lambda trace, positions: asked.append(positions))
    trained.fake.lines[2] = CellLine(line=7, function="main", text="dist.all_reduce(x)", frames=frames)
    trained.fake.script["step"] = [computes, dies, computes, computes]
    with pytest.raises(RankDied):
        trained.do(Step(), on_standing=lambda sentence: None)
    assert {each.rank: each.frames for each in asked[0] if each.frames} == {2: frames}


def test_the_line_of_a_rank_that_raised_has_the_calls_that_led_to_it(trained, monkeypatch):
    asked, frames = [], ("train.py:7 in main: load()", "train.py:3 in load: x[1]")
    monkeypatch.setattr(session, "parted", lambda trace, positions: asked.append(positions))
    trained.fake.lines[2] = CellLine(line=3, function="load", text="x[1]", frames=frames, ago_ns=5)
    trained.fake.script["step"] = [blocks, blocks, raises("KeyError", "1"), blocks]
    with pytest.raises(RankError):
        trained.step()
    trained.where()
    (found,) = (each for each in asked[-1] if each.frames == frames)
    assert (found.rank, found.reason) == (2, "KeyError: 1")


def test_a_rank_that_just_died_is_not_reported_as_running(trained, monkeypatch):
    monkeypatch.setattr(waiter, "SIGNAL_AFTER_DEATH_S", 0.3)
    trained.fake.script["step"] = computes

    def on_drain():
        if any(entry[0] == "execute" and isinstance(entry[1], Step) for entry in trained.fake.log):
            trained.fake.lose(1)

    trained.fake.on_drain, sentences = on_drain, []
    with pytest.raises(RankDied):
        trained.step(on_standing=sentences.append)
    assert re.fullmatch(r"rank 1 died \(SIGKILL\); ranks 0, 2-3 have run for \d+ s", sentences[0])


def test_after_a_death_ctrl_c_stops_waiting_for_a_rank_that_ignores_sigint(trained, monkeypatch):
    monkeypatch.setattr(waiter, "SIGNAL_AFTER_DEATH_S", 0.3)
    monkeypatch.setattr(stall_notice, "AGAIN_S", 0.0)
    hanging, sentences = [], []
    trained.fake.script["step"] = [lambda cluster, rank, answer: hanging.append(answer), dies, blocks, blocks]

    def on_standing(sentence):
        sentences.append(sentence)
        if sentence.endswith("; Ctrl-C stops waiting"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(
        Interrupted, match=r"^Interrupted; rank 0 still runs, and the notebook no longer waits: "
    ) as caught:
        trained.step(on_standing=on_standing)
    assert trained.sent("interrupt") == [("interrupt", (0,))]
    assert not sentences[0].endswith("stops waiting")
    assert re.search(r"\nbefore that: rank 1 died \(SIGKILL\); rank 0 has run for \d+ s.*$", str(caught.value))
    assert "stops waiting" not in str(caught.value)


def test_an_abort_ends_although_a_rank_does_not(trained, monkeypatch):
    monkeypatch.setattr(waiter, "ABANDON_AFTER_S", 0.05)
    trained.fake.script["step"] = [blocks, lambda cluster, rank, answer: None, blocks, blocks]
    trained.step(background=True)
    assert trained.abort().headline.startswith(
        "Aborted; rank 1 still runs, and the notebook no longer waits: %fsdp stop, then"
    )


def test_the_stall_notice_is_kept_after_ctrl_c(wb, monkeypatch):
    monkeypatch.setattr(wb._session, "_quiet_s", 0.0)
    wb.fake.script["cell"] = [returns, blocks, returns, returns]
    wb.fake.lines[1] = CellLine(line=2, function="<module>", text="dist.barrier()")
    with pytest.raises(Interrupted) as caught:
        wb.run_cell("x", on_standing=lambda pattern: signal.raise_signal(signal.SIGINT))
    pattern = (
        r"before that: rank 1 has run for \d+ s, in dist\.barrier\(\) at line 2 of the cell; ranks 0, 2-3 have ended"
    )
    assert re.fullmatch(pattern, str(caught.value).splitlines()[1])


def test_a_callback_that_raises_leaves_no_rank_waiting(trained):
    def broken(progress):
        raise LookupError("in the callback")

    trained.fake.script["step"] = blocks
    with pytest.raises(LookupError):
        trained.step(on_progress=broken)
    assert trained.sent("give up")[0][2] == (0, 1, 2, 3)
    trained.fake.script["step"] = gives(step_result(1))
    trained.step()
    assert len(trained.sent("recover")) == 1


# ---- Ctrl-C


def test_hanging_ranks_are_reported_with_their_position(wb, monkeypatch):
    monkeypatch.setattr(wb._session, "_quiet_s", 0.0)
    hanging, sentences = [], []
    wb.fake.script["cell"] = [returns, lambda cluster, rank, answer: hanging.append(answer), returns, returns]
    wb.fake.lines[1] = CellLine(line=2, function="<module>", text="dist.barrier()")

    def on_standing(sentence):
        sentences.append(sentence)
        settle(hanging[0].future, None)

    wb.run_cell("x", on_standing=on_standing)
    pattern = r"rank 1 has run for \d+ s, in dist\.barrier\(\) at line 2 of the cell; ranks 0, 2-3 have ended"
    assert re.fullmatch(pattern, sentences[0])


@pytest.mark.parametrize(
    ("command", "first"),
    [(Step(), "stops at the next event of ranks 0-3"), (Verify(), "%fsdp verify records no events to stop at")],
)
def test_the_effect_of_the_next_ctrl_c_is_shown(trained, monkeypatch, command, first):
    monkeypatch.setattr(waiter, "SIGNAL_AFTER_S", 1000.0)
    monkeypatch.setattr(stall_notice, "AGAIN_S", 0.0)
    trained.fake.script[command.word] = lambda cluster, rank, answer: None
    sentences = []

    def on_standing(sentence):
        if sentence not in sentences:
            sentences.append(sentence)
            signal.raise_signal(signal.SIGINT)

    press_ctrl_c_on_drain(trained.fake, 1)
    with pytest.raises(Interrupted):
        trained.do(command, on_standing=on_standing)
    assert sentences == [
        f"{first}; Ctrl-C again aborts",
        "aborting; ranks 0-3 still run; Ctrl-C again aborts at once",
        "aborting; ranks 0-3 still run; Ctrl-C again sends SIGINT",
        "aborting; ranks 0-3 still run; Ctrl-C again stops waiting",
    ]


def press_ctrl_c_on_drain(fake, times, together=1):
    """Send this process ``times`` SIGINT at the next drains of a running request, ``together`` at each."""
    left = times

    def on_drain():
        nonlocal left
        running = any(entry[0] in {"execute", "cell"} for entry in fake.log)
        for _ in range(min(left, together) if running else 0):
            left -= 1
            signal.raise_signal(signal.SIGINT)

    fake.on_drain = on_drain


def test_ctrl_c_frees_ranks_that_wait(trained):
    trained.fake.script["cell"] = blocks
    press_ctrl_c_on_drain(trained.fake, 1)
    with pytest.raises(Interrupted, match=r"^Interrupted. The ranks are idle again") as caught:
        trained.run_cell("x")
    assert isinstance(caught.value, KeyboardInterrupt)
    assert trained.sent("give up") == [("give up", GiveUp(reason="interrupted"), (0, 1, 2, 3))]
    assert trained.sent("interrupt") == []
    assert len(trained.sent("recover")) == 1


def test_a_ctrl_c_while_a_cell_is_sent_frees_all_ranks(trained):
    def act(cluster, rank, answer):
        if rank == 1:
            signal.raise_signal(signal.SIGINT)
        blocks(cluster, rank, answer)

    trained.fake.script["cell"] = act
    with pytest.raises(Interrupted, match=r"^Interrupted. The ranks are idle again"):
        trained.run_cell("x")
    assert trained.sent("give up") == [("give up", GiveUp(reason="interrupted"), (0, 1, 2, 3))]


def test_ctrl_c_signals_ranks_that_compute_a_moment_later(trained):
    trained.fake.script["cell"] = [blocks, computes, blocks, computes]
    press_ctrl_c_on_drain(trained.fake, 1)
    begin = time.monotonic()
    with pytest.raises(Interrupted):
        trained.run_cell("x")
    assert time.monotonic() - begin >= waiter.SIGNAL_CELL_AFTER_S
    assert trained.sent("interrupt") == [("interrupt", (1, 3))]


def test_ranks_that_have_just_ended_are_not_signalled(trained, monkeypatch):
    monkeypatch.setattr(waiter, "SIGNAL_CELL_AFTER_S", 0.0)  # as if the notebook had been slow to check the time
    trained.fake.script["cell"] = [blocks, computes, blocks, computes]
    press_ctrl_c_on_drain(trained.fake, 1)
    with pytest.raises(Interrupted):
        trained.run_cell("x")
    assert trained.sent("interrupt") == [("interrupt", (1, 3))]


@pytest.mark.parametrize("together", [1, 2])
def test_a_second_ctrl_c_signals_at_once(trained, monkeypatch, together):
    monkeypatch.setattr(waiter, "SIGNAL_CELL_AFTER_S", 1000.0)
    trained.fake.script["cell"] = computes
    press_ctrl_c_on_drain(trained.fake, 2, together)
    with pytest.raises(Interrupted):
        trained.run_cell("x")
    assert trained.sent("interrupt") == [("interrupt", (0, 1, 2, 3))]


def test_a_third_ctrl_c_stops_waiting(trained):
    trained.fake.script["cell"] = lambda cluster, rank, answer: None
    press_ctrl_c_on_drain(trained.fake, 3)
    with pytest.raises(Interrupted, match="ranks 0-3 still run, and the notebook no longer waits: %fsdp stop"):
        trained.run_cell("x")
    assert trained.sent("recover") == []
    assert trained.fake.patience[-2:] == [("drain", waiter.ASK_S), ("locate", waiter.ASK_S)]  # they need not answer


@pytest.mark.parametrize(("patient_s", "end"), [(60.0, r"The ranks are idle again"), (0.0, r".*rebuild.*\(ranks? 0")])
def test_a_ctrl_c_while_ranks_recover_ends_the_wait_only_if_they_are_late(trained, monkeypatch, patient_s, end):
    late = []

    def recovers(cluster, rank, answer):
        signal.raise_signal(signal.SIGINT)
        late.append(answer)
        if patient_s and len(late) == 4:
            [settle(each.future, {}) for each in late]

    def press_once_late(pending, timeout_s=None, *, or_error=False):
        if or_error and timeout_s == waiter.SLICE_S:
            signal.raise_signal(signal.SIGINT)
        return wait(pending, timeout_s, or_error=or_error)

    wait = PendingReplies.wait
    monkeypatch.setattr(PendingReplies, "wait", press_once_late)
    monkeypatch.setattr(session, "PATIENT_S", patient_s)
    trained.fake.script |= {"cell": blocks, "recover": recovers}
    press_ctrl_c_on_drain(trained.fake, 1)
    with pytest.raises(Interrupted, match=rf"(?s)^Interrupted. {end}"):
        trained.run_cell("x")


def test_ctrl_c_after_a_death_still_reports_it(trained):
    trained.fake.script["cell"] = [dies, blocks, blocks, blocks]
    press_ctrl_c_on_drain(trained.fake, 1)
    with pytest.raises(RankDied):
        trained.run_cell("x")


def test_ctrl_c_elsewhere_works_as_usual(trained):
    before = signal.getsignal(signal.SIGINT)
    trained.step(3)
    assert signal.getsignal(signal.SIGINT) is before


def test_it_works_in_another_thread(trained):
    reports = []
    thread = threading.Thread(target=lambda: reports.append(trained.step(3)))
    thread.start()
    thread.join()
    assert reports[0].steps_done == 3


# ---- views


@pytest.mark.parametrize("view", ["layout", "memory", "timeline", "states", "comms", "training"])
def test_every_view_has_its_method(trained, view):
    trained.step(3)
    assert getattr(trained, view)().to_json() == trained.view(view).to_json()


def test_explanations_are_reports_with_a_picture(trained):
    with pytest.raises(UsageError, match="nothing is recorded yet"):
        Bench().explain()
    trained.step(3)
    found = trained.explain("wait", step=1)
    assert "of step 1 for collectives" in found.headline
    picture = trained.picture(found)
    assert [each.to_json() for each in picture.data] == [each.to_json() for each in trained.timeline(step=1).data]
    assert list(marked(picture)) == [line for line in found.answer.evidence if " up to " in line]
    assert trained.explain("rank", "1").subject == trained.explain("1").subject == "rank 1"
    trained.back(1)
    assert trained.explain("blocks.0").headline == "blocks.0 is sharded: freed after backward in step 2"
    empty = replace(found, picture=None)
    assert trained.picture(empty) is None


def test_an_answer_whose_picture_fails_is_shown_with_the_reason():
    picture = Picture(view="timeline", options={"size": 3})
    answer = ExplainReport(subject="", step=3, answer=Fault(rule="step", verdict=""), num_checks=0, picture=picture)
    (reason,) = Bench().picture(answer).layout.annotations
    assert "%fsdp timeline --size 3 cannot be drawn" in reason.text


def test_the_policies_of_an_opened_trace_are_compared(tmp_path):
    save(resharded_at(1), tmp_path / "run.trace")
    wb = Bench.open(tmp_path / "run.trace")
    assert "step 0" in subtitle(wb.compare())
    assert wb.numbers("compare").names == ("this run, step 0", "this run, step 1")


def test_views_of_an_empty_trace_are_figures():
    assert Bench().layout().layout.annotations[0].text


def test_rows_that_a_rank_overwrote_are_counted_as_lost(trained):
    trained.fake.script["step"] = trained.fake.trains(1)
    trained.step(1)
    rank = trained.fake.ranks[1]
    first, rank.recorded = rank.recorded, rank.step_ends[1]
    rank.overwritten = rank.recorded
    rank.recorded = rank.step_ends[2]
    assert trained.trace.rank(1).lost == rank.step_ends[1] - first
    assert "lost: overwritten before they were read" in str(trained.status())


@pytest.mark.parametrize("suffix", [".trace", ".json", ".html"])
def test_export_of_some_steps_is_smaller_and_holds_only_them(trained, tmp_path, suffix):
    whole, part = (tmp_path / f"{name}{suffix}" for name in ("whole", "part"))
    trained.step(3)
    trained.export(whole)
    sentence = str(trained.export(part, steps="1..2"))
    assert "steps 1-2" in sentence
    if suffix == ".html":
        assert "4 ranks, 2 steps (1 to 2), " in part.read_text()
    assert part.stat().st_size < whole.stat().st_size
    if suffix == ".trace":
        assert steps(load(part)) == [1, 2]
    if suffix == ".json":
        step_numbers = [event.get("args", {}).get("step", -1) for event in json.loads(part.read_text())["traceEvents"]]
        assert set(step_numbers) - {-1} == {1, 2}
    with pytest.raises(UsageError, match="steps are written 5, "):
        trained.export(part, steps="three")
    with pytest.raises(UsageError, match="the trace has no step 99"):
        trained.export(part, steps="99")


def test_export_writes_the_format_of_the_suffix(trained, tmp_path):
    trained.step(3)
    assert "to open again" in str(trained.export(tmp_path / "run.trace"))
    assert load(tmp_path / "run.trace") == trained.trace
    trained.export(str(tmp_path / "run.json"))
    assert "traceEvents" in json.loads((tmp_path / "run.json").read_text())
    trained.export(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert page.count("<!DOCTYPE html>") == 1
    assert 'src="http' not in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.json", "run.trace"]


def test_a_trace_too_large_for_a_browser_is_not_exported_as_a_page(trained, tmp_path, monkeypatch):
    trained.step(3)
    monkeypatch.setattr("workbench.export.MAX_PAGE_ROWS", 100)
    with pytest.raises(UsageError, match=r"a page holds at most 100: write fewer steps, such as %fsdp export run.html"):
        trained.export(tmp_path / "run.html")
    assert list(tmp_path.iterdir()) == []


def test_help_explains_methods(wb):
    assert "Train ``count`` steps" in wb.help("step")
    assert "shard: Shard a model with fully_shard" in wb.help()


def test_a_step_that_failed_is_known_until_one_completes(wb, tmp_path):
    with pytest.raises(UsageError):
        wb.do(Step())
    assert wb.failed_step.startswith("nothing is sharded yet")
    save(Trace.empty(), tmp_path / "a.trace")
    wb.stop()
    wb.open_record(tmp_path / "a.trace")
    assert wb.failed_step == ""


def test_the_notebooks_process_never_loads_torch():
    code = "import sys, workbench.magics; from workbench import Workbench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_mesh_of_hosts_reaches_the_ranks_as_numbers(wb):
    class OnTwoHosts(FakeCluster):
        @property
        def rank_info(self):
            return [replace(info, host="a" if info.rank < 2 else "b") for info in super().rank_info]

    with Workbench(4, cluster_factory=OnTwoHosts) as bench:
        fake = bench._session.cluster
        fake.script["shard"] = raises("UsageError", "not today")
        with pytest.raises(UsageError, match="not today"):
            bench.shard("model", mesh="hosts")
        assert [entry[1].mesh for entry in fake.log if entry[0] == "execute"] == [(2, 2)]


def test_lint_reports_what_the_ranks_find(trained):
    fault = {"rule": "unsplit-unit", "verdict": "one unit", "evidence": ["9 B"], "fix": "%fsdp reshard"}
    trained.fake.script["lint"] = gives({**LINT_RESULT, "faults": [fault]})
    report = trained.lint("model")
    assert (report.models, report.problem) == (("model",), "one unit")
    assert report.facts() == [("evidence", "9 B"), ("fix", "%fsdp reshard")]


def test_lint_needs_a_sharded_model_that_is_there_and_idle_ranks(trained):
    with pytest.raises(UsageError, match="no rank has a model named 'modle'"):
        trained.lint("modle")
    trained.fake.script["step"] = computes
    trained.step(background=True)
    with pytest.raises(UsageError, match="runs in the background: %fsdp pause stops inside it, %fsdp abort aborts it"):
        trained.lint()
    trained.abort()


def test_the_newest_plan_is_compared_by_its_name_and_without_activations_that_only_it_has(trained):
    trained.step(3)
    with pytest.raises(UsageError, match="nothing is planned yet: 'plan' is the newest plan, of %fsdp plan MODEL"):
        trained.compare("plan", "last")
    trained._planned = simulate(Setup(num_ranks=1, steps=2, activations=True))
    words = subtitle(trained.compare("plan", "last")).replace("<br>", " ")
    assert "the plan without activations -&gt; this run" in words
    assert "activations (" not in title(trained.compare("plan", "last"))
