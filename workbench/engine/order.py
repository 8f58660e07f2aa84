"""Are all ranks of a group about to issue the same collective? Asked before each one is issued.

Gloo pairs collectives by their number alone: two equal-sized units swapped on one rank return each other's shards
silently, and a difference in size kills a process. So every rank keeps the order of the iterations that all ranks are
known to have gone through, and asks the others only where that order does not settle what comes next.

Words: a *call* is one collective, or the end of an iteration. A *place* is (iteration, number of calls before it in
this iteration). Iterations seen form a *tree*: those that begin alike share their first calls. A call is *known* where
it is the only one that was ever agreed on in its place: then it is issued after one comparison. Where the tree branches
(training or evaluation, with or without reduction), ends or says otherwise, the rank pins its call to the *board*, one
note per rank in the store, and issues it only when all ranks have pinned the same::

    first iteration    A? B? C? END?     every call is agreed on (?)
    the same again     A  B  C  END      one comparison each
    another end        A  B  D? END?     agreed on by all: the tree now branches behind B
    from then on       A  B  C? END      one question each iteration, until D was not seen for REMEMBERED iterations

Ranks that follow the tree do not look at the board. One that waits for a collective does so in its wait slices: a note
for a place that it has passed without being asked is a difference, because trees are equal on all ranks. It pins what
it did there, so that the other learns of it too. Whoever sees a difference tells all of its groups, and raises.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from workbench.engine.errors import CollectiveFailed, RanksDisagreeError
from workbench.engine.waits import cancellation

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.01
ANSWERS_S = 3.0
"""How long the first to see a difference waits for the others' part of the message, in seconds."""
REMEMBERED = 16
"""Iterations after which a branch of the tree that no one took is forgotten."""


@dataclass(frozen=True)
class Call:
    """A collective as all ranks must agree on it.

    Attributes:
        kind: all-gather, reduce-scatter ...
        unit: name of the unit, empty for the root's; None if it concerns no unit.
        num_bytes: bytes of the payload.
    """

    kind: str
    unit: str | None
    num_bytes: int

    def __str__(self) -> str:
        return self.kind if self.unit is None else f"{self.kind} of unit {self.unit or '(root)'}"

    def sized(self) -> str:
        """Return the text with the bytes, such as ``all-gather of unit blocks.0 (1,024 bytes)``."""
        return f"{self} ({self.num_bytes:,} bytes)" if self.num_bytes else str(self)


END = Call("end of the iteration", None, 0)


class _Step:
    """A call in the tree.

    Attributes:
        depth: calls of its iteration up to and including it; 0 is the root of the tree.
        known: the only step seen after it; None if there are several, or none.
        last_seen: of an END, the last iteration that ended so.
    """

    __slots__ = ("after", "call", "depth", "known", "last_seen", "parent")

    def __init__(self, call: Call, parent: _Step | None) -> None:
        self.call = call
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.after: dict[Call, _Step] = {}
        self.known: _Step | None = None
        self.last_seen = 0

    def grow(self, call: Call) -> _Step:
        """Return the step of ``call`` after this one, a new one if it was never seen here."""
        if call not in self.after:
            self.after[call] = _Step(call, self)
            self._settle()
        return self.after[call]

    def cut(self, call: Call) -> None:
        """Forget what follows by ``call``."""
        del self.after[call]
        self._settle()

    def _settle(self) -> None:
        self.known = next(iter(self.after.values())) if len(self.after) == 1 else None


class Tree:
    """The iterations that all ranks went through, and where this rank is in them.

    Attributes:
        here: the step of the last call.
        iteration: number of the iteration under way.
    """

    def __init__(self) -> None:
        self._root = self.here = _Step(END, None)
        self.iteration = 0
        self._ends: OrderedDict[_Step, None] = OrderedDict()  # the least recent first
        self._last_ends: deque[_Step] = deque(maxlen=REMEMBERED)

    @property
    def place(self) -> tuple[int, int]:
        """Where the next call will be."""
        return self.iteration, self.here.depth

    def end_iteration(self) -> None:
        """Go back to the root from an END."""
        end = self.here
        end.last_seen = self.iteration
        self._last_ends.append(end)
        self._ends[end] = None
        self._ends.move_to_end(end)
        oldest = next(iter(self._ends))
        if oldest.last_seen + REMEMBERED < self.iteration:
            del self._ends[oldest]
            _cut_off(oldest)
        self.here = self._root
        self.iteration += 1

    def call_at(self, place: tuple[int, int]) -> Call | None:
        """Return what this rank did at ``place``; None if that is further back than it remembers."""
        iteration, position = place
        back = self.iteration - iteration
        if back > len(self._last_ends):
            return None
        step: _Step | None = self._last_ends[-back] if back else self.here
        while step is not None and step.depth > position + 1:
            step = step.parent
        return None if step is None else step.call


def _cut_off(end: _Step) -> None:
    """Cut the tree's branch that leads to ``end`` alone."""
    step = end
    while step.parent is not None:
        parent = step.parent
        parent.cut(step.call)
        if parent.after:
            return
        step = parent


@dataclass(frozen=True)
class Note:
    """What a rank pinned.

    Attributes:
        serial: how often the ranks of the group had agreed before.
        place: where the call is.
        call: what the rank is about to do there, or did.
    """

    serial: int
    place: tuple[int, int]
    call: Call

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps([self.serial, *self.place, self.call.kind, self.call.unit, self.call.num_bytes])

    @staticmethod
    def of(fields: Sequence[Any]) -> Note:
        """Return the note whose JSON is the list ``fields``."""
        serial, iteration, position, kind, unit, num_bytes = fields
        return Note(serial, (iteration, position), Call(kind, unit, num_bytes))


class Board:
    """One note per rank of a group, in a ``store`` that is the group's own; a rank's new note replaces its last.

    Raises:
        CollectiveFailed: from every method that reads, if the store cannot be reached.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._keys = [f"order/{r}" for r in range(size)]
        self._own = self._keys[rank]
        self._reads_many = bool(store.has_extended_api())  # type: ignore[attr-defined]

    def meet(self) -> None:
        """Wait until every rank of the group has a board: from then on no read can block."""
        self.pin("[]")
        delay_s = FIRST_POLL_S
        while not self._is_complete():
            delay_s = _pause(delay_s)

    def _is_complete(self) -> bool:
        try:
            return bool(self._store.check(self._keys))
        except RuntimeError as error:
            raise _lost(error) from error

    def pin(self, text: str) -> None:
        """Replace this rank's note by ``text``."""
        try:
            self._store.set(self._own, text)
        except RuntimeError as error:
            raise _lost(error) from error

    def leave(self, message: str) -> None:
        """Tell who looks at the board that this rank has left, and why."""
        self.pin(json.dumps([message]))

    def read(self) -> dict[int, Note]:
        """Return the notes of those who pinned one, by their position in the group, one's own included.

        Raises:
            RanksDisagreeError: a rank has left.
        """
        try:
            texts = (
                self._store.multi_get(self._keys) if self._reads_many else [self._store.get(key) for key in self._keys]
            )
        except RuntimeError as error:
            raise _lost(error) from error
        fields = [json.loads(text) for text in texts]
        left = next((f[0] for f in fields if len(f) == 1), None)
        if left is not None:
            raise RanksDisagreeError(left)
        return {rank: Note.of(f) for rank, f in enumerate(fields) if f}

    def take_down(self) -> None:
        """Delete this rank's note; nobody may look for it any more."""
        try:
            self._store.delete_key(self._own)
        except RuntimeError:
            return  # the store died with its host, and the note with it


def _lost(error: RuntimeError) -> CollectiveFailed:
    cancellation.check_after_failure()
    return CollectiveFailed(
        f"the ranks' store cannot be reached: {str(error).splitlines()[0]}; the process that holds it, most often rank "
        "0's, has ended"
    )


def _pause(delay_s: float) -> float:
    """Sleep ``delay_s`` seconds unless cancelled; returns how long to sleep next time."""
    cancellation.sleep(delay_s)
    return min(2 * delay_s, LAST_POLL_S)


class Order:
    """The order check of one group, from when it was built to when it is built anew.

    Args:
        board: the group's, at which all its ranks have met.
        ranks: global ranks, in group order.
        rank: this rank's position among them.
        is_part: there are other ranks than these.
    """

    def __init__(self, board: Board, ranks: tuple[int, ...], rank: int, *, is_part: bool) -> None:
        self._board = board
        self._ranks = ranks
        self._rank = rank
        self._is_part = is_part
        self._tree = Tree()
        self._serial = 0

    def before(self, call: Call) -> None:
        """Return once it is known that all ranks issue ``call`` next.

        Raises:
            RanksDisagreeError: they do not.
            StepAborted: cancelled while waiting for the others to say.
            CollectiveFailed: the store cannot be reached.
        """
        tree = self._tree
        known = tree.here.known
        if known is not None and known.call == call:
            tree.here = known
            return
        self.ask(call)
        tree.here = tree.here.grow(call)

    def ask(self, call: Call) -> None:
        """Agree with all ranks on a call that is no part of the order, as it does not recur; raises as ``before``."""
        own = Note(self._serial, self._tree.place, call)
        self._board.pin(own.text())
        delay_s = FIRST_POLL_S
        while not self._is_agreed(own):
            delay_s = _pause(delay_s)
        self._serial += 1

    def _is_agreed(self, own: Note) -> bool:
        others = self._others()
        if self._disputed(others, own) is not None:
            self._raise_difference(own)
        # a rank with a higher serial has seen all ranks agree, this one included
        agreeing = [n for n in others.values() if n.serial > own.serial or n == own]
        return len(agreeing) == len(self._ranks) - 1

    def end_iteration(self) -> None:
        """All calls of this iteration were made; nothing if there was none. Raises as :meth:`before`."""
        tree = self._tree
        if not tree.here.depth:
            return
        place, serial = tree.place, self._serial
        self.before(END)
        tree.end_iteration()
        if serial == self._serial:  # nobody was asked: say it for one that asks whether the iteration goes on
            self._board.pin(Note(serial, place, END).text())

    def look(self) -> None:
        """Look whether a rank has asked about a place that this one has passed; raises as :meth:`before`."""
        if self._disputed(self._others(), None) is not None:
            self._raise_difference(None)

    def _others(self) -> dict[int, Note]:
        return {rank: note for rank, note in self._board.read().items() if rank != self._rank}

    def _disputed(self, others: dict[int, Note], own: Note | None) -> tuple[int, int] | None:
        """Return the first place at which another rank's note differs from what this one did, or asks in ``own``."""
        places = []
        for note in others.values():
            if note.serial != self._serial:
                continue  # settled
            if note.place < self._tree.place:
                places += [note.place] if note.call != self._tree.call_at(note.place) else []
            elif own is not None and note != own:
                places.append(own.place)  # it does something else here, or has passed without being asked
        return min(places, default=None)

    def _raise_difference(self, own: Note | None) -> None:
        """Answer what this rank did at the first place in dispute, wait for the others' answers, and raise."""
        deadline_s = time.monotonic() + ANSWERS_S
        delay_s = FIRST_POLL_S
        answer = own
        place = (-1, -1)
        while True:
            others = self._others()
            place = self._disputed(others, own) or place
            if answer is None or answer.place != place:
                done = own.call if own and own.place == place else self._tree.call_at(place)
                answer = Note(self._serial, place, done or Call("something forgotten", None, 0))
                self._board.pin(answer.text())
            notes = sorted({**others, self._rank: answer}.items())
            calls = {self._ranks[r]: n.call for r, n in notes if (n.serial, n.place) == (self._serial, place)}
            if len(calls) == len(self._ranks) or time.monotonic() > deadline_s:
                raise RanksDisagreeError(self._difference(place, calls))
            delay_s = _pause(delay_s)

    def _difference(self, place: tuple[int, int], calls: dict[int, Call]) -> str:
        holders = {call: [r for r, c in calls.items() if c == call] for call in calls.values()}
        parts = [f"{_ranks(who)} {call.sized()}" for call, who in holders.items()]
        silent = [r for r in self._ranks if r not in calls]
        parts += [f"{_ranks(silent)} elsewhere"] if silent else []
        among = f" among {_ranks(self._ranks)}" if self._is_part else ""
        return (
            f"ranks are about to do different things as collective {place[1] + 1} of this iteration{among}: "
            f"{'; '.join(parts)}. Run the same forwards and backwards on every rank; if what runs depends on data, let "
            "one rank decide for all, or run the module on all. Then go on with workbench.engine.rebuild_groups() on "
            "all ranks and reset_iter_state() on the root"
        )

    def leave(self, message: str) -> None:
        """Let every rank that looks at this group's board raise ``message``."""
        self._board.leave(message)

    def close(self) -> None:
        """Clear this rank's part of the store; all ranks of the group must be past their last look."""
        self._board.take_down()


def _ranks(ranks: Iterable[int]) -> str:
    """Name ``ranks``: ``[0]`` -> ``rank 0``, ``[0, 2]`` -> ``ranks 0, 2``."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
