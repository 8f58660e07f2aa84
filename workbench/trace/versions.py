"""Older schemas: upgrades of their JSON data to the current version in :mod:`workbench.trace.schema`.

Version 8 added to each part of a flat parameter ``global_shape``. Before, tensor parallelism had split none.

Version 7 added to a header ``unmanaged`` and ``hooks``, and to a rank ``buffers``. Before, ranks did not look for them.

Version 6 added to a header ``clocks``, by which times were converted. Before, a rank recorded by how much its clock was
ahead of rank 0's: always 0, because the clocks were not compared.

Version 5 added to a unit ``gone``, to a parameter ``use_orig_params``, and to each of its parts ``trainable``.

Version 4 added to a parameter ``parts``: the parameters that a flat one holds. Before, there were no flat ones.

Version 3 added to a rank ``device_error_ns``, and the kind DEVICE.

Version 2 added to a unit ``replicate_size``, the dtypes of its collectives, ``offload`` and ``comm``; to a parameter
``global_shape``; to a communication group its ranks; to a rank ``baseline_bytes``; the memory class RESERVED; and the
kind RESIDENT. For a version-1 trace these are filled with what the engine did then: one copy, one precision, no
offloading, no pools.
"""

from __future__ import annotations

import re
from typing import Any

from workbench.errors import TraceError
from workbench.events import Category
from workbench.trace.schema import SCHEMA_VERSION

_RANKS = re.compile(r"ranks? (\d[\d, -]*)$")
_MAX_RANKS = 2**16  # files are untrusted


def upgrade_header(data: dict[str, Any]) -> dict[str, Any]:
    """Return a header's JSON data upgraded to this version; data of this version, or of none, unchanged.

    Raises:
        TraceError: the data claims an older version and does not match it.
    """
    version = data.get("schema_version")
    if version not in (1, 2, 3, 4, 5, 6, 7):
        return data
    try:
        data = _second(data) if version == 1 else data
        ranks = [_rank(rank) for rank in data["ranks"]]
        units = [
            {"gone": False} | unit | {"params": [_param(param) for param in unit["params"]]} for unit in data["units"]
        ]
    except (KeyError, TypeError, IndexError) as error:
        what = "units, ranks or comm_groups"
        raise TraceError(f"the header claims schema version {version}, but its {what} do not match it") from error
    added: dict[str, Any] = {"clocks": [], "unmanaged": [], "hooks": []}
    return added | data | {"schema_version": SCHEMA_VERSION, "ranks": ranks, "units": units}


def _rank(data: dict[str, Any]) -> dict[str, Any]:
    found = {"device_error_ns": 0, "buffers": []} | data
    if any([found.pop("clock_offset_ns", 0), found.pop("clock_error_ns", 0)]):
        raise TraceError(
            f"rank {data['rank']} has a clock other than rank 0's, which this schema version did not record"
        )
    return found


def _param(data: dict[str, Any]) -> dict[str, Any]:
    added = {"trainable": data["trainable"]}
    parts = [added | {"global_shape": part["shape"]} | part for part in data.get("parts", ())]
    return {"use_orig_params": False} | data | {"parts": parts}


def _second(data: dict[str, Any]) -> dict[str, Any]:
    """Return a header of version 1 upgraded to version 2."""
    units = [_unit(unit) for unit in data["units"]]
    groups = [{"name": name, "ranks": _ranks_in(name)} for name in data["comm_groups"]]
    ranks = [{"baseline_bytes": 0} | rank for rank in data["ranks"]]
    return data | {"units": units, "comm_groups": groups, "ranks": ranks}


def upgrade_key_frame(data: dict[str, Any], version: int) -> dict[str, Any]:
    """Return the JSON data of a key frame in a trace of ``version``, upgraded to this version."""
    live = data["bytes_by_category"]
    return data | {"bytes_by_category": [*live, 0]} if version == 1 and len(live) == Category.RESERVED else data


def _unit(data: dict[str, Any]) -> dict[str, Any]:
    dtype = data["params"][0]["dtype"] if data["params"] else ""
    added = {"replicate_size": 1, "compute_dtype": dtype, "reduce_dtype": dtype, "offload": False, "comm": ""}
    return added | data | {"params": [{"global_shape": param["shape"]} | param for param in data["params"]]}


def _ranks_in(name: str) -> list[int]:
    """Return the ranks in a group's name; empty if it has none.

    Example: ``"group 0: ranks 0, 2"`` -> ``[0, 2]``, ``"ranks 0-1"`` -> ``[0, 1]``.
    """
    found = _RANKS.search(name)
    ranks: list[int] = []
    for part in found[1].split(",") if found else ():
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return []
        ranks += range(int(first), min(int(last or first), int(first) + _MAX_RANKS) + 1)
    return ranks
