"""The notebook's side while a rank's step is stopped: control-channel requests from another thread."""

import itertools
import json
import multiprocessing
import threading

from tests.helpers.booted_ranks import execute
from tests.helpers.waiting import PATIENCE_S, eventually
from workbench.base.codec import decode, encode
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import Continue, Evaluate, Inspect
from workbench.protocol.rank_messages import Forget, Job, Locate, RunCell, SetBreakpoints
from workbench.runtime import rank as rank_module

_FORK = multiprocessing.get_context("fork")


class Channel:
    """This rank's control channel."""

    def __init__(self):
        self._tickets = itertools.count()

    def __call__(self, request):
        data, _ = rank_module.handle_request(json.loads(json.dumps(encode(request))))
        return decode(request.reply, json.loads(json.dumps(data)), "reply")

    def where(self):
        return self(Locate())

    def until(self, condition):
        """Poll the rank's position until ``condition`` holds; return that position."""
        seen = []

        def holds():
            seen[:] = [self.where()]
            return condition(seen[0])

        assert eventually(holds), seen
        return seen[0]

    def until_held(self):
        return self.until(lambda where: where.held is not None).held

    def break_at(self, *breakpoints):
        self(SetBreakpoints(breakpoints=tuple(Breakpoint(id=i, **b) for i, b in enumerate(breakpoints))))

    def send(self, ticket, work, **company):
        assert self(Job(ticket=ticket, work=work, **company))

    def job(self, work, **company):
        """Run ``work`` on the held thread and return its outcome."""
        ticket = f"t{next(self._tickets)}"
        self.send(ticket, work, **company)
        done = self.until(lambda where: ticket in where.tickets).tickets[ticket]
        self(Forget(tickets=(ticket,)))
        return done

    def expression(self, text, *, frame=0, **company):
        return self.job(Evaluate(expr=text, frame=frame), **company)

    def cell(self, code):
        return self.job(RunCell(code=code))

    def inspect(self, fqn):
        done = self.job(Inspect(fqn=fqn))
        assert done.error is None, done
        return done.inspected

    def evaluate(self, text):
        done = self.expression(text)
        assert done.error is None, done
        return done.text


def beside(script, command):
    """Run ``command`` here and ``script(channel)`` in a thread; return the results of both.

    If the command raises, its exception is its result.
    """
    channel, results = Channel(), []

    def run():
        try:
            results.append(script(channel))
        except BaseException as error:  # noqa: BLE001 - raised again below
            results.append(error)
        finally:
            channel(SetBreakpoints(breakpoints=()))
            channel(Continue())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        outcome = execute(command)
    except BaseException as error:  # noqa: BLE001 - the test checks which one
        outcome = error
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return outcome, results[0]


class Meeting:
    """Lets the scripts of several ranks wait for each other and compare positions; create it before the ranks."""

    def __init__(self, world_size):
        self._barrier = _FORK.Barrier(world_size)
        self._numbers = _FORK.Array("q", 2 * world_size)
        self._world_size = world_size

    def wait(self):
        self._barrier.wait(PATIENCE_S)

    def furthest(self, rank, held):
        """Return the furthest (step, ordinal) at which a rank is held."""
        self._numbers[2 * rank : 2 * rank + 2] = held.place.step, held.place.ordinal
        self.wait()
        numbers = self._numbers[:]
        self.wait()
        return max((numbers[2 * r], numbers[2 * r + 1]) for r in range(self._world_size))
