"""``--json``: every line, in a real IPython shell on a fake cluster, prints one document that the schema describes."""

import json

import pytest

from tests.helpers import json_schema
from tests.helpers.fake_cluster import (
    LINT_RESULT,
    SHARD_RESULT,
    blocks,
    gives,
    inside,
    prints,
    raises,
    step_result,
    writes,
)
from tests.helpers.recorded_run import record
from tests.reports.test_inspect_table import FOUND
from workbench.base.codec import encode
from workbench.cluster.pending_replies import Output
from workbench.errors import RankDied, RankError, UsageError
from workbench.magics.command_lines import WORDS, has_json, help_text, parse_line
from workbench.protocol.checkpoint_replies import LoadReply, SaveReply
from workbench.protocol.commands import Break, Evaluate, Help, Inspect, SnapshotReply, UnshardReply, VerifyReply
from workbench.protocol.fault_kinds import FaultReply
from workbench.protocol.rank_messages import JobReply

VERIFIED = VerifyReply(
    num_params=2,
    max_abs_diff=1e-8,
    max_rel_diff=float("inf"),
    worst_param="a",
    equal_bits=1,
    ok=True,
    tolerance="rtol 0.001",
    loss_sharded=float("nan"),
    loss_reference=None,
)


SAVED = SaveReply(folder="a/step-3", step=3, num_bytes=9, blocked_s=0.1, variables=("model", "opt"), notes=("none",))


def read(cell):
    """Return the document of a line that succeeded: all that it printed."""
    assert cell.shown == []
    return json_schema.read(cell.out)


@pytest.fixture
def trained(notebook):
    """A notebook whose model is sharded and has trained three steps."""
    notebook.fake.sharded()
    notebook.fake.script |= {
        "shard": gives(SHARD_RESULT),
        "reshard": gives(SHARD_RESULT),
        "lint": gives(LINT_RESULT),
        "snapshot": gives(encode(SnapshotReply(num_bytes=2**20, kept_bytes=2**22, seconds=0.25))),
        "unshard": gives(encode(UnshardReply(model="model", num_params=2, optimizers=1))),
        "verify": gives(encode(VERIFIED)),
        "fault": gives(encode(FaultReply(name="nan", rank=1, unit="blocks.0", ms=200, is_on=True))),
        "step": notebook.fake.trains(3),
        "save": gives(encode(SAVED)),
        "load": gives(encode(LoadReply(folder="a/step-3", step=3, saved_ranks=2, variables=("model",)))),
    }
    notebook.ok("%fsdp step 3")
    notebook.fake.script["step"] = gives(step_result(3))
    return notebook


@pytest.fixture
def stopped(notebook):
    """A notebook whose step is stopped before a backward."""
    notebook.fake.sharded()
    notebook.fake.script["step"] = inside
    for gate in notebook.fake.gates:
        gate.jobs = lambda rank, job: JobReply(inspected=FOUND if isinstance(job.work, Inspect) else None, text="3")
    notebook.ok("%fsdp step --until backward")
    return notebook


IDLE = {
    "start -n 4": "StatusReport",  # they run already
    "status": "StatusReport",
    "where": "WhereReport",
    "shard model --wrap Block": "ShardReport",
    "reshard model --mp bf16": "ReshardReport",
    "unshard model": "UnshardReport",
    "lint": "LintReport",
    "step 3": "StepReport",
    "save {folder}": "SaveReport",
    "load {folder}": "LoadReport",
    "snapshot": "SnapshotReport",
    "step 3 --background": "BackgroundReport",
    "break add forward:blocks.0 --rank 2 --when 'num_bytes > 1'": "BreakReport",
    "break list": "BreakReport",
    "back 3": "BackReport",
    "verify": "VerifyReport",
    "fault nan --rank 1": "InjectReport",
    "faults": "FaultListReport",
    "layout --unit blocks.*": "LayoutReport",
    "memory --steps 2 --talk": "MemoryReport",
    "timeline --step 1": "TimelineReport",
    "states --rank 1": "StatesReport",
    "comms": "CommsReport",
    "training": "TrainingReport",
    "explain": "ExplainReport",
    "explain peak --step 1": "ExplainReport",
    "explain rank 1": "ExplainReport",
    "compare last:0 last:2": "CompareReport",
    "export {folder}/run.trace": "ExportReport",
    "history 1": "HistoryReport",
    "output --rank 1 --lines 3": "OutputReport",
    "help shard": None,
    "example": None,
    "stop": None,
}
STOPPED = {
    "where --stacks": "WhereReport",
    "inspect head.weight": "InspectReport",
    "eval x['a'] -t 1": "EvalReport",
    "next": "StopReport",
    "continue": "StepReport",
    "abort": "EndReport",
}
ELSEWHERE = {"attach", "detach", "heal", "dashboard", "pause", "open", "run", "plan"}
"""Commands with tests of their own: below, and those of plans."""


def test_every_command_is_tried():
    assert {line.split()[0] for line in {**IDLE, **STOPPED}} | ELSEWHERE == WORDS.keys()


@pytest.mark.parametrize("line", IDLE)
def test_a_line_prints_its_report(trained, tmp_path, line):
    trained.shell.user_ns["folder"] = str(tmp_path)
    found = read(trained.ok(f"%fsdp {line} --json"))
    assert (found["version"], found["command"], found["type"]) == (1, line.split()[0], IDLE[line])
    assert found["error"] is None


@pytest.mark.parametrize("line", STOPPED)
def test_a_line_about_a_stopped_step_prints_its_report(stopped, line):
    found = read(stopped.ok(f"%fsdp {line} --json"))
    assert (found["command"], found["type"]) == (line.split()[0], STOPPED[line])


def test_numbers_are_numbers_and_names_are_names(trained):
    read(trained.ok("%fsdp step 3 --json"))
    step = read(trained.ok("%fsdp history --json"))["report"]["commands"][-2]
    assert step["line"] == "%fsdp step 3"
    assert isinstance(step["t_s"], float)
    verified = read(trained.ok("%fsdp verify --json"))["report"]
    assert (verified["max_rel_diff"], verified["loss_sharded"], verified["loss_reference"]) == ("inf", "nan", None)
    sent = read(trained.ok("%fsdp comms --json"))["report"]
    assert sent["as_expected"]
    assert {row["kind"] for row in sent["rows"]} == {"all_gather", "reduce_scatter"}
    assert {row["unit"] for row in sent["rows"]} == {"(root)", "blocks.0", "blocks.1"}


def test_a_stop_says_where_each_rank_is(stopped):
    rows = read(stopped.ok("%fsdp next --json"))["report"]["ranks"]
    assert [(row["rank"], row["state"], row["step"]) for row in rows] == [(rank, "held", 0) for rank in range(4)]
    assert all(isinstance(row["for_ns"], int) for row in rows)
    inspected = read(stopped.ok("%fsdp inspect head.weight --json"))["report"]["by_rank"]
    assert sorted(inspected) == ["0", "1", "2", "3"]


def test_sentences_are_notices(trained):
    assert read(trained.ok("%fsdp help shard --json"))["notices"] == [help_text(Help("shard"))]
    assert read(trained.ok("%fsdp shard -h --json"))["notices"] == [help_text(Help("shard"))]
    assert "already running" in read(trained.ok("%fsdp start -n 4 --json"))["notices"][0]
    assert read(trained.ok("%fsdp stop --json"))["notices"] == ["Ranks stopped. The trace is kept: views still work"]


def test_a_trace_opens_without_ranks(trained, tmp_path):
    trained.ok(f"%fsdp export {tmp_path}/run.trace\n%fsdp stop")
    assert read(trained.ok(f"%fsdp open {tmp_path}/run.trace --json"))["report"]["steps"] == [0, 1, 2]
    assert read(trained.ok("%fsdp status --json"))["report"]["record"] == "run.trace"


def test_where_the_ranks_of_an_opened_recording_are(bare, tmp_path):
    record(tmp_path, ranks=[0])
    assert "no readable recording of rank 1" in read(bare.ok(f"%fsdp open {tmp_path} --json"))["report"]["notes"][0]
    found = read(bare.ok("%fsdp where --json"))
    assert (found["type"], [row["rank"] for row in found["report"]["ranks"]]) == ("RunWhereReport", [0])


def test_output_of_ranks_does_not_mix_with_the_document(notebook):
    notebook.fake.sharded()
    shown = Output("display", data={"text/plain": "a picture", "image/png": "..."})
    notebook.fake.script["step"] = writes(Output("stdout", text="hello\n"), shown, then=notebook.fake.trains(1))
    cell = notebook.ok("%fsdp step 1 --json")
    assert read(cell)["report"]["steps_done"] == 1
    assert cell.err.count("hello\n") == 1
    assert "a picture\n" in cell.err


def test_a_cell_prints_the_output_of_each_rank(notebook):
    notebook.fake.script["cell"] = [prints(f"{rank}\n") for rank in range(4)]
    found = read(notebook.ok("%%fsdp --json -t 0,2\nprint(rank)"))
    assert (found["command"], found["type"]) == ("%%fsdp", "CellReport")
    assert found["report"]["texts"] == {"0": "0\n", "2": "2\n"}


def test_a_result_that_is_used_is_returned_and_not_printed(notebook):
    cell = notebook.ok("found = %fsdp status --json")
    assert (cell.out, cell.shown) == ("", [])
    assert json_schema.check(notebook.shell.user_ns["found"])["type"] == "StatusReport"
    assert '"command"' not in notebook.run("found = %fsdp step x --json").out  # the error alone


# ---- errors


def failed(cell, kind):
    """Return the error in the document of a line that raised an exception of ``kind``, which is shown as well."""
    assert type(cell.error) is kind
    document, shown = cell.out.split("\n", 1)
    assert f"{kind.__name__}: " in shown
    found = json_schema.read(document)
    assert (found["report"], found["error"]["type"]) == (None, kind.__name__)
    return found["error"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("shrad model --json", "did you mean 'shard'?"),
        ("--json", "%fsdp has no command '--json'"),
        ("step x --json", "expected a whole number"),
        ("step --json", "No ranks are running yet"),
        ("memory --json", "No ranks are running yet"),
        ("dashboard --json", "dashboard only draws: it has no --json. %fsdp status --json, "),
        ("timeline --canvas --json", "timeline --canvas only draws: it has no --json. %fsdp timeline --json has"),
        ("attach --json --profile no_such_profile", "no_such_profile"),
        ("detach --json", "No ranks are running yet"),
    ],
)
def test_a_wrong_line_prints_its_error_and_raises(bare, line, message):
    assert message in failed(bare.run(f"%fsdp {line}"), UsageError)["message"]


def test_nothing_to_pause(notebook):
    assert "nothing to pause" in failed(notebook.run("%fsdp pause --json"), UsageError)["message"]


def test_an_error_on_a_rank_names_ranks_line_and_exception(notebook):
    notebook.fake.sharded()
    red = raises("ValueError", "no", line=3, traceback="\x1b[31mValueError\x1b[0m: no")
    notebook.fake.script["step"] = [blocks, red, red, blocks]
    error = failed(notebook.run("%fsdp step --json"), RankError)
    assert (error["ranks"], error["ename"], error["evalue"], error["line"]) == ([1, 2], "ValueError", "no", 3)
    assert error["traceback"] == "ValueError: no"


def test_an_error_of_a_dead_rank_names_it(notebook):
    notebook.fake.sharded()
    notebook.fake.lose(1)
    assert failed(notebook.run("%fsdp step --json"), RankDied)["ranks"] == [1]


# ---- where the flag may be


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("inspect a --json", Inspect("a")),
        ("inspect --json a", Inspect("a")),
        ("inspect -- --json", Inspect("--json")),
        ("break --json list", Break("list")),
        ("eval --json x[0] -t 1", Evaluate("x[0]", (1,))),
        ("eval -t 1 x[0] --json", Evaluate("x[0]", (1,))),
        ("eval x[0] --json -t 1", Evaluate("x[0]", (1,))),
        ("eval -- x --json", Evaluate("x --json")),
    ],
)
def test_the_flag_is_no_argument_of_a_command(line, command):
    assert parse_line(line) == command
    assert has_json(line) is ("--json" in line.partition(" -- ")[0])


def test_the_flag_completes_and_is_explained(notebook):
    assert notebook.complete("%fsdp status --j") == ["--json"]
    assert "print the result as one line of JSON" in notebook.ok("%fsdp status -h").out


def test_an_unexpected_error_is_a_document_too(notebook, monkeypatch):
    monkeypatch.setattr(notebook.shell.magics_manager.registry["FsdpMagics"].workbench, "status", lambda: 1 / 0)
    cell = notebook.run("%fsdp status --json")
    found = json.loads(cell.out.splitlines()[0])
    assert json_schema.check(found)["error"]["type"] == "ZeroDivisionError"
