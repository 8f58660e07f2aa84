"""A tensor-parallel model of plain parameters with types of ``spmd_types``, and what the engine needs of that package.

The package is used if it is installed; otherwise a stand-in with the same names.
"""

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

IS_INSTALLED = importlib.util.find_spec("spmd_types") is not None


@dataclass(frozen=True)
class Type:
    """A type along one axis: R, I, P, V or S(dim)."""

    name: str
    dim: int | None = None

    def backward_type(self) -> "Type":
        return {"R": P, "P": R}.get(self.name, self)


R, P, V, INVARIANT = map(Type, "RPVI")


@dataclass(frozen=True, order=False)
class Axis:
    """The ranks along an axis, as offsets from the first."""

    offsets: frozenset[int]

    @staticmethod
    def of(group: dist.ProcessGroup) -> "Axis":
        ranks = dist.get_process_group_ranks(group)
        return Axis(frozenset(rank - min(ranks) for rank in ranks))

    def __le__(self, other: "Axis") -> bool:
        return self.offsets <= other.offsets

    def size(self) -> int:
        return len(self.offsets)


def flatten_axes(axes: Iterable[Axis]) -> Axis:
    joined = {0}
    for axis in axes:
        joined = {first + offset for first in joined for offset in axis.offsets}
    return Axis(frozenset(joined))


class StandIn(SimpleNamespace):
    """The names of ``spmd_types`` that the engine uses."""

    R, P, V = R, P, V
    I = INVARIANT  # noqa: E741 - the package's name
    MeshAxis = Axis
    _mesh_axis = SimpleNamespace(flatten_axes=flatten_axes)
    types = SimpleNamespace(partition_spec_to_shard_types=dict)

    def __init__(self) -> None:
        super().__init__(checking=False, mesh=None, local=set())

    @staticmethod
    def S(dim: int) -> Type:
        return Type("S", dim)

    def get_local_type(self, tensor: torch.Tensor) -> dict[Any, Any]:
        return getattr(tensor, "_local_type", {})

    def get_partition_spec(self, tensor: torch.Tensor) -> Any:
        return getattr(tensor, "_partition_spec", None)

    def assert_type(self, tensor: torch.Tensor, types: Mapping[Any, Any], partition_spec: Any = None) -> None:
        named = {axis if isinstance(axis, Axis) else Axis.of(axis): each for axis, each in types.items()}
        split = {axis: each for axis, each in named.items() if each.dim is not None} or partition_spec
        tensor._local_type = {axis: V if each.dim is not None else each for axis, each in named.items()}
        tensor._partition_spec = split

    def current_mesh(self) -> Any:
        return self.mesh

    def is_type_checking(self) -> bool:
        return self.checking

    @contextmanager
    def no_typecheck(self) -> Iterator[None]:
        self.checking, before = False, self.checking
        yield
        self.checking = before

    def register_local_autograd_function(self, function: type) -> None:
        self.local.add(function)

    def normalize_mesh(self, axes: frozenset[Axis]) -> frozenset[Axis]:
        return frozenset(axis for axis in axes if axis.size() > 1)

    def spmd_type_to_dtensor_placement(self, each: Type) -> Any:
        if each is V:
            raise ValueError("Cannot convert plain Varying to a DTensor placement.")
        return Shard(each.dim) if each.dim is not None else Partial() if each is P else Replicate()


@contextmanager
def annotations() -> Iterator[Any]:
    """Return the package, or a stand-in for it."""
    with pytest.MonkeyPatch.context() as patch:
        if not IS_INSTALLED:
            patch.setitem(sys.modules, "spmd_types", StandIn())
        yield importlib.import_module("spmd_types")


class SumOver(torch.autograd.Function):
    """The sum over a group, whose gradient is the same on all its ranks."""

    @staticmethod
    def forward(ctx: Any, terms: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = terms.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class SumGradsOver(torch.autograd.Function):
    """The same values, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return SumOver.apply(grad, ctx.group), None


class Feed(nn.Module):
    """Two linear maps, the first split by rows over ``group``, the second by columns; on one rank without a group."""

    SPLIT: ClassVar = {"up": 0, "down": 1}

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        shapes = {"gain": (6,), "up": (20, 6), "down": (6, 20), "bias": (6,)}
        for name, shape in shapes.items():
            values = torch.randn(*shape, dtype=torch.float64)
            if group is not None and name in self.SPLIT:
                values = values.chunk(group.size(), self.SPLIT[name])[group.rank()].contiguous()
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.group is None else SumGradsOver.apply(x, self.group)
        out = torch.tanh((x * self.gain) @ self.up.T) @ self.down.T
        return (out if self.group is None else SumOver.apply(out, self.group)) + self.bias


def annotated(spmd: Any, mesh: DeviceMesh) -> nn.Sequential:
    """Return two :class:`Feed`, split over the axis "tp" of ``mesh`` if it has one, and annotated along all axes."""
    group = mesh["tp"].get_group() if "tp" in mesh.mesh_dim_names else None
    model = nn.Sequential(Feed(group), Feed(group))
    for feed in model:
        for name, param in feed.named_parameters():
            types = {mesh.get_group(axis): spmd.R for axis in mesh.mesh_dim_names}
            if group is not None:
                types[group] = spmd.S(Feed.SPLIT[name]) if name in Feed.SPLIT else spmd.I if name == "bias" else spmd.R
            spmd.assert_type(param, types)
    return model
