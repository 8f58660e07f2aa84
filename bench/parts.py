"""The time that a step of ours takes beyond compute alone, by part.

Measured in separate steps: a :class:`Meter` is the engine's probe, and also Python's profile function, which reports
when the engine's code is entered and left. Time belongs to the innermost open part::

    step     |..compute..|--hook--------------------------------|..compute..
    engine               |hooks| COPY_IN |hooks| issue |  WAIT  |
    counted              |hooks| copies  |hooks| issue |  wire  |

* ``wire``: the engine waits (WAIT, and ``PendingWork.wait`` also without a WAIT event). It excludes the part of a
  collective that computation hides, and includes the wait for a late peer.
* ``issue``: within the calls of the all-gather and the reduce-scatter themselves, which start a collective. If a pair
  moves its bytes in that call, as over shared memory, this counts here.
* ``copies``: COPY_IN, and the COPY_OUT of all-gathers.
* ``sum``: the COPY_OUT of reduce-scatters, in which a rank adds up its own and its peers' data.
* ``hooks``: all other time in the engine's code, in forward and backward; also the division by the number of ranks,
  casts and handing out the gradients if they are outside the spans above.
* ``optimizer``: its step and ``zero_grad``, minus those of compute alone. Negative: a rank updates only its shards.
* ``not covered``: the rest of the metered step above compute alone: slower computation (colder caches, threads of gloo
  on the same core), torch's code that calls hooks, autograd's own hooks, and the meter's cost outside of the engine.
  Also, medians of parts need not add up to the median of the whole.

The meter also lengthens ``hooks`` and ``issue``. Its total cost is the difference of the last two lines: metered and
plain steps above compute alone. Each step's parts are those of the slowest rank.
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from bench.cases import Case
from bench.training import warm


class Part(Enum):
    """The parts of a step's time."""

    WIRE = "wire"
    ISSUE = "issue"
    COPIES = "copies"
    SUM = "sum"
    HOOKS = "hooks"


_ENDINGS = (  # of the qualified names of functions whose time does not count as hooks
    ("AllGather.__call__", Part.ISSUE),
    ("ReduceScatter.__call__", Part.ISSUE),
    ("PendingWork.wait", Part.WIRE),
    ("StreamWork.wait", Part.WIRE),
)
_NO_FRAME = None


class Meter:
    """Adds up the time of each part.

    Args:
        engine: the folder of the engine's code.
        clock: monotonic time in nanoseconds.

    Attributes:
        total_ns: per part, since the last :meth:`clear`.
    """

    def __init__(self, engine: Path, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._folder = f"{engine}/"
        self._clock = clock
        self._thread = threading.get_ident()
        self._is_engine: dict[str, bool] = {}
        self._functions: dict[str, Part] = {}
        self._open: list[tuple[Part, FrameType | None]] = []  # with the frame that ends it, or None for an event
        self._last_collective: dict[int, str] = {}
        self.clear()

    def clear(self) -> None:
        """Restart at zero."""
        self.total_ns = dict.fromkeys(Part, 0)
        self._since_ns = self._clock()

    # ---- Python's side

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        """See ``sys.setprofile``."""
        if event == "call":
            if self._of_engine(frame.f_code.co_filename):
                self._entered(frame)
        elif event == "return" and self._open and any(owner is frame for _, owner in self._open):
            while self._pop() is not frame:
                pass  # an exception left a span of the probe open

    def _of_engine(self, filename: str) -> bool:
        if filename not in self._is_engine:
            self._is_engine[filename] = filename.startswith(self._folder)
        return self._is_engine[filename]

    def _part_of_function(self, qualname: str) -> Part:
        if qualname not in self._functions:
            found = (part for ending, part in _ENDINGS if qualname.endswith(ending))
            self._functions[qualname] = next(found, Part.HOOKS)
        return self._functions[qualname]

    def _entered(self, frame: FrameType) -> None:
        part = self._part_of_function(frame.f_code.co_qualname)
        if part is not Part.HOOKS or not self._open:
            self._push(part, frame)

    # ---- the probe's side

    def event(self, kind: Enum, edge: Enum, unit: int, *_: object) -> None:
        """Take an event of the engine."""
        if kind.name in {"ALL_GATHER", "REDUCE_SCATTER"} and edge.name == "END":
            self._last_collective[unit] = kind.name
        if kind.name in {"WAIT", "COPY_IN", "COPY_OUT"} and threading.get_ident() == self._thread:
            if edge.name == "BEGIN":
                self._push(self._part_of(kind.name, unit), _NO_FRAME)
            elif self._open and self._open[-1][1] is None:
                self._pop()

    def _part_of(self, kind: str, unit: int) -> Part:
        if kind == "WAIT":
            return Part.WIRE
        is_sum = kind == "COPY_OUT" and self._last_collective.get(unit) == "REDUCE_SCATTER"
        return Part.SUM if is_sum else Part.COPIES

    def memory(self, *_: object) -> None:
        """Ignore this, as all below."""

    phase = unit = comm_group = readers = memory

    # ---- time

    def _push(self, part: Part, frame: FrameType | None) -> None:
        self._settle()
        self._open.append((part, frame))

    def _pop(self) -> FrameType | None:
        self._settle()
        return self._open.pop()[1]

    def _settle(self) -> None:
        """Add the time since the last change to the innermost part."""
        now_ns = self._clock()
        if self._open:
            self.total_ns[self._open[-1][0]] += now_ns - self._since_ns
        self._since_ns = now_ns


@dataclass(frozen=True)
class MeteredStep:
    """One step on one rank, in nanoseconds: the whole step, the optimizer, and each part by name."""

    wall_ns: int
    optimizer_ns: int
    parts_ns: dict[str, int]


def measure_parts(case: Case, implementation: str, num_steps: int) -> list[MeteredStep]:
    """Return ``num_steps`` metered steps of this rank; ``implementation`` is one of ours."""
    training = warm(case, implementation)
    from workbench.engine import probe

    probe.active = meter = Meter(Path(probe.__file__).parent)
    steps = []
    for _ in range(num_steps):
        dist.barrier()
        meter.clear()
        begin = time.perf_counter_ns()
        sys.setprofile(meter.profile)
        training.backward()
        sys.setprofile(None)
        middle = time.perf_counter_ns()
        parts_ns = {part.value: total for part, total in meter.total_ns.items()}
        training.update()
        end = time.perf_counter_ns()
        steps.append(MeteredStep(end - begin, end - middle, parts_ns))
    probe.active = None
    return steps


def budget(ranks: Sequence[Sequence[MeteredStep]], step_ms: float, alone_ms: Mapping[str, float]) -> dict[str, float]:
    """Return the parts in milliseconds, medians over steps, and the remainder.

    Args:
        ranks: metered steps of each rank, concatenated over all starts.
        step_ms: median of the implementation's plain steps.
        alone_ms: medians of compute alone, ``{"wall": ..., "optimizer": ...}``.
    """
    slowest = [max(step, key=lambda s: s.wall_ns) for step in zip(*ranks, strict=True)]
    parts = {part.value: statistics.median(s.parts_ns[part.value] for s in slowest) / 1e6 for part in Part}
    parts["optimizer"] = statistics.median(s.optimizer_ns for s in slowest) / 1e6 - alone_ms["optimizer"]
    metered = statistics.median(s.wall_ns for s in slowest) / 1e6 - alone_ms["wall"]
    return {
        **{f"{name}_ms": value for name, value in parts.items()},
        "not_covered_ms": metered - sum(parts.values()),
        "above_alone_metered_ms": metered,
        "above_alone_ms": step_ms - alone_ms["wall"],
    }
