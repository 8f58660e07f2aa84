"""Run a field script as its user would, and ask the workbench about it at several moments."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.field.cases import Case, Kind, Moment

ROOT = Path(__file__).resolve().parents[2]
CLI = "from workbench.cli.main import main; main()"
FOREVER_S = 3600.0
GONE_S = 12.0  # a process whose files are that old counts as killed
PAUSE_S = 4.0  # between two questions


@dataclass(frozen=True)
class Answer:
    """What the workbench has said at one moment: its document, the text around it, and why there is none."""

    moment: Moment
    document: dict[str, Any] | None
    text: str = ""
    void: str = ""


@dataclass(frozen=True)
class Settings:
    """How scripts are run: the interpreter, how long to wait for an event, and the timeout of groups, in seconds."""

    python: str = sys.executable
    limit_s: float = 240.0
    timeout_s: float = 60.0
    zygote: Zygote | None = None  # starts the ranks instead of torchrun

    @property
    def environment(self) -> dict[str, str]:
        """The environment of ranks, and of the commands that judge them."""
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


class Zygote:
    """A process that forks ranks and answers, which saves the imports of each."""

    def __init__(self, settings: Settings) -> None:
        self._process = psutil.Popen(
            [settings.python, "-m", "bench.field.zygote"],
            env=settings.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process.stdout.readline()  # it has imported all
        self._lock = threading.Lock()

    def order(self, order: dict[str, Any]) -> None:
        """Send an order; its result is written to files."""
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Kill the process and what it has started."""
        _kill(self._process)


def _awaited(path: Path, settings: Settings) -> dict[str, Any]:
    """Return the document in a file, once it is there."""
    end = time.monotonic() + settings.limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} was not written")
        time.sleep(0.1)
    return dict(json.loads(path.read_text()))


def answers(case: Case, moments: Sequence[Moment], folder: Path, settings: Settings) -> Iterator[Answer]:
    """Yield an answer for each of the moments at which a case is judged; a void one if it takes too long."""
    moments = [moment for moment in moments if moment not in case.unreached]
    try:
        yield from _answers(case, moments, folder, settings)
    except TimeoutError as error:
        yield Answer(moments[0], None, void=str(error))


def _answers(case: Case, moments: Sequence[Moment], folder: Path, settings: Settings) -> Iterator[Answer]:
    if case.check != "where" or case.kind in (Kind.VERIFY, Kind.LINT):
        if Moment.CHECKED in moments:
            check = case.check if case.kind is Kind.SOUND else case.kind.value
            words = (check, str(case.script), "-n", str(case.ranks), *case.args)
            yield ask(settings, Moment.CHECKED, *words, cwd=folder)
        return
    alone = {Kind.HANG: _of_hang, Kind.DEATH: _of_death, Kind.SOUND: _of_sound}[case.kind]
    if {Moment.STANDING, Moment.KILLED, Moment.ENDED, Moment.RUNNING} & set(moments):
        yield from (each for each in alone(case, moments, folder, settings) if each.moment in moments)
    if Moment.TIMEOUT in moments and case.kind is Kind.HANG and not case.ends:
        yield from _of_timeout(case, folder, settings)
    if Moment.NOTEBOOK in moments:
        yield _of_notebook(case, folder, settings)


def ask(settings: Settings, moment: Moment, *words: str, cwd: Path) -> Answer:
    """Return what a ``workbench`` command with ``--json`` says."""
    return _document(moment, [settings.python, "-c", CLI, *words, "--json"], settings, cwd)


def _document(moment: Moment, line: list[str], settings: Settings, cwd: Path) -> Answer:
    with (cwd / "answer").open("w+") as out, (cwd / "errors").open("w+") as err:
        process = psutil.Popen(
            line, env=settings.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd
        )
        try:
            process.wait(timeout=settings.limit_s)
        except psutil.TimeoutExpired:
            _kill(process)
    text = (cwd / "answer").read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return Answer(
        moment, json.loads(lines[-1]) if lines else None, (cwd / "errors").read_text(errors="replace")[-2000:]
    )


def _kill(process: psutil.Process) -> None:
    """Kill a process and its descendants, also those in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


class Job:
    """The ranks of one script and the recorder, under torchrun or the zygote. Leaving the block kills them all."""

    def __init__(self, case: Case, folder: Path, settings: Settings, timeout_s: float = FOREVER_S) -> None:
        self.case, self.folder, self.settings = case, folder, settings
        self.out = folder / f"run-{timeout_s:.0f}"
        self._log = Path(f"{self.out}.log")
        environment = {"FIELD_TIMEOUT_S": str(timeout_s)}
        if settings.zygote:
            what = {"ranks": case.ranks, "script": str(case.script), "args": case.args, "out": str(self.out)}
            settings.zygote.order({**what, "env": environment})
            self._agent: psutil.Process = psutil.Process(_awaited(Path(f"{self.out}.pid"), settings)["pid"])
            return
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
        record = ["-m", "workbench.record", "--out", str(self.out), str(case.script), *case.args]
        with self._log.open("w") as log:
            self._agent = psutil.Popen(
                [settings.python, *launch, *record],
                env={**settings.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill torchrun and all ranks."""
        _kill(self._agent)

    @property
    def ended(self) -> bool:
        """Whether torchrun has ended, and so all ranks."""
        if isinstance(self._agent, psutil.Popen):
            return self._agent.poll() is not None
        return not self._agent.is_running() or self._agent.status() == psutil.STATUS_ZOMBIE

    @property
    def succeeded(self) -> bool:
        """Whether all ranks have ended with exit status 0."""
        if isinstance(self._agent, psutil.Popen):
            return self._agent.poll() == 0
        status = Path(f"{self.out}.status")
        return self.ended and status.exists() and json.loads(status.read_text())["status"] == 0

    @property
    def log(self) -> str:
        """The end of what torchrun and the ranks have printed."""
        return self._log.read_text(errors="replace")[-3000:]

    def wait(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the job has ended or ``until`` holds. Return whether either came before the limit."""
        end = time.monotonic() + self.settings.limit_s
        while time.monotonic() < end:
            if self.ended or until():
                return True
            time.sleep(0.5)
        return False

    def is_recorded(self) -> bool:
        """Return whether all ranks have begun to record."""
        return len({path.name.partition(".")[0] for path in self.out.glob("rank*")}) == self.case.ranks

    def where(self, moment: Moment) -> Answer:
        """Return where the ranks are."""
        if self.settings.zygote:
            answer = Path(f"{self.out}.{time.monotonic_ns()}.json")
            self.settings.zygote.order({"where": str(self.out), "answer": str(answer)})
            return Answer(moment, _awaited(answer, self.settings))
        return ask(self.settings, moment, "where", str(self.out), cwd=self.folder)


def _shape(answer: Answer) -> object:
    """Return what does not change while no rank continues; None while one does."""
    report = (answer.document or {}).get("report") or {}
    if not report.get("is_stalled"):
        return None
    rows = report.get("ranks", ())
    return [(row["rank"], row["state"], row["event"], (row.get("pending") or {}).get("number")) for row in rows]


def _of_hang(case: Case, moments: Sequence[Moment], folder: Path, settings: Settings) -> Iterator[Answer]:
    with Job(case, folder, settings) as job:
        job.wait(job.is_recorded)
        end, before, answer = time.monotonic() + settings.limit_s, None, Answer(Moment.STANDING, None)
        while not job.ended and time.monotonic() < end:
            answer = job.where(Moment.STANDING)
            shape = _shape(answer)
            if shape is not None and shape == before:
                break
            before = shape
            time.sleep(PAUSE_S)
        if job.succeeded:
            yield Answer(Moment.STANDING, None, void="it has ended well")
            return
        stood = not job.ended
        if stood:
            yield answer
            if Moment.KILLED not in moments:
                return
            job.kill()
    time.sleep(GONE_S)
    yield job.where(Moment.KILLED if stood else Moment.ENDED)


def _of_death(case: Case, _: Sequence[Moment], folder: Path, settings: Settings) -> Iterator[Answer]:
    with Job(case, folder, settings) as job:
        ended = job.wait()
        if job.succeeded:
            yield Answer(Moment.ENDED, None, void="it has ended well")
            return
        if not ended:
            job.kill()
    time.sleep(GONE_S)
    yield job.where(Moment.ENDED)


def _of_timeout(case: Case, folder: Path, settings: Settings) -> Iterator[Answer]:
    with Job(case, folder, settings, settings.timeout_s) as job:
        void = "" if job.wait() else "the timeout did not end it"
    time.sleep(GONE_S)
    yield Answer(Moment.TIMEOUT, None, void=void) if void else job.where(Moment.TIMEOUT)


def _of_sound(case: Case, moments: Sequence[Moment], folder: Path, settings: Settings) -> Iterator[Answer]:
    with Job(case, folder, settings) as job:
        job.wait(job.is_recorded)
        while not job.ended and Moment.RUNNING in moments:
            yield job.where(Moment.RUNNING)
            job.wait(_after(PAUSE_S))
        job.wait()
        if not job.succeeded:
            yield Answer(Moment.ENDED, None, void=f"it has failed: {job.log[-300:]}")
            return
    yield job.where(Moment.ENDED)


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _of_notebook(case: Case, folder: Path, settings: Settings) -> Answer:
    line = [settings.python, "-m", "bench.field.notebook", case.name, str(settings.limit_s / 2)]
    return _document(Moment.NOTEBOOK, line, settings, folder)
