"""Measure the engine and the workbench, and compare them with other implementations.

Without options it measures everything: training steps, memory, sharding, the cost of recording and watching, traces
and views. The result goes to build/bench.json. The exit status is 1 if a measurement failed.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import heal, live, report
from bench.aims import Verdict, verdicts
from bench.between_hosts import compare_hosts
from bench.cases import CASES, CLASSIC_CASES, GPU_CASES, HOSTS_CASES, IMPLEMENTATIONS, OURS, RECORDED, TORCH, Case
from bench.compare import Effort, compare, compare_classic, compare_recording, compare_sharding
from bench.gpu import compare_gpu
from workbench.base.devices import DEVICES

OUT = Path("build/bench.json")
COMPARED = ("steps", "sharding")
PARTS = (*COMPARED, "classic", "hosts", "recording", "live", "many", "heal", "plan", "trace", "browser", "gpu")
FULL = Effort(
    rounds=6,
    steps=7,
    pairs=40,
    blocks=10,
    block_s=2.0,
    starts=3,
    repeats=100,
    many_ranks=(4, 16, 64),
    many_units=(100, 400, 1000),
)
QUICK = Effort(rounds=1, steps=3, pairs=4)

Tree = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    effort = QUICK if args.quick else FULL
    result: Tree = {**_surroundings(), "effort": vars(effort)}
    for part in args.only or (COMPARED if args.check else PARTS):
        for path, found in _measure(part, args, effort):
            _put(result, path, found)
            _write(result)
    found = list(verdicts(result))
    result["verdicts"] = [verdict.as_dict() for verdict in found]
    _write(result)
    _say("\ntargets", *report.verdicts(found), "", f"wrote {OUT}")
    return _status(result, found, is_check=args.check)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="measure steps and sharding only; exit with 1 if a `must` is missed"
    )
    what.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help=f"measure only these: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help=f"compare only these models: {', '.join(CASES)}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few repetitions: check that everything runs; the times mean little"
    )
    return parser.parse_args(argv)


def _surroundings() -> Tree:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "implementations": IMPLEMENTATIONS,
    }


def _measure(part: str, args: argparse.Namespace, effort: Effort) -> Iterator[tuple[tuple[str, ...], Tree]]:
    """Measure one part and print the results; yield each measurement with its path in the result."""
    match part:
        case "steps":
            for name in args.cases:
                yield ("cases", name), _compare(CASES[name], effort, with_parts=not args.check)
        case "classic" | "hosts" | "gpu":
            for name, case in _cases(part, args.cases):
                yield (part, name), _of_case(part, case, effort)
        case "sharding":
            yield ("sharding",), _sharding(effort)
        case "recording":
            for name, case in RECORDED.items():
                yield ("recording", name), _recording(case, effort, OURS)
                yield ("recording", f"{name} torch"), _recording(case, effort, TORCH)
        case "trace":
            yield ("trace",), _apart("trace of 1 M events", lambda: live.trace(effort))
            yield from _of_512_ranks(effort)
        case _:
            works = {
                "live": lambda: live.live(effort),
                "many": lambda: live.many(effort),
                "heal": lambda: {
                    "deaths": heal.measure_heals,
                    "snapshots": lambda: heal.measure_snapshots(effort.rounds),
                },
                "plan": lambda: {f"{num} ranks": partial(_plans, num, effort) for num in (2, 4)},
                "browser": live.browser,
            }
            for name, work in works[part]().items():
                yield (part, name), _apart(name, work)


def _plans(num_ranks: int, effort: Effort) -> Tree:
    from bench import plan  # it loads the engine, which the process that forks ranks must not

    return plan.compare_all(num_ranks, quick=effort is QUICK)


def _of_512_ranks(effort: Effort) -> Iterator[tuple[tuple[str, ...], Tree]]:
    for name, work in live.scale(effort).items():
        yield ("scale", name), _apart(f"trace of 512 ranks, {name}", work)


def _compare(case: Case, effort: Effort, *, with_parts: bool) -> Tree:
    _say("", case.describe())
    found = compare(case, effort, with_parts=with_parts)
    _say(*report.steps(found), *report.parts(found), *report.memory(found), *report.failures(found))
    return found


def _sharding(effort: Effort) -> Tree:
    found = compare_sharding(effort)
    _say("", f"fully_shard of {found['num_params'] / 1e9:.1f} B parameters on meta, {found['num_ranks']} ranks")
    _say(*report.sharding(found), *report.failures(found))
    return found


def _cases(part: str, chosen: Sequence[str]) -> list[tuple[str, Case]]:
    if part == "hosts":
        return list(HOSTS_CASES.items())
    if part == "gpu":
        return list(GPU_CASES.items()) if DEVICES["cuda"].may_be_here() else []
    return [(name, case) for name, case in CLASSIC_CASES.items() if name.removesuffix("-4ranks") in chosen]


def _of_case(part: str, case: Case, effort: Effort) -> Tree:
    _say("", f"{part}, {case.describe()}")
    found = {"classic": compare_classic, "hosts": compare_hosts, "gpu": compare_gpu}[part](case, effort)
    _say(*report.numbers(found), *report.failures(found))
    return found


def _recording(case: Case, effort: Effort, engine: str) -> Tree:
    found = compare_recording(case, effort, engine)
    title = f"{case.describe()}, {IMPLEMENTATIONS[engine]}"
    _say("", *report.recording(title, found), *report.failures(found))
    return found


def _apart(name: str, work: Callable[[], Tree]) -> Tree:
    _say("", name)
    found = live.measured(name, work)
    lines = report.plans if "rows" in found else report.numbers
    _say(*lines(found), *report.failures(found))
    return found


def _status(result: Mapping[str, Any], found: Iterable[Verdict], *, is_check: bool) -> int:
    """Return 0, or 1 if a measurement failed or a check missed a requirement; goals are only printed."""
    missed = any(verdict.aim.is_must and not verdict.is_met for verdict in found)
    return int(any(_failures(result)) or (is_check and missed))


def _failures(tree: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """Yield the failures of every measurement in the result."""
    for name, below in tree.items():
        if name == "failed":
            yield below
        elif isinstance(below, Mapping):
            yield from _failures(below)


def _put(tree: Tree, path: Sequence[str], found: Tree) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = found


def _write(result: Tree) -> None:
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
