"""What the issue "Engine" asks of speed and memory, and whether a bench's result has it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.cases import CASES, OF_OURS, OURS, OURS_GLOO

STEP, RESERVED, SHARDING = "step", "reserved bytes", "sharding time"


@dataclass(frozen=True)
class Aim:
    """One ratio to torch's ``fully_shard``.

    Attributes:
        what: STEP, SHARDING, or RESERVED: all that the engine holds, pools included, to the peak of torch's process.
        case: name of the case; empty for SHARDING.
        implementation: which of ours.
        at_most: the highest ratio that will do.
        is_must: the issue says "must"; else "aim".
    """

    what: str
    case: str
    implementation: str
    at_most: float
    is_must: bool = True


AIMS = (
    Aim(STEP, "19.2M", OURS_GLOO, 0.87),
    Aim(STEP, "3.3M", OURS_GLOO, 0.84),
    Aim(STEP, "19.2M-4ranks", OURS_GLOO, 0.88),
    Aim(STEP, "19.2M-bf16", OURS_GLOO, 0.92),
    Aim(STEP, "19.2M", OURS, 0.78, is_must=False),
    Aim(STEP, "3.3M", OURS, 0.74, is_must=False),
    Aim(STEP, "19.2M-4ranks", OURS, 0.82, is_must=False),
    Aim(STEP, "19.2M-bf16", OURS, 0.85, is_must=False),
    *(Aim(RESERVED, case, implementation, 1.0) for case in CASES for implementation in OF_OURS),
    Aim(SHARDING, "", OURS, 1.0),
)


@dataclass(frozen=True)
class Verdict:
    """An aim, the ratio that was measured (None: it was not), and whether that will do."""

    aim: Aim
    measured: float | None

    @property
    def is_met(self) -> bool:
        """Measured, and not above the aim."""
        return self.measured is not None and self.measured <= self.aim.at_most

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return "met" if self.is_met else "not measured" if self.measured is None else "MISSED"

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**asdict(self.aim), "measured": self.measured, "verdict": self.word}


def verdicts(result: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge what ``build/bench.json`` holds; aims of cases that were not chosen are left out."""
    for aim in AIMS:
        if aim.what == SHARDING or aim.case in result["cases"]:
            yield Verdict(aim, _measured(aim, result))


def _measured(aim: Aim, result: Mapping[str, Any]) -> float | None:
    if aim.what == SHARDING:
        return _found(result, "sharding", "to_torch")
    case = result["cases"][aim.case]
    if aim.what == RESERVED:
        return _found(case, "bytes", aim.implementation, "reserved_to_torch")
    ratios = [_found(case, "steps", aim.implementation, run) for run in ("to_torch", "to_torch_only")]
    return max((r for r in ratios if r is not None), default=None)  # against both runs


def _found(tree: Mapping[str, Any], *path: str) -> float | None:
    """Return the number at ``path``; None where a measurement failed or was not made."""
    value: Any = tree
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
