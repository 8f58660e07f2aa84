"""What forked processes call is known to the process that runs the tests."""

import multiprocessing
from types import SimpleNamespace

from tests.helpers.reached_in_ranks import Reached


def rank(state, jobs):
    while (name := jobs.recv()) is not None:
        state._stats.add(name)
        state._stats.add(name)
        jobs.send(len(state._stats))


def test_each_name_is_told_once_in_every_turn_by_ranks_that_stay():
    state = SimpleNamespace(_stats=set())
    reached = Reached(state)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=rank, args=(state, there))
    process.start()
    for names, told in ((["f", "f", "g"], {"f", "g"}), (["f"], {"f"}), ([], set())):
        for name in names:
            here.send(name)
            here.recv()
        state._stats = set()
        reached.take()
        assert state._stats == told
    here.send(None)
    process.join()
