"""What the notebook's side does while a rank's step is stopped: requests at the side door from a thread beside it."""

import itertools
import multiprocessing
import threading

from tests.runtime.job import execute
from tests.waiting import PATIENCE_S, eventually
from workbench.runtime import rank as rank_module

_FORK = multiprocessing.get_context("fork")


class Door:
    """This rank's side door."""

    def __init__(self):
        self._tickets = itertools.count()

    def __call__(self, op, **fields):
        return rank_module.side_door({"op": op, **fields})[0]

    def where(self):
        return self("where")

    def until(self, condition):
        """Ask where the rank stands until ``condition`` holds; returns the answer for which it held."""
        seen = []

        def holds():
            seen[:] = [self.where()]
            return condition(seen[0])

        assert eventually(holds), seen
        return seen[0]

    def until_held(self):
        return self.until(lambda where: where["held"] is not None)["held"]

    def break_at(self, *breakpoints):
        self("breakpoints", breakpoints=[{"id": i} | b for i, b in enumerate(breakpoints)])

    def send(self, ticket, kind, text, **options):
        assert self("enqueue", ticket=ticket, job={"kind": kind, "text": text} | options)["accepted"]

    def job(self, kind, text, **options):
        """Run a job in the held thread and return its answer."""
        ticket = f"t{next(self._tickets)}"
        self.send(ticket, kind, text, **options)
        answer = self.until(lambda where: ticket in where["tickets"])["tickets"][ticket]
        self("forget", tickets=[ticket])
        return answer

    def evaluate(self, text):
        answer = self.job("evaluate", text)
        assert answer["ok"], answer
        return answer["result"]


def beside(script, command):
    """Run ``command`` here and ``script(door)`` in a thread; returns what both gave, or what the command raised."""
    door, said = Door(), []

    def run():
        try:
            said.append(script(door))
        except BaseException as error:  # noqa: BLE001 - raised again below
            said.append(error)
        finally:
            door("breakpoints", breakpoints=[])
            door("continue")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        outcome = execute(command)
    except BaseException as error:  # noqa: BLE001 - the test asks which one
        outcome = error
    thread.join()
    if isinstance(said[0], BaseException):
        raise said[0]
    return outcome, said[0]


class Meeting:
    """Lets the scripts of several ranks wait for each other and compare positions; make it before the ranks."""

    def __init__(self, world_size):
        self._barrier = _FORK.Barrier(world_size)
        self._numbers = _FORK.Array("q", 2 * world_size)
        self._world_size = world_size

    def wait(self):
        self._barrier.wait(PATIENCE_S)

    def furthest(self, rank, held):
        """Return the furthest (step, ordinal) at which a rank is held."""
        self._numbers[2 * rank : 2 * rank + 2] = held["step"], held["ordinal"]
        self.wait()
        numbers = self._numbers[:]
        self.wait()
        return max((numbers[2 * r], numbers[2 * r + 1]) for r in range(self._world_size))
