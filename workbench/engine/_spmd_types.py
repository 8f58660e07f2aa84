"""All uses of the package ``spmd_types``, which annotates plain parameters; it need not be installed.

An annotation names, for each mesh axis, how ranks along it hold a tensor: R or I, all the same values; P, terms of a
sum; S(dim), parts of a dim. The gradient of an R is a P. An annotated parameter is kept as the DTensor that the
annotation describes, and modules compute with a plain parameter that has the annotation again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from workbench.engine._torch import Spec, dtensor_of, make_spec, spec_of, with_dtype
from workbench.engine.mesh import FSDPMeshInfo, names_of


def _package() -> Any:  # noqa: ANN401 - an optional package
    """Return ``spmd_types``, or None if the process has not imported it: then nothing is annotated."""
    return sys.modules.get("spmd_types")


def tell_checker(function: type[torch.autograd.Function]) -> None:
    """Let the type checker, if imported, pass types of inputs on to outputs of ``function``."""
    spmd = _package()
    if spmd is not None:
        spmd.register_local_autograd_function(function)


def no_checks() -> AbstractContextManager[None]:
    """Return a context without type checks: those are for the operations of the model."""
    spmd = _package()
    if spmd is None or not spmd.is_type_checking():
        return nullcontext()
    return cast("AbstractContextManager[None]", spmd.no_typecheck())


@dataclass(frozen=True)
class Annotation:
    """The annotation of a plain parameter.

    Attributes:
        spec: of the DTensor that it describes, on the whole mesh.
        grad_spec: of the full gradient as autograd makes it.
        types: type along each axis of the mesh of the type checker.
        partition: which axes split which dim, as the package writes it; None: no axis splits any.
    """

    spec: Spec
    grad_spec: Spec
    types: Mapping[Any, Any]
    partition: Any

    def put_on(self, tensor: torch.Tensor) -> None:
        """Annotate ``tensor``; check that it has no other annotation."""
        _package().assert_type(tensor, dict(self.types), partition_spec=self.partition)

    def put_on_if_checked(self, tensor: torch.Tensor) -> None:
        """Annotate ``tensor`` if types are being checked."""
        if _package().is_type_checking():
            self.put_on(tensor)

    def as_grad(self, grad: torch.Tensor) -> DTensor:
        """Return a plain full gradient as a DTensor."""
        return dtensor_of(grad, with_dtype(self.grad_spec, grad.dtype))

    @property
    def splits_more(self) -> bool:
        """True if ranks hold different parts or terms of the full parameter."""
        return any(not placement.is_replicate() for placement in self.spec.placements)


def annotation_of(path: str, param: nn.Parameter, info: FSDPMeshInfo) -> Annotation | None:
    """Return the annotation of parameter ``path``; None without one.

    Raises:
        ValueError: it does not say how the parameter is held along each axis of the mesh, or says it of other ranks;
            the parameter differs between ranks that fully_shard splits it over; ``dp_mesh_dims`` is missing.
    """
    spmd = _package()
    types = {} if spmd is None or isinstance(param, DTensor) else spmd.get_local_type(param)
    if not types:
        return None
    if info.spmd_mesh is None:
        raise ValueError(
            f"parameter {path!r} has a type of spmd_types: pass fully_shard the whole mesh, and "
            "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...) with the names of its data-parallel axes"
        )
    partition = spmd.get_partition_spec(param)
    split = {} if partition is None else spmd.types.partition_spec_to_shard_types(partition)
    merged = {axis: axis_type for axis, axis_type in {**types, **split}.items() if axis.size() > 1}
    by_axis = _by_mesh_axis(path, merged, info)
    mesh_of_types = _mesh_of_types(path, merged, info)
    try:
        placements = [_placement(axis_type) for axis_type in by_axis]
        grads = [_placement(axis_type.backward_type()) for axis_type in by_axis]
    except ValueError as error:
        raise ValueError(f"parameter {path!r}: {error}") from error
    like = DTensor.from_local(param.detach(), info.spmd_mesh, placements, run_check=False)
    return Annotation(
        spec=spec_of(like),
        grad_spec=make_spec(info.spmd_mesh, grads, like),
        types={axis: types.get(axis, spmd.R) for axis in mesh_of_types},
        partition=partition,
    )


def _placement(axis_type: object) -> Placement:
    return cast("Placement", _package().spmd_type_to_dtensor_placement(axis_type))


def _axes(info: FSDPMeshInfo) -> list[Any]:
    """Return the package's axis for each axis of the whole mesh."""
    mesh = info.spmd_mesh
    return [] if mesh is None else [_package().MeshAxis.of(mesh.get_group(axis)) for axis in range(mesh.ndim)]


def _by_mesh_axis(path: str, types: Mapping[Any, Any], info: FSDPMeshInfo) -> list[Any]:
    """Return the type along each axis of the whole mesh; R along data-parallel axes, and those of one rank.

    Raises:
        ValueError: see :func:`annotation_of`.
    """
    spmd, axes, names = _package(), _axes(info), names_of(info.spmd_mesh)
    over = (*info.spmd_shard_axes, *info.spmd_replicate_axes)
    data_parallel = _joined([axes[number] for number in over])
    for axis, axis_type in types.items():
        if axis <= data_parallel:
            if axis_type is not spmd.R:
                raise ValueError(
                    f"parameter {path!r} must have the type R along {axis}, over which fully_shard splits or reduces "
                    f"it; it has {axis_type}"
                )
        elif axis not in {axes[number] for number in range(len(axes)) if number not in over}:
            raise ValueError(
                f"parameter {path!r} has a type along {axis}, which is no axis of the mesh passed to fully_shard "
                f"({', '.join(names)}) and not within its data-parallel axes"
            )
    found = [spmd.R if number in over or axis.size() == 1 else types.get(axis) for number, axis in enumerate(axes)]
    missing = [name for name, axis_type in zip(names, found, strict=True) if axis_type is None]
    if missing:
        raise ValueError(
            f"parameter {path!r} has no type along {missing[0]!r}, an axis of the mesh passed to fully_shard: add it "
            "with spmd_types.assert_type"
        )
    return found


def _mesh_of_types(path: str, types: Mapping[Any, Any], info: FSDPMeshInfo) -> Sequence[Any]:
    """Return the axes along which a full parameter has a type: its own, or those of the current mesh.

    Raises:
        ValueError: neither spans the ranks of the whole mesh.
    """
    spmd, axes = _package(), _axes(info)
    current = spmd.current_mesh()
    found = tuple(types) if _ranks(types) == _ranks(axes) or current is None else tuple(current)
    if _ranks(found) != _ranks(axes) or not set(types) <= set(found):
        raise ValueError(
            f"parameter {path!r} has types along {', '.join(map(str, types))}, which are not all ranks of the mesh "
            f"passed to fully_shard ({', '.join(names_of(info.spmd_mesh))}): give it a type along every axis, or call "
            "fully_shard within spmd_types.set_current_mesh"
        )
    return found


def _ranks(axes: Iterable[Any]) -> Any:  # noqa: ANN401 - an axis of the package
    """Return the ranks along all ``axes`` as one axis; None for one rank."""
    found = _package().normalize_mesh(frozenset(axes))
    return _joined(tuple(found)) if found else None


def _joined(axes: Sequence[Any]) -> Any:  # noqa: ANN401 - an axis of the package
    return _package()._mesh_axis.flatten_axes(tuple(axes))
