"""Bytes of some steps, as the process allocates them and by the engine's classes; runs on the ranks.

``peak`` is the maximum that is allocated at once within steps after a warm-up, in bytes: the allocator's own running
total, counted from before the model is built, plus what no allocator sees: this rank's part of its mapped shared
memory, and the engine's pages of full parameters. What the engine keeps counts in full, used or not, as long as it is
kept. Activations, optimizer state and the batch are included, so ours and torch's differ only by the engines.

The total comes from torch.profiler's allocation events. The events' own bytes do not add up to it: a profiler sees only
the thread that started it, but many buffers are freed in gloo's threads. So the allocator is set to count for all
threads.
"""

import ctypes
import functools
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import profile

from bench.cases import CLASSIC, OF_OURS, Case
from bench.training import WARM_UP, Training, make_training
from workbench.events import Category

NUM_STEPS = 3
_MAPPINGS = Path("/proc/self/smaps")


class Classes:
    """A probe that adds up the bytes of the engine's classes.

    Attributes:
        live: bytes per class, by its name.
        peak: maximum of each class since :meth:`clear`.
        total_peak: maximum of all classes together, including RESERVED.
        comm: the kinds of communication that the units report.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory() may run within itself: any thread may collect garbage
        self.live: Counter[str] = Counter()
        self.comm: set[str] = set()
        self.clear()

    def clear(self) -> None:
        """Restart the peaks from the live bytes."""
        self.peak = Counter(self.live)
        self.total_peak = self.live.total()

    def memory(self, category: Enum, _unit: int, delta_bytes: int, *_: object) -> None:
        """Add a change that the engine announces."""
        with self._lock:
            self.live[category.name] += delta_bytes
            self.peak[category.name] = max(self.peak[category.name], self.live[category.name])
            self.total_peak = max(self.total_peak, self.live.total())

    def unit(self, info: object) -> None:
        """Note the communication of a unit."""
        self.comm.add(getattr(info, "comm", ""))

    def event(self, *_: object) -> None:
        """Ignore this, as all below."""

    phase = comm_group = readers = event


@dataclass(frozen=True)
class Bytes:
    """The bytes that the steps of one rank need.

    Attributes:
        peak: see the module docstring.
        shared: the part of ``peak`` that is mapped shared memory after the steps.
        pages: the part of ``peak`` that is pages of full parameters, used or spare; 0 for torch's.
        classes: the peak of each of the engine's classes; empty for torch's.
        classes_peak: the maximum of all classes together.
        comm: how units communicate, in the engine's words; empty for torch's, or if the engine does not report it.
        rest_of: the parts of :attr:`rest`: ``allocated``, and the shared ``shards`` and ``stages``; the temporary
            stages of reductions are in ``allocated``.
    """

    peak: int
    shared: int
    pages: int
    classes: dict[str, int]
    classes_peak: int
    comm: list[str]
    rest_of: dict[str, int]

    @property
    def rest(self) -> int:
        """The minimum within the steps: the bytes between them."""
        return sum(self.rest_of.values())


def measure_bytes(case: Case, implementation: str) -> Bytes:
    """Return the peak bytes of this rank in its steps after the warm-up."""
    count_in_all_threads()
    before = shared_bytes(_MAPPINGS.read_text())
    classes = Classes()
    is_ours = implementation in {*OF_OURS, CLASSIC}
    pages, stages = (noted_pages(), noted_stages()) if is_ours else ([(0, 0)], [(0, 0)])
    training = _warm(case, implementation, classes)
    del pages[:-1], stages[:-1]
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(NUM_STEPS):  # when a gloo thread frees a buffer is random: measure several steps
            training.step()
    shared = shared_bytes(_MAPPINGS.read_text()) - before
    dist.barrier()  # a peer that ends unmaps its part of the shared memory
    shared_always = shared - stages[-1][1]
    of_casts = classes.live[Category.RESERVED.name] - pages[-1][1] - stages[-1][1]
    sums = list(added(totals(profiler.profiler.kineto_results.experimental_event_tree()), pages, stages))
    rest_of = {"allocated": min(sums), "shards": shared_always - of_casts, "stages": of_casts}
    return Bytes(
        peak=max(sums) + shared_always,
        shared=shared,
        pages=max(num_bytes for _, num_bytes in pages),
        classes=dict(classes.peak),
        classes_peak=classes.total_peak,
        comm=sorted(classes.comm - {""}),
        rest_of=rest_of,
    )


def count_in_all_threads() -> None:
    """Make the allocator count allocations of threads that no profiler sees, too; counts begin at 0."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # otherwise it writes two lines per profile
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _warm(case: Case, implementation: str, classes: Classes) -> Training:
    """Build the training and run the steps before those that are measured."""
    if implementation in {*OF_OURS, CLASSIC}:
        from workbench.engine import probe

        probe.active = classes
    training = make_training(case, implementation)
    for _ in range(WARM_UP):
        training.step()
    gc.collect()  # torch's keeps the full originals until then
    classes.clear()
    return training


def totals(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield the time of each allocation and free in a profiler's tree of events, and the allocator's total then.

    Times are in nanoseconds of the system's clock, totals in bytes; in no particular order.
    """
    todo = list(events)
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.total_allocated


def noted_pages() -> list[tuple[int, int]]:
    """Return a list that records, from now on, each change of the bytes of full parameters' pages: (time, bytes).

    Times are in nanoseconds of the system's clock; pages count whether used or not.
    """
    from workbench.engine.backends import page_pool

    noted = [(0, 0)]

    class NotedPages(page_pool.KeptPages):
        def __init__(self, num_bytes: int) -> None:
            super().__init__(num_bytes)
            noted.append((time.time_ns(), noted[-1][1] + num_bytes))

        def __del__(self) -> None:
            super().__del__()
            noted.append((time.time_ns(), noted[-1][1] - self.num_bytes))

    page_pool.KeptPages = NotedPages
    return noted


def noted_stages() -> list[tuple[int, int]]:
    """Return a list that records, from now on, each change of the bytes of reductions' stages on this rank.

    The items are (time, bytes), in nanoseconds of the system's clock; stages count whether used or not.
    """
    from workbench.engine.backends.shared.shared_comm import SharedMemoryReduceScatter

    noted, held = [(0, 0)], Counter[int]()

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(reduce: SharedMemoryReduceScatter, *args: Any, **options: Any) -> Any:
            result = method(reduce, *args, **options)
            held[id(reduce)] = 0 if reduce.handle is None else reduce.num_bytes
            noted.append((time.time_ns(), held.total()))
            return result

        return call

    for name in ("allocate", "empty", "release"):
        setattr(SharedMemoryReduceScatter, name, noting(getattr(SharedMemoryReduceScatter, name)))
    return noted


def added(*quantities: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield the sum of quantities at each change, once all of them are known.

    Args:
        quantities: the changes of each, as (time, value).
    """
    changes = sorted((t, which, value) for which, moments in enumerate(quantities) for t, value in moments)
    present: dict[int, int] = {}
    for _, which, value in changes:
        present[which] = value
        if len(present) == len(quantities):
            yield sum(present.values())


def shared_bytes(mappings: str) -> int:
    """Return the proportional bytes (Pss) of the shared mappings in the text of ``/proc/self/smaps``.

    A page that n ranks map counts 1/n for each, so the ranks' sum is the bytes on the host.
    """
    num_kib, is_shared = 0, False
    for line in mappings.splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            is_shared = rest[0].endswith("s")
        elif first == "Pss:" and is_shared:
            num_kib += int(rest[0])
    return 1024 * num_kib
