"""Results of operations on tensors without data: they depend on metadata alone, so each is computed once.

A model's blocks do the same operations on the same shapes again and again, in each step, and torch works out each of
them anew. Here a call that differs from an earlier one in no shape, stride, offset, dtype or number gets a result like
that call's: new tensors, views of its own arguments, or these arguments themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from workbench.base.devices import HOST
from workbench.engine._torch import fake_device, has_constant, is_fake, make_fake, storage_of

Work = TypeVar("Work")

_DEVICE = torch.device(HOST)
_UNLIKE = ("resize", "set_", "as_strided_", "_local_scalar")
"""Begins of the names of operations whose outcome depends on more, such as the size of a storage."""


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of a result.

    Attributes:
        is_argument: whether it is the argument at ``of`` itself.
        of: the place of the tensor among the arguments whose storage it has; -1: its storage is new.
        form: its shape, stride, offset and dtype.
    """

    is_argument: bool
    of: int
    form: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class OpOutcome(Generic[Work]):
    """The result of a call.

    Attributes:
        kind: type of the sequence that is the result; None: it is one tensor.
        made: the tensors of the result.
        work: what the caller has noted of it.
    """

    kind: Callable[[Sequence[torch.Tensor]], Any] | None
    made: tuple[Made, ...]
    work: Work

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401 - of the operation
        """Return the result of a call with these tensors among its arguments."""
        found = [
            tensors[made.of]
            if made.is_argument
            else make_fake(made.form, tensors[0], tensors[made.of] if made.of >= 0 else None)
            for made in self.made
        ]
        return found[0] if self.kind is None else self.kind(found)


class OpOutcomes(Generic[Work]):
    """The outcomes of calls so far.

    Args:
        work: returns what to note of a call: of the operation, its arguments and its result.
    """

    def __init__(self, work: Callable[[Any, tuple[Any, ...], Mapping[str, Any], object], Work]) -> None:
        self._work = work
        self._known: dict[Hashable, OpOutcome[Work]] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Work]:  # noqa: ANN401
        """Return the result of an operation, and what was noted of it."""
        tensors: list[torch.Tensor] = []
        key = _key(func, args, kwargs, tensors)
        if key is not None and (known := self._known.get(key)) is not None:
            return known.result(tensors), known.work
        before = [storage_of(tensor) for tensor in tensors] if key is not None else []
        result = func(*args, **kwargs)
        work = self._work(func, args, kwargs, result)
        after: list[torch.Tensor] = []
        if key is not None and key == _key(func, args, kwargs, after) and before == [*map(storage_of, after)]:
            made = _made(result, tensors)
            if made is not None:
                kind = None if isinstance(result, torch.Tensor) else type(result) if result is not None else _nothing
                self._known[key] = OpOutcome(kind, made, work)
        return result, work


def _nothing(_: object) -> None:
    """Return the result of an operation that has none."""


class _Unlike(Exception):
    """The outcome of a call depends on more than metadata."""


def _key(
    func: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensors: list[torch.Tensor],
) -> Hashable | None:
    """Return what the outcome of a call depends on, and add its tensors to ``tensors``; None if that is unknown."""
    if func.namespace != "aten" or func._opname.startswith(_UNLIKE) or torch.is_inference_mode_enabled():
        return None
    key: list[Hashable] = [func, torch.get_default_dtype()]
    try:
        _describe(args, key, tensors)
        for name, value in kwargs.items():
            key.append(name)
            _describe((value,), key, tensors)
    except _Unlike:
        return None
    key.append(len({*map(id, tensors)}))
    return tuple(key) if tensors else None


def _describe(values: Sequence[object], key: list[Hashable], tensors: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            key.append(_form(value))
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            key.append((type(value), len(value)))
            _describe(value, key, tensors)
        elif isinstance(value, (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
            key.append((type(value), value))
        elif value is None:
            key.append(None)
        else:
            raise _Unlike


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not is_fake(tensor) or has_constant(tensor) or tensor.dtype.is_complex or tensor.layout is not torch.strided:
        raise _Unlike
    if fake_device(tensor) != _DEVICE:
        raise _Unlike
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _made(result: object, tensors: Sequence[torch.Tensor]) -> tuple[Made, ...] | None:
    """Return how a result was made of the tensors among the arguments; None if it cannot be made again."""
    results = [result] if isinstance(result, torch.Tensor) else [] if result is None else result
    if not isinstance(results, (list, tuple)) or not all(isinstance(each, torch.Tensor) for each in results):
        return None
    places = {storage_of(tensor): place for place, tensor in enumerate(tensors)}
    made = []
    for each in results:
        same = next((place for place, tensor in enumerate(tensors) if tensor is each), None)
        try:
            form = _form(each)
        except _Unlike:
            return None
        if same is not None:
            made.append(Made(True, same, form))
            continue
        of = places.get(storage_of(each), -1)
        if of < 0:
            like = make_fake(form, tensors[0], None)
            if like.untyped_storage().nbytes() != each.untyped_storage().nbytes() or _form(like) != form:
                return None
            if storage_of(each) in {storage_of(other) for other in results if other is not each}:
                return None
        made.append(Made(False, of, form))
    return tuple(made)
