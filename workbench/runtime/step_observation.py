"""Observation of the two steps that ``verify`` compares: gradients as an optimizer gets them, and outputs of modules.

A *piece* is this rank's rows of one parameter; gradients are compared piece by piece, without communication.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.engine._torch import local_of
from workbench.engine.full_param import local_tensor
from workbench.engine.module_names import clean
from workbench.engine.tensor_trees import tensors_in
from workbench.events import Param, ParamTensors, Unit
from workbench.models import c10d
from workbench.protocol.commands import Difference, GradRatio

_NEARLY_ALL = 0.99
_TINY = 1e-3  # elements below this part of the largest one are left out of a ratio: rounding rules them


@dataclass(frozen=True, kw_only=True)
class ParamPiece:
    """This rank's rows of a parameter of a unit.

    Attributes:
        name: of the parameter in the model.
        unit: its unit.
        key: its name among the unit's tensors.
        rows: the rows, or the elements of a flat parameter's part, as text.
        of_whole: takes them from a tensor of the whole parameter (under tensor parallelism: of this rank's part).
    """

    name: str
    unit: Unit
    key: str
    rows: str
    of_whole: Callable[[torch.Tensor], torch.Tensor]


TensorsOf = Callable[[int], Mapping[str, ParamTensors]]
"""Returns this rank's tensors of a unit's parameters, by name."""


def pieces_of(
    units: Sequence[Unit], tensors_of: TensorsOf, paths: Mapping[Any, str], names: Mapping[str, object]
) -> list[ParamPiece]:
    """Return the pieces of a model's trainable parameters in units, in the order of ``names``.

    Args:
        units: the model's units.
        tensors_of: this rank's tensors of them.
        paths: paths of the model's modules without wrappers.
        names: names of its parameters without wrappers, each parameter once.
    """
    found: dict[str, ParamPiece] = {}
    for unit in units:
        tensors = tensors_of(unit.index)
        for param in unit.params:
            for key, rows, select in _parts(param, tensors[param.fqn].shard_rank):
                for module, own in tensors[key].places:
                    name = ".".join(filter(None, (paths.get(module), own)))
                    if name in names:
                        found[name] = ParamPiece(name=name, unit=unit, key=key, rows=rows, of_whole=select)
    return [found[name] for name in names if name in found]


_Select = Callable[[torch.Tensor], torch.Tensor]


def _parts(param: Param, shard_rank: int) -> Iterator[tuple[str, str, _Select]]:
    """Yield name, rows and selection of this rank's rows of a parameter, or of each trainable part of a flat one."""
    begin = sum(param.rows_per_rank[:shard_rank])
    end = begin + param.rows_per_rank[shard_rank]
    if not param.parts:
        if param.trainable:
            yield param.fqn, _span("row", begin, end), lambda whole: whole.narrow(param.shard_dim, begin, end - begin)
        return
    for part in param.parts:
        first, last = (place - part.first for place in part.within(begin, end))
        if part.trainable:
            yield part.fqn, _span("element", first, last), _flat_slice(first, last)


def _flat_slice(first: int, last: int) -> _Select:
    return lambda whole: whole.reshape(-1)[first:last]


def _span(noun: str, begin: int, end: int) -> str:
    if end <= begin:
        return f"no {noun}s"
    return f"{noun} {begin}" if end == begin + 1 else f"{noun}s {begin}-{end - 1}"


def tensors_of_pieces(pieces: Sequence[ParamPiece], tensors_of: TensorsOf) -> dict[str, ParamTensors]:
    """Return the current tensors of pieces, by the names of their parameters."""
    by_unit = {index: tensors_of(index) for index in {piece.unit.index for piece in pieces}}
    return {piece.name: by_unit[piece.unit.index][piece.key] for piece in pieces}


def local_values(value: object, shape: torch.Size) -> torch.Tensor:
    """Return the values of a shard, or of its gradient, in the shape that :attr:`ParamPiece.of_whole` gives."""
    assert isinstance(value, torch.Tensor)
    local = local_of(value) if isinstance(value, DTensor) else value
    return local.detach().reshape(shape)


# ---- gradients


class GradObserver:
    """Gradients of pieces in one step, read when an optimizer is about to use them, or at the end of the step.

    Args:
        pieces: the pieces.
        read: returns the gradients now, by the names of parameters, of those that have one.
        keeps: whether to keep their values, else only their norms.

    Attributes:
        norms: 2-norm of each piece's gradient, 0-dim tensors.
        after_backward: likewise, at the end of the newest backward: what the step does to them later is not in it.
        values: copies of the gradients on the host, in double precision.
        calls_after_backward: collectives of the step between that and its first optimizer step.
        optimizer_steps: number of steps of optimizers.
    """

    def __init__(
        self, pieces: Sequence[ParamPiece], read: Callable[[], Mapping[str, torch.Tensor]], *, keeps: bool
    ) -> None:
        self._pieces, self._read, self._keeps = pieces, read, keeps
        self.norms: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.after_backward: dict[str, torch.Tensor] = {}
        self.calls_after_backward = self._num_calls = 0
        self.optimizer_steps = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the body, one step."""
        hook, backward = register_optimizer_step_pre_hook(self._before_optimizer), torch.autograd.backward

        @functools.wraps(backward)
        def observed(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
            backward(*args, **kwargs)
            self.after_backward, self._num_calls = {}, _num_calls()
            with suppress(RuntimeError):  # gradients that are not reduced yet have other shapes
                self.after_backward = {name: _norm(grad) for name, grad in self._read().items()}

        torch.autograd.backward = observed
        try:
            yield
            self._record_norms()
        finally:
            hook.remove()
            torch.autograd.backward = backward

    def _before_optimizer(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        if not self.optimizer_steps:
            self.calls_after_backward = _num_calls() - self._num_calls
        self.optimizer_steps += 1
        self._record_norms()

    def _record_norms(self) -> None:
        for name, grad in self._read().items():
            if name not in self.norms:
                self.norms[name] = _norm(grad)
                if self._keeps:
                    self.values[name] = grad.cpu().double()


def _num_calls() -> int:
    """Return the number of collectives of this process while the workbench's own are not announced."""
    return 0 if c10d.active is None else c10d.active.num_paused


def _norm(grad: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(grad.float()) if grad.numel() else torch.zeros(())


def scaled_after_backward(actual: GradObserver, expected: GradObserver, tolerance: float) -> float | None:
    """Return the factor between two steps' gradients that were equal after backward, and are scaled later.

    The result is None if they were not equal, or if the factor is not the same for all, and NaN without gradients.
    """
    factors: list[float] = []
    for name, of_copy in expected.after_backward.items():
        if name not in actual.after_backward or name not in actual.norms or name not in expected.norms:
            return None
        raw, own = float(of_copy), float(actual.after_backward[name])
        if not abs(own - raw) <= tolerance * raw:
            return None
        if raw and own and expected.norms[name]:
            factors.append(float(actual.norms[name]) / own / (float(expected.norms[name]) / raw))
    if not factors:
        return math.nan
    return factors[0] if max(factors) - min(factors) <= tolerance * abs(factors[0]) else None


def grads_of(params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the gradients of parameters that have one, by name."""
    return {name: param.grad for name, param in params.items() if param.grad is not None}


def of_grads(pieces: Sequence[ParamPiece], grads: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the pieces of whole gradients, of the unsharded copy."""
    return {p.name: p.of_whole(local_tensor(grads[p.name]).detach()) for p in pieces if p.name in grads}


def of_sharded(
    pieces: Sequence[ParamPiece], tensors_of: TensorsOf, params: Mapping[str, nn.Parameter]
) -> Mapping[str, torch.Tensor]:
    """Return the pieces of the sharded model's gradients, in the shapes of those of the copy."""
    found, tensors = {}, tensors_of_pieces(pieces, tensors_of)
    for piece in pieces:
        grad = tensors[piece.name].sharded_grad
        if grad is not None:
            found[piece.name] = local_values(grad, piece.of_whole(local_tensor(params[piece.name])).shape)
    return found


def ratio(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float | None:
    """Return the ratio of two gradients if nearly all elements have the same; NaN if there is nothing to compare."""
    scale = expected.abs().max().item() if expected.numel() else 0.0
    if not scale or not math.isfinite(scale):
        return math.nan
    counted = expected.abs() > _TINY * scale
    quotients = actual[counted] / expected[counted]
    middle = float(quotients.median())
    alike = float(((quotients - middle).abs() <= tolerance * abs(middle)).double().mean())
    if alike < _NEARLY_ALL:
        return None
    return 1.0 if abs(middle - 1) <= tolerance else middle


def grouped(ratios: Mapping[str, float | None], tolerance: float) -> tuple[GradRatio, ...]:
    """Return the distinct ratios of parameters' gradients, each with its parameters; those without information last."""
    groups: list[tuple[float | None, list[str]]] = []
    for name, value in ratios.items():
        if value is not None and math.isnan(value):
            continue
        for known, names in groups:
            if known == value or (
                known is not None and value is not None and abs(known - value) <= 2 * tolerance * abs(known)
            ):
                names.append(name)
                break
        else:
            groups.append((value, [name]))
    return tuple(GradRatio(ratio=value, num_params=len(names), first=names[0]) for value, names in groups)


# ---- outputs of modules


@dataclass
class OutputObserver:
    """Outputs of a model's modules in one step, in the order in which their calls end.

    Attributes:
        modules: by path, without wrappers.
        expected: the observer of the other step, with which outputs are compared at once; None: they are kept.
        outputs: floating-point outputs on the host, by path and number of the call.
        inputs: tensors that the root got, in order.
        num_inputs: elements of the first tensor of each call of the root together.
        differences: relative difference from the expected output, by path and number of the call.
    """

    modules: Mapping[str, nn.Module]
    expected: OutputObserver | None = None
    outputs: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    inputs: list[torch.Tensor] = field(default_factory=list)
    num_inputs: int = 0
    differences: dict[tuple[str, int], float] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the body, one step."""
        hooks = [module.register_forward_hook(self._hook(path)) for path, module in self.modules.items()]
        if "" in self.modules:
            hooks.append(self.modules[""].register_forward_pre_hook(self._before_root, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_root(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        self.inputs += map(_on_host, given)
        self.num_inputs += given[0].numel() if given else 0

    def _hook(self, path: str) -> Callable[[nn.Module, object, object], None]:
        def after(_module: nn.Module, _args: object, output: object) -> None:
            call = self._calls[path] = self._calls.get(path, -1) + 1
            found = [_on_host(tensor) for tensor in tensors_in(output) if tensor.is_floating_point()]
            if self.expected is None:
                self.outputs[path, call] = found
                return
            expected = self.expected.outputs.get((path, call))
            if expected is not None and [t.shape for t in expected] == [t.shape for t in found]:
                both = zip(found, expected, strict=True)
                self.differences[path, call] = max((relative(a, b) for a, b in both), default=0.0)

        return after

    @property
    def differs_in_input(self) -> bool:
        """Whether the root got other tensors than in the expected step."""
        expected = self.expected.inputs if self.expected is not None else []
        return len(expected) == len(self.inputs) and any(
            not _is_same(a, b) for a, b in zip(expected, self.inputs, strict=True)
        )

    def first_difference(self, tolerance: float) -> Difference | None:
        """Return the first output, in the order of the expected step, that differs by more than ``tolerance``."""
        order = list(self.expected.outputs) if self.expected is not None else []
        for position, key in enumerate(order):
            if self.differences.get(key, 0.0) > tolerance:
                return Difference(name=key[0], position=position, total=len(order), relative=self.differences[key])
        return None


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by their paths without wrappers; the innermost where wrappers share one."""
    return {clean(path): module for path, module in model.named_modules()}


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", copy=True)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference relative to that of ``expected``; infinite where only one of them is finite."""
    a, b = actual.cpu().double(), expected.cpu().double()
    if not a.numel() or _is_same(a, b):
        return 0.0
    error, scale = float((a - b).norm()), float(b.norm())
    if not math.isfinite(error):
        return math.inf
    return error / scale if scale else math.inf


def is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have one shape and the same values, NaN included."""
    return a.shape == b.shape and relative(a, b) == 0.0
