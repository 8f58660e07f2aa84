"""Run a function on N forked ranks with a gloo process group: torch is imported once, a rank costs a fork."""

import functools
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # the first DTensor loads it: once here, not 0.6 s in every rank
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.namespaces import Seat
from workbench.engine import groups
from workbench.engine.backends import tell_host
from workbench.ports import LOOPBACK, LOOPBACK_INTERFACE

_FORK = multiprocessing.get_context("fork")


class RankFailure(AssertionError):
    """A rank raised or died."""


def _rank_main(
    rank: int,
    world_size: int,
    ports: tuple[Connection, ...],
    job: tuple[Callable[..., Any], tuple],
    seats: Sequence[Seat],
) -> None:
    torch.set_num_threads(1)
    if seats:
        sit_down(seats[rank])
    # gloo would otherwise ask the network for the address of this host, and listen there
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    fn, args = job
    try:
        store = _store(rank, ports, seats[0].address if seats else LOOPBACK)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()  # a rank that fails at once would leave those that are still connecting to it
        result = ("ok", fn(*args))
    except BaseException as error:  # noqa: BLE001 - everything goes to the parent
        result = (f"{type(error).__name__}: {error}", traceback.format_exc())
    ports[rank].send_bytes(pickle.dumps(result))  # plain pickle: tensors by value, not by a file of this process
    if result[0] == "ok":
        ports[rank].recv()  # until all have answered: others may still be making a group with this rank
    groups.forget_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def sit_down(seat: Seat) -> None:
    """Be on a host of its own, as far as network and shared memory go."""
    seat.take()
    tell_host(seat.namespace)


def _store(rank: int, ports: tuple[Connection, ...], address: str) -> dist.Store:
    """Rank 0 listens on a free port of ``address``, its host's, and tells the parent, which tells the others."""
    port = ports[rank]
    if rank == 0:
        # a listener of torch's own takes IPv6 too: it then asks the network for the name of every rank that connects
        listener = socket.create_server((address, 0))
        number = listener.getsockname()[1]
        port.send(number)
        fd = listener.detach()
        return dist.TCPStore(address, number, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    return dist.TCPStore(address, port.recv(), is_master=False)


def outcomes(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120, seats: Sequence[Seat] = ()
) -> list[tuple[str, Any]]:
    """Return per rank ("ok", result) or ("Name: message", traceback); ``seats``: where each is, if not here."""
    pairs = [_FORK.Pipe() for _ in range(world_size)]
    ends = tuple(child for _, child in pairs)
    arguments = [(rank, world_size, ends, (fn, args), seats) for rank in range(world_size)]
    processes = [_FORK.Process(target=_rank_main, args=each) for each in arguments]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        number = pairs[0][0].recv()
        for parent, _ in pairs[1:]:
            parent.send(number)
        return [_result(parent, process, deadline) for (parent, _), process in zip(pairs, processes, strict=True)]
    finally:
        for parent, _ in pairs:
            parent.send("end")
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for parent, child in pairs:
            parent.close()
            child.close()


def _result(parent: Connection, process: Any, deadline: float) -> tuple[str, Any]:
    ready = wait([parent, process.sentinel], max(0.0, deadline - time.monotonic()))
    if parent in ready or parent.poll():
        return pickle.loads(parent.recv_bytes())
    return ("died" if ready else "timed out", f"exit code {process.exitcode}")


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``fn(*args)`` on every rank and return its results in rank order; raise if any rank did."""
    return _all_ok(outcomes(world_size, fn, *args))


def run_on(seats: Sequence[Seat], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """As :func:`run_ranks`, with a rank on each seat."""
    return _all_ok(outcomes(len(seats), fn, *args, seats=seats))


def _all_ok(results: Sequence[tuple[str, Any]]) -> list[Any]:
    bad = [f"rank {rank}: {what}\n{detail}" for rank, (what, detail) in enumerate(results) if what != "ok"]
    if bad:
        raise RankFailure("\n".join(bad))
    return [result for _, result in results]


def run_cases(world_size: int, cases: Mapping[Any, Callable[[], Any]]) -> list[dict[Any, Any]]:
    """Call every case on every rank, one after another in the same processes; returns results per rank, by name.

    What a rank works out once, such as how DTensor acts on an operation, it does for all of them. An error says in
    which case it was.
    """
    return run_ranks(world_size, in_turn, cases)


def in_turn(cases: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Call every case on this rank; see :func:`run_cases`."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        except Exception as error:
            error.add_note(f"case: {name}")
            raise
    return found


def on_one_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Make a test run on a rank of its own: whatever autograd, hooks or counters it leaves behind go with it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_ranks(1, functools.partial(test, *args, **kwargs))

    return run


def simulating(test: Callable[[], None]) -> Callable[[], None]:
    """Make a test run in a process of its own, where it may be :func:`simulated_rank` of one world after another.

    DTensor caches what it found out for a mesh without regard to the rank: no other test may inherit that.
    """

    def run() -> None:
        run_ranks(1, _without_group, test)

    run.__name__, run.__module__ = test.__name__, test.__module__
    return run


def _without_group(test: Callable[[], None]) -> None:
    dist.destroy_process_group()
    test()


@contextmanager
def simulated_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of a world whose collectives do nothing; only within a :func:`simulating` test."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        groups.forget_all()
        dist.destroy_process_group()
