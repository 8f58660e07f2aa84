"""A queue's messages about a job, with scripts in place of Slurm's programs."""

import pytest
from ipyparallel.cluster.launcher import LocalEngineSetLauncher, SlurmEngineSetLauncher

from tests.helpers.waiting import PATIENCE_S
from workbench.cluster import job_queue
from workbench.cluster.job_queue import JobQueue


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Makes a queue with job 12 whose programs are these shell scripts."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(job_queue, "WORD_S", PATIENCE_S)

    def make(**scripts):
        for name, script in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        engine_set = SlurmEngineSetLauncher(profile_dir=str(tmp_path))
        engine_set.job_id = "12"
        return JobQueue(engine_set)

    return make


@pytest.mark.parametrize(
    ("states", "word"),
    [
        ("CANCELLED (None)", "the queue has ended job 12: CANCELLED"),
        ("TIMEOUT (TimeLimit)", "the queue has ended job 12: TIMEOUT (TimeLimit)"),
    ],
)
def test_the_end_of_a_job_is_queried_once(queue, tmp_path, states, word):
    job = queue(squeue=f"echo queried >>{tmp_path}/queries; echo '{states}'")
    assert [job.word_on_the_end() for _ in range(3)] == [word] * 3
    assert job.has_ended
    assert (tmp_path / "queries").read_text() == "queried\n"


def test_an_ending_job_is_queried_again(queue, tmp_path):
    turns = f"if [ -e {tmp_path}/second ]; then echo 'FAILED (NonZeroExitCode)'; else echo 'COMPLETING (None)'; fi"
    job = queue(squeue=f"{turns}; : >{tmp_path}/second")
    assert job.word_on_the_end() == "the queue has ended job 12: FAILED (NonZeroExitCode)"


@pytest.mark.parametrize(
    ("states", "word"),
    [
        ("COMPLETING (None)", "the queue is ending job 12"),
        ("COMPLETING (TimeLimit)", "the queue is ending job 12 (TimeLimit)"),
        ("RUNNING (None)", ""),
    ],
)
def test_a_job_that_has_not_ended_in_time(queue, monkeypatch, states, word):
    monkeypatch.setattr(job_queue, "_output", lambda *_: states)
    monkeypatch.setattr(job_queue, "WORD_S", 0.3)
    assert queue().word_on_the_end() == word


def test_a_job_missing_in_the_queue_is_looked_up_in_the_accounting(queue):
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    job = queue(squeue=forgotten, sacct="echo 'CANCELLED by 1000'")
    assert job.word_on_the_end() == "job 12 is no longer in the queue; its accounting record: CANCELLED by 1000"
    job = queue(squeue=forgotten, sacct="echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert job.word_on_the_end() == "job 12 is no longer in the queue"


def test_an_unresponsive_queue_gives_no_reason(queue, monkeypatch):
    monkeypatch.setattr(job_queue, "WORD_S", 0.1)
    assert queue(squeue="exec sleep 1000").word_on_the_end() == ""


def test_a_launcher_without_a_queue_gives_no_reason(tmp_path):
    none = JobQueue(LocalEngineSetLauncher(profile_dir=str(tmp_path)))
    none.poll()
    assert (none.can_be_asked, none.state, none.has_ended, none.word_on_the_end()) == (False, "", False, "")
