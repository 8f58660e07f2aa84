"""Reply of a rank to an inspection of one parameter, while it is held inside a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.events import UnitState

Number = float | str
"""A number; a text for the numbers that JSON lacks: ``nan``, ``inf``, ``-inf``."""


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """One tensor as stored on a rank.

    Attributes:
        shape: local shape, in elements; empty: a scalar.
        dtype: such as ``float32``.
        device: such as ``cpu``.
        num_bytes: local bytes.
        norm, mean, max_abs: 2-norm, mean and largest magnitude; None if undefined for no values or this dtype.
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
    """The rows of a parameter that this rank holds.

    Attributes:
        dim: tensor dimension that is split; None: it is part of a flat parameter, and elements are counted as rows.
        first_row: index of the first row along ``dim``.
        num_rows: number of rows; may be 0.
        of_rows: rows of all ranks together.
        values: their values.
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
        state: state of its unit.
        why: reason for the state, as a phrase.
        values: its values; None: it is not in memory.
    """

    state: UnitState
    why: str
    values: TensorFacts | None


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """State that an optimizer keeps for a parameter.

    Attributes:
        name: variable that holds the optimizer.
        type: its class.
        state: its tensors by name; empty: none yet.
    """

    name: str
    type: str
    state: dict[str, TensorFacts]


@dataclass(frozen=True, kw_only=True)
class InspectReply:
    """A parameter as one rank holds it.

    Attributes:
        fqn: its name in its model.
        model: variable that holds its model; empty: none.
        unit: name of its unit, ``(root)`` for the root.
        global_shape: shape of the whole parameter, in elements.
        trainable: whether it takes a gradient.
        shard: this rank's rows.
        full: the whole parameter.
        full_grad: gradient of the whole parameter, its bytes including accumulated gradients; None: there is none.
        sharded_grad: gradient of this rank's rows; None: there is none.
        optimizers: those among the cells' variables that hold it.
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
