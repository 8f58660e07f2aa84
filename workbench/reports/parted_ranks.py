"""Where ranks did different things: collectives, payloads, order, forwards and backwards; as a fault. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from workbench.base.fault import Fault, listed
from workbench.base.text_formats import format_bytes, plural
from workbench.events import Kind, unit_words
from workbench.replay.divergence import Divergence, IssuedCall, OutsideCalls, Parting, has_usual_end
from workbench.replay.endings import Ending
from workbench.replay.grouping import by_value, label
from workbench.replay.passes import BegunPass, counts, first_difference
from workbench.replay.run_positions import RunPosition
from workbench.reports.event_text import unit_names
from workbench.trace.frames import branch_apart, branch_past, error_handled, has_left_loop, has_passed_call, short_place
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name

SAME_CALLS = "let all ranks issue the same collectives: none within `if rank == 0:`, nor in a branch that data decides"
SAME_BATCHES = "give all ranks the same number of batches, such as by DistributedSampler(dataset, drop_last=True)"
LEAVE_TOGETHER = "let all ranks leave together: decide on one rank and broadcast it, or all-reduce the decision"
_SAME_PASSES = "let all ranks run the same forwards and backwards in each step, whatever their data"
SAME_ROOT = "pass the same src or dst on all ranks"
_FIX = {
    Parting.ORDER: "let all ranks run the same units in the same order",
    Parting.PAYLOAD: "pass tensors of the same shape and dtype on all ranks",
    Parting.ROOT: SAME_ROOT,
    Parting.EXTRA: SAME_CALLS,
    Parting.LEFT_OUT: SAME_CALLS,
    Parting.UNKNOWN: SAME_CALLS,
}
_SAME_MODULES = (
    "call the same modules in forward on all ranks: none may be skipped where a rank's own data, or a random number of "
    "its own, decides"
)
_HANDLE_TOGETHER = "let all ranks know of an error before one of them goes on, or let it end the rank"
_MAX_CALLERS = 3
_RULE = {Parting.ORDER: "wrong-order", Parting.PAYLOAD: "other-payload", Parting.ROOT: "other-root"}


def divergence_fault(found: Divergence, header: Header, positions: Sequence[RunPosition]) -> Fault:
    """Return a divergence as a fault.

    Args:
        found: the divergence.
        header: of the trace.
        positions: of ranks, whose own lines are shown.
    """
    found = _by_abort(found, header, positions)
    words = _Words(found, header, positions)
    return with_handled(_of_words(found, words), positions)


def with_handled(fault: Fault, positions: Sequence[RunPosition]) -> Fault:
    """Return a fault with the error that some ranks alone handle meanwhile, if any, such as in an ``except``."""
    found = by_value((each.rank, error) for each in positions if (error := error_handled(each.users_frames)))
    if not found or sum(map(len, found.values())) == len(positions):
        return fault
    told = (f"{label(ranks)} {'handle' if len(ranks) > 1 else 'handles'} {error}" for error, ranks in found.items())
    return replace(fault, verdict="; ".join([fault.verdict, *told]), fix=_HANDLE_TOGETHER)


def _of_words(found: Divergence, words: _Words) -> Fault:
    if found.outside is not None:
        return words.of_outside(found.outside)
    most, other = found.most_passes, found.other_passes
    place = first_difference(most, other)
    if place == len(most) == len(other):
        return words.of_calls()
    if place < min(len(most), len(other)):
        return words.of_passes(place)
    is_less = len(other) == place  # the others have begun fewer passes than most
    more = (most if is_less else other)[place]
    if more.kind is Kind.FORWARD:
        return words.of_batches(more, is_less=is_less)
    has_forward = place > 0 and more.kind is Kind.BACKWARD and most[place - 1].kind is Kind.FORWARD
    return (has_forward and words.of_backward(more, is_less=is_less)) or words.of_calls()


def _by_abort(found: Divergence, header: Header, positions: Sequence[RunPosition]) -> Divergence:
    """Return a divergence of two equal parties with the larger payload as the exception, if the unknown ranks tell so.

    On the CPU gloo aborts a rank that receives more bytes than it expects, such as before its call was recorded. So it
    brought less than the larger payload.
    """
    is_even = found.parting is Parting.PAYLOAD and len(found.most_ranks) == len(found.other_ranks)
    unknown = set(found.unknown_ranks)
    on_cpu = {rank for rank, info in header.info_of.items() if info.device.startswith("cpu")}
    aborted = {each.rank for each in positions if each.ending is Ending.ABORTED} & on_cpu
    if not (is_even and unknown and unknown <= aborted) or found.most.num_bytes == found.other.num_bytes:
        return found
    larger = found if found.other.num_bytes > found.most.num_bytes else found.swapped()
    return replace(larger, unknown_ranks=(), aborted_ranks=found.unknown_ranks)


class _Words:
    """Sentences about one divergence."""

    def __init__(self, found: Divergence, header: Header, positions: Sequence[RunPosition]) -> None:
        self._found, self._header, self._positions = found, header, positions
        self._units = unit_names(header)
        self._most, self._other = (call_words(call, self._units) for call in (found.most, found.other))
        self._mine, self._theirs = label(found.other_ranks), label(found.most_ranks)

    def of_calls(self) -> Fault:
        """Return the fault that collectives differ."""
        found = self._found
        mine, other, theirs, most = self._mine, self._other, self._theirs, self._most
        at = self._line(found.other_ranks, found.most_ranks)
        there = self._line(found.most_ranks, found.other_ranks)
        fix = _FIX[found.parting]
        match found.parting:
            case Parting.PAYLOAD:
                sizes = self._payload(found.other), self._payload(found.most)
                verdict = f"{mine} issued {other} with {sizes[0]}{at}, {theirs} with {sizes[1]}{there}"
                if found.aborted_ranks:
                    verdict += f"; gloo aborted {label(found.aborted_ranks)} as it received more than it expected"
            case Parting.ROOT:
                to = "source" if found.most.kind in (Kind.BROADCAST, Kind.SCATTER) else "destination"
                roots = found.other.root, found.most.root
                verdict = f"{mine} issued {other} with {to} rank {roots[0]}{at}, {theirs} with rank {roots[1]}{there}"
            case Parting.ORDER:
                verdict = f"{mine} issued {other}{at} before {most}, {theirs} the other way round{there}"
            case Parting.EXTRA:
                within, fix = self._within_forward(found.other, fix)
                verdict = f"{mine} issued {other}{at}{within}, which {theirs} left out{there}"
            case Parting.LEFT_OUT:
                within, fix = self._within_forward(found.most, fix)
                verdict = f"{mine} left out {most}{at}{within}, which {theirs} issued{there}"
            case Parting.UNKNOWN:
                verdict = self._of_unknown(at, there)
                said, fix = self._who_left_loop()
                verdict += said
        if found.unknown_ranks and len(found.most_ranks) == len(
            found.other_ranks
        ):  # so which ones are fewer is not known
            both = label(sorted((*found.most_ranks, *found.other_ranks)))
            verdict = f"{both} differ, and the call of {label(found.unknown_ranks)} is not recorded: {verdict}"
        rule = _RULE.get(found.parting, "other-collective")
        return Fault(rule=rule, verdict=verdict, evidence=self._evidence(), fix=fix)

    def _within_forward(self, call: IssuedCall, fix: str) -> tuple[str, str]:
        """Return that a unit was gathered for a forward, as part of a verdict, and the fix then, or else ``fix``."""
        passes = self._found.most_passes, self._found.other_passes
        is_within = all(each and each[-1].kind is Kind.FORWARD for each in passes) and len(passes[0]) == len(passes[1])
        if is_within and call.kind is Kind.ALL_GATHER and call.unit >= 0:
            return " in forward", _SAME_MODULES
        return "", fix

    def of_outside(self, outside: OutsideCalls) -> Fault:
        """Return the fault that some ranks gathered units where others were in their next pass."""
        group = self._header.comm_groups[self._found.group].name
        units = listed([unit_words(self._units[each]) for each in outside.units if each in self._units])
        others = sorted({*self._found.most_ranks, *self._found.other_ranks} - {*outside.ranks})
        first, last = outside.numbers
        gathers = f"all-gathers {first} to {last}" if last > first else f"all-gather {first}"
        verdict = (
            f"{label(outside.ranks)} gathered {units} outside of forward and backward, as state_dict(), full_tensor() "
            f"and a save do, and {label(others)} did not"
        )
        pairs = f"{gathers} of {group}: those of {label(outside.ranks)} paired with the next forward of {label(others)}"
        fix = (
            "let all ranks save and gather parameters, or none: decide on one rank and broadcast it, or all-reduce "
            "what decides, such as a loss"
        )
        return Fault(rule="other-collective", verdict=verdict, evidence=(pairs, *self._evidence()), fix=fix)

    def _of_unknown(self, at: str, there: str) -> str:
        """Return that ranks issued different calls, where what follows them does not tell how they part."""
        found = self._found
        mine, other, theirs, most = self._mine, self._other, self._theirs, self._most
        if not found.is_open:
            if self._is_apart(found.most_ranks, found.other_ranks):
                return f"{theirs} issued {most}{there} where {mine} issued {other}{at}"
            return f"{mine} issued {other}{at} where {theirs} issued {most}{there}"
        if self._have_passed(found.most_ranks, found.other_ranks):
            return f"{mine} issued {other}{at}, which {theirs} left out{there}"
        if self._have_passed(found.other_ranks, found.most_ranks):
            return f"{theirs} issued {most}{there}, which {mine} left out{at}"
        both = label(sorted((*found.most_ranks, *found.other_ranks)))
        return f"{both} part: {theirs} issued {most}{there}, {mine} {other}{at}"

    def _who_left_loop(self) -> tuple[str, str]:
        """Return which ranks have left a loop in which others still are, as the end of a verdict, and the fix."""
        for gone, still in permutations((self._found.other_ranks, self._found.most_ranks)):
            if self._have_left_loop(gone, still):
                have, are = ("have" if len(gone) > 1 else "has"), ("are" if len(still) > 1 else "is")
                said = f"; {label(gone)} {have} left the loop in which {label(still)} still {are}"
                return said, f"{SAME_BATCHES}; if {label(gone)} decided to leave, {LEAVE_TOGETHER}; else {SAME_CALLS}"
        return "", _FIX[Parting.UNKNOWN]

    def _payload(self, call: IssuedCall) -> str:
        """Return the payload of a call as text: ``"512 elements of float32 (2.00 KiB)"``."""
        size = format_bytes(call.num_bytes)
        if call.dtype < 0:
            return size
        name = self._header.strings[call.dtype]
        bits = re.search(r"\d+", name)  # torch's names say them, but for bool
        return f"{call.num_bytes * 8 // (int(bits[0]) if bits else 8)} elements of {name} ({size})"

    def of_passes(self, place: int) -> Fault:
        """Return the fault that forwards or backwards differ, the first one at ``place``."""
        most, other = self._found.most_passes, self._found.other_passes
        if {most[place].kind, other[place].kind} == {Kind.FORWARD, Kind.OPTIMIZER}:
            return self._of_micro_batches(place)
        mine, theirs = self._mine, self._theirs
        ranks, others = self._found.other_ranks, self._found.most_ranks
        of_exception = self._is_exception(place)
        if of_exception is None:
            verdict = f"{theirs} ran {_pass_words(most[place])} where {mine} ran {_pass_words(other[place])}"
            return Fault(rule="uneven-passes", verdict=verdict, evidence=self._evidence(), fix=_SAME_PASSES)
        if not of_exception:
            mine, theirs, most, other, ranks, others = theirs, mine, other, most, others, ranks
        left_out = _number(other, most[place]) < _number(most, most[place])
        extra = _number(other, other[place]) > _number(most, other[place])
        later = self._later(ranks, others) if left_out and extra else ""
        if left_out and extra:
            left_out = _is(most[place + 1 : place + 2], other[place]) or most[place].kind is Kind.BACKWARD
        if later:
            verdict = f"{mine} ran {_pass_words(other[place])} where {theirs} ran {_pass_words(most[place])}, {later}"
        elif left_out:
            verdict = f"{mine} left out {_pass_words(most[place])}, which {theirs} ran"
        elif extra:
            verdict = f"{mine} ran {_pass_words(other[place])}, which {theirs} left out"
        else:
            verdict = f"{mine} ran {_pass_words(other[place])} where {theirs} ran {_pass_words(most[place])}"
        return Fault(rule="uneven-passes", verdict=verdict, evidence=self._evidence(), fix=_SAME_PASSES)

    def _is_exception(self, place: int) -> bool | None:
        """Return whether the other ranks, not the majority, ran a pass at ``place`` that is unusual; None: unknown.

        Of two equal parties that is the one whose pass has not followed the same passes before, while that of the
        other one has; or the one that left out the backward of its forward, and ran no forward more.
        """
        found = self._found
        most, other = found.most_passes, found.other_passes
        if len(found.most_ranks) != len(found.other_ranks):
            return True
        usual = [has_usual_end(_codes(passes[: place + 1])) for passes in (other, most)]
        if sorted(usual, key=str) == [False, True]:
            return usual[1]
        if not place or most[place - 1].kind is not Kind.FORWARD:
            return None
        for is_other, own, others in ((True, other, most), (False, most, other)):
            missing = others[place]
            is_left_out = missing.kind is Kind.BACKWARD and _number(own, missing) < _number(others, missing)
            if is_left_out and _number(own, own[place]) <= _number(others, own[place]):
                return is_other
        return None

    def _of_micro_batches(self, place: int) -> Fault:
        """Return the fault that some ranks began a further forward where others ended the step, at ``place``."""
        found = self._found
        few, many = self._few_and_many(is_less=found.most_passes[place].kind is Kind.FORWARD)
        step = found.most_passes[place].step
        before = [each for each in found.most_passes[:place] if each.step == step]
        forwards, *_ = counts(before)
        verdict = (
            f"{label(few)} ran {plural(forwards, 'forward')} before the optimizer in {step_name(step)}"
            f"{self._line(few, many)}, {label(many)} began forward {forwards + 1}{self._line(many, few)}"
        )
        fix = "let all ranks run the same number of forwards and backwards before each step of the optimizer"
        return Fault(rule="uneven-batches", verdict=verdict, evidence=self._evidence(), fix=fix)

    def of_backward(self, more: BegunPass, *, is_less: bool) -> Fault | None:
        """Return the fault that ranks left their loop without the backward ``more``; None: they are still in the loop.

        Arguments are as for :meth:`of_batches`.
        """
        few, many = self._few_and_many(is_less=is_less)
        if not self._have_left_loop(few, many):
            return None
        verdict = f"{label(few)} left out {_pass_words(more)}, which {label(many)} ran{self._line(many, few)}"
        return Fault(rule="uneven-passes", verdict=verdict, evidence=self._evidence(), fix=_SAME_PASSES)

    def _few_and_many(self, *, is_less: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks that have begun fewer passes, and those that have begun more."""
        found = self._found
        return (found.other_ranks, found.most_ranks) if is_less else (found.most_ranks, found.other_ranks)

    def of_batches(self, more: BegunPass, *, is_less: bool) -> Fault:
        """Return the fault that some ranks began the forward ``more``, in the place of which others went on.

        Args:
            more: the first pass that only some ranks have begun.
            is_less: whether most ranks have begun it; else the others.
        """
        found = self._found
        few, many = self._few_and_many(is_less=is_less)
        call, passes = (found.other, found.other_passes) if is_less else (found.most, found.most_passes)
        forwards, *_ = counts(passes)
        issued = f"{label(few)} issued {call_words(call, self._units)}{self._line(few, many)}"
        own = f"{issued} after {plural(forwards, 'forward')}"
        verdict = f"{own}, where {label(many)} began forward {forwards + 1}{self._line(many, few)}"
        if call.unit >= 0:
            if call.kind is Kind.ALL_GATHER:  # before its next forward: not a sign of fewer batches
                return self.of_calls()
            return Fault(rule="uneven-batches", verdict=verdict, evidence=self._evidence(), fix=_SAME_PASSES)
        have_left = self._have_left_loop(few, many)
        rule, fix = {
            True: ("uneven-batches", SAME_BATCHES),
            False: ("other-collective", SAME_CALLS),
            None: ("other-collective", same_calls_or_batches(label(few))),
        }[have_left]
        if not have_left and (len(many) < len(few) or self._is_apart(many, few)):
            verdict = f"{label(many)} began forward {forwards + 1}{self._line(many, few)}, where {own}"
        return Fault(rule=rule, verdict=verdict, evidence=self._evidence(), fix=fix)

    def _have_passed(self, ranks: Sequence[int], others: Sequence[int]) -> bool:
        """Return whether ranks are past the call in which others issued what they did not."""
        stacks = [[each.users_frames for each in self._positions if each.rank in own] for own in (ranks, others)]
        return all(stacks) and all(has_passed_call(mine, theirs) for mine, theirs in product(*stacks))

    def _have_left_loop(self, few: Sequence[int], many: Sequence[int]) -> bool | None:
        """Return whether ranks have left a loop in which others still are; None if their stacks do not tell."""
        stacks = [dict.fromkeys(each.frames for each in self._positions if each.rank in own) for own in (few, many)]
        told = (has_left_loop(one, other) for one, other in product(*stacks))
        return next((each for each in told if each is not None), None)

    def _is_apart(self, ranks: Sequence[int], others: Sequence[int]) -> bool:
        """Return whether only ``ranks``, which are not the majority, are in a branch in which others are not."""
        is_minority = len(ranks) <= len(others)
        return is_minority and bool(self._branch(ranks, others)) and not self._branch(others, ranks)

    def _branch(self, ranks: Sequence[int], others: Sequence[int]) -> str:
        """Return the branch in which the lowest rank is and the lowest of others is not, as text; else nothing."""
        found = branch_apart(self._frames(ranks), self._frames(others))
        return f"under `{found[1]}` of {found[0]}" if found else ""

    def _later(self, ranks: Sequence[int], others: Sequence[int]) -> str:
        """Return where the lowest rank is, as text, if it has gone on beyond the call of the lowest of others.

        Else nothing.
        """
        frames = self._frames(ranks)
        found = branch_past(frames, self._frames(others))
        if found is None:
            return ""
        place, statement = found
        under = f", under `{statement}` of {place}" if place else ""
        return f"and is in {short_place(frames[-1])}{under}"

    def _frames(self, ranks: Sequence[int]) -> Sequence[str]:
        """Return the calls of the user's code in which the lowest of some ranks is."""
        return next((each.users_frames for each in self._positions if each.rank in ranks), ())

    def _line(self, ranks: Sequence[int], others: Sequence[int]) -> str:
        """Return the line that issued the call, in parentheses, if the lowest rank is still in it; else nothing.

        It is followed by the branch in which ``others`` are not.
        """
        found = self._found
        name = self._header.comm_groups[found.group].name
        for each in self._positions:
            waits = each.pending is not None and (each.pending.group, each.pending.number) == (name, found.number)
            if each.rank in ranks and waits and each.users_frame:
                branch = self._branch(ranks, others)
                return f" ({short_place(each.users_frame)}{', ' if branch else ''}{branch})"
        return ""

    def _evidence(self) -> tuple[str, ...]:
        found = self._found
        step = f" of {step_name(found.step)}" if found.step >= 0 else ""
        group = self._header.comm_groups[found.group].name
        place = f"number {found.number} of {group}{step}: {self._mine} {self._other}, {self._theirs} {self._most}"
        progress = [(found.other_ranks, found.other_passes), (found.most_ranks, found.most_passes)]
        differ = counts(found.other_passes) != counts(found.most_passes)
        numbers = [f"{label(ranks)}: {progress_words(passes)}" for ranks, passes in progress] if differ else []
        return (place, *numbers, *frame_lines(self._positions))


def same_calls_or_batches(ranks: str) -> str:
    """Return the fix where it is not known whether ``ranks`` left out a call or had no further batch."""
    return f"{SAME_CALLS}; if {ranks} had no further batch, {SAME_BATCHES}"


def call_words(call: IssuedCall, units: Mapping[int, str]) -> str:
    """Return a call as text: ``"all-gather of blocks.2"``, ``"barrier"``."""
    return f"{call.kind.words} of {unit_words(units[call.unit])}" if call.unit in units else call.kind.words


def progress_words(passes: Sequence[BegunPass]) -> str:
    """Return the numbers of passes as text: ``"5 forwards, 5 backwards, 5 steps of the optimizer"``."""
    forwards, backwards, steps = counts(passes)
    return f"{plural(forwards, 'forward')}, {plural(backwards, 'backward')}, {plural(steps, 'step')} of the optimizer"


def frame_lines(positions: Iterable[RunPosition]) -> list[str]:
    """Return the user's own line in which each rank is, and what called it; ranks in the same lines together."""
    found = by_value((each.rank, each.users_frames) for each in positions if each.users_frames)
    return [
        f"{label(ranks)} {'are' if len(ranks) > 1 else 'is'} in {_with_callers(frames)}"
        for frames, ranks in found.items()
    ]


def _with_callers(frames: Sequence[str]) -> str:
    """Return the innermost of the user's own calls as text, with the places that led to it, the nearest first."""
    *callers, frame = frames
    places = list(dict.fromkeys(short_place(each) for each in reversed(callers)))[:_MAX_CALLERS]
    return f"{frame} (called from {', '.join(places)})" if places else frame


def _codes(passes: Sequence[BegunPass]) -> NDArray[np.int64]:
    return np.array([each.kind * (1 << 32) + each.unit for each in passes], np.int64)


def _number(passes: Sequence[BegunPass], wanted: BegunPass) -> int:
    return sum((each.kind, each.unit) == (wanted.kind, wanted.unit) for each in passes)


def _is(passes: Sequence[BegunPass], wanted: BegunPass) -> bool:
    return any((each.kind, each.unit) == (wanted.kind, wanted.unit) for each in passes)


def _pass_words(found: BegunPass) -> str:
    words = "step of the optimizer" if found.kind is Kind.OPTIMIZER else found.kind.words
    return f"the {words} of {step_name(found.step)}" if found.step >= 0 else f"a {words}"
