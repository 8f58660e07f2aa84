"""The output of processes that ranks start, and of a rank whose own thread outlives it."""

import os
import signal

import pytest

from tests.cluster.conftest import texts
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.errors import RankDied

pytestmark = pytest.mark.cluster

PROCESSES = """
import multiprocessing, os, sys
def work(n):
    print("child", n)
    print("error", n, file=sys.stderr)
    os.system("echo grandchild")
for n in range(2):
    process = multiprocessing.get_context("fork").Process(target=work, args=(n,))
    process.start()
    process.join()
print("parent")
"""

WORKERS = """
import torch
class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, place):
        print("item", place)
        return torch.zeros(1)
for batch in torch.utils.data.DataLoader(Items(), num_workers=2):
    pass
"""

STARTED = """
import multiprocessing, os, subprocess, sys
process = multiprocessing.get_context("spawn").Process(target=print, args=("spawn",))
process.start()
process.join()
subprocess.run([sys.executable, "-c", "import sys; print('program'); print('error', file=sys.stderr)"])
print(subprocess.run(["echo", "captured"], capture_output=True, text=True).stdout, end="")
os.write(1, b"for the log")
"""

REDIRECTED = """
import contextlib, io, os
with contextlib.redirect_stdout(io.StringIO()) as mine:
    pid = os.fork()
    if pid == 0:
        print("kept by the child's own redirection")
        os._exit(0)
    os.waitpid(pid, 0)
print(repr(mine.getvalue()))
"""


def written(cluster, code, kind="stdout"):
    pending = cluster.run_cell(code, ranks=[0])
    assert pending.result(0, PATIENCE_S) is None
    return texts(pending, 0, kind)


def test_output_of_child_processes_appears_in_their_cell(cluster):
    pending = cluster.run_cell(PROCESSES, ranks=[0])
    pending.result(0, PATIENCE_S)
    stdout = texts(pending, 0).splitlines()
    assert stdout == ["child 0", "grandchild", "child 1", "grandchild", "parent"]
    assert texts(pending, 0, "stderr").splitlines() == ["error 0", "error 1"]
    assert written(cluster, "print('next')") == "next\n"


def test_output_of_dataloader_workers_appears_in_their_cell(cluster):
    assert sorted(written(cluster, WORKERS).splitlines()) == [f"item {place}" for place in range(4)]


def test_output_of_other_programs_appears_in_their_cell(make_cluster):
    cluster = make_cluster(1)  # only one rank: multiprocessing's own helpers end with it
    cluster.start()
    pending = cluster.run_cell(STARTED, ranks=[0])
    assert pending.result(0, PATIENCE_S) is None
    assert texts(pending, 0).splitlines() == ["spawn", "program", "captured"]
    assert texts(pending, 0, "stderr").splitlines() == ["error"]


def test_what_c_code_writes_to_stderr_is_shown_and_in_the_log_if_the_rank_dies(make_cluster, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # under pytest ipykernel leaves the standard files as they are
    cluster = make_cluster(1)
    cluster.start()
    log = "import os, stat; print(stat.S_ISREG(os.fstat(2).st_mode))"
    assert written(cluster, log) == "True\n", "what is written there outlives the process"
    assert written(cluster, "_ = os.write(2, b'from C\\n')", "stderr") == "from C\n"
    pending = cluster.run_cell("import ctypes\nos.write(2, b'last words\\n')\nctypes.string_at(0)")
    with pytest.raises(RankDied, match=r"SIGSEGV \(line 3 of the cell\); the end of its log:\nfrom C\nlast words$"):
        pending.result(0, PATIENCE_S)
    assert cluster.losses() == {0: "died: the process was killed by SIGSEGV (line 3 of the cell)"}


def test_output_of_a_child_during_a_command_is_shown(cluster):
    pending = cluster.apply("tests.helpers.fake_rank:fork_and_print", "hello", ranks=[0])
    pending.result(0, PATIENCE_S)
    assert texts(pending, 0) == "hello\n"


def test_a_redirection_of_the_users_stays(cluster):
    assert written(cluster, REDIRECTED) == "''\n"


def test_a_rank_ends_although_a_user_thread_still_runs(make_cluster):
    cluster = make_cluster(1)
    cluster.start()
    cluster.run_cell("import threading; threading.Thread(target=threading.Event().wait).start()").results(PATIENCE_S)
    os.kill(cluster.rank_info[0].pid, signal.SIGTERM)
    wait_until(cluster.losses)
    assert cluster.losses() == {0: "died: the process ended with exit code 1"}
    assert cluster.alive() == (False,)
