"""How long the trace takes at 1 M rows: ``python -m tests.trace.bench_trace``."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.trace.strategies import example_trace
from workbench.trace import TraceBuilder, advance, check, load, partners, save, to_perfetto


def measure(name: str, work: Callable[[], object]) -> None:
    """Write the best of three runs."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    sys.stdout.write(f"{name:<36} {min(seconds) * 1000:8.1f} ms\n")


def main() -> None:
    """Measure the operations whose cost grows with the trace."""
    trace = example_trace(num_ranks=4, num_units=33, steps=160)
    rank = trace.rank(0)
    packed = rank.rows.tobytes()
    after = advance(rank.start, rank.rows)
    sys.stdout.write(f"{trace.num_rows} rows, {len(trace.ranks)} ranks\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.trace"
        measure("save", lambda: save(trace, path))
        sys.stdout.write(f"{'file':<36} {path.stat().st_size / 1e6:8.1f} MB\n")
        measure("load", lambda: load(path))
    measure("slice one step", lambda: trace.slice(step=150))
    measure(f"key frame after {len(rank.rows)} rows", lambda: advance(rank.start, rank.rows))
    measure(f"partners of {len(rank.rows)} rows", lambda: partners(rank.rows))
    measure(f"builder, {len(rank.rows)} rows at once", lambda: TraceBuilder().append(0, packed, key_frame=after))
    measure("check all rules", lambda: check(trace))
    measure("to_perfetto", lambda: to_perfetto(trace))


if __name__ == "__main__":
    main()
