"""The cost for the ranks of being watched, and the bytes that this takes: on a real cluster.

Blocks of steps alternate: ``plain`` (nothing is recorded), ``unwatched`` (recorded, without requests to the ranks),
``watched`` (a cell waits for the steps, draining the ranks, and a dashboard's view, or a panel, requests updates as the
browser does, at most ten times a second, in another thread as in a notebook). CPU time is that of the ranks' processes,
with all threads. It excludes the notebook's own process, the server and the browser; these take a core from the ranks
if there are no more cores than ranks, which shows in the wall times.

Bytes: of a drain, the answer's JSON and its rows; to the browser, whole messages of the Jupyter protocol with their
envelopes, except a view's first answer, which covers the time before it was opened.
"""

import json
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jupyter_client.session import Session

from bench.stats import median_interval, rotated
from workbench.base.codec import encode
from workbench.cluster import Cluster
from workbench.live.messages import VERSION, GetState, Hello, State, Welcome
from workbench.panel.client import Client
from workbench.protocol.commands import RankRequest, Step, to_dict
from workbench.protocol.rank_messages import DrainReply
from workbench.session.session import RUNTIME
from workbench.widgets.dashboard import DashboardWidget
from workbench.workbench import Workbench

R = TypeVar("R")
Tree = dict[str, Any]
PLAIN, UNWATCHED, WATCHED = "plain", "unwatched", "watched"
ON_RANK = "bench.on_rank"
ASK_EVERY_S, LOOK_S = 0.1, 0.02
ANSWER_S = 60.0
LONG_S = 300.0
WARM_UP = 4


class CountedCluster(Cluster):
    """A cluster that counts the bytes of drains."""

    drained_bytes = 0

    def ask(
        self, request: RankRequest[R], ranks: Iterable[int] | None = None, timeout_s: float = 2.0
    ) -> dict[int, R | Exception]:
        """As :meth:`Cluster.ask`."""
        replies = super().ask(request, ranks, timeout_s)
        self.drained_bytes += sum(size_of(reply) for reply in replies.values() if isinstance(reply, DrainReply))
        return replies


def size_of(recorded: DrainReply) -> int:
    """Return the bytes of a control channel's answer: its JSON and its buffers."""
    buffers: list[memoryview] = []
    return len(json.dumps(encode(recorded, buffers))) + sum(buffer.nbytes for buffer in buffers)


class Viewer(ABC):
    """One view in a browser that requests updates and counts the answers.

    Attributes:
        sizes: bytes of each answer, including the envelope.
        times_s: arrival of each answer, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.times_s: list[float] = []
        self._session = Session()
        self._parent = self._session.msg("comm_msg", {"comm_id": self._session.session, "data": {}})
        self._is_answered = threading.Event()
        self._is_answered.set()

    @abstractmethod
    def ask(self, *, wait: bool) -> None:
        """Request the state: at once, or when there is something new."""

    @abstractmethod
    def close(self) -> None:
        """Close the other side."""

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Send requests while the body runs: one at a time, and at most ten per second.

        Raises:
            RuntimeError: a request was not answered; ipywidgets has logged the reason.
        """
        over = threading.Event()
        thread = threading.Thread(target=self._ask_until, args=(over,), name="viewer")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if not self._is_answered.wait(ANSWER_S):  # otherwise it would be answered later
            raise RuntimeError(f"it did not answer within {ANSWER_S} s")

    def _ask_until(self, over: threading.Event) -> None:
        due_s = 0.0
        while not over.wait(LOOK_S):
            now = time.monotonic()
            if self._is_answered.is_set() and now >= due_s:
                self._is_answered.clear()
                due_s = now + ASK_EVERY_S
                self.ask(wait=bool(self.sizes))

    def _take(self, data: dict[str, Any], buffers: Sequence[bytes] | None) -> None:
        message = self._session.msg("comm_msg", {"comm_id": self._session.session, "data": data}, self._parent)
        parts = [*self._session.serialize(message), *(buffers or ())]
        self.sizes.append(sum(memoryview(part).nbytes for part in parts))
        self.times_s.append(time.monotonic())
        self._is_answered.set()

    def kib_per_s(self) -> float:
        """Return the rate of everything after the first answer."""
        return sum(self.sizes[1:]) / 1024 / (self.times_s[-1] - self.times_s[0])


class DashboardViewer(Viewer):
    """A view of a dashboard."""

    def __init__(self, workbench: Workbench) -> None:
        super().__init__()
        self._dashboard = DashboardWidget(workbench)
        self._dashboard.send = self._sent

    def ask(self, *, wait: bool) -> None:
        """As :meth:`Viewer.ask`."""
        self._dashboard._handle_custom_msg({"view": "bench", "word": "feed", "wait": wait}, [])

    def close(self) -> None:
        """As :meth:`Viewer.close`."""
        self._dashboard.close()

    def _sent(self, content: dict[str, Any], buffers: Sequence[bytes] | None = None) -> None:
        self._take({"method": "custom", "content": content}, buffers)


class PanelViewer(Viewer):
    """A panel of JupyterLab, and the comm that it has opened."""

    def __init__(self, workbench: Workbench) -> None:
        super().__init__()
        self._panel = Client(workbench, self, version="bench")
        self._receive({"word": Hello.word, "number": 0, "version": VERSION, "extension": "bench"})

    def ask(self, *, wait: bool) -> None:
        """As :meth:`Viewer.ask`."""
        self._receive({"word": GetState.word, "number": len(self.sizes) + 1, "wait": wait})

    def close(self) -> None:
        """As :meth:`Viewer.close`."""
        self._panel.close()

    # ---- the comm

    def send(self, data: dict[str, Any], *, buffers: list[bytes] | None = None) -> None:
        """Take a message of the panel."""
        if data["word"] == State.word:
            self._take(data, buffers)
        elif data["word"] != Welcome.word:
            raise RuntimeError(f"the panel says {data}")

    def on_msg(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Let ``callback`` read the requests."""
        self._receive = lambda data: callback({"content": {"data": data}})

    def on_close(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Ignore: only this side closes it."""


VIEWERS: dict[str, Callable[[Workbench], Viewer]] = {"dashboard": DashboardViewer, "panel": PanelViewer}


@dataclass
class Blocks:
    """The times of blocks of steps, by kind; nanoseconds per step.

    Attributes:
        cpu_ns: mean over the ranks.
        wall_ns: of the slowest rank.
    """

    cpu_ns: dict[str, list[float]] = field(default_factory=dict)
    wall_ns: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, marks: Sequence[Sequence[Sequence[int]]]) -> None:
        """Add one block: per rank, CPU time and time at the end of each step."""
        cpu_ns, wall_ns = ([(rank[-1][i] - rank[0][i]) / (len(rank) - 1) for rank in marks] for i in (0, 1))
        self.cpu_ns.setdefault(name, []).append(statistics.fmean(cpu_ns))
        self.wall_ns.setdefault(name, []).append(max(wall_ns))

    def ratios(self) -> Tree:
        """Return medians, and ratios of neighbouring blocks with the interval of their median."""
        found: Tree = {}
        for what, blocks in (("cpu", self.cpu_ns), ("wall", self.wall_ns)):
            found |= {f"{name}_{what}_ms": statistics.median(values) / 1e6 for name, values in blocks.items()}
            for other in (PLAIN, UNWATCHED):
                pairs = [a / b for a, b in zip(blocks[WATCHED], blocks[other], strict=True)]
                low, high = median_interval(pairs)
                found |= {
                    f"{what}_to_{other}": statistics.median(pairs),
                    f"{what}_to_{other}_low": low,
                    f"{what}_to_{other}_high": high,
                }
        return found


@contextmanager
def training(case: str, num_ranks: int) -> Iterator[tuple[Workbench, CountedCluster]]:
    """Yield a workbench whose ranks are ready to train the model of a case, and its cluster."""
    made: list[CountedCluster] = []

    def factory(*args: Any, **settings: Any) -> CountedCluster:
        made.append(CountedCluster(*args, **settings))
        return made[-1]

    with Workbench(num_ranks, device="cpu", cluster_factory=factory) as workbench:
        cluster = made[0]
        cluster.apply(f"{ON_RANK}:build", case).results(LONG_S)
        workbench.shard("model", wrap=["Block"])
        cluster.apply(f"{ON_RANK}:make_trainable", case).results(LONG_S)
        workbench.step(WARM_UP)
        yield workbench, cluster


def measure_watched(case: str, num_ranks: int, rounds: int, block_s: float, viewer: str = "dashboard") -> Tree:
    """Return the cost of watching: see the module docstring.

    Args:
        case: name of one of :data:`bench.cases.RECORDED`.
        num_ranks: ranks that train.
        rounds: blocks of each kind.
        block_s: approximate duration of a block.
        viewer: the kind of viewer, one of :data:`VIEWERS`.
    """
    blocks = Blocks()
    with training(case, num_ranks) as (workbench, cluster):
        num_steps = _steps_in(workbench, block_s)
        watching = VIEWERS[viewer](workbench)
        run: dict[str, Callable[[], object]] = {
            PLAIN: lambda: cluster.apply(f"{ON_RANK}:train_unrecorded", num_steps).results(LONG_S),
            UNWATCHED: lambda: cluster.apply(f"{RUNTIME}:execute", to_dict(Step(count=num_steps))).results(LONG_S),
            WATCHED: lambda: _watch(workbench, watching, num_steps),
        }
        drained_bytes = 0
        for number in range(rounds):
            for name in rotated(tuple(run), number):
                workbench.pulse()  # drain what earlier blocks left
                _marks(cluster)
                before = cluster.drained_bytes
                run[name]()
                drained_bytes += cluster.drained_bytes - before if name == WATCHED else 0
                blocks.add(name, _marks(cluster))
        watching.close()
    drained_kb = drained_bytes / 1e3 / (rounds * num_steps * num_ranks)
    return {"num_steps": num_steps, "rounds": rounds, "drained_kb": drained_kb, **blocks.ratios()}


def measure_to_browser(num_ranks: int, seconds: float, case: str = "0.23M") -> Tree:
    """Return the rate at which one view of a dashboard gets data while ``num_ranks`` ranks train, in KiB a second."""
    with training(case, num_ranks) as (workbench, _):
        viewer = DashboardViewer(workbench)
        num_steps = _steps_in(workbench, seconds)
        _watch(workbench, viewer, num_steps)
        viewer.close()
        num_rows = workbench.trace.num_rows
    return {
        "num_ranks": num_ranks,
        "kib_per_s": viewer.kib_per_s(),
        "first_kib": viewer.sizes[0] / 1024,
        "answers": len(viewer.sizes),
        "seconds": viewer.times_s[-1] - viewer.times_s[0],
        "num_steps": num_steps,
        "num_rows": num_rows,
    }


def _watch(workbench: Workbench, viewer: Viewer, num_steps: int) -> None:
    with viewer.asking():
        workbench.step(num_steps)


def _steps_in(workbench: Workbench, seconds: float) -> int:
    """Return about how many steps take ``seconds``; at least 3, as a block is timed between the ends of its steps."""
    begin = time.monotonic()
    workbench.step(WARM_UP)
    return max(3, round(seconds * WARM_UP / (time.monotonic() - begin)))


def _marks(cluster: Cluster) -> list[list[list[int]]]:
    return list(cluster.apply(f"{ON_RANK}:take_marks").results(LONG_S).values())
