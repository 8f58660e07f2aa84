"""``make bench``: training steps, ours and others'; where the time goes; bytes; and what recording costs.

``make bench-check`` makes the comparison alone, and ends with 1 if the issue's figures (``tests/bench/aims.py``) are
not met. Both write build/bench.json, and end with 1 if something could not be measured.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.bench import report
from tests.bench.aims import verdicts
from tests.bench.cases import CASES, IMPLEMENTATIONS, Case
from tests.bench.compare import Effort, compare, compare_recording, compare_sharding

OUT = Path("build/bench.json")
RECORDING_LIMIT = 1.03  # step CPU, recorded to plain
RECORDED = ("19.2M", "3.3M")
FULL, QUICK = Effort(rounds=3, steps=7, pairs=40), Effort(rounds=1, steps=3, pairs=4)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    effort = QUICK if args.quick else FULL
    result: dict[str, Any] = {**_surroundings(), "effort": vars(effort), "cases": {}}
    for name in args.cases:
        result["cases"][name] = _compare(CASES[name], effort, with_parts=not args.check)
        _write(result)
    result["sharding"] = _sharding(effort)
    if not args.check:
        result["recording"] = {name: _recording(CASES[name], effort) for name in RECORDED if name in args.cases}
    found = list(verdicts(result))
    result["verdicts"] = [verdict.as_dict() for verdict in found]
    _write(result)
    _say("\nwhat the issue asks", *report.verdicts(found), "", f"wrote {OUT}")
    return _status(result, is_check=args.check, all_met=all(verdict.is_met for verdict in found))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--check", action="store_true", help="the comparison alone, judged by the issue's figures")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--quick", action="store_true", help="few steps: whether it works, not how fast it is")
    return parser.parse_args(argv)


def _surroundings() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "implementations": IMPLEMENTATIONS,
    }


def _compare(case: Case, effort: Effort, *, with_parts: bool) -> dict[str, Any]:
    _say("", case.describe())
    found = compare(case, effort, with_parts=with_parts)
    _say(*report.steps(found), *report.parts(found), *report.memory(found), *report.failures(found))
    return found


def _sharding(effort: Effort) -> dict[str, Any]:
    found = compare_sharding(effort)
    _say("", f"fully_shard of {found['num_params'] / 1e9:.1f} B parameters on meta, {found['num_ranks']} ranks")
    _say(*report.sharding(found), *report.failures(found))
    return found


def _recording(case: Case, effort: Effort) -> dict[str, Any]:
    found = compare_recording(case, effort)
    _say("", *report.recording(case.name, found), *report.failures(found))
    return found


def _status(result: dict[str, Any], *, is_check: bool, all_met: bool) -> int:
    """0, or 1 if something could not be measured, or is not as it should be."""
    recordings = result.get("recording", {})
    status = 0 if all_met or not is_check else 1
    for found in (*result["cases"].values(), result["sharding"], *recordings.values()):
        status |= bool(found["failed"])
    for name, found in recordings.items():
        if found.get("cpu_ratio_low", 0) > RECORDING_LIMIT:
            _say(f"{name}: recording costs more than {RECORDING_LIMIT - 1:.0%} of a step's CPU time, beyond chance")
            status = 1
    return status


def _write(result: dict[str, Any]) -> None:
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
