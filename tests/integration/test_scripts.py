"""Scripts of torchrun on the ranks of a notebook: the same losses, stops, Ctrl-C, and scripts that fail."""

import os
import re
import threading

import pytest

from tests.helpers.ctrl_c import CtrlCCallback
from tests.helpers.scripts import TRAIN, written
from tests.helpers.waiting import PATIENCE_S
from tests.helpers.warm_python import torchrun
from workbench import Workbench
from workbench.errors import Interrupted, RankDied, RankError, UsageError
from workbench.protocol.rank_messages import LocateLine
from workbench.reports.pause_reports import StopReport

pytestmark = pytest.mark.cluster

BEGIN = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
"""


@pytest.fixture(scope="module")
def wb():
    """Two ranks."""
    with Workbench(2, device="cpu") as bench:
        yield bench


@pytest.fixture
def run(wb, tmp_path):
    """Run a script on the ranks; return the report and what they wrote."""
    wb.break_clear()
    wb.news()

    def run(source=TRAIN, *args, **options):
        texts = []
        options.setdefault("on_output", lambda output: texts.append(output.text))
        report = wb.run_script(written(tmp_path, source), args, **options)
        return report, "".join(texts)

    yield run
    if wb._session.request is not None:
        wb.abort()
    wb.run_cell("import torch.distributed; torch.distributed.barrier()")  # they are ready again


def losses(wb):
    """Return the losses that the script has left on each rank."""
    texts = wb.run_cell("print(' '.join(losses))").texts
    assert all(texts.values())
    return {rank: text.strip() for rank, text in texts.items()}


@pytest.mark.parametrize("args", [(), ("--ddp",), ("--workers", "2")])
def test_losses_are_those_under_torchrun_bit_for_bit(wb, run, tmp_path, args):
    run(TRAIN, "--lr", "1e-3", "--steps", "5", *args)
    threads = str(max(1, (os.cpu_count() or 1) // 2))  # as the ranks have: sums depend on it
    line = (tmp_path / "train.py", "--lr", "1e-3", "--steps", "5", *args)
    done = torchrun(*line, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS=threads)
    expected = {int(rank): text for rank, text in re.findall(r"losses of rank (\d): (.*)", done.stdout)}
    assert [len(text.split()) for text in expected.values()] == [5, 5], (done.returncode, done.stderr)
    assert losses(wb) == expected


def test_its_model_is_there_for_views_and_cells(wb, run):
    run()
    assert "4 units: (root), layers.0, layers.1, layers.2" in str(wb.status())
    assert wb.layout().layout.title.text.startswith("Each of 2 ranks keeps")
    assert "FSDPNet" in wb.run_cell("print(type(model).__name__, world_size)").texts[1]


def test_it_stops_at_a_breakpoint_and_goes_on_with_the_same_losses(wb, run):
    run()
    expected = losses(wb)
    wb.break_add("all_gather:layers.0")
    report, _ = run()
    for _ in range(2):  # in forward and in backward
        assert isinstance(report, StopReport)
        assert "before all-gather of layers.0" in report.headline
        assert wb.evaluate("len(losses)").texts == {0: "0", 1: "0"}
        assert wb.inspect("layers.0.weight").by_rank[1].shard.of_rows == 16
        report = wb.resume()
    wb.break_clear()
    assert wb.resume().steps_done == 3
    assert losses(wb) == expected


FOREVER = (
    BEGIN
    + """
from torch import nn
from torch.distributed.fsdp import fully_shard
model = fully_shard(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
print("begins", flush=True)
while True:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.001)
"""
)


def test_ctrl_c_stops_inside_it_and_an_abort_leaves_the_ranks_ready(wb, run):
    report, _ = run(FOREVER, on_output=CtrlCCallback())
    assert isinstance(report, StopReport)
    assert "Aborted. The ranks are idle again" in wb.abort().headline
    assert run(TRAIN)[0].steps_done == 3


def test_in_the_background_it_can_be_paused_and_aborted(wb, run):
    begun = threading.Event()
    report, _ = run(FOREVER, background=True, on_output=lambda output: begun.set())
    assert "runs in the background" in report.headline
    assert begun.wait(PATIENCE_S)
    assert isinstance(wb.pause(), StopReport)
    wb.resume()
    assert "Aborted" in wb.abort().headline


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("if rank == 1:\n    raise ValueError('boom')\ndist.barrier()", "rank 1 raised ValueError: boom (line 7 of"),
        (
            "pair = dist.new_group([0, 1])\n"
            "if rank == 1:\n    raise ValueError('boom')\n"
            "dist.all_reduce(torch.ones(1), group=pair)",
            "rank 1 raised ValueError: boom (line 8 of train.py)",
        ),
        ("if rank == 1:\n    sys.exit(3)\ndist.barrier()", "rank 1 raised ScriptExit: the script called sys.exit(3)"),
        ("sys.exit('no data')", "rank 0 raised ScriptExit: the script called sys.exit('no data') (line 6 of train.py)"),
        (
            "dist.destroy_process_group()\ndist.barrier()",
            "ValueError: Default process group has not been initialized, please make sure to call init_process_group. "
            "(line 7 of train.py)",
        ),
        ("dist.init_process_group()", "ValueError: trying to initialize the default process group twice!"),
        ("from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cpu', (2, 2))", "(line 7 of"),
    ],
)
def test_a_script_that_fails_is_named_with_rank_and_line(run, source, message):
    with pytest.raises(RankError) as caught:
        run(BEGIN + source)
    assert message in str(caught.value)
    assert str(caught.value).endswith("correct train.py and run it again")


def test_its_line_is_kept_until_the_next_cell(wb, run):
    with pytest.raises(RankError):
        run("def load():\n    raise KeyError('lang')\nload()\n")
    lines = wb._session.ask(LocateLine())
    assert {(each.line, each.function, each.text, each.ago_ns > 0) for each in lines.values()} == {
        (2, "load", "raise KeyError('lang')", True)
    }
    wb.run_cell("pass")
    assert wb._session.ask(LocateLine()) == {0: None, 1: None}
    with pytest.raises(RankError):
        wb.run_cell("1 / 0")
    assert {each.text for each in wb._session.ask(LocateLine()).values()} == {"1 / 0"}


def test_a_syntax_error_is_one_sentence(run):
    with pytest.raises(UsageError, match=r"^train\.py, line 1: invalid syntax: x = = 1$"):
        run("x = = 1")


def test_what_threads_print_is_shown_and_a_status_of_0_is_success(run):
    source = """
import sys, threading
threads = [threading.Thread(target=print, args=(f"thread {n}\\n",), kwargs={"end": ""}) for n in range(3)]
for thread in threads:
    thread.start()
sys.exit(0)
"""
    shown = []
    report, _ = run(source, on_output=lambda output: shown.append(output.text or str(output.data)))
    assert report.steps_done == 0
    text = "".join(shown)  # in tabs if the threads of the ranks print in different orders
    assert [f"thread {n}" in text for n in range(3)] == [True] * 3


def test_a_rank_that_the_script_ends_is_lost(tmp_path):
    with Workbench(2, device="cpu") as bench, pytest.raises(RankDied, match="rank 1 died"):
        bench.run_script(written(tmp_path, BEGIN + "if rank == 1:\n    os._exit(9)\ndist.barrier()"))


def test_a_rank_that_computes_is_interrupted(wb, run):
    with pytest.raises(Interrupted, match="idle again"):
        run(BEGIN + "print('begins', flush=True)\nwhile True:\n    pass", on_output=CtrlCCallback(2))
