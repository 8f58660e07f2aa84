"""Ranks that a queue, a real Slurm, starts, and ranks that MPI starts."""

import os
import re
import subprocess
import sys

import psutil
import pytest

from tests.helpers import slurm
from tests.helpers.notebook_model import CELL
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster import job_queue as cluster_queues
from workbench.cluster.processes import is_running
from workbench.errors import ClusterError, Interrupted
from workbench.workbench import Workbench

pytestmark = [pytest.mark.thorough, pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ipython(tmp_path_factory):
    """The directory of the profiles."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        directory = tmp_path_factory.mktemp("ipython")
        monkeypatch.setenv("IPYTHONDIR", str(directory))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield directory


@pytest.fixture(scope="module")
def queue(tmp_path_factory, ipython):
    with slurm.slurm(tmp_path_factory.mktemp("slurm")) as config, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SLURM_CONF", str(config))
        yield config


@pytest.fixture
def of_profile(ipython, monkeypatch, tmp_path):
    """Makes a workbench of two ranks whose profile has the given configuration; no files remain in its start folder."""
    made = []
    monkeypatch.chdir(tmp_path)

    def make(engines, config):
        directory = ipython / "profile_queue"
        (directory / "startup").mkdir(parents=True, exist_ok=True)
        (directory / "ipcluster_config.py").write_text(f"c = get_config()\n{config}")
        made.append(Workbench(2, device="cpu", profile="queue", engines=engines))
        return made[-1]

    yield make
    for bench in made:
        bench.stop()
    assert list(tmp_path.iterdir()) == []


HERE = "c.Cluster.controller_ip = '127.0.0.1'\n"


def train(bench):
    bench.run_cell(CELL)
    bench.shard("model", wrap="Block")
    return bench.step(2).losses


@pytest.fixture(scope="module")
def on_one_machine():
    with Workbench(2, device="cpu") as bench:
        return train(bench)


def engines_of(bench):
    return [psutil.Process(info.pid) for info in bench._session.cluster.rank_info]


@pytest.mark.needs("slurm")
def test_ranks_of_a_job_train_and_a_stop_leaves_neither_job_nor_process(queue, of_profile, on_one_machine):
    bench = of_profile("slurm", HERE)
    bench.start()
    assert len(slurm.jobs(queue)) == 1
    assert train(bench) == pytest.approx(on_one_machine, rel=1e-5)
    engines = engines_of(bench)
    assert bench.stop() is None
    wait_until(lambda: slurm.jobs(queue) == [])
    wait_until(lambda: not any(engine.is_running() for engine in engines))


@pytest.mark.needs("slurm")
def test_ranks_whose_job_the_queue_ends_are_named(queue, of_profile, monkeypatch):
    monkeypatch.setattr(cluster_queues, "WORD_S", PATIENCE_S)
    bench = of_profile("slurm", HERE)
    bench.start()
    engines, (job,) = engines_of(bench), slurm.jobs(queue)
    slurm.cancel(queue, job)
    wait_until(lambda: set(bench.losses) == {0, 1})
    message = rf"died: the process on \S+ has ended: the queue has ended job {job}: CANCELLED.*"
    assert re.fullmatch(message, bench.losses[1])
    wait_until(lambda: not any(engine.is_running() for engine in engines))


@pytest.mark.needs("slurm")
def test_the_queue_state_is_shown_and_cancelling_removes_the_job(queue, of_profile):
    bench, notices = of_profile("slurm", f"{HERE}c.SlurmLauncher.queue = 'closed'"), []

    def give_up(sentence):
        notices.append(sentence)
        if "PENDING" in sentence:
            assert len(slurm.jobs(queue)) == 1
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="The start was cancelled: no ranks are running"):
        bench.start(on_wait=give_up)
    message = re.escape("0 of 2 engines are connected, in the queue as job ") + r"\d+: PENDING \(PartitionDown\), \d+ s"
    assert re.match(message, notices[-1])
    wait_until(lambda: slurm.jobs(queue) == [])


@pytest.mark.needs("slurm")
def test_a_job_that_is_taken_from_the_queue_ends_the_start(queue, of_profile):
    bench = of_profile("slurm", f"{HERE}c.SlurmLauncher.queue = 'closed'")

    def take_away(sentence):
        for job in slurm.jobs(queue) if "PENDING" in sentence else ():
            slurm.cancel(queue, job)

    with pytest.raises(ClusterError, match=r"the queue has ended job \d+: CANCELLED .*; 0 of 2 engines are connected"):
        bench.start(on_wait=take_away)


KERNEL = """
import sys
from workbench.workbench import Workbench
bench = Workbench(2, device="cpu", profile="queue", engines="slurm")
bench.start(on_wait=lambda sentence: print("waits" if "PENDING" in sentence else "starts", flush=True))
bench.run_cell("import time\\nwhile True: time.sleep(0.01)", on_output=lambda _: None)
"""


@pytest.mark.needs("slurm")
@pytest.mark.parametrize("partition", ["open", "closed"])
def test_a_killed_notebook_leaves_neither_job_nor_process(queue, of_profile, ipython, partition):
    of_profile("slurm", f"{HERE}c.SlurmLauncher.queue = {partition!r}")
    with subprocess.Popen([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, text=True) as kernel:
        try:
            if partition == "closed":
                assert "waits\n" in kernel.stdout
                assert len(slurm.jobs(queue)) == 1
            else:
                wait_until(lambda: len(engines_of_jobs()) == 2)
            started = {*psutil.Process(kernel.pid).children(recursive=True), *engines_of_jobs()}
        finally:
            kernel.kill()
    wait_until(lambda: slurm.jobs(queue) == [])
    wait_until(lambda: not any(map(is_running, started)))
    left = [path for name in ("log", "pid", "security") for path in (ipython / "profile_queue" / name).glob("*")]
    wait_until(lambda: not any(path.exists() for path in left))


def engines_of_jobs():
    """Return this machine's engines that Slurm started, without ``srun``, whose arguments are an engine's command."""
    found = psutil.process_iter(["cmdline", "environ"])
    return [
        each
        for each in found
        if (each.info["cmdline"] or ())[1:3] == ["-m", "ipyparallel.engine"]
        and "SLURM_PROCID" in (each.info["environ"] or ())
    ]


@pytest.mark.needs("slurm")
def test_a_queue_that_refuses_is_quoted(queue, of_profile):
    bench = of_profile("slurm", f"{HERE}c.SlurmLauncher.queue = 'nowhere'")
    with pytest.raises(ClusterError, match=r"could not start 2 engines: .*sbatch: error: .*[Ii]nvalid partition"):
        bench.start()
    assert slurm.jobs(queue) == []


@pytest.mark.needs("mpi")
def test_ranks_that_mpi_starts_train_and_a_stop_leaves_nothing(of_profile, on_one_machine):
    arguments = ["--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    bench = of_profile("mpi", f"{HERE}c.MPILauncher.mpi_args = {arguments!r}")
    before = set(psutil.Process().children(recursive=True))
    bench.start()
    assert train(bench) == pytest.approx(on_one_machine, rel=1e-5)
    engines = engines_of(bench)
    started = set(psutil.Process().children(recursive=True)) - before
    assert bench.stop() is None
    wait_until(lambda: not any(process.is_running() for process in {*engines, *started}))
