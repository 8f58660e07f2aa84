"""Convert a trace of CPU ranks to one of ranks that compute on devices.

The devices do what the ranks did, at the same times. The host issues all of a step in a third of the step's time and
waits for the device at the end, where it reads the loss. The device rows of a step are recorded in the next step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workbench.events import BESIDE, COLLECTIVES, COMPUTE_STREAM, Edge, Kind, Phase
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Rows

ERROR_NS = 6_000
STREAMS = (COMPUTE_STREAM, "copy-in", "reduce", "communication")
_SHARE = 0.35  # the host's share of a step's time


def on_devices(trace: Trace, *, has_device_rows: bool = True) -> Trace:
    """Return the trace on devices; without device rows unless ``has_device_rows``."""
    ranks = (replace(r, device=f"cuda:{r.rank}", device_error_ns=ERROR_NS) for r in trace.header.ranks)
    header = replace(trace.header, ranks=tuple(ranks), strings=(*trace.header.strings, *STREAMS))
    return Trace(
        header, tuple(_with_device(r, len(trace.header.strings), has_device_rows=has_device_rows) for r in trace.ranks)
    )


def hung(trace: Trace, rank: int, row: int) -> Trace:
    """Return a device trace in which the device of ``rank`` never reaches ``row``, nor its host the end of the step."""
    whole = trace.rank(rank)
    rows = whole.rows
    is_device, number = rows["kind"] == Kind.DEVICE, np.arange(len(rows))
    stuck_ns = rows["t_ns"][is_device & (rows["value"] == row)]
    end = np.flatnonzero(rows["kind"] == Kind.STEP)[-1]
    kept = np.where(is_device, rows["t_ns"] < stuck_ns, number < end)
    ranks = (replace(whole, rows=_numbered([rows[kept]], whole.start.seq)) if r is whole else r for r in trace.ranks)
    return Trace(trace.header, tuple(ranks))


def _with_device(rank_trace: RankTrace, first_string: int, *, has_device_rows: bool) -> RankTrace:
    rows = rank_trace.rows.copy()
    true_ns = rows["t_ns"].copy()
    rows["t_ns"] = _host_ns(rows)
    host_rows = rows[~np.isin(rows["kind"], BESIDE)]
    device = host_rows.copy()
    device["kind"], device["edge"], device["num_bytes"], device["unit"] = Kind.DEVICE, Edge.INSTANT, 0, -1
    device["comm_seq"] = device["comm_group"] = -1
    device["t_ns"], device["value"] = true_ns[host_rows["seq"] - rank_trace.start.seq], host_rows["seq"]
    device["module"] = first_string + _streams(host_rows)
    parts, at = [], 0
    for step in np.unique(rows["step"][rows["step"] >= 0]):
        here = np.flatnonzero(rows["step"] == step)
        cut = int(here[len(here) // 3])  # the device rows of the previous step are recorded here
        device_now = device[host_rows["step"] == step - 1]
        device_now["step"] = step
        parts += [rows[at:cut], device_now]
        at = cut
    device_now = device[host_rows["step"] == rows["step"].max(initial=-1)]
    device_now["step"] = -1
    parts += [rows[at:], device_now]
    return replace(rank_trace, rows=_numbered(parts if has_device_rows else [rows], rank_trace.start.seq))


def _numbered(parts: list[Rows], first: int) -> Rows:
    """Return the rows renumbered, with the device rows referring to the new numbers."""
    rows = np.concatenate(parts)
    is_device = rows["kind"] == Kind.DEVICE
    number = np.zeros(rows["seq"].max(initial=first) - first + 1, np.int64)
    number[rows["seq"][~is_device] - first] = np.flatnonzero(~is_device)
    rows["value"][is_device] = first + number[rows["value"][is_device].astype(np.int64) - first]
    rows["seq"] = first + np.arange(len(rows))
    return rows


def _host_ns(rows: Rows) -> np.ndarray:
    t_ns = np.maximum.accumulate(rows["t_ns"])
    found = t_ns.copy()
    for step in np.unique(rows["step"][rows["step"] >= 0]):
        here = np.flatnonzero(rows["step"] == step)
        begin = t_ns[here[0]]
        found[here] = begin + ((t_ns[here] - begin) * _SHARE).astype(np.int64)
        waited = here[np.isin(rows["kind"][here], (Kind.METRIC, Kind.STEP)) & (np.arange(len(here)) > 0)]
        found[waited] = t_ns[waited]
    return found


def _streams(rows: Rows) -> np.ndarray:
    """Return the index of each row's stream in STREAMS, as the engine assigns it."""
    stream = np.zeros(len(rows), np.int64)
    reduces = rows["phase"] == Phase.POST_BACKWARD
    copies = np.isin(rows["kind"], (Kind.COPY_IN, Kind.OFFLOAD)) | (reduces & (rows["kind"] == Kind.COPY_OUT))
    issues = np.isin(rows["kind"], COLLECTIVES)
    stream[copies | issues] = np.where(reduces, 2, 1)[copies | issues]
    stream[issues & (rows["edge"] == Edge.END)] = 3
    return stream
