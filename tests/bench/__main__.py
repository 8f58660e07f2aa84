"""``make bench``: training steps, ours and others', as ratios of medians; and what recording costs.

Times on a shared machine drift, so rounds of all implementations alternate, and what counts is the ratio to the same
model without communication (``alone``). Writes build/bench.json.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.steps import PREPARE, SIZES, Recording, Sample, measure, measure_recording
from tests.engine.ranks import outcomes

OUT = Path("build/bench.json")
TIMEOUT_S = 600
RECORDING_LIMIT = 1.03  # step CPU, recorded to plain


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    result = {
        "num_ranks": args.ranks,
        "steps": {size: _compare(size, args) for size in args.sizes},
        "recording": {size: _recording(size, args) for size in args.sizes},
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _say(f"\nwrote {OUT}")
    if any(recording["cpu_ratio_low"] > RECORDING_LIMIT for recording in result["recording"].values()):
        _say(f"recording costs more than {RECORDING_LIMIT - 1:.0%} of a step's CPU time, beyond what is chance")
        return 1
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3, help="times each implementation is started")
    parser.add_argument("--steps", type=int, default=10, help="steps measured per start")
    parser.add_argument("--pairs", type=int, default=40, help="recorded and plain steps each")
    return parser.parse_args(argv)


def _compare(size: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    _say(f"\n{size} parameters, {args.ranks} ranks   step ms   / alone   CPU ms")
    samples: dict[str, list[list[Sample]]] = {name: [] for name in PREPARE}
    for _ in range(args.rounds):
        for name in samples:
            samples[name] += _on_ranks(args.ranks, measure, size, name, args.steps)
    rows = {name: _medians(found) for name, found in samples.items()}
    for name, row in rows.items():
        row["to_alone"] = row["wall_ms"] / rows["alone"]["wall_ms"]
        _say(f"  {name:<26} {row['wall_ms']:>8.1f}   {row['to_alone']:>7.3f}   {row['cpu_ms']:>6.1f}")
    return rows


def _recording(size: str, args: argparse.Namespace) -> dict[str, float]:
    ranks: list[Recording] = _on_ranks(args.ranks, measure_recording, size, args.pairs)
    pairs = [on.cpu_ns / off.cpu_ns for r in ranks for on, off in zip(r.on, r.off, strict=True)]
    plain_ns = statistics.median(sample.cpu_ns for r in ranks for sample in r.off)
    ratio, (low, high) = statistics.median(pairs), _median_interval(pairs)
    num_rows, row_ns = ranks[0].num_rows, ranks[0].row_ns
    share = num_rows * row_ns / plain_ns
    _say(
        f"\n{size}: step CPU recorded / plain {ratio:.3f} (95 % interval {low:.3f} to {high:.3f}); "
        f"{num_rows} rows x {row_ns:.0f} ns = {share:.2%} of {plain_ns / 1e6:.1f} ms"
    )
    return {
        "cpu_ratio": ratio,
        "cpu_ratio_low": low,
        "cpu_ratio_high": high,
        "num_rows": num_rows,
        "row_ns": row_ns,
        "rows_share": share,
    }


def _median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The values between which the true median lies in 95 of 100 cases, by counting: n / 2 -+ sqrt(n) from below."""
    ordered, half = sorted(values), len(values) / 2
    spread = math.sqrt(len(values))
    return ordered[max(0, math.floor(half - spread))], ordered[min(len(values) - 1, math.ceil(half + spread))]


def _medians(ranks: list[list[Sample]]) -> dict[str, float]:
    samples = [sample for rank in ranks for sample in rank]
    return {
        "wall_ms": statistics.median(s.wall_ns for s in samples) / 1e6,
        "cpu_ms": statistics.median(s.cpu_ns for s in samples) / 1e6,
    }


def _on_ranks(num_ranks: int, function: object, *args: object) -> list:
    results = outcomes(num_ranks, function, *args, timeout_s=TIMEOUT_S)
    for rank, (what, detail) in enumerate(results):
        if what != "ok":
            sys.exit(f"rank {rank}: {what}\n{detail}")
    return [result for _, result in results]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
