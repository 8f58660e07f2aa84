"""Why the ranks of a run do not continue, as a fault: one order of questions, before and after their end. Pure.

1. Did ranks part: in kind, payload or order of a collective, in the number of forwards or backwards?
2. Which rank do the others wait for, and where is it?
3. Which rank's program ended first, and of what?

Only then it is said what ended the others. A rank that waits is never the cause, nor is one that may wait in a
collective that its torch does not announce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.fault import Fault
from workbench.base.text_formats import format_long
from workbench.events import Edge, Kind, unit_words
from workbench.replay.divergence import (
    Divergence,
    Parting,
    UnsharedCall,
    first_divergence,
    first_unshared,
    has_left_out,
    is_usual,
)
from workbench.replay.endings import Ending
from workbench.replay.grouping import by_value, label
from workbench.replay.passes import counts, first_difference, passes_before
from workbench.replay.run_positions import (
    DEADLOCKED_NS,
    STALLED_NS,
    TOGETHER_NS,
    PendingCollective,
    RunPosition,
    RunState,
)
from workbench.reports.ended_ranks import ends_words, first_end, first_end_ns
from workbench.reports.event_text import unit_names
from workbench.reports.parted_ranks import (
    LEAVE_TOGETHER,
    SAME_BATCHES,
    SAME_CALLS,
    SAME_ROOT,
    divergence_fault,
    frame_lines,
    progress_words,
    same_calls_or_batches,
)
from workbench.trace.columns import Trace
from workbench.trace.frames import is_in_loop, short_place
from workbench.trace.recording import Activity
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name

_MAX_PLACES = 3
"""Lines that a verdict names; of more, the evidence has them."""


def stall_cause(trace: Trace, positions: Sequence[RunPosition]) -> Fault | None:
    """Return why a stalled run does not continue; None if what is recorded does not tell.

    Args:
        trace: of the run.
        positions: of its recorded ranks.
    """
    found = parted(trace, positions) or _Waits(trace, positions).cause()
    if found is None:
        return first_end(positions)
    ended = ends_words(positions)
    return replace(found, evidence=(*found.evidence, ended)) if ended else found


def parted(trace: Trace, positions: Sequence[RunPosition] = ()) -> Fault | None:
    """Return where ranks did different things; None if they did not.

    Args:
        trace: of the run.
        positions: of ranks, whose own lines are evidence.
    """
    found = first_divergence(trace)
    return None if found is None else divergence_fault(found, trace.header, positions)


def not_judged(trace: Trace, positions: Sequence[RunPosition]) -> str:
    """Return which ranks were not judged, as their torch does not announce what they may wait for; usually empty."""
    unseen = [each.rank for each in positions if _waits_unseen(trace.header, each) and not _failed_in_call(each)]
    if not unseen:
        return ""
    return (
        f"{label(unseen)} {'are' if len(unseen) > 1 else 'is'} in torch's C++ code or a backward of "
        "DistributedDataParallel, whose collectives only torch 2.14 or newer announces: not judged"
    )


def pending_words(pending: PendingCollective, units: Mapping[int, str]) -> str:
    """Return a collective as text: ``"all-gather of blocks.2"``, ``"all-reduce number 12 of group 0"``."""
    if pending.unit in units:
        return f"{pending.kind.words} of {unit_words(units[pending.unit])}"
    return f"{pending.kind.words} number {pending.number} of {pending.group}"


def _waits_unseen(header: Header, position: RunPosition) -> bool:
    """Return whether a rank may be in a collective of C++ that its torch does not announce, such as of DDP.

    A collective that failed as others did not come, and that is not recorded, was one of these.
    """
    info = header.info_of.get(position.rank)
    of_ddp = 0 <= position.unit < len(header.units) and not header.units[position.unit].runner.splits
    sees = info is None or info.sees_cpp
    in_backward = of_ddp and (position.kind, position.edge) == (Kind.BACKWARD, Edge.BEGIN)
    in_torch = any(part in frame for frame in position.frames[-1:] for part in _MAY_WAIT)
    has_failed_there = position.ending is Ending.TIMEOUT
    return not sees and position.pending is None and (in_backward or in_torch or has_failed_there)


def _failed_in_call(position: RunPosition) -> bool:
    """Return whether a rank's collective failed, so that the rank was in one."""
    return position.ending in (Ending.TIMEOUT, Ending.PEER)


_MAY_WAIT = ("/torch/distributed/", "/torch/nn/parallel/")


@dataclass(frozen=True)
class _Waits:
    """Who waited for whom before the first program ended.

    Args:
        trace: of the run.
        positions: of its recorded ranks.
    """

    trace: Trace
    positions: Sequence[RunPosition]

    def cause(self) -> Fault | None:
        """Return the rank that the others wait for, or that they wait for each other; None if it is not recorded."""
        by_rank = {each.rank: each for each in self.positions}
        stuck = [each for each in self.positions if each.pending is not None and each.ending is not Ending.ERROR]
        awaited = {rank for each in stuck for rank in _absent(each) if rank in by_rank}
        ended = [by_rank[rank] for rank in sorted(awaited) if self._has_ended_early(by_rank[rank])]
        if ended:
            return self._of_ended(ended, stuck)
        cycle = _cycle([each for each in stuck if self._is_quiet(each, DEADLOCKED_NS)])
        if cycle:
            return self._of_cycle(cycle)
        waiting = [each for each in stuck if self._is_quiet(each)]
        unseen = [each for each in self.positions if _waits_unseen(self.trace.header, each) and self._is_quiet(each)]
        if unseen:
            awaited = set(by_rank)
        elif not waiting:
            return None
        has_timed_out = any(each.ending is Ending.TIMEOUT for each in waiting)
        late = [
            each
            for each in map(by_rank.__getitem__, sorted(awaited))
            if each not in (*waiting, *unseen)
            and each.pending is None
            and each.ending is not Ending.ERROR
            and (has_timed_out or self._is_quiet(each))
        ]
        if late:
            return _of_silent(late)
        if unseen:
            return self._of_counts([*waiting, *unseen]) or self._of_unseen(waiting, unseen)
        complete = [each for each in waiting if not _absent(each) and each.pending and not each.pending.unknown]
        stuck = [each for each in complete if self._is_still(each)]
        return self._of_stuck(stuck) if stuck else None

    def _has_ended_early(self, position: RunPosition) -> bool:
        """Return whether a rank's program ended with success, before any other program ended otherwise."""
        first_ns = first_end_ns(self.positions)
        if position.state is not RunState.ENDED or position.ended_ns is None or first_ns is None:
            return position.state is RunState.ENDED
        return position.ended_ns <= first_ns + TOGETHER_NS

    def _is_quiet(self, position: RunPosition, least_ns: int = STALLED_NS) -> bool:
        """Return whether a rank was without an event for long when the first program ended, or is now."""
        first_ns = first_end_ns(self.positions)
        if first_ns is None:
            return position.state in (RunState.SILENT, RunState.WAITS)
        end_ns = first_ns if position.ended_ns is None else min(position.ended_ns, first_ns)
        return position.ending is Ending.TIMEOUT or end_ns - position.since_ns >= least_ns

    def _is_still(self, position: RunPosition) -> bool:
        """Return whether all ranks of the collective in which one waits have been without an event for long.

        Its data begins to move when the last rank has come, and may take seconds.
        """
        assert position.pending is not None
        ranks = self.trace.header.comm_groups[self._group_of(position.pending)].ranks
        others = [each for each in self.positions if not ranks or each.rank in ranks]
        is_live = first_end_ns(self.positions) is None
        return all(each.is_over or each.for_ns >= STALLED_NS if is_live else self._is_quiet(each) for each in others)

    def _of_ended(self, ended: Sequence[RunPosition], waiting: Sequence[RunPosition]) -> Fault:
        receiver = next((each for each in waiting if _is_pair(each) and ended[0].rank in _absent(each)), None)
        if receiver is not None:
            return self._of_unpaired(receiver, ended[0])
        passes = {each.rank: passes_before(self.trace.header, self.trace.rank(each.rank)) for each in self.positions}
        numbers = by_value((each.rank, progress_words(passes[each.rank])) for each in (*ended, *waiting))
        ranks = label([each.rank for each in ended])
        have, others = "have" if len(ended) > 1 else "has", label([each.rank for each in waiting])
        units = unit_names(self.trace.header)
        pending = next(each.pending for each in waiting if each.pending is not None)
        rule, end = "uneven-batches", f"{have} ended"
        fix = f"{SAME_BATCHES}; or, if {ranks} decided to end, {LEAVE_TOGETHER}"
        if all(is_in_loop(each.users_frames) for each in ended):
            end, fix = f"ended by sys.exit{_places(ended, ' in ')}", LEAVE_TOGETHER
        elif len(numbers) == 1 and pending.unit < 0 and not self._is_usual(waiting[0].rank, pending):
            # the call is of no model, nor of a loop that made a further turn
            rule, fix = "other-collective", same_calls_or_batches(ranks)
        return Fault(
            rule=rule,
            verdict=f"{ranks} {end}, while {others} still issued collectives: "
            f"{pending_words(pending, units)}{_places(waiting, ', in ')}",
            evidence=(*(f"{label(ranks)}: {words}" for words, ranks in numbers.items()), *frame_lines(waiting)),
            fix=fix,
        )

    def _is_usual(self, rank: int, pending: PendingCollective) -> bool:
        """Return whether a rank has issued the call in which it waits at the same place of its loop before."""
        return bool(is_usual(self.trace.rank(rank), self._group_of(pending), pending.number))

    def _group_of(self, pending: PendingCollective) -> int:
        """Return the index of the group of a collective in which ranks wait."""
        return [info.name for info in self.trace.header.comm_groups].index(pending.group)

    def _of_counts(self, ranks: Sequence[RunPosition]) -> Fault | None:
        """Return that ranks whose collectives are not announced have run different passes; None if they have not."""
        passes = {each.rank: passes_before(self.trace.header, self.trace.rank(each.rank)) for each in ranks}
        parties = by_value((rank, tuple((each.kind, each.unit) for each in own)) for rank, own in passes.items())
        if len(parties) < 2:
            return None
        first, second = sorted(parties.values(), key=lambda party: counts(passes[party[0]]))[:2]
        few, many = passes[first[0]], passes[second[0]]
        place = first_difference(few, many)
        numbers = tuple(f"{label(own)}: {progress_words(passes[own[0]])}" for own in parties.values())
        if place == len(few):
            verdict = f"{label(first)} began {counts(few)[0]} forwards, {label(second)} {counts(many)[0]}"
            rule, fix = "uneven-batches", SAME_BATCHES
        else:
            verdict = f"{label(first)} ran other forwards and backwards than {label(second)}, from the pass {place} on"
            rule, fix = "uneven-passes", "let all ranks run the same forwards and backwards in each step"
        return Fault(rule=rule, verdict=verdict, evidence=(*numbers, *frame_lines(ranks)), fix=fix)

    def _of_unseen(self, waiting: Sequence[RunPosition], unseen: Sequence[RunPosition]) -> Fault | None:
        """Return that ranks were in another collective than those that wait: it failed, and was not announced."""
        pending = next((each.pending for each in waiting), None)
        if pending is None or not all(map(_failed_in_call, unseen)):
            return None
        few, many = label([each.rank for each in unseen]), label([each.rank for each in waiting])
        call = pending_words(pending, unit_names(self.trace.header))
        at, there = (_places(each, ", in ") for each in (waiting, unseen))
        apart = f"{few} waited in another collective{there}"
        if len(waiting) < len(unseen):
            verdict = f"{many} waited for {call}{at}, while {apart}"
        else:
            verdict = f"{apart}, while {many} waited for {call}{at}"
        return Fault(
            rule="other-collective",
            verdict=verdict,
            evidence=(
                f"which one {few} waited in is not recorded: only torch 2.14 or newer announces it",
                *frame_lines([*unseen, *waiting]),
            ),
            fix=SAME_CALLS,
        )

    def _of_cycle(self, cycle: Sequence[RunPosition]) -> Fault:
        """Return why ranks wait for each other, each for the next one of ``cycle``, and the last for the first."""
        if all(map(_is_pair, cycle)):
            return self._of_pairs(cycle)
        one, other = cycle[0], cycle[1]
        receiver = next((at for at, each in enumerate(cycle) if _is_pair(each)), None)
        if receiver is not None:
            return self._of_unpaired(cycle[receiver], cycle[(receiver + 1) % len(cycle)])
        waiting = [each for each in self.positions if each.pending is not None]
        mine, theirs = (first_unshared(self.trace, *pair) for pair in ((one.rank, other.rank), (other.rank, one.rank)))
        if mine is None or theirs is None or _is_same(mine, theirs):
            return self._of_crossed(waiting)
        return self._of_other(waiting, (one, mine), (other, theirs))

    def _of_other(
        self,
        waiting: Sequence[RunPosition],
        one: tuple[RunPosition, UnsharedCall],
        other: tuple[RunPosition, UnsharedCall],
    ) -> Fault:
        """Return that two parties issued different collectives, in different groups."""
        found = sorted(((self._party(waiting, each[0]), *each) for each in (one, other)), key=lambda each: len(each[0]))
        usual = [is_usual(self.trace.rank(each.rank), made.group, made.number) for _, each, made in found]
        if usual == [True, False]:  # a rank of the larger party did not do what it did before, its others need not
            party, position, made = found[1]
            new_to = [rank for rank in party if is_usual(self.trace.rank(rank), made.group, made.number) is False]
            found = [(tuple(new_to), position, made), found[0]]
        (less, less_position, call), (more, _, most) = found
        passes = [passes_before(self.trace.header, self.trace.rank(ranks[0])) for ranks in (less, more)]
        divergence = Divergence(
            group=call.group,
            number=call.number,
            step=less_position.step,
            most=most.call,
            most_ranks=more,
            other=call.call,
            other_ranks=less,
            parting=Parting.UNKNOWN,
            other_passes=passes[0],
            most_passes=passes[1],
        )
        fault = divergence_fault(divergence, self.trace.header, self.positions)
        waits = tuple(self._wait_lines(waiting))
        return replace(fault, evidence=(*waits, *fault.evidence[1:]))

    @staticmethod
    def _party(waiting: Sequence[RunPosition], position: RunPosition) -> tuple[int, ...]:
        """Return the ranks that wait for the same collective as one of them."""
        return tuple(each.rank for each in waiting if each.pending is not None and _id(each) == _id(position))

    def _of_stuck(self, stuck: Sequence[RunPosition]) -> Fault:
        """Return that a collective does not end though all of its ranks have started it."""
        pending = stuck[0].pending
        assert pending is not None
        alike = [each for each in stuck if each.pending == pending]
        group = self._group_of(pending)
        ended = self._ended(group, pending.number)
        ranks, wait = label([each.rank for each in alike]), "wait" if len(alike) > 1 else "waits"
        words = pending_words(pending, unit_names(self.trace.header))
        left = f", and {label(ended)} {_has(ended)} ended" if ended else ""
        is_root_unknown = pending.kind.info.has_root and not self._roots(group, pending.number)
        return Fault(
            rule="stuck-collective",
            verdict=f"{ranks} {wait} for {words}, which all of its ranks have started{left}{_places(alike, ', in ')}",
            evidence=(*self._wait_lines(stuck), *frame_lines(stuck)),
            fix=f"{SAME_ROOT}: which one each has passed is not recorded"
            if is_root_unknown
            else "see the standard error of these ranks, and what their network or devices do: their calls agree",
        )

    def _roots(self, group: int, number: int) -> set[int]:
        """Return the ranks that are the source or destination of a collective, as far as they are recorded."""
        rows = (part.rows[part.rows["edge"] == Edge.BEGIN] for part in self.trace.ranks)
        values = (own["value"][(own["comm_group"] == group) & (own["comm_seq"] == number)] for own in rows)
        return {int(value) for of_rank in values for value in of_rank if value >= 0}

    def _ended(self, group: int, number: int) -> list[int]:
        """Return the ranks on which a collective has ended."""
        rows = ((part.rank, part.rows[part.rows["edge"] == Edge.END]) for part in self.trace.ranks)
        return [rank for rank, own in rows if ((own["comm_group"] == group) & (own["comm_seq"] == number)).any()]

    def _of_crossed(self, waiting: Sequence[RunPosition]) -> Fault:
        told = [each for each in waiting if _absent(each)]
        parties = sorted(by_value((each.rank, _id(each)) for each in told).values(), key=len)
        verdict = f"{label([each.rank for each in told])} wait for each other, in different groups"
        if len(parties) == 2:
            less, more = parties
            (mine,), (theirs,) = ([each for each in told if each.rank == ranks[0]] for ranks in parties)
            verdict = f"{label(less)} issued {self._call(mine)} where {label(more)} issued {self._call(theirs)}"
        return Fault(
            rule="crossed-groups",
            verdict=f"{verdict}{_places(told, ': ')}",
            evidence=(*self._wait_lines(told), *frame_lines(told)),
            fix="let all ranks use the groups in the same order, and none of them within `if rank == 0:`",
        )

    def _of_pairs(self, cycle: Sequence[RunPosition]) -> Fault:
        """Return that all ranks of a cycle receive, or send, first, or that one left out what the one before awaits."""
        found = [each for each in zip(cycle, (*cycle[1:], cycle[0]), strict=True) if self._has_left_out(*each)]
        if len(found) == 1:
            return self._of_left_out(*found[0])
        kinds = {each.pending.kind for each in cycle if each.pending is not None}
        verb = f"all {kinds.pop().words} first" if len(kinds) == 1 else "none of them can end"
        verb = verb.replace("all recv", "all receive")
        return Fault(
            rule="unpaired-calls",
            verdict=f"{label([each.rank for each in cycle])} wait for each other: {verb}{_places(cycle, ', in ')}",
            evidence=(*self._wait_lines(cycle), *frame_lines(cycle)),
            fix="let one of two ranks send first and the other receive first, or use dist.batch_isend_irecv",
        )

    def _has_left_out(self, waiting: RunPosition, other: RunPosition) -> bool:
        """Return whether a rank has left out the send or receive for which another one waits."""
        awaited, own = waiting.pending, other.pending
        assert awaited is not None
        assert own is not None
        part = self.trace.rank(other.rank)
        return has_left_out(part, self._group_of(awaited), self._group_of(own), own.number)

    def _of_left_out(self, waiting: RunPosition, other: RunPosition) -> Fault:
        awaited = waiting.pending
        assert awaited is not None
        sends = awaited.kind is Kind.RECV
        what, has, to = ("a send to", "sent", "to") if sends else ("a receive from", "received", "from")
        peer, step = f"rank {waiting.rank}", f" in {step_name(other.step)}" if other.step >= 0 else ""
        both = (waiting, other)
        number = (
            f"rank {other.rank} has {has} {awaited.number} {to} {peer}, one less than at this place of earlier steps"
        )
        return Fault(
            rule="unpaired-calls",
            verdict=f"rank {other.rank} left out {what} {peer}{step}: {peer} waits for it{_places([waiting], ', in ')}",
            evidence=(number, *self._wait_lines(both), *frame_lines(both)),
            fix="let each rank send as often as its peer receives, whatever its data",
        )

    def _of_unpaired(self, one: RunPosition, other: RunPosition) -> Fault:
        """Return that a rank receives, or sends, once more than its partner does the opposite."""
        pending = one.pending
        assert pending is not None
        receives = pending.kind is Kind.RECV
        mine, theirs = ("receives from", "sent") if receives else ("sends to", "received")
        if other.pending is not None:
            now = f"waits for {pending_words(other.pending, unit_names(self.trace.header))}"
        else:
            now = other.state.value
        both = (one, other)
        return Fault(
            rule="unpaired-calls",
            verdict=f"rank {one.rank} {mine} rank {other.rank} once more than that rank {theirs}: it {theirs} "
            f"{pending.number}, and {now}",
            evidence=(*self._wait_lines([each for each in both if each.pending is not None]), *frame_lines(both)),
            fix="let as many sends as receives pass between two ranks",
        )

    def _call(self, position: RunPosition) -> str:
        assert position.pending is not None
        return _in_group(position.pending, unit_names(self.trace.header))

    def _wait_lines(self, waiting: Sequence[RunPosition]) -> list[str]:
        """Return what each rank waits for, ranks that wait for the same together."""
        units = unit_names(self.trace.header)
        by_call = by_value((each.rank, each.pending) for each in waiting if each.pending is not None)
        return [
            f"{label(ranks)} {'wait' if len(ranks) > 1 else 'waits'} for {_in_group(pending, units)}"
            + (f", which {label(pending.absent)} {_has(pending.absent)} not started" if pending.absent else "")
            for pending, ranks in by_call.items()
        ]


def _cycle(waiting: Sequence[RunPosition]) -> list[RunPosition]:
    """Return ranks of which each waits for the next one, and the last for the first; empty if there are none."""
    by_rank = {each.rank: each for each in waiting}
    next_of = {rank: next((other for other in _absent(each) if other in by_rank), -1) for rank, each in by_rank.items()}
    for rank in by_rank:
        path = [rank]
        while path[-1] not in (-1, *path[:-1]):
            path.append(next_of[path[-1]])
        if path[-1] >= 0:
            return [by_rank[each] for each in path[path.index(path[-1]) : -1]]
    return []


def _in_group(pending: PendingCollective, units: Mapping[int, str]) -> str:
    words = pending_words(pending, units)
    return f"{words} in {pending.group}" if pending.unit in units else words


def _absent(position: RunPosition) -> tuple[int, ...]:
    return () if position.pending is None else position.pending.absent


def _id(position: RunPosition) -> tuple[str, int] | None:
    return None if position.pending is None else (position.pending.group, position.pending.number)


def _is_pair(position: RunPosition) -> bool:
    return position.pending is not None and position.pending.kind.info.is_point_to_point


def _is_same(one: UnsharedCall, other: UnsharedCall) -> bool:
    """Return whether two calls in different groups are alike, so that their order alone may differ."""
    return (one.call.kind, one.call.unit) == (other.call.kind, other.call.unit)


def _places(positions: Sequence[RunPosition], before: str) -> str:
    """Return the lines of ranks after ``before``, each once; empty if there are none, or more than some."""
    found = dict.fromkeys(short_place(each.users_frame) for each in positions if each.users_frame)
    return before + ", ".join(found) if 0 < len(found) <= _MAX_PLACES else ""


def _has(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


_LAST: Activity = "since its last collective"
_WHAT_TO_DO: Mapping[Activity, str] = {
    "": "look at that line: it sleeps, waits for data, or computes for long",
    "asleep": "look at that line: it sleeps, or waits for data, a lock or another process",
    "computing": "look at that line: it computes for long, in Python or in a library",
    "reading a disk or swapped memory": "look at that line, and at the free memory of its host",
    "stopped": "continue its process, which a signal or a debugger has stopped: kill -CONT PID",
    "without a processor or disk": "look at the load and the disk of its host: not even its recording has been written",
    "since its last collective": "look at what the rank does after that line; its stack is not recorded",
}


def _of_silent(silent: Sequence[RunPosition]) -> Fault:
    ranks = label([each.rank for each in silent])
    do, what = ("do", "they do") if len(silent) > 1 else ("does", "it does")
    places = (
        f"rank {each.rank} has recorded no event for {format_long(each.for_ns)}"
        + (f", {each.activity}" if each.activity else "")
        + (f", in {each.users_frame or each.frames[-1]}" if each.frames else "; it has written no stack since")
        for each in silent
    )
    known = {each.activity for each in silent}
    place = _places(silent, ", after " if _LAST in known else ", in ")
    return Fault(
        rule="late-rank",
        verdict=f"{ranks} {do} not come: the others wait for what {what} outside of collectives{place}",
        evidence=tuple(places),
        fix=_WHAT_TO_DO[known.pop() if len(known) == 1 else ""],
    )
