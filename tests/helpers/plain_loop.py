"""A second source of events: fully sharded training in plain Python, by ranks that take turns in one thread.

The model multiplies a vector element by element by the weights of each unit in turn. Of the workbench, it uses only the
words of ``workbench.events`` and the probes that it gets.
"""

from collections import Counter

from workbench.events import Category, Comm, Edge, Kind, Param, ParamTensors, Phase, Probe, Unit

ITEMSIZE = 8
NAME = "plain loop"


def _name(unit: int) -> str:
    return f"layers.{unit - 1}" if unit else ""


def _fqn(unit_name: str) -> str:
    return f"{unit_name}.weight" if unit_name else "weight"


class OnRank:
    """The loop as one rank's source of events."""

    name = NAME

    def __init__(self, loop: "PlainLoop", rank: int):
        self._loop, self._rank = loop, rank

    def has(self, unit: int) -> bool:
        return bool(self.tensors(unit))

    def tensors(self, unit: int) -> dict[str, ParamTensors]:
        return self._loop.tensors(self._rank, unit)


class PlainLoop:
    """Trains on as many ranks as there are probes.

    Attributes:
        losses: of each step, the mean over ranks.
        live: bytes alive on one rank, by class, as the loop itself counts them.
        peak: maximum of their sum.
    """

    def __init__(self, probes: list[Probe], *, layers: int = 3, rows: int = 8, reshard_after_forward: bool = True):
        self.losses: list[float] = []
        self.live: Counter[Category] = Counter()
        self.peak = 0
        self._probes, self._size, self._rows, self._reshards = probes, len(probes), rows, reshard_after_forward
        self._calls = 0
        self._num_bytes = rows * ITEMSIZE  # of a unit's full parameters; ranks divide the rows
        self._full: dict[int, list[float]] = {}
        self._inputs = [[1 + 0.1 * rank + 0.01 * row for row in range(rows)] for rank in range(self._size)]
        share = rows // self._size
        self._shards = [[[0.9] * share for _ in probes] for _ in range(layers + 1)]  # [unit][rank][row]
        self._grads: dict[int, list[list[float]]] = {}
        self._whole_grads: dict[int, list[list[float]]] = {}
        for rank, probe in enumerate(probes):
            probe.source(OnRank(self, rank))
        self._call_probes("comm_group", 0, tuple(range(self._size)))
        for index in range(layers + 1):
            self._call_probes("unit", self._unit(index, _name(index), share))
            self._move(Category.SHARDED_PARAMS, index, share * ITEMSIZE)

    def _unit(self, index: int, name: str, share: int) -> Unit:
        param = Param(
            fqn=_fqn(name),
            shape=(self._rows,),
            global_shape=(self._rows,),
            dtype="float64",
            itemsize=ITEMSIZE,
            shard_dim=0,
            rows_per_rank=(share,) * self._size,
            padded_rows=share,
        )
        return Unit(
            index=index,
            name=name,
            root=0,
            params=(param,),
            reshard_after_forward=self._reshards and index > 0,
            shard_size=self._size,
            compute_dtype="float64",
            reduce_dtype="float64",
            compute_itemsize=ITEMSIZE,
            reduce_itemsize=ITEMSIZE,
        )

    def tensors(self, rank: int, unit: int) -> dict[str, ParamTensors]:
        """Return the tensors of a unit's weights on a rank."""
        if unit not in range(len(self._shards)):
            return {}
        grad = self._grads[unit][rank] if unit in self._grads else None
        whole = self._whole_grads.get(unit)
        held = ParamTensors(
            shard=self._shards[unit][rank],
            shard_rank=rank,
            full=self._full.get(unit),
            full_grads=() if whole is None else (whole[rank],),
            sharded_grad=grad,
        )
        return {_fqn(_name(unit)): held}

    # ---- the probes of all ranks

    def _call_probes(self, what: str, *args: object) -> None:
        for probe in self._probes:
            getattr(probe, what)(*args)

    def _event(self, kind: Kind, edge: Edge, unit: int = -1, num_bytes: int = 0, comm: Comm | None = None) -> None:
        self._call_probes("event", kind, edge, unit, num_bytes, comm, None)

    def _move(self, category: Category, unit: int, num_bytes: int) -> None:
        self._call_probes("memory", category, unit, num_bytes)
        self.live[category] += num_bytes
        self.peak = max(self.peak, self.live.total())

    # ---- training

    def step(self) -> None:
        """Run one forward, backward and optimizer step."""
        self._call_probes("begin_step")
        inputs, outputs = self._forward()
        losses = [sum((y - 1) ** 2 for y in output) / self._rows for output in outputs]
        self.losses.append(sum(losses) / self._size)
        self._call_probes("metric", "loss", self.losses[-1])
        self._backward(inputs, [[2 * (y - 1) / self._rows for y in output] for output in outputs])
        self._call_probes("phase", Phase.OPTIMIZER)
        self._event(Kind.OPTIMIZER, Edge.BEGIN)
        self._optimize()
        self._event(Kind.OPTIMIZER, Edge.END)
        self._call_probes("phase", Phase.IDLE)
        self._call_probes("end_step")

    def _forward(self) -> tuple[dict[int, list[list[float]]], list[list[float]]]:
        """Return the inputs of each unit on each rank, and the outputs; the root's own weights are applied last."""
        self._call_probes("phase", Phase.FORWARD)
        self._gather(0)
        self._event(Kind.FORWARD, Edge.BEGIN, 0)
        inputs, values = {}, self._inputs
        for unit in [*range(1, len(self._shards)), 0]:
            if unit:
                self._gather(unit)
                self._event(Kind.FORWARD, Edge.BEGIN, unit)
            inputs[unit] = values
            values = [[w * x for w, x in zip(self._full[unit], own, strict=True)] for own in values]
            self._event(Kind.FORWARD, Edge.END, unit)
            if unit and self._reshards:
                self._reshard(unit)
        return inputs, values

    def _backward(self, inputs: dict[int, list[list[float]]], grads: list[list[float]]) -> None:
        for unit in [0, *reversed(range(1, len(self._shards)))]:
            self._call_probes("phase", Phase.PRE_BACKWARD)
            if unit not in self._full:
                self._gather(unit)
            self._call_probes("phase", Phase.BACKWARD)
            self._event(Kind.BACKWARD, Edge.BEGIN, unit)
            self._move(Category.UNSHARDED_GRADS, unit, self._num_bytes)
            own = [[g * x for g, x in zip(*pair, strict=True)] for pair in zip(grads, inputs[unit], strict=True)]
            self._whole_grads[unit] = own
            grads = [[g * w for g, w in zip(grad, self._full[unit], strict=True)] for grad in grads]
            self._event(Kind.BACKWARD, Edge.END, unit)
            self._call_probes("phase", Phase.POST_BACKWARD)
            self._reshard(unit)
            self._reduce(unit, own)

    def _optimize(self) -> None:
        for unit, grads in self._grads.items():
            self._shards[unit] = [
                [w - 0.2 * g for w, g in zip(*pair, strict=True)]
                for pair in zip(self._shards[unit], grads, strict=True)
            ]
            self._move(Category.SHARDED_GRADS, unit, -self._num_bytes // self._size)
        self._grads.clear()

    # ---- communication

    def _gather(self, unit: int) -> None:
        self._event(Kind.UNSHARD, Edge.BEGIN, unit)
        self._move(Category.UNSHARDED_PARAMS, unit, self._num_bytes)
        self._full[unit] = [
            row for shard in self._communicate(Kind.ALL_GATHER, unit, self._shards[unit]) for row in shard
        ]
        self._event(Kind.UNSHARD, Edge.END, unit)

    def _reduce(self, unit: int, grads: list[list[float]]) -> None:
        self._move(Category.SHARDED_GRADS, unit, self._num_bytes // self._size)
        mean = [
            sum(rows) / self._size for rows in zip(*self._communicate(Kind.REDUCE_SCATTER, unit, grads), strict=True)
        ]
        share = self._rows // self._size
        del self._whole_grads[unit]
        self._grads[unit] = [mean[rank * share : (rank + 1) * share] for rank in range(self._size)]
        self._move(Category.UNSHARDED_GRADS, unit, -self._num_bytes)

    def _communicate(self, kind: Kind, unit: int, values: list[list[float]]) -> list[list[float]]:
        comm, self._calls = Comm(group=0, seq=self._calls), self._calls + 1
        self._event(kind, Edge.BEGIN, unit, self._num_bytes, comm)
        self._event(Kind.WAIT, Edge.BEGIN, unit, comm=comm)
        self._event(Kind.WAIT, Edge.END, unit, comm=comm)
        self._event(kind, Edge.END, unit, self._num_bytes, comm)
        return values

    def _reshard(self, unit: int) -> None:
        self._event(Kind.RESHARD, Edge.INSTANT, unit)
        del self._full[unit]
        self._move(Category.UNSHARDED_PARAMS, unit, -self._num_bytes)
