"""Examine the workbench on training scripts of strangers: does it name the right cause, and the right rank?

Each script of ``bench/field/scripts`` is run as its user would, with the recorder, and the workbench is asked at
several moments; its answers are judged by the verdicts of ``bench/field/cases.py``. Writes build/field.html and
build/field.json, and prints the table. The exit status is 1 if less than 95 % of the answers are right, or if one
accuses a wrong rank, or finds a fault in a sound script.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.field.cases import CASES, Case, Moment
from bench.field.judge import FATAL, GOOD, Judgement, Outcome, faults, judge
from bench.field.run import Settings, Zygote, answers
from bench.verdict_page import confusion, html_page, html_table

OUT = Path("build/field.html")
ENOUGH = 0.95


@dataclass(frozen=True)
class Result:
    """What was said about one case at one moment, and how good that is."""

    case: str
    kind: str
    moment: str
    cause: str
    outcome: str
    said: str
    why: str
    text: str
    seconds: float


def examine(case: Case, moments: Sequence[Moment], settings: Settings, torch: tuple[int, int]) -> list[Result]:
    """Run a case, and return a result for each moment."""
    found, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="field-") as folder:
        for answer in answers(case, moments, Path(folder), settings):
            if answer.void:
                judgement, text = Judgement(Outcome.VOID, why=answer.void), answer.void
            else:
                judgement = judge(case, answer.moment, answer.document, torch)
                report = (answer.document or {}).get("report") or {}
                said = "\n".join(f"{fault.rule}: {fault.text}" for fault in faults(answer.document))
                text = f"{said}\n{report.get('headline') or report.get('news') or answer.text}"
            found.append(
                Result(
                    case=case.name,
                    kind=case.kind,
                    moment=answer.moment,
                    cause=case.causes[0].name if case.causes else "none",
                    outcome=judgement.outcome,
                    said=judgement.said,
                    why=judgement.why,
                    text=text,
                    seconds=time.monotonic() - begin,
                )
            )
    return found


def worst(found: Sequence[Result]) -> list[Result]:
    """Return one result for each case and moment: the worst."""
    order = {outcome.value: number for number, outcome in enumerate(Outcome)}
    kept: dict[tuple[str, str], Result] = {}
    for each in found:
        other = kept.setdefault((each.case, each.moment), each)
        if order[each.outcome] > order[other.outcome]:
            kept[each.case, each.moment] = each
    return list(kept.values())


def passes(found: Sequence[Result]) -> bool:
    """Return whether enough answers are right, and none accuses a wrong rank or a sound script."""
    good = sum(each.outcome in GOOD for each in found)
    is_fatal = any(each.outcome in (*FATAL, Outcome.VOID) for each in found)
    return bool(found) and good >= ENOUGH * len(found) and not is_fatal


def summary(found: Sequence[Result]) -> str:
    """Return how many answers are right, and what the others are, in a line."""
    counts = Counter(each.outcome for each in found)
    good = sum(counts[outcome] for outcome in GOOD)
    others = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
    return f"{good} of {len(found)} answers are right ({others})"


def page(found: Sequence[Result]) -> str:
    """Return the page: totals, the confusion matrix, and every answer."""
    rows = [[each.case, each.moment, each.cause, each.outcome, each.said, each.why, each.text] for each in found]
    order = {outcome.value: number for number, outcome in enumerate(Outcome)}
    rows.sort(key=lambda row: -order[row[3]])
    return html_page(
        "Field scripts and verdicts",
        f"{summary(found)}. Each script is one as strangers write them; the right verdicts were written before.",
        [
            confusion(Counter((each.cause, each.said) for each in found)).to_html(
                full_html=False, include_plotlyjs=True
            ),
            html_table(["script", "moment", "right cause", "outcome", "said", "why", "words"], rows),
        ],
    )


def torch_of(python: str) -> tuple[int, int]:
    """Return the version of an interpreter's torch."""
    line = [python, "-c", "from importlib.metadata import version; print(version('torch'))"]
    major, minor, *_ = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split(".")
    return int(major), int(minor)


def interpreter(name: str) -> str:
    """Return the absolute path of an interpreter: scripts run in folders of their own.

    Raises:
        ArgumentTypeError: there is none.
    """
    found = shutil.which(name)
    if found is None:
        raise argparse.ArgumentTypeError(f"no such interpreter: {name}")
    return str(Path(found).absolute())


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m bench.field", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="default: all scripts")
    parser.add_argument("--moments", nargs="+", choices=list(Moment), default=list(Moment), help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="scripts that run at the same time (default 2)")
    parser.add_argument(
        "--python", type=interpreter, default=sys.executable, help="interpreter of the ranks, for another torch"
    )
    parser.add_argument("--limit", type=float, default=240.0, help="seconds to wait for an event (default 240)")
    parser.add_argument(
        "--fork", action="store_true", help="fork ranks from one process, which is quicker than torchrun"
    )
    args = parser.parse_args(argv)
    settings, moments = Settings(args.python, args.limit), [Moment(name) for name in args.moments]
    torch, found = torch_of(args.python), []
    with ExitStack() as stack, ThreadPoolExecutor(args.jobs) as pool:
        if args.fork:
            settings = replace(settings, zygote=stack.enter_context(closing(Zygote(settings))))
        asked = {pool.submit(examine, case, moments, settings, torch) for case in CASES if case.name in args.only}
        for done in as_completed(asked):
            for each in worst(done.result()):
                found.append(each)
                why = f": {each.why}" if each.why else ""
                _say(f"{each.case:24} {each.moment:9} {each.outcome:20} {each.said}{why}  ({each.seconds:.0f} s)")
            _write(found)
    _say(f"{summary(found)}; wrote {OUT} and {OUT.with_suffix('.json')}")
    return 0 if passes(found) else 1


def _write(found: Sequence[Result]) -> None:
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(page(found), encoding="utf-8")
    OUT.with_suffix(".json").write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
