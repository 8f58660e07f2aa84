"""What a rank says of one parameter, asked while it stands inside a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.events import UnitState

Number = float | str
"""A number; text where JSON has none for it: ``nan``, ``inf``, ``-inf``."""


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """What lies on a rank of one tensor.

    Attributes:
        shape: of what lies here, in elements; empty: a scalar.
        dtype: such as ``float32``.
        device: such as ``cpu``.
        num_bytes: of what lies here.
        norm, mean, max_abs: 2-norm, mean and largest magnitude; None: there is none of no values, or of such a dtype.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    num_bytes: int
    norm: Number | None
    mean: Number | None
    max_abs: Number | None


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """The rows of a parameter that are this rank's.

    Attributes:
        dim: tensor dimension that is split; None: it lies in a flat parameter, and elements stand for rows.
        first_row: number of the first row along it.
        num_rows: how many there are; 0: none.
        of_rows: rows of all ranks together.
        values: what is in them.
    """

    dim: int | None
    first_row: int
    num_rows: int
    of_rows: int
    values: TensorFacts


@dataclass(frozen=True, kw_only=True)
class FullFacts:
    """The whole parameter.

    Attributes:
        state: where it is.
        why: why it is there, or is not, a phrase.
        values: what is in it; None: it is not in memory.
    """

    state: UnitState
    why: str
    values: TensorFacts | None


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """What an optimizer keeps of a parameter.

    Attributes:
        name: variable that holds it.
        type: its class.
        state: its tensors by name; empty: none yet.
    """

    name: str
    type: str
    state: dict[str, TensorFacts]


@dataclass(frozen=True, kw_only=True)
class InspectReply:
    """A parameter as one rank has it.

    Attributes:
        fqn: its name in its model.
        model: variable that holds its model; empty: none does.
        unit: name of its unit, empty: the root.
        global_shape: of the whole parameter, in elements.
        trainable: whether it takes a gradient.
        shard: this rank's rows.
        full: the whole parameter.
        full_grad: gradient of the whole parameter, the bytes of what was accumulated with it; None: there is none.
        sharded_grad: gradient of this rank's rows; None: there is none.
        optimizers: of the cells' variables, those that have it.
    """

    word: ClassVar[str] = "inspected"
    fqn: str
    model: str
    unit: str
    global_shape: tuple[int, ...]
    trainable: bool
    shard: ShardFacts
    full: FullFacts
    full_grad: TensorFacts | None
    sharded_grad: TensorFacts | None
    optimizers: tuple[OptimizerFacts, ...]
