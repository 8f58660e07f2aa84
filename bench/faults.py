"""Inject every fault of ``%fsdp fault`` into a small model, and see which instrument names it.

After each injection ``where``, ``lint``, ``verify``, ``explain`` and the error of the step, if there is one, are asked;
the first verdict of them is the primary one. Writes the confusion matrix of faults and primary verdicts to
build/faults.html, every run to build/faults.json, and prints the table. The exit status is 1 if a fault was not named,
or if a run without a fault got a verdict.
"""

import argparse
import html
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import plotly.graph_objects as go

from bench.verdict_page import confusion, html_page, html_table
from workbench import Workbench
from workbench.errors import RankDied, RankError, UsageError
from workbench.protocol.fault_kinds import KINDS, SAVE

OUT = Path("build/faults.html")
ENGINES = {"ours": "workbench", "torch": "torch"}
CLEAN = "no fault"
NOTHING = "no verdict"
STALL_S = 30.0  # for a verdict on a stall, on a busy machine
POLL_S = 0.2

MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(16, 3))
"""
TRAINING = """
draw = torch.Generator().manual_seed(1)
rows = TensorDataset(torch.randn(512, 16, generator=draw), torch.randint(3, (512,), generator=draw))
loader = DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows))
opt = torch.optim.AdamW(model.parameters(), 1e-3)
x, y = next(iter(loader))

def train_step():
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()
"""
DUMP = """
import threading, time
import torch._C._distributed_c10d as c10d

def dump():
    time.sleep(1.0)
    with open(f"{folder}/dump_{{rank}}", "wb") as file:
        file.write(c10d._dump_fr_trace())

threading.Thread(target=dump, daemon=True).start()
"""
"""Writes what torch's Flight Recorder has of this rank, during the stall that follows; ``{folder}`` is filled in."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What an instrument says.

    Attributes:
        instrument: ``lint``, ``the error`` ...
        rule: rule of the fault that it names, or the type of the error.
        text: the verdict.
    """

    instrument: str
    rule: str
    text: str


@dataclass(frozen=True, kw_only=True)
class FaultRun:
    """One injection, or a run without a fault.

    Attributes:
        fault: its name; :data:`CLEAN` without one.
        seed: seed that drew rank and unit.
        ranks: number of ranks.
        engine: key of :data:`ENGINES`.
        words: what the fault did.
        refused: why it could not be injected; empty if it was.
        verdicts: of all instruments, the primary one first.
        after: verdicts after it was removed.
        recorder: what torch's Flight Recorder analysis says; empty if it was not asked.
        seconds: how long it took.
    """

    fault: str
    seed: int
    ranks: int
    engine: str
    words: str = ""
    refused: str = ""
    verdicts: tuple[Verdict, ...] = ()
    after: tuple[Verdict, ...] = ()
    recorder: str = ""
    seconds: float = 0.0

    @property
    def primary(self) -> str:
        """The rule of the primary verdict."""
        return self.verdicts[0].rule if self.verdicts else NOTHING

    @property
    def is_named(self) -> bool:
        """Whether the primary verdict is right, and none is left after the removal."""
        wanted = (NOTHING,) if self.fault == CLEAN else KINDS[self.fault].rules
        return self.primary in wanted and not self.after


# ---- one run


class Bench:
    """Runs faults on the same ranks one after the other; restarts them when a fault has killed one.

    Args:
        ranks: number of ranks.
        engine: key of :data:`ENGINES`.
        has_replicas: whether the model is sharded over half of the ranks, with two replicas.
        asks_recorder: whether torch's analysis is asked about stalls of torch's engine.
    """

    def __init__(self, ranks: int, engine: str, *, has_replicas: bool, asks_recorder: bool = False) -> None:
        self._asks_recorder = asks_recorder and engine == "torch"
        self.ranks, self.engine, self._mesh = ranks, engine, (2, ranks // 2) if has_replicas else ()
        self._wb = Workbench(ranks, device="cpu")

    def __enter__(self) -> "Bench":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wb.stop()

    def _start(self) -> None:
        self._wb.start()
        self._wb.run_cell(MODEL)
        self._wb.shard("model", wrap=["Block"], engine=ENGINES[self.engine], mesh=self._mesh)
        self._wb.run_cell(TRAINING)
        self._wb.step(2)

    def run(self, fault: str, seed: int) -> FaultRun:
        """Inject a fault, ask all instruments, remove it, and ask again."""
        begin = time.monotonic()
        about = {"fault": fault, "seed": seed, "ranks": self.ranks, "engine": self.engine}
        recorder, words = "", ""
        try:
            words = self._wb.fault(fault, seed=seed).words if fault != CLEAN else ""
        except UsageError as error:
            return FaultRun(**about, refused=str(error))
        try:
            if fault != CLEAN and KINDS[fault].shown_by == "where":
                verdicts, recorder = self._of_stall()
            elif fault != CLEAN and KINDS[fault].shown_by == SAVE:
                verdicts = self._of_save()
            else:
                verdicts = self._of_steps(0 if fault == CLEAN else KINDS[fault].steps)
            after = self._after(fault)
        except RankDied as error:
            verdicts, after = (Verdict(instrument="the error", rule=type(error).__name__, text=str(error)),), ()
            self._wb.stop()
            self._start()
        found = {"words": words, "verdicts": verdicts, "after": after, "recorder": recorder}
        return FaultRun(**about, **found, seconds=time.monotonic() - begin)

    def _after(self, fault: str) -> tuple[Verdict, ...]:
        """Remove a fault, and return what lint and verify still find."""
        if fault == CLEAN:
            return ()
        self._wb.fault("off")
        return (*self._asked("lint", self._wb.lint), *self._asked("verify", self._wb.verify))

    def _of_steps(self, steps: int) -> tuple[Verdict, ...]:
        """Take steps, and ask every instrument."""
        found: list[Verdict] = []
        if steps:
            found += self._asked("the step", lambda: self._wb.step(steps))
        found += self._asked("where", self._wb.where)
        found += self._asked("lint", self._wb.lint)
        found += self._asked("verify", self._wb.verify)
        if not steps:  # steps may train NaN, of which verify says nothing
            found += self._asked("the step", self._wb.step)
        return (*found, *self._asked("explain step", lambda: self._wb.explain("step")))

    def _of_save(self) -> tuple[Verdict, ...]:
        """Save a checkpoint, whose error is the verdict."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._wb.save(folder)
            except UsageError as error:
                return (Verdict(instrument="save", rule=type(error).__name__, text=str(error)),)
        return ()

    def _of_stall(self) -> tuple[tuple[Verdict, ...], str]:
        """Take a step in the background, and ask where the ranks are until there is a verdict; then abort."""
        with tempfile.TemporaryDirectory() as folder:
            if self._asks_recorder:
                self._wb.run_cell(DUMP.replace("{folder}", folder).replace("{{rank}}", "{rank}"))
            self._wb.step(1, background=True)
            deadline = time.monotonic() + STALL_S
            found: tuple[Verdict, ...] = ()
            while not found and time.monotonic() < deadline:
                time.sleep(POLL_S)
                found = self._asked("where", self._wb.where)
            recorder = _flight_recorder(Path(folder), self.ranks) if self._asks_recorder else ""
            with suppress(UsageError):  # it has ended
                self._wb.abort()
            self._wb.news()
        return found, recorder

    @staticmethod
    def _asked(instrument: str, ask: Callable[[], object]) -> tuple[Verdict, ...]:
        """Return the verdicts of an instrument; an error of a rank is one, its own refusal is none."""
        try:
            report = ask()
        except RankDied:
            raise
        except RankError as error:
            return (Verdict(instrument="the error", rule=error.ename, text=str(error).partition("\n")[0]),)
        except UsageError:
            return ()
        cause = getattr(report, "cause", None)
        faults = getattr(report, "faults", ()) if cause is None else (cause,)
        found = [Verdict(instrument=instrument, rule=fault.rule, text=fault.verdict) for fault in faults]
        not_finite = getattr(report, "not_finite", "")
        if not_finite and not found:
            found = [Verdict(instrument="the step", rule="not-finite", text=str(not_finite))]
        return tuple(found)


def _flight_recorder(folder: Path, ranks: int) -> str:
    """Return what torch's analysis says of the dumps in a folder, in one line."""
    deadline = time.monotonic() + 5.0
    while len(list(folder.glob("dump_*"))) < ranks and time.monotonic() < deadline:
        time.sleep(POLL_S)
    line = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-p", "dump_"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    said = [text.strip() for text in (done.stdout + done.stderr).splitlines() if text.strip()]
    told = [text for text in said if "mismatch" in text.lower() or "missing" in text.lower() or "Error" in text]
    return "; ".join(dict.fromkeys(told)) or (f"{len(said)} lines, no mismatch" if said else "nothing")


# ---- all runs


def runs(seeds: int, ranks: Sequence[int], engines: Sequence[str], faults: Sequence[str]) -> Iterator[FaultRun]:
    """Yield a run of every fault, and of none, with every seed, number of ranks and engine."""
    replicated = [name for name in faults if name == "drifting-replica"]
    plain = [CLEAN, *(name for name in faults if name not in replicated)]
    for number in ranks:
        for engine in engines:
            for names in (plain, replicated):
                if names:
                    with Bench(number, engine, has_replicas=names is replicated, asks_recorder=True) as bench:
                        yield from (bench.run(name, seed) for name in names for seed in range(seeds))


def missed(found: Sequence[FaultRun]) -> list[FaultRun]:
    """Return the runs whose primary verdict is wrong, of those with an injected fault, or none."""
    return [run for run in found if not run.refused and not run.is_named]


# ---- what is written


def table(found: Sequence[FaultRun]) -> list[list[str]]:
    """Return a row for each fault: how many of its runs were named, and the verdicts of the others."""
    rows = []
    for name in dict.fromkeys(run.fault for run in found):
        own = [run for run in found if run.fault == name]
        asked = [run for run in own if not run.refused]
        named = sum(run.is_named for run in asked)
        wrong = Counter(
            f"{run.primary}{' (and after its removal)' if run.after else ''}" for run in asked if not run.is_named
        )
        others = ", ".join(f"{rule} x {count}" for rule, count in wrong.items())
        refused = "; ".join(dict.fromkeys(f"{run.engine}: {run.refused}" for run in own if run.refused))
        rows.append([name, f"{named} of {len(asked)}", others, refused])
    return rows


def figure(found: Sequence[FaultRun]) -> go.Figure:
    """Return the confusion matrix: faults by primary verdicts, in runs."""
    asked = [run for run in found if not run.refused]
    return confusion(Counter((run.fault, run.primary) for run in asked))


def page(found: Sequence[FaultRun], beside: Sequence[str]) -> str:
    """Return the page: totals, the confusion matrix, a table of faults, and what other tools say of the stalls."""
    asked, wrong = [run for run in found if not run.refused], missed(found)
    total = f"{len(asked) - len(wrong)} of {len(asked)} runs got the right verdict"
    about = {kind.name: kind.summary for kind in KINDS.values()}
    rows = [[row[0], about.get(row[0], "training as it should be: no verdict"), *row[1:]] for row in table(found)]
    stalls = dict.fromkeys((run.fault, run.engine, run.verdicts[0].text if run.verdicts else "", run.recorder)
                           for run in found if run.recorder)  # fmt: skip
    return html_page(
        "Faults and verdicts",
        f"{total}. Each fault is injected into the training of a small model, and every instrument is asked; the first "
        "verdict counts.",
        [
            figure(found).to_html(full_html=False, include_plotlyjs=True),
            html_table(["fault", "what it does", "named", "other verdicts", "not asked"], rows),
            "<h2>Beside it: other tools on the same runs</h2>",
            *(f"<p>{html.escape(line)}</p>" for line in beside),
            html_table(["fault", "engine", "workbench", "torch's Flight Recorder analysis"], stalls) if stalls else "",
        ],
    )


BESIDE = (
    "torch's Flight Recorder: each rank writes its dump during the stall, and torch.distributed.flight_recorder "
    "(fr_trace) analyses the dumps of all ranks. The collectives of the workbench's engine do not go through c10d, so "
    "only runs of torch's engine are analysed. "
    "Where the analysis itself fails on the dumps of gloo, its error is shown.",
    "TraceML (traceml-ai 0.5.0) starts scripts itself, so it is not asked in these runs. Tried once, by hand, on this "
    "model with torch's engine, two CPU ranks, 60 steps and rank 1 asleep for 200 ms in every forward of one unit, it "
    "said COMPUTE-BOUND, and named no rank. It judges times and memory of steps, not the other faults.",
)


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="runs of each fault (default 20)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default 2 4)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: both")
    parser.add_argument("--faults", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    args = parser.parse_args(argv)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # ranks inherit it: the Flight Recorder is off without
    found: list[FaultRun] = []
    for run in runs(args.seeds, args.ranks, args.engines, args.faults):
        found.append(run)
        mark = "refused" if run.refused else "named" if run.is_named else "MISSED"
        what = f"{run.ranks} ranks, {run.engine:5}, {run.fault:17} seed {run.seed:2}"
        _say(f"{what}: {mark}, {run.primary}, {run.seconds:.1f} s")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(page(found, BESIDE), encoding="utf-8")
    data = [{**asdict(run), "primary": run.primary, "is_named": run.is_named} for run in found]
    OUT.with_suffix(".json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    _say(*("  ".join([f"{row[0]:17}", f"{row[1]:>10}", *row[2:]]).rstrip() for row in table(found)))
    wrong = missed(found)
    _say(f"{len(wrong)} missed; wrote {OUT} and {OUT.with_suffix('.json')}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
