"""Check, before each collective, that all ranks of a group are about to issue the same one.

Gloo pairs collectives by their number alone: two equal-sized units swapped on one rank return each other's shards
silently, and a difference in size kills a process. So every rank keeps the order of the iterations that all ranks have
agreed on, and asks the others only where that order does not determine the next collective.

Terms: a *collective* is an operation that all ranks of a group do together: one of c10d's, the end of an iteration, a
comparison. A *place* is (iteration, number of collectives before it in this iteration). Past iterations form a *tree*:
those that begin alike share their first collectives. A collective is *known* if it is the only one ever agreed on in
its place: it is issued after one comparison. Where the tree branches (training or evaluation, with or without
reduction), ends or differs, the rank *asks*: it votes in the question's tally, one number in the store, and issues the
collective only when all ranks have cast the same vote::

    first iteration    A? B? C? END?     each is agreed on (?)
    the same again     A  B  C  END      one comparison each
    another end        A  B  D? END?     agreed on by all: the tree now branches behind B
    from then on       A  B  C? END      one question each iteration, until D was not seen for REMEMBERED iterations

A question costs each rank one addition plus, per poll while it waits, one read, or three once others are late. This
does not depend on the number of ranks.

Ranks that follow the tree do not read the board. A rank that waits for a collective reads it in its wait slices: a
question about a place that this rank passed without asking is a difference, because trees are equal on all ranks. The
rank then votes for its own collective there, so that the asking ranks see the difference. Only then do all ranks
publish notes, each with its own collective, and read all of them for the message. A rank that sees a difference
notifies all of its groups and raises. A rank that ends an iteration without asking may never poll again: it publishes a
note at once, and asking ranks read the others' notes in turn.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from workbench.engine.cancellable_waits import cancellation
from workbench.engine.errors import CollectiveFailed, RanksDisagreeError
from workbench.events import unit_words

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.01
ANSWERS_S = 3.0
"""How long a rank that sees a difference waits for the others' answers for the message, in seconds."""
REMEMBERED = 16
"""Iterations after which an unused branch of the tree is forgotten."""


@dataclass(frozen=True)
class Collective:
    """An operation that all ranks of a group do together, with the fields they must agree on.

    Attributes:
        kind: all-gather, reduce-scatter ...
        unit: name of the unit, empty for the root; None without a unit.
        num_bytes: bytes of the payload.
    """

    kind: str
    unit: str | None
    num_bytes: int

    def __str__(self) -> str:
        return self.kind if self.unit is None else f"{self.kind} of unit {unit_words(self.unit)}"

    def sized(self) -> str:
        """Return the text with the bytes, such as ``all-gather of unit blocks.0 (1,024 bytes)``."""
        return f"{self} ({self.num_bytes:,} bytes)" if self.num_bytes else str(self)


END = Collective("end of the iteration", None, 0)
_DROPPED = Collective("a collective that is no longer recorded", None, 0)


class _Step:
    """A collective in the tree.

    Attributes:
        depth: collectives of its iteration up to and including it; 0 is the root of the tree.
        known: the only step seen after it; None if there are several or none.
        last_seen: for an END, the last iteration that ended here.
    """

    __slots__ = ("after", "collective", "depth", "known", "last_seen", "parent")

    def __init__(self, collective: Collective, parent: _Step | None) -> None:
        self.collective = collective
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.after: dict[Collective, _Step] = {}
        self.known: _Step | None = None
        self.last_seen = 0

    def grow(self, collective: Collective) -> _Step:
        """Return the step of ``collective`` after this one; create it if it is new here."""
        if collective not in self.after:
            self.after[collective] = _Step(collective, self)
            self._settle()
        return self.after[collective]

    def cut(self, collective: Collective) -> None:
        """Remove the branch that begins with ``collective``."""
        del self.after[collective]
        self._settle()

    def _settle(self) -> None:
        self.known = next(iter(self.after.values())) if len(self.after) == 1 else None


class Tree:
    """The iterations that all ranks agreed on, and this rank's position in them.

    Attributes:
        here: the step of the last collective.
        iteration: number of the current iteration.
    """

    def __init__(self) -> None:
        self._root = self.here = _Step(END, None)
        self.iteration = 0
        self._ends: OrderedDict[_Step, None] = OrderedDict()  # least recent first
        self._last_ends: deque[_Step] = deque(maxlen=REMEMBERED)

    @property
    def place(self) -> tuple[int, int]:
        """Place of the next collective."""
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

    def collective_at(self, place: tuple[int, int]) -> Collective | None:
        """Return this rank's collective at ``place``; None if it is no longer remembered."""
        iteration, position = place
        back = self.iteration - iteration
        if back > len(self._last_ends):
            return None
        step: _Step | None = self._last_ends[-back] if back else self.here
        while step is not None and step.depth > position + 1:
            step = step.parent
        return None if step is None else step.collective


def _cut_off(end: _Step) -> None:
    """Remove the branch that leads only to ``end``."""
    step = end
    while step.parent is not None:
        parent = step.parent
        parent.cut(step.collective)
        if parent.after:
            return
        step = parent


@dataclass(frozen=True)
class BoardEntry:
    """A rank's note or vote.

    Attributes:
        serial: number of questions that the group's ranks had agreed on before.
        place: place of the collective.
        collective: what the rank is about to do there, or did.
    """

    serial: int
    place: tuple[int, int]
    collective: Collective

    def text(self) -> str:
        """Return the entry as JSON."""
        return json.dumps(
            [self.serial, *self.place, self.collective.kind, self.collective.unit, self.collective.num_bytes]
        )

    @staticmethod
    def of(fields: Sequence[Any]) -> BoardEntry:
        """Return the entry with JSON fields ``fields``."""
        serial, iteration, position, kind, unit, num_bytes = fields
        return BoardEntry(serial, (iteration, position), Collective(kind, unit, num_bytes))


_ONE = 1 << 48  # above the sum of 32-bit digests; leaves room for 2 ** 15 ranks


def _vote(text: str) -> int:
    """Return the number that a vote for ``text`` adds to a tally."""
    return _ONE + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


@dataclass(frozen=True)
class Tally:
    """Sum of the ranks' votes: one number that holds their count and whether they agree.

    Different texts count as equal with a probability of 2 ** -32.
    """

    total: int

    @property
    def count(self) -> int:
        """Number of votes."""
        return self.total // _ONE

    def all_say(self, text: str) -> bool:
        """True if every vote so far was for ``text``."""
        return self.total == self.count * _vote(text)


class MessageBoard:
    """Notes and tallies that the ranks of a group exchange through the group's own ``store``.

    Each rank has one *note*; a new one replaces it. A *tally* belongs to a question, identified by its serial. A
    question's keys are deleted two questions later: by then every rank has asked the next one and reads them no more.

    Raises:
        CollectiveFailed: from every method, if the store cannot be reached.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._next_reader = itertools.cycle([*range(rank + 1, size), *range(rank)])
        self._own: deque[tuple[int, str]] = deque()  # (serial, key) that this rank has made and will delete

    def barrier(self) -> None:
        """Wait until every rank of the group has a board: after that no read can block.

        Raises:
            StepAborted: the wait was cancelled; this rank may call again and counts once.
        """
        is_new = not self._is_there(f"note/{self._rank}")
        self.publish("[]")
        if self._rank == 0:
            self._set("question", "[]")
            self._add("left", 0)
        met = self._add("met", int(is_new))
        delay_s = FIRST_POLL_S
        while met < self._size:
            delay_s = _pause(delay_s)
            met = self._add("met", 0)

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise _lost(error) from error

    def _set(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise _lost(error) from error

    def _get(self, key: str) -> str:
        try:
            return bytes(self._store.get(key)).decode()
        except RuntimeError as error:
            raise _lost(error) from error

    def _add(self, key: str, number: int) -> int:
        """Add to a number in the store and return the sum; adding 0 reads it, or creates it."""
        try:
            return int(self._store.add(key, number))
        except RuntimeError as error:
            raise _lost(error) from error

    # ---- questions

    def vote(self, serial: int, text: str, about: str = "tally") -> Tally:
        """Add a vote to a tally of question ``serial`` and return the tally."""
        key = f"{about}/{serial}"
        tally = Tally(self._add(key, _vote(text)))
        if tally.count == 1:
            self._own.append((serial, key))
        return tally

    def tally(self, serial: int, about: str = "tally") -> Tally:
        """Return a tally of question ``serial``."""
        return Tally(self._add(f"{about}/{serial}", 0))

    def put(self, serial: int, key: str, text: str) -> None:
        """Store ``text`` under ``key``, to be read once the ranks agree on question ``serial``."""
        self._set(f"{key}/{serial}", text)
        self._own.append((serial, f"{key}/{serial}"))

    def text(self, serial: int, key: str) -> str:
        """Return the text that :meth:`put` stored."""
        return self._get(f"{key}/{serial}")

    def ask(self, note: BoardEntry) -> Tally:
        """Vote for ``note``; the first rank to vote also publishes it as the question."""
        while self._own and self._own[0][0] <= note.serial - 2:
            self._delete(self._own.popleft()[1])
        tally = self.vote(note.serial, note.text())
        if tally.count == 1:
            self._set("question", note.text())
        return tally

    def question(self) -> BoardEntry | None:
        """Return the note of the first rank that asked the newest question; None without one."""
        return _note_of(self._get("question"))

    # ---- notes

    def publish(self, text: str) -> None:
        """Replace this rank's note with ``text``."""
        self._set(f"note/{self._rank}", text)

    def note_of_next(self) -> BoardEntry | None:
        """Return the note of another rank, a different one at each call."""
        return _note_of(self._get(f"note/{next(self._next_reader)}")) if self._size > 1 else None

    def notes(self) -> dict[int, BoardEntry]:
        """Return the other ranks' notes by position in the group."""
        found = {r: _note_of(self._get(f"note/{r}")) for r in range(self._size) if r != self._rank}
        return {rank: note for rank, note in found.items() if note is not None}

    # ---- the end

    def leave(self, message: str) -> None:
        """Post on the board that this rank has left, and why."""
        self._set("why", message)
        self._add("left", 1)

    def check_left(self) -> None:
        """Raise RanksDisagreeError if a rank has left."""
        if self._add("left", 0):
            raise RanksDisagreeError(self._get("why"))

    def withdraw(self) -> None:
        """Delete this rank's keys; no rank may read them any more."""
        common = ("question", "left", "why", "met") if self._rank == 0 else ()
        for key in (f"note/{self._rank}", *(key for _, key in self._own), *common):
            self._delete(key)
        self._own.clear()

    def _delete(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except RuntimeError:
            return  # the store died with its host, and the key with it


def _note_of(text: str) -> BoardEntry | None:
    fields = json.loads(text)
    return BoardEntry.of(fields) if fields else None


class StoreLost(CollectiveFailed):
    """The process that hosts the ranks' store has ended."""


def _lost(error: RuntimeError) -> StoreLost:
    cancellation.check_after_failure()
    return StoreLost(
        f"cannot reach the ranks' store: {str(error).splitlines()[0]}; the process that hosts it, usually rank 0, "
        "has ended"
    )


def _pause(delay_s: float) -> float:
    """Sleep ``delay_s`` seconds unless cancelled; return the next delay."""
    cancellation.sleep(delay_s)
    return min(2 * delay_s, LAST_POLL_S)


class OrderCheck:
    """The order check of one group, until the group is rebuilt.

    Args:
        board: the group's board; all its ranks have met there.
        ranks: global ranks, in group order.
        rank: this rank's position among them.
        is_part: there are ranks outside the group.
    """

    def __init__(self, board: MessageBoard, ranks: tuple[int, ...], rank: int, *, is_part: bool) -> None:
        self._board = board
        self._ranks = ranks
        self._rank = rank
        self._is_part = is_part
        self._tree = Tree()
        self._serial = 0

    def before(self, collective: Collective) -> None:
        """Return once all ranks are known to issue ``collective`` next.

        Raises:
            RanksDisagreeError: they do not.
            StepAborted: cancelled while waiting for the other ranks.
            CollectiveFailed: the store cannot be reached.
        """
        tree = self._tree
        known = tree.here.known
        if known is not None and known.collective == collective:
            tree.here = known
            return
        self.ask(collective)
        tree.here = tree.here.grow(collective)

    def ask(self, collective: Collective) -> None:
        """Agree with all ranks on ``collective`` without adding it to the order; raises as :meth:`before`."""
        own = BoardEntry(self._serial, self._tree.place, collective)
        tally = self._board.ask(own)
        self._check_same(tally, own)
        delay_s = FIRST_POLL_S
        while tally.count < len(self._ranks):
            delay_s = _pause(delay_s)
            tally = self._board.tally(own.serial)
            self._check_same(tally, own)
            if delay_s == LAST_POLL_S and tally.count < len(self._ranks):
                self._look_for_others(own)
        self._serial += 1

    def _look_for_others(self, own: BoardEntry) -> None:
        """Raise if a rank that has not voted has left or issues another collective."""
        self._board.check_left()
        if self._disputed([self._board.note_of_next()], own) is not None:
            self._raise_difference(own, own.place)

    def _check_same(self, tally: Tally, own: BoardEntry) -> None:
        if not tally.all_say(own.text()):
            self._raise_difference(own, own.place)

    def tell(self, collective: Collective, text: str) -> str:
        """Return the first rank's ``text``; ``collective`` names the occasion. Raises as :meth:`before`."""
        serial = self._serial
        if self._rank == 0:
            self._board.put(serial, "told", text)
        self.ask(collective)
        return self._board.text(serial, "told")

    def compare(self, collective: Collective, text: str) -> list[str]:
        """Return every rank's text, in group order; read the others' only if they differ.

        ``collective`` names the occasion. Raises as :meth:`before`.
        """
        serial = self._serial
        same = self._board.vote(serial, text, about="same")
        self.ask(collective)
        if same.count < len(self._ranks):
            same = self._board.tally(serial, about="same")
        if same.all_say(text):
            return [text] * len(self._ranks)
        serial = self._serial
        self._board.put(serial, f"text/{self._rank}", text)
        self.ask(collective)
        return [self._board.text(serial, f"text/{rank}") for rank in range(len(self._ranks))]

    def end_iteration(self) -> None:
        """Agree that the iteration has ended; no-op if it had no collective.

        All collectives of this iteration are complete on this rank, so one whose store is lost ends its iteration too:
        its host may have ended after the last step of a run.

        Raises:
            RanksDisagreeError, StepAborted: as :meth:`before`.
        """
        tree = self._tree
        if not tree.here.depth:
            return
        place, serial = tree.place, self._serial
        try:
            self.before(END)
            if serial == self._serial:  # ended without asking: leave a note for ranks that ask in this iteration
                self._board.publish(BoardEntry(serial, place, END).text())
        except StoreLost:
            tree.here = tree.here if tree.here.collective == END else tree.here.grow(END)
        tree.end_iteration()

    def check_peers(self) -> None:
        """Check whether a rank asks about a place that this one has passed; raises as :meth:`before`.

        No-op once the store is lost: its host may have ended well, and a wait for a rank that has not fails by itself.
        """
        try:
            self._board.check_left()
            tally = self._board.tally(self._serial)
            question = self._board.question() if tally.count else None
        except StoreLost:
            return
        if question is None or question.serial != self._serial:
            return  # no question, or not written yet
        place = self._disputed([question], None)
        if place is None and not tally.all_say(question.text()):
            place = self._disputed(self._board.notes().values(), None)
        if place is not None:
            self._raise_difference(None, place)

    def _disputed(self, others: Iterable[BoardEntry | None], own: BoardEntry | None) -> tuple[int, int] | None:
        """Return the first place where another rank's note differs from this rank's past or from ``own``."""
        places = []
        for note in others:
            if note is None or note.serial != self._serial:
                continue  # settled
            if note.place < self._tree.place:
                places += [note.place] if note.collective != self._tree.collective_at(note.place) else []
            elif own is not None and note != own:
                places.append(own.place)  # it differs here, or has passed this place without asking
        return min(places, default=None)

    def _raise_difference(self, own: BoardEntry | None, place: tuple[int, int]) -> None:
        """Pin this rank's collective at the first place in dispute, wait for the others' answers, and raise.

        Args:
            own: the note this rank asks with; None if it is not asking.
            place: a place in dispute; the others' notes may move it to an earlier one.
        """
        deadline_s = time.monotonic() + ANSWERS_S
        delay_s = FIRST_POLL_S
        answer: BoardEntry | None = None
        while True:
            try:
                others = self._board.notes()
            except StoreLost as error:  # its host has seen the difference, and has ended
                known = {} if own is None else {self._ranks[self._rank]: own.collective}
                raise RanksDisagreeError(self._difference(place, known)) from error
            place = min(place, self._disputed(others.values(), own) or place)
            if answer is None or answer.place != place:
                done = own.collective if own and own.place == place else self._tree.collective_at(place)
                is_first = answer is None
                answer = BoardEntry(self._serial, place, done or _DROPPED)
                self._board.publish(answer.text())
                if own is None and is_first:
                    self._board.vote(self._serial, answer.text())  # asking ranks read the tally
            notes = sorted({**others, self._rank: answer}.items())
            collectives = {
                self._ranks[r]: n.collective for r, n in notes if (n.serial, n.place) == (self._serial, place)
            }
            if len(collectives) == len(self._ranks) or time.monotonic() > deadline_s:
                raise RanksDisagreeError(self._difference(place, collectives))
            self._board.check_left()
            delay_s = _pause(delay_s)

    def _difference(self, place: tuple[int, int], collectives: dict[int, Collective]) -> str:
        holders = {
            collective: [r for r, c in collectives.items() if c == collective] for collective in collectives.values()
        }
        parts = [f"{_ranks(who)} {collective.sized()}" for collective, who in holders.items()]
        silent = [r for r in self._ranks if r not in collectives]
        parts += [f"{_ranks(silent)} did not answer"] if silent else []
        among = f" among {_ranks(self._ranks)}" if self._is_part else ""
        return (
            f"ranks disagree on collective {place[1] + 1} of this iteration{among}: {'; '.join(parts)}. Run the same "
            "forwards and backwards on every rank; if they depend on data, let one rank decide for all, or run the "
            "module on all. To continue, call workbench.engine.rebuild_groups() on all ranks and reset_iter_state() "
            "on the root"
        )

    def leave(self, message: str) -> None:
        """Make every rank that reads this group's board raise ``message``."""
        self._board.leave(message)

    def close(self) -> None:
        """Delete this rank's keys from the store; all ranks of the group must have stopped reading them."""
        self._board.withdraw()


def _ranks(ranks: Iterable[int]) -> str:
    """Return ``ranks`` as text: ``[0]`` -> ``rank 0``, ``[0, 2]`` -> ``ranks 0, 2``."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
