"""Why the ranks of a run do not continue, as a fault: one order of questions, before and after their end. Pure.

1. Did ranks part: in kind, payload or order of a collective, in the number of forwards or backwards?
2. Which rank do the others wait for, and where is it?
3. Which rank's program ended first, and of what?

Only then it is said what ended the others. A rank that waits is never the cause, nor is one that may wait in a
collective that its torch does not announce.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from workbench.base.fault import LATE, Fault
from workbench.base.text_formats import format_long, plural
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
    with_handled,
)
from workbench.trace.columns import Trace
from workbench.trace.frames import is_in_loop, lock_held, short_place
from workbench.trace.recording import Activity
from workbench.trace.schema import GroupInfo, Header
from workbench.trace.step_names import step_name

_CALL = {Kind.SEND: "send", Kind.RECV: "receive"}
_TO = {Kind.SEND: "to", Kind.RECV: "from"}
_OPPOSITE = {Kind.SEND: "received", Kind.RECV: "sent"}
"""What the peer of a send or receive has done that pairs with it."""

_IS_PAIRED = np.isin(np.arange(256), list(_CALL))  # indexed by the column ``kind``

_SAME_NUMBER = "let each rank send as often as its peer receives, such as once for each micro-batch, whatever its data"
_OTHER_WAY_ROUND = "let one of two ranks send first and the other receive first, or use dist.batch_isend_irecv"

_MAX_PLACES = 3
"""Lines that a verdict names; of more, the evidence has them."""


def stall_cause(trace: Trace, positions: Sequence[RunPosition]) -> Fault | None:
    """Return why a stalled run does not continue; None if what is recorded does not tell.

    Args:
        trace: of the run.
        positions: of its recorded ranks.
    """
    found = parted(trace, positions)
    if found is None:
        waits = _Waits(trace, positions).cause()
        if waits is None:
            return first_end(positions)
        found = with_handled(waits, positions)
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
            return self._of_groups()
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
            return _of_silent(late, waiting, self.trace.header.comm_groups)
        if unseen:
            return self._of_counts([*waiting, *unseen]) or self._of_unseen(waiting, unseen)
        complete = [each for each in waiting if not _absent(each) and each.pending and not each.pending.unknown]
        stuck = [each for each in complete if self._is_still(each)]
        return self._of_stuck(stuck) if stuck else None

    def _of_groups(self) -> Fault | None:
        """Return that all ranks wait for each other while they make groups; None if one does something else."""
        making = [each for each in self.positions if _makes_a_group(each) and self._is_quiet(each)]
        if len(making) < max(len(self.positions), 2):
            return None
        left_out = _left_out_group(self.trace.header.comm_groups) or "one of them has made another group before"
        return Fault(
            rule="crossed-groups",
            verdict=f"{label([each.rank for each in making])} wait for each other to make a process group"
            f"{_places(making, ', in ')}: {left_out}",
            evidence=tuple(frame_lines(making)),
            fix=_ALL_IN,
        )

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
        if all(map(_has_decided, ended)):
            is_hard = any("os._exit(" in each.users_frame for each in ended)
            call, rule = ("os._exit", "dead-rank") if is_hard else ("sys.exit", rule)
            end, fix = f"ended by {call}{_places(ended, ' in ')}", LEAVE_TOGETHER
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
        waiting = [each for each in self.positions if each.pending is not None]
        first = next((at for at, each in enumerate(cycle) if _is_pair(each)), 0)
        one, other = cycle[first], cycle[(first + 1) % len(cycle)]
        if one.pending is not None and _is_pair(one):
            has_passed_messages = self._num_issued(other, self._group_of(one.pending)) > 0
            if _is_pair(other) or has_passed_messages:
                return self._of_unpaired(one, other)
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
        fix = fault.fix + _own_group((more, most), (less, call)) + _own_group((less, call), (more, most))
        return replace(fault, evidence=(*waits, *fault.evidence[1:]), fix=fix)

    @staticmethod
    def _party(waiting: Sequence[RunPosition], position: RunPosition) -> tuple[int, ...]:
        """Return the ranks that wait for the same collective as one of them."""
        return tuple(each.rank for each in waiting if each.pending is not None and _id(each) == _id(position))

    def _of_stuck(self, stuck: Sequence[RunPosition]) -> Fault:
        """Return that a collective does not end though all of its ranks have started it."""
        pending = stuck[0].pending
        assert pending is not None
        if _is_pair(stuck[0]):
            return self._of_unmatched([each for each in stuck if _id(each) == _id(stuck[0])])
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

    def _of_unmatched(self, stuck: Sequence[RunPosition]) -> Fault:
        """Return that a message does not arrive, though its send and its receive are issued; ``stuck`` wait for it."""
        ranks, wait = label([each.rank for each in stuck]), "wait" if len(stuck) > 1 else "waits"
        pending = stuck[0].pending
        assert pending is not None
        sender, receiver = self.trace.header.comm_groups[self._group_of(pending)].ranks
        return Fault(
            rule="unpaired-calls",
            verdict=f"{ranks} {wait} for message {pending.number + 1} from rank {sender} to rank {receiver}, whose "
            f"send and receive are issued{_places(stuck, ', in ')}",
            evidence=(*self._wait_lines(stuck), *frame_lines(stuck)),
            fix="pass the same tags, which are not recorded, in the same order, and tensors of the same size on both "
            "ranks; if they are, see what their network does",
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
        lock = _lock_words(told, told)
        return Fault(
            rule="crossed-groups",
            verdict=f"{verdict}{_places(told, ': ')}",
            evidence=(*([lock] if lock else []), *self._wait_lines(told), *frame_lines(told)),
            fix=_NO_LOCK if lock else _SAME_GROUPS,
        )

    def _of_pairs(self, cycle: Sequence[RunPosition]) -> Fault:
        """Return why each rank of a cycle waits in a send or receive for the next one.

        One left out what the one before awaits; or the numbers of their calls differ; or all receive, or send, first.
        """
        pairs = list(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        calls = [each.pending for each in cycle if each.pending is not None]
        is_even = len({call.number for call in calls}) == 1
        found = [] if is_even and _is_one_place(cycle) else [each for each in pairs if self._has_left_out(*each)]
        if len(found) == 1:
            return self._of_left_out(*found[0])
        if not is_even:
            return self._of_numbers(pairs)
        kinds = {call.kind for call in calls}
        verb = f"all {_CALL[kinds.pop()]} first" if len(kinds) == 1 else "none of them can end"
        return Fault(
            rule="unpaired-calls",
            verdict=f"{label([each.rank for each in cycle])} wait for each other: {verb}{_places(cycle, ', in ')}",
            evidence=(*self._wait_lines(cycle), *frame_lines(cycle)),
            fix=_OTHER_WAY_ROUND,
        )

    def _of_numbers(self, pairs: Sequence[tuple[RunPosition, RunPosition]]) -> Fault:
        """Return that each rank waits for the next one in unlike numbers of sends or receives.

        It is not recorded whether one passes more messages than its peer, or all would pair if none waited: that is in
        the calls to which they do not come.
        """
        newest = {each.rank: each.pending.number for each, _ in pairs if each.pending is not None}
        found = sorted(pairs, key=lambda pair: -newest[pair[0].rank])
        fixes = (
            (_OTHER_WAY_ROUND, f"if one call is too many, {_SAME_NUMBER}"),
            (_SAME_NUMBER, f"if the numbers of a whole step agree, {_OTHER_WAY_ROUND}"),
        )
        stuck = [each for each in self.positions if _is_pair(each)]
        return Fault(
            rule="unpaired-calls",
            verdict=f"{label(sorted(newest))} part: {'; '.join(self._number_words(*pair) for pair in found)}",
            evidence=(*self._number_lines(stuck), *frame_lines(stuck)),
            fix="; ".join(fixes[0] if _is_one_place([each for each, _ in pairs]) else fixes[1]),
        )

    def _number_words(self, waiting: RunPosition, other: RunPosition) -> str:
        """Return the send or receive in which a rank waits, and how often its peer has done the opposite, as text."""
        pending = waiting.pending
        assert pending is not None
        call, to, did = _CALL[pending.kind], _TO[pending.kind], _OPPOSITE[pending.kind]
        own = (each for each in reversed(waiting.users_frames) if each not in other.users_frames)  # no shared helper
        frame = next(own, waiting.users_frame)
        place = f" ({short_place(frame)})" if frame else ""
        number = self._num_issued(other, self._group_of(pending))
        return (
            f"rank {waiting.rank} issued {call} {pending.number + 1} {to} rank {other.rank}{place}, which has {did} "
            f"{number}"
        )

    def _number_lines(self, stuck: Sequence[RunPosition]) -> list[str]:
        """Return the numbers of sends and receives of each direction in which a rank is stuck, as lines."""
        by_rank = {each.rank: each for each in self.positions}
        lines = []
        for group in dict.fromkeys(self._group_of(each.pending) for each in stuck if each.pending is not None):
            ranks = self.trace.header.comm_groups[group].ranks
            ends = [by_rank[rank] for rank in ranks if rank in by_rank]
            steps = {each.step for each in ends}
            if len(ends) < len(ranks):
                continue
            words = _both(*(self._num_issued(each, group) for each in ends))
            if len(steps) == 1 and (step := steps.pop()) >= 0:
                words += f"; in {step_name(step)}: {_both(*(self._num_issued(each, group, step) for each in ends))}"
            lines.append(f"from rank {ranks[0]} to rank {ranks[1]}: {words}")
        return lines

    def _num_issued(self, position: RunPosition, group: int, step: int | None = None) -> int:
        """Return how many sends or receives a rank has issued in a group; with ``step``, in that step."""
        rows = self.trace.rank(position.rank).rows
        own = rows[(rows["comm_group"] == group) & (rows["edge"] == Edge.BEGIN) & _IS_PAIRED[rows["kind"]]]
        return int(own["comm_seq"].max(initial=-1)) + 1 if step is None else int((own["step"] == step).sum())

    def _has_left_out(self, waiting: RunPosition, other: RunPosition) -> bool:
        """Return whether a rank has left out the send or receive for which another one waits; not outside of a loop."""
        awaited, own = waiting.pending, other.pending
        assert awaited is not None
        assert own is not None
        if other.users_frames and not is_in_loop(other.users_frames):
            return False
        part = self.trace.rank(other.rank)
        return has_left_out(part, self._group_of(awaited), self._group_of(own), own.number)

    def _of_left_out(self, waiting: RunPosition, other: RunPosition) -> Fault:
        awaited = waiting.pending
        assert awaited is not None
        what, to = ("send", "to") if awaited.kind is Kind.RECV else ("receive", "from")
        peer, step = f"rank {waiting.rank}", f" in {step_name(other.step)}" if other.step >= 0 else ""
        both, did = (waiting, other), _OPPOSITE[awaited.kind]
        number = (
            f"rank {other.rank} has {did} {awaited.number} {to} {peer}, one less than at this place of earlier steps"
        )
        return Fault(
            rule="unpaired-calls",
            verdict=f"rank {other.rank} left out a {what} {to} {peer}{step}: {peer} waits for it"
            f"{_places([waiting], ', in ')}",
            evidence=(number, *self._number_lines(both), *frame_lines(both)),
            fix=_SAME_NUMBER,
        )

    def _of_unpaired(self, one: RunPosition, other: RunPosition) -> Fault:
        """Return that a rank receives, or sends, more often than its partner does the opposite."""
        stuck = [each for each in self.positions if _is_pair(each) and _absent(each) == (other.rank,)]
        if other.pending is not None:
            now = f"waits for {pending_words(other.pending, unit_names(self.trace.header))}"
        else:
            now = other.state.value
        both: Sequence[RunPosition] = (one, other)
        fix = _SAME_NUMBER
        if other.pending is not None and not _is_pair(other):
            fix += f"; or, if rank {one.rank} went past that {other.pending.kind.words}, let it issue it too"
        verdict = f"{self._excess_words(one, other)}, and {now}"
        if len(stuck) > 1 and not _is_pair(other):  # it has gone on, and its peers have not
            told = "; ".join(self._excess_words(each, other) for each in stuck)
            verdict = f"rank {other.rank} issued fewer sends and receives than its peers, and {now}: {told}"
            both = (*stuck, other)
        return Fault(
            rule="unpaired-calls",
            verdict=verdict,
            evidence=(*self._wait_lines([each for each in both if each.pending is not None]), *frame_lines(both)),
            fix=fix,
        )

    def _excess_words(self, one: RunPosition, other: RunPosition) -> str:
        """Return how often a rank receives, or sends, and its partner does the opposite, as text."""
        pending = one.pending
        assert pending is not None
        did, number = _OPPOSITE[pending.kind], self._num_issued(other, self._group_of(pending))
        times = "once more" if number == pending.number else "more often"
        return (
            f"rank {one.rank} {_CALL[pending.kind]}s {_TO[pending.kind]} rank {other.rank} {times} than that rank "
            f"{did}: it {did} {number}"
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


def _is_one_place(positions: Sequence[RunPosition]) -> bool:
    """Return whether ranks are in the same calls of the same lines."""
    return bool(positions[0].users_frames) and len({each.users_frames for each in positions}) == 1


def _both(sends: int, receives: int) -> str:
    return f"{plural(sends, 'send')}, {plural(receives, 'receive')}"


def _is_same(one: UnsharedCall, other: UnsharedCall) -> bool:
    """Return whether two calls in different groups are alike, so that their order alone may differ."""
    return (one.call.kind, one.call.unit) == (other.call.kind, other.call.unit)


def _own_group(one: tuple[Sequence[int], UnsharedCall], other: tuple[Sequence[int], UnsharedCall]) -> str:
    """Return what to do if ranks in a send or receive have no part in the collective of others, as the end of a fix."""
    (party, made), (apart, message) = one, other
    is_told = len(party) > 1 and not made.call.kind.info.is_point_to_point and message.call.kind.info.is_point_to_point
    if not is_told:
        return ""
    return f"; or, if {label(apart)} has no part in that {made.call.kind.words}, pass it the group of {label(party)}"


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


_SAME_GROUPS = "let all ranks use the groups in the same order, and none of them within `if rank == 0:`"
_NO_LOCK = "issue no collective while a lock is held: leave its block first"


def _lock_words(waiting: Sequence[RunPosition], holding: Sequence[RunPosition]) -> str:
    """Return which ranks are at a lock within whose block others wait in a collective, as text; empty: none."""
    for one, other in product(waiting, holding):
        found = lock_held(one.users_frames, other.users_frames) if other.pending else None
        if found:
            at = [each.rank for each in waiting if lock_held(each.users_frames, other.users_frames) == found]
            within = [each.rank for each in holding if lock_held(one.users_frames, each.users_frames) == found]
            are, wait = "are" if len(at) > 1 else "is", "wait" if len(within) > 1 else "waits"
            return f"{label(at)} {are} at `{found[1]}` of {found[0]}, within which {label(within)} {wait} for others"
    return ""


def _of_silent(silent: Sequence[RunPosition], waiting: Sequence[RunPosition], groups: Sequence[GroupInfo]) -> Fault:
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
    lock = _lock_words(silent, waiting)
    if lock:
        place, fix = f"{place}; {lock}", _NO_LOCK
    elif all(map(_makes_a_group, silent)):
        left_out, fix = _left_out_group(groups), _ALL_IN
        place += f"; {left_out}" if left_out else ""
    elif all(map(_waits_for_loader, silent)):
        fix = _LOADER
    elif all(_STORE_CALL.search(each.users_frame) for each in silent):
        fix = _STORE
    else:
        fix = _WHAT_TO_DO[known.pop() if len(known) == 1 else ""]
    return Fault(
        rule=LATE,
        verdict=f"{ranks} {do} not come: the others wait for what {what} outside of collectives{place}",
        evidence=tuple(places),
        fix=fix,
    )


_GROUP_CALL = re.compile(r"/torch/distributed/\S+ in \w*(process|new|split)_group")
_STORE_CALL = re.compile(r"\bstore\.(get|wait)\(", re.IGNORECASE)
_STORE = (
    "it waits for a key of a store: see that another rank sets it, under the same name on all ranks, such as none with "
    "hash() of a text, a time or a rank"
)
_LOADER_CALL = "/torch/utils/data/dataloader.py:"
_LOADER = (
    "see why a worker of its DataLoader does not answer: with timeout=60 it raises, and num_workers=0 shows the line"
)
_ALL_IN = "let all ranks make the same groups in the same order, also those that are in none of them"


def _left_out_group(groups: Sequence[GroupInfo]) -> str:
    """Return which ranks have not made a group that others made, as text; empty: unknown.

    torch numbers groups in the order in which a rank makes them. If a number stands for some ranks, and on others for
    more ranks, those others have not made the first group.
    """
    for one, other in permutations(groups, 2):
        if one.name == other.name and {*one.ranks} < {*other.ranks}:
            own, others = "their" if len(one.ranks) > 1 else "its", label({*other.ranks} - {*one.ranks})
            return f"{label(one.ranks)} made a group of {own} own before, which {others} did not make"
    return ""


def _makes_a_group(position: RunPosition) -> bool:
    """Return whether a rank waits in torch for others to make a process group too."""
    return any(map(_GROUP_CALL.search, position.frames))


def _has_decided(position: RunPosition) -> bool:
    """Return whether a rank ended within a loop, or from a thread beside the main one: not at its program's end."""
    frames = position.users_frames
    return is_in_loop(frames) or (bool(frames) and " in <module>" not in frames[0])


def _waits_for_loader(position: RunPosition) -> bool:
    """Return whether a rank waits for a worker of a DataLoader, which is another process."""
    return any(_LOADER_CALL in frame and "_get_data" in frame for frame in position.frames)
