"""From what the ranks answer to a command, plain dicts, to the report of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from workbench.commands import Command, Reshard, Shard, Step, Unshard, Verify
from workbench.session.reports import (
    Report,
    ReshardReport,
    ShardReport,
    StepReport,
    UnshardReport,
    VerifyReport,
)


def to_report(command: Command, results: Mapping[int, dict[str, Any]]) -> Report:
    """Return the report of ``command`` from the result of every rank.

    Raises:
        ValueError: there is no report of such a command.
    """
    by_rank = [results[rank] for rank in sorted(results)]
    match command:
        case Shard():
            return ShardReport(**_shard(by_rank))
        case Reshard():
            return ReshardReport(**_shard(by_rank), optimizers=by_rank[0]["optimizers"])
        case Unshard():
            first = by_rank[0]
            return UnshardReport(model=first["model"], num_params=first["num_params"], optimizers=first["optimizers"])
        case Step():
            return _step(by_rank)
        case Verify():
            return _verify(by_rank)
        case _:
            raise ValueError(f"there is no report of {command.word!r}")


def _shard(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    first = by_rank[0]
    same = {name: first[name] for name in ("model", "num_params", "num_elements", "bytes_unsharded")}
    return same | {
        "units": tuple(first["units"]),
        "policy": tuple(first["policy"]),
        "bytes_at_rest": tuple(result["bytes_at_rest"] for result in by_rank),
    }


def _step(by_rank: list[dict[str, Any]]) -> StepReport:
    return StepReport(
        steps_done=min(result["steps_done"] for result in by_rank),
        losses=_losses([result["losses"] or () for result in by_rank]),
        seconds=tuple(map(max, zip(*(result["seconds"] for result in by_rank), strict=False))),
        optimizer_steps=min(result["optimizer_steps"] for result in by_rank),
    )


def _losses(by_rank: Sequence[Sequence[float | None]]) -> tuple[float | None, ...] | None:
    """Return the mean of each step over the ranks that have a loss of it; None if no rank has one of any step."""
    steps = [[loss for loss in step if loss is not None] for step in zip_longest(*by_rank)]
    return tuple(fmean(step) if step else None for step in steps) if any(steps) else None


def _verify(by_rank: list[dict[str, Any]]) -> VerifyReport:
    worst = max(by_rank, key=lambda result: float(result["max_abs_diff"]))
    return VerifyReport(
        num_params=worst["params"],
        max_abs_diff=worst["max_abs_diff"],
        max_rel_diff=max(result["max_rel_diff"] for result in by_rank),
        worst_param=worst["worst_param"],
        loss_sharded=_mean(by_rank, "loss_sharded"),
        loss_reference=_mean(by_rank, "loss_reference"),
        equal_bits=min(result["equal_bits"] for result in by_rank),
        ok=all(result["ok"] for result in by_rank),
        tolerance=worst["tolerance"],
    )


def _mean(by_rank: list[dict[str, Any]], name: str) -> float | None:
    values = [result[name] for result in by_rank if result[name] is not None]
    return fmean(values) if values else None
