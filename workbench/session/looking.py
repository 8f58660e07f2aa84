"""Asking the ranks of a session where they are, and turning the answers into a table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from workbench.events import unit_words
from workbench.session.places import State, event_words, state_of, unit_names
from workbench.session.session import Session
from workbench.session.stop_reports import WhereReport, WhereRow
from workbench.session.stopping import WHERE_S
from workbench.session.threads import Thread, threads_of
from workbench.session.watch import PATIENT_S
from workbench.trace.schema import Header
from workbench.views.theme import format_duration


def where(session: Session, *, stacks: bool) -> WhereReport:
    """Return where every rank is; one that does not answer in a moment is named so."""
    timeout_s = PATIENT_S if _all_stand(session) else WHERE_S
    positions = session.ask({"op": "where"}, timeout_s=timeout_s)
    threads = session.ask({"op": "stacks"}, timeout_s=timeout_s) if stacks else {}
    header, now_ns = session.trace.header, time.monotonic_ns()
    rows = []
    for rank, alive in enumerate(session.cluster.alive()):
        found = threads_of(threads.get(rank, {}))
        if rank in positions:
            rows.append(row_of(rank, positions[rank], header, now_ns, found, session.state(rank, positions[rank])))
        else:
            rows.append(WhereRow(rank=rank, state="no answer" if alive else "gone", stacks=found))
    return WhereReport(rows=tuple(rows))


def _all_stand(session: Session) -> bool:
    """Whether all ranks stand in a stopped step: they are there, and answer once the machine lets them."""
    request = session.request
    return request is not None and request.state == "stopped" and not (request.stop and request.stop.is_late)


def row_of(
    rank: int,
    position: Mapping[str, Any],
    header: Header,
    now_ns: int,
    stacks: tuple[Thread, ...] = (),
    state: State | None = None,
) -> WhereRow:
    """Return one line of the table.

    Args:
        rank: whose.
        position: its answer to "where".
        header: of its trace.
        now_ns: of the clock that the ranks of this machine share, in nanoseconds.
        stacks: its Python threads.
        state: what it is doing; None: what the position says.
    """
    state = state or state_of(position)
    here = {**position, **(position.get("held") or {})}
    unit = unit_names(header).get(int(here.get("unit", -1)))
    kind, edge = here.get("kind", ""), here.get("edge", "")
    # of a held rank the event to come, of others the newest one
    waits = (state, kind, edge) == ("held", "wait", "begin")  # it stands in the wait, not before it
    prefix = "in a " if waits else "before " if state == "held" else "begin of " if edge == "begin" else ""
    since = here.get("since_ns")
    synchronised = ", device synchronised" if here.get("synchronised") else ""
    return WhereRow(
        rank=rank,
        state=state,
        step=str(here["step"]) if here.get("step", -1) >= 0 else "",
        phase=str(here.get("phase", "")).replace("_", "-"),
        unit="" if unit is None else unit_words(unit),
        event=f"{prefix}{event_words(kind, edge, None)}" + synchronised if kind else "",
        since=format_duration(max(now_ns - since, 0)) if since is not None else "",
        stacks=stacks,
    )
