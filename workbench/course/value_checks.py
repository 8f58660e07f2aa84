"""Findings about values: of ranks beside each other, and beside the unsharded run."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.course.finding import CheckFinding, fails, holds, not_an_answer, short
from workbench.replay.grouping import by_value, label

_Floats = NDArray[np.float64]


def agree(values: Mapping[int, Any] | Sequence[Any], what: str = "the values") -> CheckFinding:
    """Return whether the values of all ranks are equal, bit by bit.

    Args:
        values: of each rank, by rank or in the order of ranks, as :func:`~workbench.course.from_ranks` returns them.
        what: what they are, for the sentence.
    """
    if problem := problem_of(values):
        return fails(problem)
    by_rank = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
    if not by_rank:
        return fails(f"{what}: no rank has any")
    groups = by_value({rank: _key(value) for rank, value in by_rank.items()})
    if len(groups) == 1:
        return holds(f"{what} are equal on {label(by_rank)}")
    (first, *_), (other, *_), *_ = groups.values()
    return fails(
        f"{what} differ: rank {first} has {short(by_rank[first])}, rank {other} has {short(by_rank[other])}",
        "what differs between ranks was not reduced over all of them, or one rank alone had the result",
    )


def same(
    values: Any,  # noqa: ANN401 - numbers of any kind
    reference: Any,  # noqa: ANN401 - likewise
    atol: float = 1e-6,
    rtol: float = 1e-5,
    what: str = "the values",
    *,
    look: str = "",
) -> CheckFinding:
    """Return whether numbers are those of a reference, such as the losses of the unsharded run.

    Args:
        values: a number, nested lists, an array, or any of these by rank or by name.
        reference: the same for the reference.
        atol: absolute difference that is allowed.
        rtol: relative difference that is allowed in addition, as in :func:`numpy.isclose`.
        what: what they are, for the sentence.
        look: what a student has to read again: then ``values`` is an answer, and the sentence has no right value.
    """
    if problem := problem_of(values) or problem_of(reference):
        return fails(problem)
    if not _is_answer(values):
        return not_an_answer(values, what, "a number") if look else fails(f"{what}: there are none")
    wrong = [found for found in _differences(values, reference, atol, rtol, "") if found]
    if not wrong:
        return holds(f"{what} are those of the reference")
    sentence = f"{what} are not those of the reference: {wrong[0]}{_ratio_words(values, reference)}"
    if look:
        return replace(fails(f"{what}: {short(values)} is not right", look), answer=sentence)
    return fails(sentence)


class RankValues(dict[int, Any]):
    """Values by rank, and why they are not those of the newest step; empty if they are."""

    problem = ""


def problem_of(values: object) -> str:
    """Return why values are not those of the newest step; empty if they are, or nothing is known of them."""
    return values.problem if isinstance(values, RankValues) else ""


def _differences(values: Any, reference: Any, atol: float, rtol: float, where: str) -> list[str]:  # noqa: ANN401
    if isinstance(values, Mapping) and isinstance(reference, Mapping):
        if values.keys() != reference.keys():
            return [f"there are {sorted(map(str, values))}, expected {sorted(map(str, reference))}"]
        return [
            text
            for key in values
            for text in _differences(values[key], reference[key], atol, rtol, f"{where} of {_name(key)}")
        ]
    mine, theirs = _floats(values), _floats(reference)
    if mine is None or theirs is None:
        return [] if _is_equal(values, reference) else [f"{short(values)}{where}, expected {short(reference)}"]
    if mine.shape != theirs.shape:
        return [f"shape {mine.shape}{where}, expected {theirs.shape}"]
    close = np.isclose(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return []
    place = np.unravel_index(int(np.argmax(~close)), close.shape) if close.shape else ()
    came, wanted = float(mine[place]), float(theirs[place])
    at = f"[{', '.join(map(str, place))}]" if place else ""
    return [f"{came:.7g}{where}{f' at {at}' if at else ''}, expected {wanted:.7g}"]


def ratio_of(values: Any, reference: Any) -> float:  # noqa: ANN401 - as in :func:`same`
    """Return by which whole number, or one over a whole number, all values differ from the reference; 0: by none.

    Values that are 0 or not finite in either are left out.
    """
    mine, theirs = (np.concatenate([np.empty(0), *_arrays(each)]) for each in (values, reference))
    if mine.shape != theirs.shape:
        return 0
    used = (np.abs(theirs) > 1e-6) & (np.abs(mine) > 1e-6) & np.isfinite(mine) & np.isfinite(theirs)
    ratios = mine[used] / theirs[used]
    if not len(ratios):
        return 0
    ratio = float(np.median(ratios))
    if not math.isfinite(ratio):
        return 0
    whole = round(ratio) if abs(ratio) >= 1 else 1 / (round(1 / ratio) if abs(ratio) > 1e-4 else 1)
    return float(whole) if whole != 1 and np.allclose(ratios, whole, rtol=1e-2) else 0


def _arrays(value: Any) -> list[_Floats]:  # noqa: ANN401 - as in :func:`same`
    if isinstance(value, Mapping):
        return [array for key in sorted(value, key=str) for array in _arrays(value[key])]
    found = _floats(value)
    return [] if found is None else [found.ravel()]


def _ratio_words(values: Any, reference: Any) -> str:  # noqa: ANN401 - as in :func:`same`
    ratio = ratio_of(values, reference)
    if not ratio:
        return ""
    if ratio == -1:
        return " (all have the other sign)"
    return (
        f" (all are {ratio:g} times as large)"
        if abs(ratio) > 1
        else f" (all are too small by a factor of {1 / ratio:g})"
    )


def _is_answer(value: Any) -> bool:  # noqa: ANN401 - as in :func:`same`
    """Return whether there is a value to compare at all."""
    if isinstance(value, Mapping):
        return bool(value)
    return not (value is None or value is ... or (isinstance(value, Sequence) and not len(value)))


def _is_equal(value: Any, reference: Any) -> bool:  # noqa: ANN401 - as in :func:`same`
    """Return whether two values of one type are equal; an object that equals everything is not."""
    return type(value) is type(reference) and bool(value == reference)


def _name(key: object) -> str:
    return f"rank {key}" if isinstance(key, int) else str(key)


def _floats(value: Any) -> _Floats | None:  # noqa: ANN401 - what may be numbers
    """Return numbers as an array; None for anything else, also for text that looks like a number."""
    try:
        found = np.asarray(float(value) if isinstance(value, numbers.Real) else value)
    except (TypeError, ValueError):
        return None
    return found.astype(np.float64) if found.dtype.kind in "biuf" else None


def _key(value: Any) -> object:  # noqa: ANN401 - what may be numbers
    found = _floats(value)
    return repr(value) if found is None else (found.shape, found.tobytes())
