"""Which rank's program ended first, of what, and what ended the others: as a fault, and as a sentence. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

from workbench.base.fault import Fault
from workbench.base.text_formats import format_long
from workbench.replay.endings import Ending, short_reason
from workbench.replay.grouping import by_value, label
from workbench.replay.run_positions import TOGETHER_NS, RunPosition, RunState
from workbench.trace.frames import short_place

_AT_ONCE_NS = 20_000_000
"""Limit of the time between the ends of ranks that one sender terminates: the time of each is recorded."""

_ABORTED_FOR = re.compile(r"^StepAborted: rank (\d+): ")
"""Begin of the error of a rank that was aborted because another one had raised."""

_NO_MEMORY = re.compile(r"^\w*MemoryError|^[\w.]+: .*can(?:no|')t allocate memory", re.IGNORECASE)
"""Errors of Python, of devices, and of torch or the kernel on the CPU."""


def first_end_ns(positions: Sequence[RunPosition]) -> int | None:
    """Return when the first program ended other than by success, on the trace's clock; None: none has."""
    return min((each.ended_ns for each in _gone(positions) if each.ended_ns is not None), default=None)


def first_end(positions: Sequence[RunPosition]) -> Fault | None:
    """Return which rank's program ended first, and of what; None: none has ended other than by success.

    An error of a collective, as its peer was gone or did not come, is first only if there is no other.

    Args:
        positions: of the ranks of a run.
    """
    first = _first(_gone(positions))
    if not first:
        return None
    others = [each for each in _gone(positions) if each not in first]
    # a process that is killed may end after its last sign of life and the end of another one
    alike = dict.fromkeys(map(_how_first, first))
    parties = [[each for each in first if _how_first(each) == how] for how in alike]
    lead = "first" if others and len(parties) == 1 else ""
    verdict = "; ".join(_end_words(party, lead) for party in parties)
    if len(parties) > 1:
        apart_ns = max(each.ended_ns or 0 for each in first) - (first[0].ended_ns or 0)
        within = f" within {format_long(apart_ns)}" if apart_ns else ""
        verdict = f"{label(sorted(_ranks(first)))} ended{within}, and which of them first is not recorded: {verdict}"
    later = _sequence(others, since_ns=first[0].ended_ns)
    return Fault(
        rule="dead-rank",
        verdict="; ".join([verdict, *later]),
        evidence=tuple(_evidence([*first, *others])),
        fix="; ".join(_fix(party, others if party is parties[-1] else []) for party in parties),
    )


def _how_first(position: RunPosition) -> tuple[RunState, str]:
    """Return how a rank ended that was among the first; those with the same are named together."""
    return position.state, short_reason(position.reason) if position.ending is Ending.ERROR else ""


def _end_words(alike: Sequence[RunPosition], lead: str) -> str:
    """Return how ranks that ended alike did, such as ``"rank 0 was terminated first: SIGTERM, train.py:9"``."""
    ranks, alone = label(_ranks(alike)), alike[0]
    if alone.state is RunState.LOST:
        return f"{ranks} {_killed_words(alike, lead)}"
    words = f"{' '.join(filter(None, (ranks, _verb(alike), lead)))}: {short_reason(alone.reason)}"
    return f"{words}, {short_place(alone.users_frame)}" if alone.users_frame else words


def ends_words(positions: Sequence[RunPosition]) -> str:
    """Return what ended the programs of a stalled run, the first one first; empty: none has ended."""
    return "; ".join(_sequence(_gone(positions), since_ns=first_end_ns(positions)))


def _gone(positions: Sequence[RunPosition]) -> list[RunPosition]:
    found = [each for each in positions if each.state in (RunState.FAILED, RunState.LOST)]
    return sorted(found, key=lambda each: (each.ended_ns or 0, -each.ago_ns, each.rank))


def _first(gone: Sequence[RunPosition]) -> list[RunPosition]:
    """Return the ranks that ended first, and alike; ``gone`` is in the order of their ends.

    A rank that a signal ended after others had lost a peer is not that peer.
    """
    lost_ns = min((each.ended_ns or 0 for each in gone if each.ending is Ending.PEER), default=None)
    if lost_ns is not None:
        by_signal = [each for each in gone if each.reason.startswith("SIG")]
        later = [each for each in by_signal if (each.ended_ns or 0) > lost_ns + _AT_ONCE_NS]
        gone = [each for each in gone if each not in later]
    own = [each for each in gone if each.ending in (Ending.ERROR, Ending.ABORTED)]
    killed = [each for each in gone if each.ending in (None, Ending.OUTSIDE)]
    if own and all(each.ended_ns is None for each in gone):  # of a request
        named = {int(found[1]) for each in gone if (found := _ABORTED_FOR.match(each.reason))}
        causes = [each for each in own if each.rank in named]
        if causes:
            return causes
        is_order_known = all(each.ago_ns for each in own)
        return own[:1] if is_order_known else own
    if own and (not killed or (own[0].ended_ns or 0) <= (killed[0].ended_ns or 0) + TOGETHER_NS):
        alike = [each for each in own if short_reason(each.reason) == short_reason(own[0].reason)]
        return [each for each in alike if len(alike) == len(gone) or _is_together(each, own[0])]
    if killed and killed[0].state is RunState.LOST:
        return [each for each in killed if _is_together(each, killed[0])]
    if killed:
        return [each for each in killed if each.state is not RunState.LOST and _is_together(each, killed[0])]
    return list(gone[:1])


def _is_together(one: RunPosition, first: RunPosition) -> bool:
    is_terminated = first.reason.startswith("SIGTERM")
    return (one.ended_ns or 0) - (first.ended_ns or 0) <= (_AT_ONCE_NS if is_terminated else TOGETHER_NS)


def _ranks(positions: Sequence[RunPosition]) -> list[int]:
    return [each.rank for each in positions]


def _killed_words(killed: Sequence[RunPosition], when: str = "") -> str:
    """Return that ranks were killed, such as ``"was killed first"``."""
    words = killed[0].state.value.replace("killed", f"killed {when}".rstrip())
    return words if len(killed) == 1 else words.replace("was", "were")


def _verb(ended: Sequence[RunPosition]) -> str:
    were = "were" if len(ended) > 1 else "was"
    match ended[0].ending:
        case Ending.OUTSIDE:
            return f"{were} {'interrupted' if ended[0].reason.startswith('KeyboardInterrupt') else 'terminated'}"
        case Ending.ABORTED:
            return f"{were} aborted"
        case _:
            return "failed"


def _sequence(gone: Sequence[RunPosition], *, since_ns: int | None) -> list[str]:
    """Return how ranks ended, ranks that ended alike together, in the order of their ends."""
    found = by_value((each.rank, _how(each)) for each in gone)
    by_rank = {each.rank: each for each in gone}
    sentences = []
    for how, ranks in found.items():
        after_ns = min(by_rank[rank].ended_ns or 0 for rank in ranks) - (since_ns or 0)
        later = f" {format_long(after_ns)} later" if after_ns > 0 else ""
        several = [by_rank[rank] for rank in ranks]
        if how is Ending.PEER:
            words = f"failed{later} because {'their' if len(ranks) > 1 else 'its'} peer was gone"
        elif how is Ending.TIMEOUT:
            words = f"failed{later} as {'they' if len(ranks) > 1 else 'it'} had waited too long"
        elif how is None:
            words = _killed_words(several, later.strip())
        elif isinstance(how, Ending):
            words = f"{_verb(several)}{later}"
        else:
            words = f"failed{later}: {how}"
        sentences.append(f"{label(ranks)} {words}")
    return sentences


def _how(position: RunPosition) -> Ending | str | None:
    return short_reason(position.reason) if position.ending is Ending.ERROR else position.ending


def _evidence(gone: Sequence[RunPosition]) -> list[str]:
    """Return the error and the line of each rank, ranks of the same together."""
    told = by_value((each.rank, _error_words(each)) for each in gone)
    return [f"{label(ranks)}: {words}" for words, ranks in told.items() if words]


def _error_words(position: RunPosition) -> str:
    error = short_reason(position.reason)
    place = f"in {position.users_frame}" if position.users_frame else ""
    return ", ".join(filter(None, (error, place)))


_BUS = ": a mapped file has become shorter, or its disk or /dev/shm is full"
"""Why the kernel sends SIGBUS."""


def _fix(first: Sequence[RunPosition], others: Sequence[RunPosition]) -> str:
    """Return what to do about the first ranks that ended, of which ``others`` ended too."""
    alone, ranks = first[0], label(_ranks(first))
    at = f" at {short_place(alone.users_frame)}" if alone.users_frame else ""
    name = alone.reason.partition(":")[0]
    match alone.ending:
        case None:
            found = (
                f"find out what killed {ranks}: the kernel, for lack of memory (dmesg), its launcher or queue (their "
                "logs), or its host"
            )
        case Ending.OUTSIDE:
            sender = (
                f"see what sent {name} to {ranks}: its queue, to preempt it or at a limit, its launcher, or a person"
            )
            found = "start the run again" if name == "KeyboardInterrupt" else sender
        case Ending.PEER | Ending.TIMEOUT:
            return f"see what ended the process that {ranks} waited for, which is not recorded"
        case Ending.ABORTED:
            found = (
                f"see the end of the standard error of {ranks}: gloo aborts a rank if the sizes of a collective differ"
                f"{_apart(first, others)}"
            )
        case _ if _NO_MEMORY.search(alone.reason):
            found = f"let {ranks} need less memory{at}: smaller batches, shorter inputs, or parameters over more ranks"
        case _ if name.startswith("SIG"):
            why = _BUS if name == "SIGBUS" else ""
            found = f"see what C or C++ code {ranks} called{at}, and the end of its standard error{why}"
        case _ if name.startswith("exit"):
            found = f"see why {ranks} ended the program{at}"
        case _:
            found = f"correct the error of {ranks}{at}"
    return f"{found}; the others ended because of it" if others else found


def _apart(first: Sequence[RunPosition], others: Sequence[RunPosition]) -> str:
    """Return that ranks that were aborted and their peers were in different lines, as text, which they need not be."""
    for mine, theirs in product(first, others):
        if mine.users_frame and theirs.users_frame and short_place(mine.users_frame) != short_place(theirs.users_frame):
            places = f"rank {mine.rank} was in {short_place(mine.users_frame)}, rank {theirs.rank} in"
            return f", and {places} {short_place(theirs.users_frame)}"
    return ""
