"""How the demo runs a notebook and reads its results; needs no ranks."""

import dataclasses
import subprocess
import sys

import nbformat.v4
import pytest

from tests.helpers.simulated_job import Setup, simulate
from workbench.cli import demo
from workbench.cli.demo import DemoError, communication, heldout_losses, summary
from workbench.events import Edge, Kind
from workbench.trace import save
from workbench.trace.columns import RankTrace, Trace


def notebook(*sources):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def printed(*texts):
    outputs = [
        nbformat.v4.new_output("stream", text=texts[0]),
        *(nbformat.v4.new_output("display_data", data={"text/plain": text}) for text in texts[1:]),
    ]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=outputs)])


def without_one_gather(trace):
    """Return ``trace`` as if rank 1 had skipped one all-gather."""
    rows = trace.rank(1).rows
    first = (rows["kind"] == Kind.ALL_GATHER) & (rows["edge"] == Edge.BEGIN)
    gone = (rows["comm_seq"] == rows["comm_seq"][first][0]) & (rows["kind"] == Kind.ALL_GATHER)
    rows = rows[~gone].copy()
    rows["seq"] = range(len(rows))
    others = [r for r in trace.ranks if r.rank != 1]
    return Trace(trace.header, (*others, RankTrace(1, rows)))


def test_a_notebook_runs_in_this_python_and_in_its_folder(tmp_path, capsys):
    program = "import os, sys\nprint(sys.executable, os.getcwd())"
    executed = demo.execute(notebook("1 + 1", program), tmp_path)
    assert executed.cells[0].outputs[0].data["text/plain"] == "2"
    assert executed.cells[1].outputs[0].text.split() == [demo.sys.executable, str(tmp_path)]
    assert "[ 2/2] import os, sys" in capsys.readouterr().out


def test_a_cell_that_raises_is_named(tmp_path):
    with pytest.raises(DemoError, match=r"the notebook failed in cell 2 of 3: \{\}\['nothing'\]\nKeyError: 'nothing'"):
        demo.execute(notebook("a = 1", "{}['nothing']", "b = 2"), tmp_path)


def test_a_kernel_that_dies_is_named(tmp_path):
    message = r"in cell 1 of 1: import os; os._exit\(1\)\nthe notebook's kernel failed: Kernel died"
    with pytest.raises(DemoError, match=message):
        demo.execute(notebook("import os; os._exit(1)"), tmp_path)


UNSTARTED = """
import socket
from pathlib import Path
import nbformat.v4
from workbench.base import ports
from workbench.cli import demo

with socket.create_server((ports.LOOPBACK, 0)) as taken:
    settings = ports.of_a_kernel() | {"shell_port": taken.getsockname()[1]}
    ports.of_a_kernel = lambda: settings
    try:
        demo.execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]), Path("."))
    except demo.DemoError as error:
        print(error)
"""


@pytest.mark.thorough
def test_a_kernel_that_does_not_start_is_reported_without_noise_at_exit(tmp_path):
    """The kernel writes to the same streams, but never the texts that must not appear."""
    done = subprocess.run([sys.executable, "-c", UNSTARTED], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "before the first cell\nthe notebook's kernel failed: Kernel died" in done.stdout
    assert "atexit" not in done.stderr
    assert "nbclient" not in done.stderr


def test_a_cell_that_takes_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "CELL_TIMEOUT_S", 1)
    with pytest.raises(DemoError, match=r"in cell 1 of 1: while True: pass\nit took longer than 1 s"):
        demo.execute(notebook("while True: pass"), tmp_path)


def test_a_notebook_without_a_trace_is_refused(tmp_path):
    (tmp_path / "tour.trace").write_text("of an earlier run")
    nbformat.write(notebook("1"), tmp_path / "tour.ipynb")
    with pytest.raises(DemoError, match=r"did not write .*tour\.trace"):
        demo.run(tmp_path / "tour.ipynb", tmp_path)


@pytest.mark.parametrize("as_expected", [True, False])
def test_page_trace_and_summary(as_expected, tmp_path, capsys):
    trace = simulate(Setup())
    save(trace if as_expected else without_one_gather(trace), tmp_path / "made")
    nbformat.write(notebook("import shutil; shutil.copy('made', 'tour.trace')"), tmp_path / "tour.ipynb")
    report = demo.run(tmp_path / "tour.ipynb", tmp_path)
    assert report.communication.as_expected is as_expected
    assert (report.page, report.trace) == (tmp_path / "tour.html", tmp_path / "tour.trace")
    out = capsys.readouterr().out
    assert "The tour ran from top to bottom" in out
    assert "NOT equal" in out or as_expected
    assert "<html" in (tmp_path / "tour.html").read_text()


def test_predictions_need_no_answer_and_checks_of_exercises_are_left_out(tmp_path):
    save(simulate(Setup()), tmp_path / "made")
    tour = notebook(
        "import os, shutil; assert os.environ['WORKBENCH_UNATTENDED']; shutil.copy('made', 'tour.trace')", "1 / 0"
    )
    tour.cells[1].metadata["nbgrader"] = {"grade": True}
    nbformat.write(tour, tmp_path / "tour.ipynb")
    assert demo.run(tmp_path / "tour.ipynb", tmp_path).trace.exists()


def test_heldout_losses_are_parsed_from_the_output():
    executed = printed(
        "held-out loss 4.833, unigram 3.238 nats", "nothing", "x\nheld-out loss 2.351, unigram 3.238 nats"
    )
    assert heldout_losses(executed) == ((4.833, 3.238), (2.351, 3.238))
    assert heldout_losses(nbformat.v4.new_notebook()) == ()


def test_the_summary_names_the_losses_only_if_there_are_any():
    trace = simulate(Setup())
    assert "held-out loss" not in dict(summary(trace, ()))
    found = dict(summary(trace, ((4.0, 3.0), (3.5, 3.0), (2.0, 3.0))))
    assert found["held-out loss"] == "4.000 -> 2.000 nats per character; a unigram model has 3.000"


def test_units_that_were_undone_count_in_their_steps():
    trace = simulate(Setup(steps=2))
    header = dataclasses.replace(
        trace.header, units=tuple(dataclasses.replace(unit, retired=True) for unit in trace.header.units)
    )
    sent = communication(Trace(header, trace.ranks))
    assert sent == communication(trace)
    assert sent.as_expected
    assert (sent.num_steps, sent.calls) == (2, 2 * (2 * 4 - 1 + 4))


def test_the_rank_that_differs_is_the_one_shown():
    sent = communication(without_one_gather(simulate(Setup())))
    assert not sent.as_expected
    assert sent.calls == sent.expected_calls - 1


def test_without_steps_there_is_no_communication():
    sent = communication(Trace.empty())
    assert sent.as_expected
    assert (sent.num_steps, sent.calls) == (0, 0)
