"""Deaths of processes: of a rank, the controller, the kernel."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import FOREVER_S, ROOT, RUNTIME, texts, wait_until_held
from tests.helpers.fake_rank import Die, GetThreadState, Release
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster.processes import is_running
from workbench.cluster.reaper import Reaper, process_of
from workbench.errors import ClusterError, RankDied

pytestmark = pytest.mark.cluster


def test_a_killed_rank_ends_its_request_and_the_others_continue(make_cluster):
    cluster = make_cluster(3)
    cluster.start()
    pending = cluster.apply(f"{RUNTIME}:hold")
    wait_until_held(cluster)
    os.kill(cluster.rank_info[1].pid, signal.SIGKILL)
    with pytest.raises(RankDied, match="rank 1 died: the process was killed by SIGKILL") as caught:
        pending.result(1, timeout_s=PATIENCE_S)
    assert caught.value.ranks == (1,)
    assert not pending.done(0)
    assert cluster.alive() == (True, False, True)

    replies = cluster.ask(Release(), timeout_s=FOREVER_S)  # returns without waiting for the dead rank
    assert isinstance(replies[1], RankDied)
    assert (pending.result(0, PATIENCE_S), pending.result(2, PATIENCE_S)) == (True, True)

    later = cluster.run_cell("print(rank)")
    assert later.wait(PATIENCE_S)
    assert isinstance(later.error(1), RankDied)
    assert [texts(later, rank) for rank in (0, 2)] == ["0\n", "2\n"]
    cluster.interrupt()
    with pytest.raises(RankDied):
        cluster.apply(f"{RUNTIME}:echo").results(PATIENCE_S)


def test_a_rank_that_dies_during_a_control_request_is_not_waited_for(make_cluster):
    cluster = make_cluster(1)
    cluster.start()
    replies = cluster.ask(Die(), timeout_s=FOREVER_S)
    assert "ended with exit code 7" in str(replies[0])
    assert isinstance(replies[0], RankDied)


def test_a_rank_that_exits_leaves_its_last_output(make_cluster):
    cluster = make_cluster(2)
    cluster.start()
    pending = cluster.run_cell("import os\nos.write(2, b'out of shared memory')\nos._exit(3)", ranks=[0])
    assert pending.wait(PATIENCE_S)
    message = str(pending.error(0))
    assert "the process ended with exit code 3" in message
    assert "out of shared memory" in message


def test_a_cluster_without_its_controller_is_reported(make_cluster):
    cluster = make_cluster(2)
    cluster.start()
    pending = cluster.apply(f"{RUNTIME}:hold")
    os.kill(cluster._provider._watched[None].process.pid, signal.SIGKILL)
    assert pending.wait(PATIENCE_S)
    with pytest.raises(ClusterError, match="rank 0 cannot be reached: the cluster's controller was killed by SIGKILL"):
        pending.result(0)
    assert cluster.alive() == (False, False)
    assert isinstance(cluster.ask(GetThreadState())[1], ClusterError)


KERNEL = f"""
import json, signal, sys
import psutil
from workbench.cluster import Cluster
cluster = Cluster(2, "cpu", runtime="{RUNTIME}")
cluster.start()
found = [[p.pid, p.create_time()] for p in psutil.Process().children(recursive=True)]
print(json.dumps([found, str(cluster._provider._root)]), flush=True)
if sys.argv[1] == "wait":
    cluster.run_cell("while True: pass", ranks=[1])
    signal.pause()
"""


def started_by(kernel):
    """Return the processes and the private directory of the cluster that another Python has started."""
    found, root = json.loads(kernel.stdout.readline())
    processes = [psutil.Process(pid) for pid, _ in found]
    assert [process.create_time() for process in processes] == [created for _, created in found]
    return processes, Path(root)


def python(*arguments):
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_nothing_outlives_a_killed_kernel():
    with python("-c", KERNEL, "wait") as kernel:
        processes, root = started_by(kernel)
        assert len(processes) >= 4
        assert root.is_dir()
        kernel.kill()
    wait_until(lambda: not any(map(is_running, processes)))
    assert not root.exists()


def test_nothing_outlives_a_kernel_that_ends_without_a_stop():
    with python("-c", KERNEL, "end") as kernel:
        processes, root = started_by(kernel)
        _, stderr = kernel.communicate(timeout=PATIENCE_S)
    assert (kernel.returncode, stderr) == (0, "")
    assert not any(map(is_running, processes))
    assert not root.exists()


FORKED = """
import os, signal, sys
from pathlib import Path
from workbench.cluster.reaper import Reaper
reaper = Reaper("of a test", sys.argv[1])
child = os.fork()
if child:
    print(reaper.pid, child, flush=True)
signal.pause()
"""


def test_a_forked_child_that_keeps_the_pipe_open_does_not_hold_the_reaper(tmp_path):
    with python("-c", FORKED, str(tmp_path / "files")) as kernel:
        reaper, child = (psutil.Process(int(pid)) for pid in kernel.stdout.readline().split())
        kernel.kill()
        kernel.wait()
        wait_until(lambda: not is_running(reaper))
        assert is_running(child)
        child.kill()


def test_the_reaper_ends_adopted_processes_and_removes_their_files(tmp_path):
    (tmp_path / "files").mkdir()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as adopted:
        reaper = Reaper("of a test", str(tmp_path / "files"))
        reaper.adopt(psutil.Process(adopted.pid))
        reaper.close(PATIENCE_S)
        assert adopted.wait(PATIENCE_S) == -signal.SIGTERM
    assert not (tmp_path / "files").exists()


def test_a_dead_reaper_is_noticed(tmp_path):
    reaper = Reaper("of a test", str(tmp_path))
    os.kill(reaper.pid, signal.SIGKILL)
    reaper._popen.wait()
    with pytest.raises(ClusterError, match="ended early"):
        reaper.adopt(psutil.Process())
    reaper.close(PATIENCE_S)


def test_a_reaper_that_does_not_end_is_killed(tmp_path):
    reaper = Reaper("of a test", str(tmp_path))
    os.kill(reaper.pid, signal.SIGSTOP)
    reaper.close(0.1)
    assert reaper._popen.returncode == -signal.SIGKILL


def test_a_process_is_named_by_pid_and_creation_time():
    me = psutil.Process()
    assert process_of({"pid": me.pid, "created_s": me.create_time()}) == me
    assert process_of({"pid": me.pid, "created_s": 1.5}) is None
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert process_of({"pid": gone.pid, "created_s": 1.5}) is None


def test_the_reaper_runs_its_final_commands_and_removes_registered_files(tmp_path):
    ran = {name: tmp_path / f"{name} ran" for name in ("before", "one", "two")}
    private, file = tmp_path / "private", tmp_path / "file"
    private.mkdir()
    file.touch()
    reaper = Reaper("of a test", f"{tmp_path}/priv*")
    reaper.leave([["touch", str(ran["before"])]])
    missing = ["no-such-program"]
    reaper.leave([missing, *(["touch", str(ran[name])] for name in ("one", "two"))], [file])
    reaper.close(PATIENCE_S)
    assert {path.name for path in tmp_path.iterdir()} == {"one ran", "two ran"}


def test_a_command_that_does_not_end_does_not_keep_the_reaper(tmp_path):
    code = f"from workbench.cluster import reaper; reaper.COMMANDS_S = 0.1; reaper.main('of a test', {os.getpid()})"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT) as reaper:
        pid = tmp_path / "pid"
        stuck = ["sh", "-c", f"echo $$ >{pid}; exec sleep 1000"]
        reaper.communicate(json.dumps({"commands": [stuck], "paths": []}).encode() + b"\n", PATIENCE_S)
    assert not pid.exists() or not psutil.pid_exists(int(pid.read_text() or 0))
