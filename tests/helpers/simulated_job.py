"""A simulated FSDP training job: it writes a real job's rows, in the real order, with plausible times.

All ranks run the same program, so each operation is simulated on every rank at once; a collective ends when the slowest
rank has joined it. Times are a fixed model plus a jitter from ``Setup.seed``: equal setups give equal traces. For a
large job, only the first ranks may be simulated.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from workbench.events import Category, Edge, Kind, Param, Phase, Unit
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import NO_CATEGORY, ROW_DTYPE, GroupInfo, Header, RankInfo

ITEMSIZE = 4
START_NS = 5_000_000_000  # a monotonic clock does not start at 0
LATENCY_NS = 40_000
NS_PER_WIRE_BYTE = 0.8
NS_PER_COPIED_BYTE = 0.1
NS_PER_PARAM = 12.0  # forward compute of one parameter element
TICK_NS = 600  # host work between two rows
LATE = 1.4  # factor of a late rank's compute time
BASELINE_BYTES = 2**26  # of a process that has not sharded anything yet


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The job and its policy. ``num_units`` counts the root, which is the last unit; ``copies`` divides ``num_ranks``.

    ``played`` is the number of ranks, the first ones, that write rows (0: all); ``late`` is a rank whose compute takes
    longer. ``slow`` is a rank that loses ``slow_ns`` in every step in ``slow_in``: ``before`` forward, in ``forward``
    or ``backward`` of unit 0, in the ``loss``, in the ``optimizer``, ``after`` it, or ``between`` the steps.
    """

    num_ranks: int = 4
    played: int = 0
    late: int = -1
    slow: int = -1
    slow_in: str = "before"
    slow_ns: int = 200_000_000
    copies: int = 1
    num_units: int = 4
    steps: int = 3
    passes: int = 1  # of forward and backward in a step
    reduces: bool = True  # in each pass; otherwise gradients accumulate, and the last pass reduces them
    reshard_after_forward: bool | int = True
    compute_itemsize: int = ITEMSIZE
    reduce_itemsize: int = ITEMSIZE
    reshard_root: bool = False  # by default, the engine keeps a root unsharded
    prefetch: bool = True
    activations: bool = False
    samples: bool = False  # of the process's memory
    width: int = 64
    vocab: int = 97
    heads: int = 6
    seed: int = 0

    @property
    def num_played(self) -> int:
        """The number of ranks that write rows."""
        return self.played or self.num_ranks

    @property
    def shard_size(self) -> int:
        """The number of ranks that share one copy."""
        return self.num_ranks // self.copies

    def ranks_of(self, role: str) -> list[tuple[int, ...]]:
        """Return the groups of ranks that communicate for a role; each rank is in one of them."""
        size, num_ranks = self.shard_size, self.num_ranks
        if role == "replicate":
            return [tuple(range(i, num_ranks, size)) for i in range(size)]
        width = size if role == "shard" else int(self.reshard_after_forward)
        return [tuple(range(i, i + width)) for i in range(0, num_ranks, width)]

    @property
    def roles(self) -> list[str]:
        """The roles of communication: within a copy, between copies, and among fewer ranks after forward."""
        is_number = type(self.reshard_after_forward) is int
        return ["shard", *(["replicate"] if self.copies > 1 else []), *(["after forward"] if is_number else [])]


def make_header(setup: Setup) -> Header:
    """Return the header of a small GPT: blocks 0.. and a root with the embeddings."""
    root = setup.num_units - 1
    d = setup.width
    units = [
        _unit(setup, index, f"blocks.{index}", _block_shapes(d, setup.heads), setup.reshard_after_forward)
        for index in range(root)
    ]
    shapes = {"embed.weight": (setup.vocab, d), "norm.weight": (d,), "head.weight": (setup.vocab, d)}
    keeps = setup.reshard_after_forward if setup.reshard_root else False
    known = {"host": "localhost", "device": "cpu", "baseline_bytes": BASELINE_BYTES if setup.samples else 0}
    ranks = tuple(RankInfo(rank=r, pid=4000 + r, **known) for r in range(setup.num_ranks))
    return Header(
        producer="simulation",
        world_size=setup.num_ranks,
        mesh_shape=(setup.num_ranks,) if setup.copies == 1 else (setup.copies, setup.shard_size),
        mesh_axes=("shard",) if setup.copies == 1 else ("replicate", "shard"),
        ranks=ranks,
        units=(*units, _unit(setup, root, "", shapes, keeps)),
        comm_groups=tuple(
            GroupInfo(name=f"{role}: {ranks}", ranks=ranks) for role in setup.roles for ranks in setup.ranks_of(role)
        ),
        strings=("loss",),
    )


def _block_shapes(d: int, heads: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm1.weight": (d,),
        "attn.qkv.weight": (3 * d, d),
        "attn.scale": (heads,),  # has so few rows that some ranks may hold none
        "attn.proj.weight": (d, d),
        "norm2.weight": (d,),
        "mlp.up.weight": (4 * d, d),
        "mlp.down.weight": (d, 4 * d),
    }


DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}


def _unit(setup: Setup, index: int, name: str, shapes: dict[str, tuple[int, ...]], reshard: bool | int) -> Unit:
    prefix = f"{name}." if name else ""
    return Unit(
        index=index,
        name=name,
        root=setup.num_units - 1,
        params=tuple(_param(prefix + fqn, shape, setup.shard_size) for fqn, shape in shapes.items()),
        reshard_after_forward=reshard,
        shard_size=setup.shard_size,
        replicate_size=setup.copies,
        compute_dtype=DTYPES[setup.compute_itemsize],
        reduce_dtype=DTYPES[setup.reduce_itemsize],
        compute_itemsize=setup.compute_itemsize,
        reduce_itemsize=setup.reduce_itemsize,
    )


def _param(fqn: str, shape: tuple[int, ...], num_shards: int) -> Param:
    padded = math.ceil(shape[0] / num_shards)
    rows = tuple(max(0, min(padded, shape[0] - r * padded)) for r in range(num_shards))
    return Param(
        fqn=fqn,
        shape=shape,
        global_shape=shape,
        dtype="float32",
        itemsize=ITEMSIZE,
        shard_dim=0,
        rows_per_rank=rows,
        padded_rows=padded,
    )


def full_bytes(unit: Unit) -> int:
    """Return the bytes of a unit's unsharded parameters, without padding."""
    return sum(math.prod(p.shape) * p.itemsize for p in unit.params)


def padded_bytes(unit: Unit) -> int:
    """Return the bytes of all shards of a unit at rest, with padding."""
    return sum(p.padded_rows * math.prod(p.shape[1:]) * p.itemsize for p in unit.params) * unit.shard_size


def padded_elements(unit: Unit, num_ranks: int) -> int:
    """Return the elements of a unit, with the padding for this number of ranks."""
    return sum(math.ceil(p.shape[0] / num_ranks) * num_ranks * math.prod(p.shape[1:]) for p in unit.params)


def payload_bytes(unit: Unit, kind: Kind, role: str = "shard") -> int:
    """Return the payload of one of a unit's collectives, in bytes of the dtype that it sends."""
    fewer = int(unit.reshard_after_forward) if role == "after forward" else unit.shard_size
    elements = padded_elements(unit, fewer)
    if kind == Kind.ALL_GATHER:
        return elements * unit.compute_itemsize
    return elements * unit.reduce_itemsize // (unit.shard_size if kind == Kind.ALL_REDUCE else 1)


def owned_elements(unit: Unit, rank: int) -> int:
    """Return the number of a unit's elements on ``rank``, without padding."""
    return sum(p.rows_per_rank[rank] * math.prod(p.shape[1:]) for p in unit.params)


class Recorder:
    """The clocks and rows of all ranks."""

    def __init__(self, num_ranks: int, seed: int, late: int = -1) -> None:
        self.random, self.late = random.Random(seed), late
        self.clock = [START_NS + 1_000 * r for r in range(num_ranks)]
        self.rows: list[list[tuple[float, ...]]] = [[] for _ in range(num_ranks)]
        self.step, self.phase = -1, Phase.IDLE

    def put(self, kind: Kind, edge: Edge, *, rank: int, t_ns: int | None = None, **columns: float) -> None:
        """Write one row on one rank; ``t_ns`` is by default the current time."""
        c = {"num_bytes": 0, "value": math.nan, "module": -1, "comm_seq": -1, "unit": -1, "comm_group": -1} | columns
        self.clock[rank] += TICK_NS
        self.rows[rank].append(
            (
                len(self.rows[rank]),
                self.clock[rank] if t_ns is None else t_ns,
                *(c["num_bytes"], c["value"], self.step, c["module"], c["comm_seq"], c["unit"], c["comm_group"]),
                *(kind, edge, self.phase, c.get("category", NO_CATEGORY)),
            )
        )

    def all(self, kind: Kind, edge: Edge, **columns: float) -> None:
        """Write the same row on every rank."""
        for rank in range(len(self.clock)):
            self.put(kind, edge, rank=rank, **columns)

    def move(self, category: Category, unit: int, num_bytes: int) -> None:
        """Allocate (positive) or free (negative) bytes of ``category`` on every rank."""
        if num_bytes:
            kind = Kind.ALLOC if num_bytes > 0 else Kind.FREE
            self.all(kind, Edge.INSTANT, category=category, unit=unit, num_bytes=num_bytes)

    def span(self, kind: Kind, unit: int, duration_ns: float, num_bytes: int = 0) -> None:
        """Write a span on every rank."""
        self.all(kind, Edge.BEGIN, unit=unit, num_bytes=num_bytes)
        self.pass_time(duration_ns)
        self.all(kind, Edge.END, unit=unit, num_bytes=num_bytes)

    def pass_time(self, duration_ns: float) -> None:
        """Let about ``duration_ns`` pass on every rank."""
        for rank in range(len(self.clock)):
            factor = LATE if rank == self.late else 1.0
            self.clock[rank] += int(duration_ns * factor * self.random.uniform(0.97, 1.08))


class Job:
    """The program of the ranks; its methods are those of an FSDP engine."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.header = setup, make_header(setup)
        self.units, self.root = self.header.units, setup.num_units - 1
        self.out = Recorder(setup.num_played, setup.seed, setup.late)
        self.unsharded: set[int] = set()
        self.gathering: dict[int, int] = {}  # unit -> comm_seq
        self.reducing: dict[int, int] = {}
        self.ends_ns: list[int] = []  # of each collective, by comm_seq
        self.has_grads: set[int] = set()
        self.accumulated: set[int] = set()  # units that keep their unsharded gradients for the next pass
        self.reduces = True
        # a rank's group, per role
        names, places = [g.name for g in self.header.comm_groups], range(setup.num_played)
        self.groups = {
            role: [names.index(f"{role}: {next(g for g in setup.ranks_of(role) if r in g)}") for r in places]
            for role in setup.roles
        }
        self.role_of: dict[int, str] = {}  # of each collective, by comm_seq

    def train(self) -> Trace:
        """Run the whole job."""
        for unit in self.units:
            self.out.move(Category.SHARDED_PARAMS, unit.index, padded_bytes(unit) // unit.shard_size)
        for step in range(self.setup.steps):
            self.run_step(step)
        ranks = [
            RankTrace(rank, np.array(rows, dtype=ROW_DTYPE).reshape(-1)) for rank, rows in enumerate(self.out.rows)
        ]
        return Trace(self.header, tuple(ranks))

    def lose_time(self, where: str) -> None:
        """Let the slow rank lose its time, if it does so here."""
        if self.setup.slow >= 0 and where == self.setup.slow_in:
            self.out.clock[self.setup.slow] += self.setup.slow_ns

    def run_step(self, step: int) -> None:
        self.lose_time("between")
        self.out.step = step
        self.out.all(Kind.STEP, Edge.BEGIN)
        self.zero_grad()
        self.lose_time("before")
        for number in range(self.setup.passes):
            self.reduces = self.setup.reduces or number == self.setup.passes - 1
            self.forward(self.root)
            self.lose_time("loss")
            self.backward()
        self.optimize(first=step == 0)
        for rank in range(self.setup.num_played):
            loss = 1.5 + 3.0 * math.exp(-0.1 * step) + 0.01 * rank
            self.out.put(Kind.METRIC, Edge.INSTANT, rank=rank, module=0, value=loss)
        self.out.all(Kind.STEP, Edge.END)
        self.out.step = -1

    def forward(self, unit: int) -> None:
        self.out.phase = Phase.FORWARD
        self.unshard(unit)
        after = 0 if unit == self.root else unit + 1
        if self.setup.prefetch and after < self.root:
            self.unshard(after)
        self.wait_for_unshard(unit)
        self.out.all(Kind.FORWARD, Edge.BEGIN, unit=unit)
        self.compute(unit, 1.0)
        if unit == 0:
            self.lose_time("forward")
        if unit == self.root:
            for child in range(self.root):
                self.forward(child)
        if self.setup.activations:
            self.out.move(Category.ACTIVATIONS, unit, full_bytes(self.units[unit]) // 2)
        self.out.all(Kind.FORWARD, Edge.END, unit=unit)
        if self.units[unit].reshard_after_forward:
            self.reshard(unit)

    def backward(self) -> None:
        self.start_backward(self.root)
        for unit in reversed(range(self.root)):
            self.start_backward(unit)
            self.end_backward(unit)
        self.end_backward(self.root)
        self.finish_reductions(keep=0)
        self.out.phase = Phase.IDLE

    def sample(self) -> None:
        """Record the memory of the process, if the setup samples it."""
        if self.setup.samples:
            self.out.all(Kind.RESIDENT, Edge.INSTANT, num_bytes=2 * BASELINE_BYTES + len(self.unsharded))

    def start_backward(self, unit: int) -> None:
        self.sample()
        self.out.phase = Phase.PRE_BACKWARD
        self.unshard(unit)
        if self.setup.prefetch and unit > 0:
            self.unshard(unit - 1)
        self.wait_for_unshard(unit)
        self.out.phase = Phase.BACKWARD
        self.out.all(Kind.BACKWARD, Edge.BEGIN, unit=unit)
        self.compute(unit, 2.0)
        if unit == 0:
            self.lose_time("backward")

    def end_backward(self, unit: int) -> None:
        if self.setup.activations:
            self.out.move(Category.ACTIVATIONS, unit, -(full_bytes(self.units[unit]) // 2))
        self.out.all(Kind.BACKWARD, Edge.END, unit=unit)
        self.out.phase = Phase.POST_BACKWARD
        if unit not in self.accumulated:
            self.out.move(Category.UNSHARDED_GRADS, unit, full_bytes(self.units[unit]))
        self.reshard(unit)
        if not self.reduces:
            self.accumulated.add(unit)
            return
        self.accumulated.discard(unit)
        self.reduce(unit)
        self.finish_reductions(keep=1)

    def optimize(self, *, first: bool) -> None:
        self.sample()
        self.out.phase = Phase.OPTIMIZER
        self.out.all(Kind.OPTIMIZER, Edge.BEGIN)
        for unit in self.units if first else ():
            for rank in range(self.setup.num_played):
                num_bytes = 2 * ITEMSIZE * owned_elements(unit, rank % self.setup.shard_size) + ITEMSIZE * len(
                    unit.params
                )
                columns = {"category": Category.OPTIMIZER_STATE, "unit": unit.index, "num_bytes": num_bytes}
                self.out.put(Kind.ALLOC, Edge.INSTANT, rank=rank, **columns)
        self.out.pass_time(sum(padded_bytes(u) for u in self.units) / self.setup.num_ranks)
        self.lose_time("optimizer")
        self.out.all(Kind.OPTIMIZER, Edge.END)
        self.lose_time("after")
        self.out.phase = Phase.IDLE

    def zero_grad(self) -> None:
        for unit in sorted(self.has_grads):
            self.out.move(Category.SHARDED_GRADS, unit, -(padded_bytes(self.units[unit]) // self.setup.shard_size))
        self.has_grads.clear()

    def take_grads(self, unit: int) -> None:
        """Keep the rank's shard of the gradients, or add it to that of the previous pass."""
        if unit not in self.has_grads:
            self.out.move(Category.SHARDED_GRADS, unit, padded_bytes(self.units[unit]) // self.setup.shard_size)
        self.has_grads.add(unit)

    def compute(self, unit: int, factor: float) -> None:
        self.out.pass_time(factor * NS_PER_PARAM * full_bytes(self.units[unit]) / ITEMSIZE)

    def copy(self, kind: Kind, unit: int, num_bytes: int) -> None:
        self.out.span(kind, unit, num_bytes * NS_PER_COPIED_BYTE, num_bytes)

    # unsharding

    def gather_buffer_bytes(self, unit: int) -> int:
        """Return the bytes of the rank's shard and the output."""
        payload = payload_bytes(self.units[unit], Kind.ALL_GATHER)
        return payload + payload // self.setup.shard_size

    def unshard(self, unit: int) -> None:
        """Issue the all-gather of a unit, if it needs one."""
        if unit in self.unsharded or unit in self.gathering:
            return
        self.out.all(Kind.UNSHARD, Edge.BEGIN, unit=unit)
        self.gathering[unit] = -1
        if self.setup.shard_size > 1:
            self.out.move(Category.ALL_GATHER_BUFFERS, unit, self.gather_buffer_bytes(unit))
            self.copy(Kind.COPY_IN, unit, payload_bytes(self.units[unit], Kind.ALL_GATHER) // self.setup.shard_size)
            is_later = self.out.phase != Phase.FORWARD and type(self.units[unit].reshard_after_forward) is int
            self.gathering[unit] = self.issue(Kind.ALL_GATHER, unit, "after forward" if is_later else "shard")

    def wait_for_unshard(self, unit: int) -> None:
        """Make a unit's parameters usable."""
        if unit in self.unsharded:
            return
        comm_seq = self.gathering.pop(unit)
        if comm_seq >= 0:
            self.wait(Kind.ALL_GATHER, unit, comm_seq)
        self.out.move(Category.UNSHARDED_PARAMS, unit, full_bytes(self.units[unit]))
        self.copy(Kind.COPY_OUT, unit, full_bytes(self.units[unit]))
        if comm_seq >= 0:
            self.out.move(Category.ALL_GATHER_BUFFERS, unit, -self.gather_buffer_bytes(unit))
        self.out.all(Kind.UNSHARD, Edge.END, unit=unit)
        self.unsharded.add(unit)

    def reshard(self, unit: int) -> None:
        self.out.all(Kind.RESHARD, Edge.INSTANT, unit=unit)
        self.out.move(Category.UNSHARDED_PARAMS, unit, -full_bytes(self.units[unit]))
        self.unsharded.remove(unit)

    # reduction

    def reduce_buffer_bytes(self, unit: int) -> int:
        """Return the bytes of the input and the rank's part of the output."""
        return self.gather_buffer_bytes(unit)

    def reduce(self, unit: int) -> None:
        """Issue the reduction of a unit's gradients."""
        full = full_bytes(self.units[unit])
        if self.setup.num_ranks == 1:
            self.take_grads(unit)
            self.out.move(Category.UNSHARDED_GRADS, unit, -full)
            return
        self.out.move(Category.REDUCE_SCATTER_BUFFERS, unit, self.reduce_buffer_bytes(unit))
        self.copy(Kind.COPY_IN, unit, full)
        self.out.move(Category.UNSHARDED_GRADS, unit, -full)
        first = Kind.REDUCE_SCATTER if self.setup.shard_size > 1 else Kind.ALL_REDUCE
        self.reducing[unit] = self.issue(first, unit, "shard" if first == Kind.REDUCE_SCATTER else "replicate")

    def finish_reductions(self, *, keep: int) -> None:
        """Wait for all but the ``keep`` newest reductions."""
        for unit in list(self.reducing)[: max(0, len(self.reducing) - keep)]:
            if self.setup.shard_size > 1:
                self.wait(Kind.REDUCE_SCATTER, unit, self.reducing[unit])
                if self.setup.copies > 1:
                    self.reducing[unit] = self.issue(Kind.ALL_REDUCE, unit, "replicate")
            if self.setup.copies > 1:
                self.wait(Kind.ALL_REDUCE, unit, self.reducing[unit])
            del self.reducing[unit]
            shard = padded_bytes(self.units[unit]) // self.setup.shard_size
            self.take_grads(unit)
            self.copy(Kind.COPY_OUT, unit, shard)
            self.out.move(Category.REDUCE_SCATTER_BUFFERS, unit, -self.reduce_buffer_bytes(unit))

    # collectives

    def issue(self, kind: Kind, unit: int, role: str) -> int:
        """Begin a collective; it transfers once the slowest rank has joined and the previous one is done."""
        comm_seq, payload = len(self.ends_ns), payload_bytes(self.units[unit], kind, role)
        self.role_of[comm_seq] = role
        self.put_all(kind, Edge.BEGIN, comm_seq, unit=unit, num_bytes=payload)
        begin = max(self.out.clock + self.ends_ns[-1:])
        self.ends_ns.append(begin + LATENCY_NS + int(payload * NS_PER_WIRE_BYTE))
        return comm_seq

    def wait(self, kind: Kind, unit: int, comm_seq: int) -> None:
        """Wait on every rank; the END row carries the collective's true end, which may be before the wait."""
        end_ns = self.ends_ns[comm_seq]
        self.put_all(Kind.WAIT, Edge.BEGIN, comm_seq, unit=unit)
        self.out.clock = [max(now, end_ns) for now in self.out.clock]
        self.put_all(Kind.WAIT, Edge.END, comm_seq, unit=unit)
        payload = payload_bytes(self.units[unit], kind, self.role_of[comm_seq])
        self.put_all(kind, Edge.END, comm_seq, t_ns=end_ns, unit=unit, num_bytes=payload)

    def put_all(self, kind: Kind, edge: Edge, comm_seq: int, **columns: float) -> None:
        """Write a row of a collective on every rank, with its own group."""
        for rank, group in enumerate(self.groups[self.role_of[comm_seq]]):
            self.out.put(kind, edge, rank=rank, comm_seq=comm_seq, comm_group=group, **columns)


def simulate(setup: Setup) -> Trace:
    """Return the trace of the job that ``setup`` describes."""
    return Job(setup).train()


def with_loss(trace: Trace, step: int, loss: float) -> Trace:
    """Return the trace with another loss of one step, on all ranks."""
    ranks = []
    for rank_trace in trace.ranks:
        rows = rank_trace.rows.copy()
        rows["value"][(rows["kind"] == Kind.METRIC) & (rows["step"] == step)] = loss
        ranks.append(RankTrace(rank_trace.rank, rows, rank_trace.start))
    return Trace(trace.header, tuple(ranks))


def example_trace(
    num_ranks: int = 4, num_units: int = 4, steps: int = 3, *, reshard_after_forward: bool = True
) -> Trace:
    """Return one fixed, realistic trace: ``num_units - 1`` blocks and their root (the last unit)."""
    return simulate(
        Setup(num_ranks=num_ranks, num_units=num_units, steps=steps, reshard_after_forward=reshard_after_forward)
    )
