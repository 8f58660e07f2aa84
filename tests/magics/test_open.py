"""``%fsdp open`` shows a trace again, without ranks."""

import shutil
import time

import pytest

from tests.helpers.trace_strategies import example_trace
from workbench import workbench as workbench_module
from workbench.errors import UsageError
from workbench.live.long_poll import mark
from workbench.session.outputs import WIDGET_MIME
from workbench.trace import load, save
from workbench.trace.recording import RecordingWriter, RunEnd, RunStart
from workbench.views import VIEWS
from workbench.views.theme import PLOTLY_MIME
from workbench.workbench import Workbench


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A trace of 4 ranks and 3 steps in the working directory."""
    monkeypatch.chdir(tmp_path)
    save(example_trace(), "run.trace")


def test_an_opened_trace_has_every_view_without_ranks(bare, run):
    reported = bare.ok("%fsdp open run.trace").shown[0]["text/plain"]
    assert reported.startswith("opened run.trace: 4 ranks, 3 steps, ")
    assert "  steps    0-2\n" in reported
    for name in VIEWS:
        assert PLOTLY_MIME in bare.ok(f"%fsdp {name}").shown[0]
    bare.ok("board = %fsdp dashboard")
    assert bare.shell.user_ns["board"]._repr_mimebundle_()[0].keys() >= {WIDGET_MIME}
    bare.shell.user_ns["board"].close()
    whole = bare.shell.run_line_magic("fsdp", "memory")
    bare.ok("%fsdp back 300")
    assert bare.shell.run_line_magic("fsdp", "memory") != whole
    bare.ok("%fsdp back 0")
    assert bare.ok("%fsdp compare run.trace last").shown[0]["text/plain"].startswith("the same, event for event")
    bare.ok("%fsdp export again.trace")
    assert load("again.trace") == load("run.trace")
    assert not bare.fakes


def test_commands_for_ranks_say_that_a_trace_is_open(bare, run):
    bare.ok("%fsdp open run.trace")
    for line in ("%fsdp step", "%fsdp where", "%%fsdp\n1", "%fsdp continue"):
        assert "No ranks are running; views show run.trace. Start them with %fsdp start -n 4" in bare.run(line).out
    status = bare.ok("%fsdp status").shown[0]["text/plain"]
    assert status.startswith("no ranks are running, run.trace is open: %fsdp start -n 4")
    assert "blocks.0" in status


def test_running_ranks_are_not_stopped_for_a_file(notebook, run):
    error = notebook.run("%fsdp open run.trace").error
    assert isinstance(error, UsageError)
    assert (
        "4 ranks are already running: %fsdp stop first, then %fsdp open. To view the file without stopping them:"
        in str(error)
    )
    notebook.ok("%fsdp stop\n%fsdp open run.trace")
    notebook.ok("%fsdp start -n 2")
    assert "run.trace" not in notebook.ok("%fsdp status").shown[0]["text/plain"]
    assert notebook.run("%fsdp compare last run.trace").out.count("nothing is recorded yet")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rnu.trace", "there is no file 'rnu.trace', did you mean 'run.trace'?"),
        ("notes.txt", "cannot read notes.txt: it is not a trace, or it is damaged or truncated"),
        ("folder", "folder is a folder without the recording of a rank, such as rank0.0000.rec"),
    ],
)
def test_an_unreadable_file_is_reported_and_the_shown_trace_stays(bare, run, tmp_path, name, message):
    (tmp_path / "notes.txt").write_text("no")
    (tmp_path / "folder").mkdir()
    bare.ok("%fsdp open run.trace")
    error = bare.run(f"%fsdp open {name}").error
    assert isinstance(error, UsageError)
    assert message in str(error)
    assert "run.trace is open" in bare.ok("%fsdp status").shown[0]["text/plain"]


def test_in_python_a_record_is_a_workbench(tmp_path):
    save(example_trace(), tmp_path / "run.trace")
    workbench = Workbench.open(tmp_path / "run.trace")
    assert workbench.trace == load(tmp_path / "run.trace")
    assert not workbench.running
    assert workbench.pulse().record == "run.trace"
    assert workbench.memory().data


def record(folder, trace, rank, rows):
    """Write the first ``rows`` of a rank, as a run that is alive does; return the open writer."""
    start = RunStart(rank=rank, world_size=len(trace.ranks), clock="one", t_ns=0, wall_ns=time.time_ns())
    writer = RecordingWriter(folder, start, trace.header, 1 << 30)
    write(writer, trace.rank(rank), 0, rows)
    return writer


def write(writer, part, begin, end):
    writer.append(part.rows[begin:end].tobytes(), part.state_before(end))


def test_a_recording_is_followed_while_its_run_writes(bare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workbench_module, "FOLLOW_S", 0.0)
    trace = example_trace(num_ranks=2, steps=2)
    writers = [record(tmp_path / "out", trace, part.rank, 50) for part in trace.ranks]
    opened = bare.ok("%fsdp open out").shown[0]["text/plain"]
    assert "run" in opened
    assert "continues; views and the dashboard follow it" in opened
    bench = bare.shell.magics_manager.registry["FsdpMagics"].workbench
    before = bench.pulse()
    assert before.trace.num_rows == 100
    assert before.is_live
    assert bare.ok("%fsdp where").shown[0]["text/plain"].startswith("the run continues")
    for writer, part in zip(writers, trace.ranks, strict=True):
        write(writer, part, 50, len(part.rows))
        writer.end(RunEnd(t_ns=int(part.rows["t_ns"][-1])))
        writer.close()
    after = bench.pulse()
    assert after.trace.ranks == trace.ranks
    assert not after.is_live
    assert mark(after) != mark(before)
    assert bench.trace.ranks == trace.ranks
    assert f"{trace.num_rows:,}" in bare.ok("%fsdp status").shown[0]["text/plain"]
    assert bare.ok("%fsdp where").shown[0]["text/plain"].startswith("the run has ended")
    assert "continues" not in bare.ok("%fsdp open out").shown[0]["text/plain"]


def test_a_recording_whose_folder_is_gone_stays_open(bare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workbench_module, "FOLLOW_S", 0.0)
    trace = example_trace(num_ranks=1, steps=1)
    record(tmp_path / "out", trace, 0, 50).close()
    bare.ok("%fsdp open out")
    shutil.rmtree(tmp_path / "out")
    assert bare.shell.magics_manager.registry["FsdpMagics"].workbench.trace.num_rows == 50
    assert "out is no longer" in bare.run("%fsdp where").out
    bare.ok("%fsdp memory")
