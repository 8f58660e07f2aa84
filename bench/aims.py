"""The performance targets as numbers, and the verdicts on a result."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.cases import CASES, CLASSIC_CASES, HOSTS_CASES, OF_OURS, OURS, OURS_GLOO

Path = tuple[str, ...]
"""Path to a value in the result: the names on the way to it."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """One target.

    Attributes:
        what: what is measured, in half a line.
        part: path of the measurement in the result; if it is missing, it was not requested and is not judged.
        values: paths of the numbers within the part; the worst counts, and missing ones do not.
        limit: the highest acceptable number, or the lowest if ``is_at_least``.
        unit: of the numbers; empty for a ratio.
        is_at_least: more is better.
        digits: decimals to which a number is rounded before the comparison; None for no rounding.
        is_must: a requirement; otherwise a goal.
    """

    what: str
    part: Path
    values: tuple[Path, ...]
    limit: float
    unit: str = ""
    is_at_least: bool = False
    digits: int | None = None
    is_must: bool = True

    @property
    def target(self) -> str:
        """The requirement, as a sign and a number."""
        sign = ">=" if self.is_at_least else "<="
        return f"{'must' if self.is_must else 'aim'} {sign} {self.limit:g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Verdict:
    """A target, the measured number or None, and whether it meets the target."""

    aim: Aim
    measured: float | None

    @property
    def is_met(self) -> bool:
        """Whether the number was measured and is on the right side of the limit."""
        if self.measured is None:
            return False
        judged = self.measured if self.aim.digits is None else round(self.measured, self.aim.digits)
        return judged >= self.aim.limit if self.aim.is_at_least else judged <= self.aim.limit

    @property
    def word(self) -> str:
        """The verdict in one or two words."""
        return "met" if self.is_met else "not measured" if self.measured is None else "MISSED"

    @property
    def number(self) -> str:
        """The measured number, with its unit."""
        if self.measured is None:
            return "-"
        return f"{self.measured:.2f} {self.aim.unit}" if self.aim.unit else f"{self.measured:.3f}"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return {**asdict(self.aim), "measured": self.measured, "verdict": self.word}


def _step(case: str, implementation: str, limit: float, *, is_must: bool = True) -> Aim:
    """Return the target of a step's time relative to torch's, in both runs: the second run loads nothing of ours."""
    return Aim(
        what=f"{implementation}, {case}: step / torch's",
        part=("cases", case),
        values=tuple(("steps", implementation, key) for key in ("to_torch", "to_torch_only")),
        limit=limit,
        is_must=is_must,
    )


def _to_ddp(case: str, implementation: str, limit: float) -> Aim:
    """Return the target of a step's time relative to torch's DistributedDataParallel, which communicates least."""
    return Aim(
        what=f"{implementation}, {case}: step / DDP's",
        part=("cases", case),
        values=(("steps", implementation, "to_ddp"),),
        limit=limit,
        is_must=False,
    )


def _peak(case: str, implementation: str) -> Aim:
    """Return the target of our process's peak bytes within steps, relative to torch's."""
    return Aim(
        what=f"{implementation}, {case}: peak of the process / torch's",
        part=("cases", case),
        values=(("bytes", implementation, "to_torch"),),
        limit=1.0,
    )


ENGINE = (
    _step("19.2M", OURS_GLOO, 0.87),
    _step("3.3M", OURS_GLOO, 0.84),
    _step("19.2M-4ranks", OURS_GLOO, 0.88),
    _step("19.2M-bf16", OURS_GLOO, 0.92),
    _step("19.2M", OURS, 0.78, is_must=False),
    _step("3.3M", OURS, 0.74, is_must=False),
    _step("19.2M-4ranks", OURS, 0.82, is_must=False),
    _step("19.2M-bf16", OURS, 0.85, is_must=False),
    _to_ddp("19.2M", OURS_GLOO, 1.08),
    _to_ddp("3.3M", OURS_GLOO, 1.15),
    _to_ddp("19.2M", OURS, 1.00),
    _to_ddp("3.3M", OURS, 1.03),
    *(_peak(case, implementation) for case in CASES for implementation in OF_OURS),
    Aim(
        what=f"{OURS}, 0.8 B parameters: sharding time / torch's",
        part=("sharding",),
        values=(("to_torch",),),
        limit=1.0,
    ),
)
"""The targets that ``--check`` judges."""


WATCHED = (("cpu_to_plain",), ("cpu_to_unwatched",))


def _recording(case: str, share: float, watched: float) -> Iterator[Aim]:
    part = ("recording", case)
    yield Aim(what=f"{case}: events x ns / step CPU", part=part, values=(("rows_percent",),), limit=share, unit="%")
    yield Aim(what=f"{case}: step CPU, recorded / plain", part=part, values=(("cpu_ratio",),), limit=1.03)
    live = ("live", f"watched {case}")
    yield Aim(what=f"{case}: step CPU, with / without live dashboard", part=live, values=WATCHED, limit=watched)
    yield Aim(what=f"{case}: drained per step and rank", part=live, values=(("drained_kb",),), limit=10, unit="kB")


def _live(what: str, part: Path, value: str, limit: float, unit: str = "") -> Aim:
    return Aim(what=what, part=part, values=((value,),), limit=limit, unit=unit)


def _frames(move: str) -> Aim:
    # a frame clock of 60 Hz measures 59.9 as often as 60.1
    return Aim(
        what=f"timeline: {move}, 500,000 rectangles",
        part=("browser", "timeline"),
        values=((f"fps_{move}",),),
        limit=60,
        unit="fps",
        is_at_least=True,
        digits=0,
    )


RECORDING = (("3.7M", 1, 1.05), ("0.23M", 5, 1.10))  # case, % of step CPU, limit with the dashboard live
LIVE = (
    *(aim for figures in RECORDING for aim in _recording(*figures)),
    _live("to the browser, 8 ranks", ("live", "to browser"), "kib_per_s", 64, "KiB/s"),
    Aim(
        what="control channel while ranks compute, median",
        part=("live", "control channel"),
        values=(("python_ms",), ("torch_ms",)),
        limit=30,
        unit="ms",
    ),
    _live("%%fsdp pass / %%px pass", ("live", "cells"), "to_px", 1.3),
    _live("start to first ready cell, 4 ranks", ("live", "start"), "median_s", 5, "s"),
    _live("trace of 1 M events: load", ("trace",), "load_ms", 2000, "ms"),
    _live("trace of 1 M events: state at any event", ("trace",), "state_ms", 50, "ms"),
    _live("trace of 1 M events: slowest figure", ("trace",), "figure_ms", 100, "ms"),
    _live("100 units x 100 steps: slowest explanation", ("trace",), "explain_ms", 300, "ms"),
    _frames("pan"),
    _frames("zoom"),
    _live("timeline: first paint, 1 M rectangles", ("browser", "timeline"), "first_paint_ms", 1000, "ms"),
    _live("time from an event to its pixels, median", ("browser", "pixels"), "median_ms", 150, "ms"),
)
LAB = (
    Aim(what="3.7M, 8 ranks: step CPU, with / without panel", part=("live", "panel 3.7M"), values=WATCHED, limit=1.05),
    _live("panel: time until a change is shown, median", ("browser", "panel"), "median_ms", 200, "ms"),
    _live("panel: first paint after the click", ("browser", "panel"), "first_paint_ms", 500, "ms"),
    _live("panel: time until a killed rank is named", ("browser", "panel"), "recovers_ms", 2000, "ms"),
    _live("panel: size of its bundle", ("browser", "panel"), "bundle_kb", 300, "kB"),
    _live("8 hours: memory growth of the kernel", ("browser", "soak"), "kernel_mb", 200, "MB"),
    _live("8 hours: memory growth of the page", ("browser", "soak"), "page_mb", 200, "MB"),
)

_SIZES = {"wide": "512 ranks x 128 units", "long": "512 ranks x 200 steps"}
SCALE = (
    *(
        _live(f"{size}: {what}", ("scale", name), value, limit, "ms")
        for name, size in _SIZES.items()
        for what, value, limit in (("load", "load_ms", 5000), ("slowest figure", "figure_ms", 300))
    ),
    Aim(
        what="512 ranks x 200 steps: dashboard scrub",
        part=("browser", "scrub"),
        values=(("fps",), ("moments",)),
        limit=30,
        unit="fps",
        is_at_least=True,
    ),
)
"""Traces as large as those of 512 ranks."""

HOSTS = (
    *(
        Aim(
            what=f"{name}: step / torch's",
            part=("hosts", name),
            values=(("to_torch",),),
            limit=0.9,
        )
        for name in HOSTS_CASES
    ),
    _live(
        "control channel of 3 hosts, beyond 2 link latencies",
        ("live", "control channel of hosts"),
        "above_links_ms",
        30,
        "ms",
    ),
    _live("attach to 8 engines with torch loaded, until the first cell", ("live", "attach"), "median_s", 2, "s"),
)
"""6 ranks on 3 hosts, at 1 Gbit/s and 2 ms; and a cluster that is already running."""

CLASSIC = tuple(
    Aim(what=f"classic, {case}: {what}", part=("classic", case), values=((value,),), limit=limit)
    for case in CLASSIC_CASES
    for what, value, limit in (
        ("step / torch's wrapper", "to_torch", 0.80),
        ("step / fully_shard", "to_fully_shard", 1.03),
        ("peak of the process / torch's wrapper", "peak_to_torch", 1.0),
        ("bytes at rest / torch's wrapper", "rest_to_torch", 1.0),
    )
)

MANY = (
    _live("next collective, time per rank: most / fewest ranks", ("many", "next collective"), "growth", 1.5),
    _live("shard and step, time per unit: most / fewest units", ("many", "shard"), "growth", 1.5),
    _live("100 units: lint", ("many", "shard"), "lint_ms", 300, "ms"),
)
"""Costs per rank and per unit, whose totals are to be linear, and of a command on many units."""

AIMS = (*ENGINE, *LIVE, *MANY, *LAB, *SCALE, *HOSTS, *CLASSIC)


def verdicts(result: Mapping[str, Any], aims: Iterable[Aim] = AIMS) -> Iterator[Verdict]:
    """Judge the contents of ``build/bench.json``; skip targets whose part was not measured."""
    for aim in aims:
        part = _found(result, aim.part)
        if isinstance(part, Mapping):
            numbers = [n for n in (_found(part, path) for path in aim.values) if n is not None]
            worst = min if aim.is_at_least else max
            yield Verdict(aim, worst(numbers, default=None))


def _found(tree: Mapping[str, Any], path: Path) -> Any:
    """Return the value at ``path``; None if a measurement failed or was not made."""
    value: Any = tree
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
