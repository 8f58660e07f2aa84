"""Run a function on N forked ranks with a process group: torch is imported once, and the ranks are reused.

Ranks on GPUs are forked from a process that never uses CUDA: a child of one that does cannot use it.
"""

import atexit
import functools
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import pytest
import torch
import torch._dynamo  # the first DTensor imports it: 0.6 s once here, not in every rank
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers import gpu_ranks, leaks
from tests.helpers.rank_state import RankState, packed, unpacked
from tests.helpers.ranks_on_hosts import Seat
from workbench.base.ports import LOOPBACK, LOOPBACK_INTERFACE
from workbench.engine import process_groups
from workbench.engine.backends import tell_host

TIMEOUT_S = 120.0
_FORK = multiprocessing.get_context("fork")
_CONTEXTS = {"cpu": _FORK, "cuda": gpu_ranks.CONTEXT}
if not torch.cuda.is_available():
    # The first backward of a process decides whether forked ranks can run one: autograd starts a thread per device
    # then, and the first FakeTensorMode makes torch count a GPU where there is none. So it comes before any test.
    torch.ones((), requires_grad=True).backward()
Job = tuple[Callable[..., Any], tuple[Any, ...], "type[Group]"]


class RankFailure(AssertionError):
    """A rank raised or died."""


def _rank_main(
    rank: int,
    world_size: int,
    pipes: Sequence[tuple[Connection, Connection]],
    job: Job | None,
    seats: Sequence[Seat],
    device: str,
) -> None:
    for parent, _ in pipes:
        parent.close()  # otherwise the ranks would not notice the end of the test run
    ports = [child for _, child in pipes]
    torch.set_num_threads(1)
    torch.manual_seed(0)  # this process's own generator depends on the tests that ran in it before
    if seats:
        sit_down(seats[rank])
    address = seats[0].address if seats else LOOPBACK
    if job is not None:
        _run(job, rank, ports, address, device)
        return
    begin = RankState()
    with suppress(EOFError):
        while (message := ports[rank].recv_bytes()) and _run(unpacked(message), rank, ports, address, device):
            ports[rank].send(begin.put_back())


def _run(job: Job, rank: int, ports: Sequence[Connection], address: str, device: str) -> bool:
    """Call the function in a new group; return whether it succeeded."""
    fn, args, group = job
    try:
        group.join(rank, ports, address, device)
        result = ("ok", fn(*args))
    except BaseException as error:  # noqa: BLE001 - every error is sent to the parent
        result = (f"{type(error).__name__}: {error}", traceback.format_exc())
    ports[rank].send_bytes(pickle.dumps(result))  # plain pickle: tensors by value, not by a file of this process
    if result[0] == "ok":
        ports[rank].recv()  # until all ranks have answered: others may still be creating a group with this rank
    group.leave()
    return result[0] == "ok"


class Group:
    """How ranks become a group before a job, and cease to be one after it; here: torch's process group alone."""

    @staticmethod
    def join(rank: int, ports: Sequence[Connection], address: str, device: str) -> None:
        """Join the group; rank 0 sends the parent, and with it the others, what they need for that."""
        # gloo would otherwise look up this host's address on the network and listen there
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        if device == "cuda":
            gpu_ranks.take(rank, len(ports))
        store = _store(rank, ports[rank], address)
        dist.init_process_group(gpu_ranks.BACKENDS[device], store=store, rank=rank, world_size=len(ports))
        dist.barrier()  # a rank that fails at once would leave the others connecting to it

    @staticmethod
    def leave() -> None:
        """Leave the group, if the rank joined it."""
        process_groups.forget_all()
        if dist.is_initialized():
            dist.destroy_process_group()


def sit_down(seat: Seat) -> None:
    """Simulate a host for this rank, as far as network and shared memory go."""
    seat.take()
    tell_host(seat.namespace)


def _store(rank: int, port: Connection, address: str) -> dist.Store:
    """Return this rank's store; rank 0 listens on a free port of ``address`` and sends it to all via the parent."""
    if rank == 0:
        # torch's own listener takes IPv6 too: it then looks up the name of every rank that connects
        listener = socket.create_server((address, 0))
        number = listener.getsockname()[1]
        port.send(number)
        fd = listener.detach()
        return dist.TCPStore(address, number, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    return dist.TCPStore(address, port.recv(), is_master=False)


class World:
    """Forked ranks on devices of one type, for one job that they inherit, or for a series of jobs that they receive.

    Attributes:
        processes: of the ranks.
    """

    def __init__(
        self, world_size: int, job: Job | None = None, seats: Sequence[Seat] = (), device: str = "cpu"
    ) -> None:
        context = _CONTEXTS[device]
        pipes = [context.Pipe() for _ in range(world_size)]
        self._ports = [parent for parent, _ in pipes]
        arguments = [(rank, world_size, pipes, job, seats, device) for rank in range(world_size)]
        self._ranks = [context.Process(target=_rank_main, args=each) for each in arguments]
        for process in self._ranks:
            process.start()
        self.processes = frozenset(psutil.Process(process.pid) for process in self._ranks)
        for _, child in pipes:
            child.close()

    def send(self, message: bytes) -> None:
        """Send the next job."""
        for port in self._ports:
            port.send_bytes(message)

    def outcomes(self, timeout_s: float) -> list[tuple[str, Any]]:
        """Return the outcome of the job per rank; see :func:`outcomes`."""
        deadline = time.monotonic() + timeout_s
        with suppress(EOFError, OSError):  # a rank died
            number = self._ports[0].recv()
            for port in self._ports[1:]:
                port.send(number)
        results = [self._result(rank, deadline) for rank in range(len(self._ranks))]
        for port in self._ports:
            with suppress(OSError):
                port.send("end")
        return results

    def _result(self, rank: int, deadline: float) -> tuple[str, Any]:
        port, process = self._ports[rank], self._ranks[rank]
        ready = wait([port, process.sentinel], max(0.0, deadline - time.monotonic()))
        with suppress(EOFError, OSError):
            if port in ready or port.poll():
                return pickle.loads(port.recv_bytes())
        if ready:
            process.join()
        return ("died" if ready else "timed out", f"exit code {process.exitcode}")

    def left(self) -> list[tuple[list[str], list[str]]]:
        """Return the leftovers of a job on each rank; see :meth:`RankState.put_back`."""
        return [port.recv() for port in self._ports]

    def end(self) -> None:
        """End the ranks, by force after 10 s."""
        for port in self._ports:
            with suppress(OSError):
                port.send_bytes(b"")  # processes forked later hold the pipe too: closing it ends nothing
            port.close()
        for process in self._ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


class Pool:
    """Reusable worlds, one per size: most of the cost of a short test is the first run on a rank.

    Attributes:
        is_open: whether they may be used now; they do not see what a test patches in this process.
    """

    SIZES = (1, 2, 4)

    def __init__(self, device: str = "cpu") -> None:
        self.is_open = False
        self._device = device
        self._worlds: dict[int, World] = {}

    @property
    def processes(self) -> frozenset[psutil.Process]:
        """The processes of all ranks."""
        return frozenset().union(*(world.processes for world in self._worlds.values()))

    def outcomes(self, world_size: int, message: bytes, timeout_s: float = TIMEOUT_S) -> list[tuple[str, Any]]:
        """Run a job on the world of a size; discard the world unless the job left it unchanged."""
        if world_size not in self._worlds:
            self._worlds[world_size] = World(world_size, device=self._device)
        world, is_kept = self._worlds[world_size], False
        try:
            world.send(message)
            results = world.outcomes(timeout_s)
            if all(what == "ok" for what, _ in results):
                left = world.left()
                is_kept = not any(unfit for _, unfit in left)
                results = [
                    ("left behind", ", ".join(wrong)) if wrong else result
                    for result, (wrong, _) in zip(results, left, strict=True)
                ]
            return results
        finally:
            if not is_kept:
                self._worlds.pop(world_size).end()

    def end(self) -> None:
        """End all ranks."""
        while self._worlds:
            self._worlds.popitem()[1].end()


POOL = Pool()
ON_GPUS = Pool("cuda")
leaks.KEPT += [POOL, ON_GPUS, gpu_ranks.STARTERS]
for each in (POOL, ON_GPUS):
    atexit.register(each.end)  # before multiprocessing waits for their processes


def run_on_gpus(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Like :func:`run_ranks`, on GPUs, which ranks share if there are fewer; the ranks are kept for the module."""
    message = packed((fn, args, Group))
    assert message is not None
    return _all_ok(ON_GPUS.outcomes(world_size, message))


def outcomes(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    seats: Sequence[Seat] = (),
    group: type[Group] = Group,
) -> list[tuple[str, Any]]:
    """Return per rank ("ok", result) or ("Name: message", traceback), from ranks forked for this job.

    ``seats``: the simulated host of each rank, if not this one.
    """
    world = World(world_size, (fn, args, group), seats)
    try:
        return world.outcomes(timeout_s)
    finally:
        world.end()


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    fresh: bool = False,
    timeout_s: float = TIMEOUT_S,
    group: type[Group] = Group,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank and return its results in rank order; raise if any rank did.

    The ranks are those of :data:`POOL`; with ``fresh``, new ones are forked, for a job that leaves something behind.
    """
    if POOL.is_open and not fresh and world_size in POOL.SIZES and (message := packed((fn, args, group))) is not None:
        return _all_ok(POOL.outcomes(world_size, message, timeout_s))
    return _all_ok(outcomes(world_size, fn, *args, timeout_s=timeout_s, group=group))


@contextmanager
def shared_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Share long-lived ranks between tests, except those that patch this process: only a forked rank sees the patch."""
    POOL.is_open = "monkeypatch" not in request.fixturenames and request.node.get_closest_marker("fresh_ranks") is None
    yield
    POOL.is_open = False


def run_on(seats: Sequence[Seat], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Like :func:`run_ranks`, with a rank on each seat."""
    return _all_ok(outcomes(len(seats), fn, *args, seats=seats))


def _all_ok(results: Sequence[tuple[str, Any]]) -> list[Any]:
    bad = [f"rank {rank}: {what}\n{detail}" for rank, (what, detail) in enumerate(results) if what != "ok"]
    if bad:
        raise RankFailure("\n".join(bad))
    return [result for _, result in results]


def run_cases(world_size: int, cases: Mapping[Any, Callable[[], Any]]) -> list[dict[Any, Any]]:
    """Call every case on every rank, in sequence in the same processes; return the results per rank, by name.

    The cases share what a rank works out once, such as DTensor's sharding of an operation. An error names its case.
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
    """Run a test on a rank, so that its leftovers in autograd, hooks and counters do not affect other tests."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_ranks(1, functools.partial(test, *args, **kwargs))

    return run


def simulating(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a new process, where it may be :func:`simulated_rank` of several worlds in sequence.

    DTensor caches results per mesh without regard to the rank: no other test may inherit them.
    """

    def run() -> None:
        run_ranks(1, _without_group, test, fresh=True)

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
        process_groups.forget_all()
        dist.destroy_process_group()
