"""Check that all ranks hold the same units, done once when the root of a model first runs.

Ranks that built different models would hang, return each other's bytes or kill a process in their first collective.
The ranks compare a digest of every unit's names, shapes, dtypes and policy through the store. They read each other's
text only if digests differ, to name the first difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest

from workbench.engine.collective_order import Collective
from workbench.engine.errors import RanksDisagreeError
from workbench.engine.process_groups import CommGroup
from workbench.events import Unit, unit_words


def _lines(units: Sequence[Unit]) -> list[str]:
    """Return one line per parameter, unit by unit."""
    return [
        f"{unit_words(unit.name)}: {p.fqn} {list(p.shape)} {p.dtype}{'' if p.trainable else ' frozen'}"
        f"{'' if unit.reshard_after_forward else ', kept after forward'}"
        for unit in units
        for p in unit.params
    ]


def _first_difference(lines_per_rank: list[list[str]], ranks: Sequence[int]) -> str:
    """Describe the first position at which not all ranks have the same line.

    Example: ``[["u: a [2]"], ["u: a [3]"]]`` -> ``parameter 0: rank 0 has 'u: a [2]'; rank 1 has 'u: a [3]'``.
    """
    rows = enumerate(zip_longest(*([repr(line) for line in lines] for lines in lines_per_rank), fillvalue="nothing"))
    number, texts = next((i, row) for i, row in rows if len(set(row)) > 1)
    return f"parameter {number}: {holders(texts, ranks)}"


def holders(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return which ranks have which text: ``["a", "b", "b"], [0, 1, 2]`` -> ``"rank 0 has a; ranks 1, 2 have b"``."""
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"{name_ranks(r)} {'have' if len(r) > 1 else 'has'} {text}" for text, r in by_text.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``[0]`` -> ``rank 0``, ``[0, 2]`` -> ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def check_same_units(units: Sequence[Unit], group: CommGroup) -> None:
    """Compare ``units`` across the ranks of ``group``; raises as :func:`check_same_lines`."""
    check_same_lines(_lines(units), group)


def check_same_lines(lines: Sequence[str], group: CommGroup) -> None:
    """Compare descriptions, one line per parameter, across the ranks of ``group``; collective.

    Raises:
        RanksDisagreeError: on every rank, with the first parameter that differs and each rank's line.
    """
    texts = group.compare(Collective("comparison of the ranks' models", None, 0), json.dumps(list(lines)))
    if len(set(texts)) == 1:
        return
    difference = _first_difference([json.loads(t) for t in texts], group.ranks)
    raise RanksDisagreeError(
        f"ranks built different models; {difference}. Build the same model on every rank, and shard it in the same way."
    )
