"""State of an engine set's job in its queue: why it waits, and how it ended. Only Slurm is queried so far."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import suppress
from subprocess import SubprocessError
from typing import Any

from ipyparallel.cluster.launcher import SlurmLauncher

EVERY_S = 5.0
"""Period of the queries while a job waits, in seconds."""

ANSWER_S = 10.0
"""Timeout of a query while a job waits, in seconds."""

WORD_S = 1.0
"""Time in seconds to poll for the job's end after engines are gone; the queue may not know it at once."""

_POLL_S = 0.1
_STATE = ("squeue", "--noheader", "--states=all", "--format=%T (%r)", "--jobs")
_ACCOUNT = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=State", "--jobs")
_GOES_ON = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"}


class JobQueue:
    """The queue of an engine set's job; reports nothing if there is none or it is not Slurm's.

    Attributes:
        state: the job's last known state, such as ``PENDING (Resources)``.
    """

    def __init__(self, engine_set: Any) -> None:  # noqa: ANN401 - untyped in ipyparallel
        self._job = engine_set.job_id if isinstance(engine_set, SlurmLauncher) else ""
        self._next = time.monotonic()
        self._asking = threading.Lock()
        self._word: str | None = None
        self.state = ""

    @property
    def can_be_asked(self) -> bool:
        """Whether the queue can be queried."""
        return bool(self._job)

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended for good."""
        word = self.state.partition(" ")[0]
        return bool(word) and word not in _GOES_ON and "REQUEUE" not in word

    def poll(self) -> None:
        """Query the state if the period has passed; a failed query keeps the old state."""
        if not self._job or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        with suppress(OSError, SubprocessError):
            self.state = _output(_STATE, self._job, ANSWER_S)

    def word_on_the_end(self) -> str:
        """Return how the job ended, in words; empty: it runs, or that is unknown. Takes :data:`WORD_S` at most.

        Example: ``the queue has ended job 12: TIMEOUT (TimeLimit)``.
        """
        with self._asking:
            if self._word is None:
                self._word = self._ask() if self._job else ""
            return self._word

    def _ask(self) -> str:
        until = time.monotonic() + WORD_S
        while (left_s := until - time.monotonic()) > 0:
            try:
                self.state = _output(_STATE, self._job, left_s)
            except subprocess.CalledProcessError:  # an old job is only in the accounting database
                return f"job {self._job} is no longer in the queue{self._in_the_accounts(left_s)}"
            except (OSError, SubprocessError):
                break
            if self.has_ended:
                return f"the queue has ended job {self._job}: {self.state.removesuffix(' (None)')}"
            time.sleep(_POLL_S)
        word, _, why = self.state.removesuffix(" (None)").partition(" ")
        return f"the queue is ending job {self._job} {why}".rstrip() if word == "COMPLETING" else ""

    def _in_the_accounts(self, timeout_s: float) -> str:
        with suppress(OSError, SubprocessError):
            if record := _output(_ACCOUNT, self._job, timeout_s):
                return f"; its accounting record: {record}"
        return ""


def _output(command: tuple[str, ...], job: str, timeout_s: float) -> str:
    """Return the first line of a command's output for a job.

    Raises:
        OSError, SubprocessError: it cannot be run, fails, or times out.
    """
    ended = subprocess.run([*command, job], capture_output=True, text=True, timeout=timeout_s, check=True)
    return ended.stdout.strip().partition("\n")[0]
