"""The benchmarks' result as text: pure functions from the contents of ``build/bench.json`` to lines.

A case has ``steps`` and ``steps_torch_only`` (per implementation spreads of ``wall_ms``, ``cpu_ms`` and
``optimizer_ms``, and ratios), ``parts`` (see :mod:`bench.parts`), ``bytes`` (see :mod:`bench.memory`; of the rank with
the highest peak) and ``failed``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.aims import Verdict
from bench.cases import OURS, TORCH
from bench.parts import Part

Tree = Mapping[str, Any]
PARTS = (*(part.value for part in Part), "optimizer", "not_covered", "above_alone_metered", "above_alone")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column left-aligned, the others right-aligned."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        yield ("  " + "   ".join(cells)).rstrip()


def number(value: float | None, digits: int) -> str:
    """Format a number; a dash if it was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def steps(case: Tree) -> Iterator[str]:
    """Yield lines on a step's time under each implementation."""
    titles = ("", "step ms", "quartiles", "/ alone", "/ DDP", "/ torch", "/ torch only", "CPU ms")
    second_run = {f"{name}, second run": row for name, row in case["steps_torch_only"].items()}
    yield from table(titles, (_step(name, row) for name, row in {**case["steps"], **second_run}.items()))


def _step(name: str, row: Tree) -> tuple[str, ...]:
    wall = row["wall_ms"]
    ratios = [number(row.get(key), 3) for key in ("to_alone", "to_ddp", "to_torch", "to_torch_only")]
    quartiles = f"{wall['lower']:.1f} - {wall['upper']:.1f}"
    return (name, number(wall["median"], 1), quartiles, *ratios, number(row["cpu_ms"]["median"], 1))


def plans(found: Tree) -> Iterator[str]:
    """Yield lines on plans beside measured steps."""
    rows = found.get("rows", {})
    titles = ("", "peak MiB", "measured", "calls", "bytes", "step ms", "measured", "error %")
    if rows:
        yield from table(titles, (_plan(name, row) for name, row in rows.items()))
        summary = {key: value for key, value in found.items() if key not in {"rows", "failed"}}
        yield "  " + ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in summary.items())


def _plan(name: str, row: Tree) -> tuple[str, ...]:
    peaks = [number(row[key] / 2**20, 2) for key in ("peak_planned", "peak_measured")]
    same = ["equal" if row["calls_equal"] else "DIFFER", "DIFFER" if row["differing_bytes"] else "equal"]
    times = [number(row[key], 1) for key in ("planned_ms", "measured_ms", "time_error_percent")]
    return (name, *peaks, *same, *times)


def parts(case: Tree) -> Iterator[str]:
    """Yield lines on the time that our step takes beyond compute alone."""
    names = list(case["parts"])
    if names:
        yield "  time beyond compute alone, ms (parts: see bench/parts.py):"
        rows = [(key.replace("_", " "), *(number(case["parts"][n][f"{key}_ms"], 1) for n in names)) for key in PARTS]
        yield from table(("", *names), rows)


def memory(case: Tree) -> Iterator[str]:
    """Yield lines on the bytes of a step."""
    titles = ("", "peak MB", "/ torch", "shared", "full params", "engine's classes", "kept unused", "communication")
    if case["bytes"]:
        yield "  peak bytes within a step, of the rank with the highest peak (columns: see bench/memory.py):"
        yield from table(titles, (_bytes(name, row) for name, row in case["bytes"].items()))


def _bytes(name: str, row: Tree) -> tuple[str, ...]:
    ours = (number(row["classes_peak"] / 1e6, 1), number(row["classes"].get("RESERVED", 0) / 1e6, 1))
    is_theirs = name == TORCH
    return (
        name,
        number(row["peak"] / 1e6, 1),
        number(row.get("to_torch"), 3),
        number(row["shared"] / 1e6, 1),
        number(row["pages"] / 1e6, 1),
        *(("-", "-") if is_theirs else ours),
        "-" if is_theirs else ", ".join(row["comm"]) or "unknown",
    )


def sharding(found: Tree) -> Iterator[str]:
    """Yield lines on the time of ``fully_shard``."""
    rows = [
        (n, number(found[n]["first_ms"]["median"], 1), number(found[n]["later_ms"]["median"], 1))
        for n in (TORCH, OURS)
        if n in found
    ]
    yield from table(("", "first ms", "later ms"), rows)
    yield f"  ours / torch: first {number(found.get('first_to_torch'), 3)}, later {number(found.get('to_torch'), 3)}"


def recording(case: str, found: Tree) -> Iterator[str]:
    """Yield lines on the cost of recording."""
    yield case
    if not found["failed"]:
        yield (
            f"  step CPU recorded / plain {found['cpu_ratio']:.3f} "
            f"(95% interval {found['cpu_ratio_low']:.3f} to {found['cpu_ratio_high']:.3f}); "
            f"{found['num_rows']} events x {found['row_ns']:.0f} ns = {found['rows_percent']:.2f}% "
            f"of {found['plain_ms']:.1f} ms"
        )


def numbers(found: Tree) -> Iterator[str]:
    """Yield a line for every result, by name; for a spread, its median and quartiles."""
    for name, value in found.items():
        if name == "failed":
            continue
        if isinstance(value, Mapping) and "median" in value:
            yield f"  {name}: {value['median']:.4g} ({value['lower']:.4g} to {value['upper']:.4g}, {value['count']})"
        elif isinstance(value, Mapping):
            yield f"  {name}: " + ", ".join(f"{key} {_short(one)}" for key, one in value.items())
        else:
            yield f"  {name}: {_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_short, value)) if isinstance(value, list) else str(value)


def failures(found: Tree) -> Iterator[str]:
    """Yield lines on failed measurements: the last line of each traceback."""
    for what, text in found["failed"].items():
        yield f"  FAILED {what}: {text.strip().splitlines()[-1]}"


def verdicts(found: Iterable[Verdict]) -> Iterator[str]:
    """Yield lines that compare targets with measurements."""
    yield from table(("", "aim", "measured", "verdict"), ((v.aim.what, v.aim.target, v.number, v.word) for v in found))
