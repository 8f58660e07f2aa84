"""The state of the user's program, which a step changes: saved once, and restored after each run of the step.

It is all that the variables of cells reach: counters, lists, objects, closures, schedulers, scalers, optimizers, other
models, and random number generators. What libraries hold inside is left alone. An iterator cannot be restored: what it
gave in the first run it gives again in the next, and to the program afterwards (:class:`RewindableIterator`).
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
import sysconfig
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from io import IOBase
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from workbench.engine.full_param import local_tensor
from workbench.models.engines import is_wrapper

_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_TENSORS = (torch.Tensor, nn.Parameter, DTensor)  # others, such as placeholders, have rules of their own
_HISTORY = ("In", "Out")  # variables of IPython
_DEPTH, _FEW = 4, 1000  # of what is reached for a checkpoint, and of a container that is entered for it
_MANY = 10_000  # a container of more elements is restored, but they are not: it is data
_OF_MODULES = vars(nn.Module()).keys() - {"training"}
_OF_LIBRARIES = (Sampler, DataLoader, Dataset, types.SimpleNamespace)  # restored, as is what has a state_dict
_NO_COPIES: Mapping[int, object] = types.MappingProxyType({})
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class ProgramState:
    """The state that variables reach.

    Args:
        variables: the variables.
        models: sharded models, whose parameters, gradients and buffers are not restored here.
        around: each makes a context in which every run is, such as one that restores such a model.

    Attributes:
        optimizers: all optimizers found.
        random: the random number generators.
    """

    def __init__(
        self,
        variables: dict[str, Any],
        models: Iterable[nn.Module] = (),
        around: Sequence[Callable[[], AbstractContextManager[None]]] = (),
    ) -> None:
        self._around = around
        self.optimizers: list[Optimizer] = []
        self.random = RandomStates()
        self._kept: list[_Kept] = []
        self._holders: list[_Holder] = []
        self._replaceable: list[_Holder] = []  # of them, those whose references a run may replace
        self._tape = _Tape(self.random, self._holders)
        self._iterators: dict[int, RewindableIterator] = {}
        self._seen: dict[int, object] = {}  # alive, so that no id is used twice
        modules = [module for model in models for module in model.modules()]
        self._modules = set(map(id, modules))
        tensors = (each for m in modules for each in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
        self._tensors = set(map(id, tensors))
        self._pending = [_Reached(variables), *map(_Reached, modules)]
        while self._pending:
            self._visit(self._pending.pop())
        self._saved_random = self.random.get()

    # ---- runs

    @contextmanager
    def restored(self, replaced: Mapping[int, object] = _NO_COPIES) -> Iterator[None]:
        """Restore everything after the body.

        Args:
            replaced: what references refer to in the body, by the id of what they refer to now.
        """
        for holder in self._replaceable:
            for key, value in holder.saved.items():
                if (new := _replaced(value, replaced)) is not value:
                    holder.put(key, new)
        for iterator in self._iterators.values():
            iterator.is_recording = True
        try:
            with self._tape.recording(), ExitStack() as stack:
                for make in self._around:
                    stack.enter_context(make())
                yield
        finally:
            for kept in (*self._holders, *self._kept):
                kept.restore()
            self.random.set(self._saved_random)
            for iterator in self._iterators.values():
                iterator.rewind()

    def close(self) -> None:
        """Give iterators back to the program, with what they gave in the runs."""
        for iterator in self._iterators.values():
            iterator.end_recording()
        for holder in self._holders:
            holder.saved = {}  # an iterator may keep its holder
        vars(self).clear()

    # ---- the search

    def _visit(self, found: _Reached) -> None:
        value = found.value
        if isinstance(value, (*_ATOMS, types.BuiltinFunctionType)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if self.random.add(value) or isinstance(value, (RewindableIterator, IOBase)):
            return
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors and not found.is_data:
                self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            if not found.is_data and value.flags.writeable and type(value) is np.ndarray and value.dtype != object:
                self._kept.append(_KeptArray(value))
        elif isinstance(value, nn.Module) and id(value) in self._modules:
            self._visit_module(value, found)
        else:
            self._visit_object(value, found)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        local = local_tensor(tensor).detach() if type(tensor) in _TENSORS else None
        if local is None or local.is_meta or local.is_inference() or local.layout != torch.strided:
            return
        if local.numel() and not local.untyped_storage().nbytes():
            return  # a full parameter that is freed
        self._kept.append(_KeptTensor(tensor))
        if tensor.is_leaf and tensor.grad is not None:
            self._pending.append(_Reached(tensor.grad))

    def _visit_module(self, module: nn.Module, found: _Reached) -> None:
        """Save numbers and text among the attributes of a module of a sharded model; find what others hold."""
        if is_wrapper(module):
            return
        own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        self._kept.append(_Attributes(vars(module), {k: v for k, v in own.items() if isinstance(v, _ATOMS)}))
        others = (value for value in own.values() if not isinstance(value, torch.Tensor))  # those are the engine's
        self._pending += [_Reached(value, found.is_data, may_replace=False) for value in others]

    def _visit_object(self, value: Any, found: _Reached) -> None:  # noqa: ANN401 - anything
        may_replace = found.may_replace
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
            may_replace = False
        is_data = found.is_data or isinstance(value, Dataset)
        if isinstance(value, (tuple, frozenset)):
            self._pending += [_Reached(each, is_data, may_replace) for each in value if len(value) <= _MANY]
            return
        for holder in next(make for kind, make in _HOLDERS if isinstance(value, kind))(value):
            self._holders.append(holder)
            if may_replace:
                self._replaceable.append(holder)
            if len(holder.saved) > _MANY:
                continue
            for key, each in holder.saved.items():
                if is_iterator(each):
                    holder.saved[key] = rewindable = self._rewindable(each)
                    holder.put(key, rewindable)
                    rewindable.places.append((holder, key))
                else:
                    self._pending.append(_Reached(each, is_data, may_replace))
        self._pending += [_Reached(each, is_data, may_replace) for each in _others_in(value)]

    def _rewindable(self, iterator: Any) -> RewindableIterator:  # noqa: ANN401 - any iterator
        if isinstance(iterator, RewindableIterator):  # of an earlier verify: the step has not drawn everything since
            found, key = iterator, id(iterator)
            found.take_up(self._tape)
        else:
            found, key = RewindableIterator(iterator, self._tape), id(iterator)
        return self._iterators.setdefault(key, found)


def _replaced(value: Any, by: Mapping[int, object]) -> Any:  # noqa: ANN401 - anything
    """Return what a run uses in the place of a value, also within tuples and as the object of a method."""
    if id(value) in by:
        return by[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in by:
        return types.MethodType(value.__func__, by[id(value.__self__)])
    if isinstance(value, tuple) and len(value) <= _MANY:
        parts = [_replaced(each, by) for each in value]
        if any(new is not old for new, old in zip(parts, value, strict=True)):
            return type(value)._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value


@dataclass(frozen=True)
class _Reached:
    """A value that is reached.

    Attributes:
        value: the value.
        is_data: whether it is in a data set, whose tensors do not change.
        may_replace: whether a run may replace the references in it.
    """

    value: Any
    is_data: bool = False
    may_replace: bool = True


def _others_in(value: Any) -> list[Any]:  # noqa: ANN401 - anything
    """Return what a value refers to besides the references in its holders."""
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType) and _is_of_program(value.__module__):
        own = [] if value.__module__ == "__main__" else [sys.modules.get(value.__module__)]
        return [*own, *(value.__closure__ or ())]
    if isinstance(value, functools.partial):
        return [value.func]
    if isinstance(value, type):
        return [*vars(value).values()] if _is_of_program(value.__module__) else []
    return [type(value)] if _is_of_program(type(value).__module__) else []


def reachable(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables and what they reach, each with its expression, the nearest first; an object is entered once.

    Lists, dicts, closures, and objects, classes and modules of the program are entered; neither are models, tensors and
    optimizers nor the frames of generators.
    """
    entered: set[int] = set()
    found = [(name, value) for name, value in variables.items() if not name.startswith("_") and name not in _HISTORY]
    for _ in range(_DEPTH):
        yield from found
        new = [(name, value) for name, value in found if not isinstance(value, _ATOMS) and id(value) not in entered]
        entered.update(id(value) for _, value in new)
        below = (part for name, value in new for part in _parts_of(name, value))
        found = [(name, part) for name, part in below if id(part) not in entered]


def fingerprint(value: object) -> object:
    """Return what shows whether a number, a text, an array or a container has another value; None: it is none of them.

    Of a container it is the number of elements, as :func:`reachable` yields these too.
    """
    if isinstance(value, np.ndarray):
        return (value.shape, hash(value.tobytes())) if value.dtype != object else value.shape
    if isinstance(value, (list, dict, set)):
        return len(value)
    return repr(value) if isinstance(value, (int, float, complex, str)) else None


def _parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - anything
    """Yield what a value refers to, each with its expression, which begins with ``name``, or with that of a module."""
    if isinstance(value, (list, tuple, deque)):
        yield from ((f"{name}[{place}]", each) for place, each in enumerate(value) if len(value) <= _FEW)
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", each) for key, each in value.items() if len(value) <= _FEW)
    elif isinstance(value, functools.partial):
        yield from ((f"{name}.args[{place}]", each) for place, each in enumerate((value.func, *value.args)))
        yield from ((f"{name}.{key}", each) for key, each in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield f"{name}.self", value.__self__
        yield from _parts_of(name, value.__func__)
    else:
        yield from ((f"{name}.{key}", each) for key, each in _attributes_of(value))
        if isinstance(value, (types.FunctionType, type)) and _is_of_program(value.__module__):
            yield from _modules_of(value)


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - anything
    """Yield what a function, module, class or object of the program refers to, each with its name."""
    if isinstance(value, types.SimpleNamespace):
        yield from vars(value).items()
    elif isinstance(value, types.FunctionType):
        if _is_of_program(value.__module__):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((key, cell.cell_contents) for key, cell in cells if cell != types.CellType())
            yield from ((f"__defaults__[{place}]", each) for place, each in enumerate(value.__defaults__ or ()))
            yield from {**(value.__kwdefaults__ or {}), **vars(value)}.items()
    elif isinstance(value, types.ModuleType):
        if _is_of_program(value.__name__):
            yield from ((key, each) for key, each in vars(value).copy().items() if not key.startswith("__"))
    elif isinstance(value, type):
        if _is_of_program(value.__module__):
            yield from _ClassAttributes(value).saved.items()
    elif _is_of_program(type(value).__module__) and not isinstance(value, (nn.Module, torch.Tensor, Optimizer)):
        for holder in _of_object(value):
            yield from holder.saved.items()
        yield "__class__", type(value)


def _modules_of(value: Any) -> Iterator[tuple[str, types.ModuleType]]:  # noqa: ANN401 - a function or class
    """Yield the imported module that a function or class is from, with its name."""
    name = value.__module__
    if name not in {None, "__main__"} and name in sys.modules:
        yield name, sys.modules[name]


@functools.cache
def _is_of_program(module: str | None) -> bool:
    """Return whether a module is the user's own and no library's."""
    if module is None or module == "__main__":
        return True
    if module.partition(".")[0] in {*sys.stdlib_module_names, *sys.builtin_module_names, "torch", "workbench"}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not (file.startswith(_LIBRARIES) or "site-packages" in Path(file).parts)


def is_iterator(value: Any) -> bool:  # noqa: ANN401 - anything
    """Return whether a value gives others one by one; an object of a class of the program has attributes to restore."""
    cls = type(value)
    return (
        hasattr(cls, "__next__")
        and hasattr(cls, "__iter__")
        and not isinstance(value, IOBase)
        and (cls is RewindableIterator or isinstance(value, types.GeneratorType) or not _is_of_program(cls.__module__))
    )


# ---- references


class _Kept(Protocol):
    def restore(self) -> None:
        """Restore what was saved."""


class _Holder(ABC):
    """An object with references to others.

    Args:
        own: the object.

    Attributes:
        saved: the references, by their keys.
    """

    def __init__(self, own: Any) -> None:  # noqa: ANN401 - of many types
        self._own = own
        self.saved = self.now()

    @abstractmethod
    def now(self) -> dict[Any, Any]:
        """Return the references now, by their keys."""

    @abstractmethod
    def put(self, key: Any, value: object) -> None:  # noqa: ANN401 - as of the object
        """Replace or add a reference."""

    @abstractmethod
    def drop(self, key: Any) -> None:  # noqa: ANN401 - as of the object
        """Remove a reference."""

    def become(self, wanted: Mapping[Any, Any]) -> None:
        """Make the references those of ``wanted``."""
        now = self.now()
        for key in now.keys() - wanted.keys():
            self.drop(key)
        for key, value in wanted.items():
            if now.get(key, _NONE) is not value:
                self.put(key, value)

    def restore(self) -> None:
        """Restore the saved references."""
        self.become(self.saved)

    def change(self, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
        """Change references as once from ``before`` to ``after``, those that are as before."""
        now = self.now()
        for key, value in after.items():
            if before.get(key, _NONE) is not value and now.get(key, _NONE) is before.get(key, _NONE):
                self.put(key, value)


_NONE = object()


def _is_same(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    return len(a) == len(b) and all(b.get(key, _NONE) is value for key, value in a.items())


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return tuple(each for each in ((names,) if isinstance(names, str) else names) if not each.startswith("__"))


def _has_state(value: Any) -> bool:  # noqa: ANN401 - anything
    cls = type(value)
    if _is_of_program(cls.__module__):
        return True
    is_inside = cls.__module__.startswith(("workbench.", "torch.distributed."))
    return isinstance(value, _OF_LIBRARIES) or (hasattr(cls, "state_dict") and not is_inside)


class _Items(_Holder):
    """The items of a dictionary, or the attributes of an object."""

    def now(self) -> dict[Any, Any]:
        return dict(self._own)

    def put(self, key: Hashable, value: object) -> None:
        self._own[key] = value

    def drop(self, key: Hashable) -> None:
        del self._own[key]


class _ClassAttributes(_Holder):
    """The attributes of a class that are neither methods nor descriptors."""

    def now(self) -> dict[str, Any]:
        own = vars(self._own).items()
        return {k: v for k, v in own if not k.startswith("__") and not hasattr(type(v), "__get__")}

    def put(self, key: str, value: object) -> None:
        setattr(self._own, key, value)

    def drop(self, key: str) -> None:
        delattr(self._own, key)


class _Slots(_Holder):
    """The attributes of an object that its class has slots for."""

    def __init__(self, own: object, names: Iterable[str]) -> None:
        self._names = tuple(names)
        super().__init__(own)

    def now(self) -> dict[str, Any]:
        return {name: getattr(self._own, name) for name in self._names if hasattr(self._own, name)}

    def put(self, key: str, value: object) -> None:
        object.__setattr__(self._own, key, value)

    def drop(self, key: str) -> None:
        object.__delattr__(self._own, key)


class _Ordered(_Holder):
    """References whose number and order matter: they change together."""

    @abstractmethod
    def set(self, values: Iterable[Any]) -> None:
        """Replace all references."""

    def put(self, key: Hashable, value: object) -> None:
        self.set({**self.now(), key: value}.values())

    def drop(self, key: Hashable) -> None:
        self.set([value for each, value in self.now().items() if each != key])

    def become(self, wanted: Mapping[Any, Any]) -> None:
        if not _is_same(self.now(), wanted):
            self.set(wanted.values())

    def change(self, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
        if _is_same(self.now(), before):
            self.become(after)


class _Elements(_Ordered):
    """The elements of a list or deque, by their places."""

    def now(self) -> dict[int, Any]:
        return dict(enumerate(self._own))

    def set(self, values: Iterable[Any]) -> None:
        new = list(values)
        self._own.clear()
        self._own.extend(new)


class _Members(_Ordered):
    """The members of a set."""

    def now(self) -> dict[Any, Any]:
        return {each: each for each in self._own}

    def set(self, values: Iterable[Any]) -> None:
        new = list(values)
        self._own.clear()
        self._own.update(new)


class _Cell(_Holder):
    """A variable of a closure."""

    def now(self) -> dict[str, Any]:
        try:
            return {"": self._own.cell_contents}
        except ValueError:  # it is not set yet
            return {}

    def put(self, key: str, value: object) -> None:
        self._own.cell_contents = value

    def drop(self, key: str) -> None:
        del self._own.cell_contents


class _Arguments(_Ordered):
    """The arguments of a partial call, or the defaults of a function, by their places."""

    def now(self) -> dict[int, Any]:
        is_call = isinstance(self._own, functools.partial)
        return dict(enumerate((self._own.args if is_call else self._own.__defaults__) or ()))

    def set(self, values: Iterable[Any]) -> None:
        new = tuple(values)
        if isinstance(self._own, functools.partial):
            cast("Any", self._own).__setstate__((self._own.func, new, self._own.keywords, vars(self._own)))
        else:
            self._own.__defaults__ = new or None


def _of_function(function: types.FunctionType) -> list[_Holder]:
    named = [vars(function), function.__kwdefaults__ or {}]
    return [_Arguments(function), *map(_Items, named)] if _is_of_program(function.__module__) else []


def _of_object(value: Any) -> list[_Holder]:  # noqa: ANN401 - anything
    if not _has_state(value):
        return []
    names = [name for cls in type(value).__mro__ for name in _slots(cls)]
    found: list[_Holder] = [_Slots(value, names)] if names else []
    return [*found, _Items(vars(value))] if hasattr(value, "__dict__") else found


_HOLDERS: tuple[tuple[Any, Callable[[Any], list[_Holder]]], ...] = (
    (dict, lambda value: [_Items(value)]),
    ((list, deque), lambda value: [_Elements(value)]),
    (set, lambda value: [_Members(value)]),
    (types.CellType, lambda value: [_Cell(value)]),
    (functools.partial, lambda value: [_Arguments(value), _Items(value.keywords)]),
    (types.FunctionType, _of_function),
    (types.ModuleType, lambda value: [_Items(vars(value))] if _is_of_program(value.__name__) else []),
    (type, lambda value: [_ClassAttributes(value)] if _is_of_program(value.__module__) else []),
    (object, _of_object),
)
"""Functions that make the holders of a value's references, by its type; the first that fits counts."""


# ---- values


class _Attributes:
    """Some attributes of an object; what is new stays."""

    def __init__(self, own: dict[str, Any], saved: dict[str, Any]) -> None:
        self._own, self._saved = own, saved

    def restore(self) -> None:
        self._own.update(self._saved)


class _KeptTensor:
    """The values of a tensor of this rank, and which gradient it has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._values = tensor, local_tensor(tensor).detach().clone()
        self._grad = tensor.grad if tensor.is_leaf else None

    @torch.no_grad()
    def restore(self) -> None:
        if self._tensor.is_leaf and self._tensor.grad is not self._grad:
            self._tensor.grad = self._grad
        now = local_tensor(self._tensor).detach()
        if now.shape == self._values.shape and not torch.equal(now, self._values):
            now.data.copy_(self._values)  # data: a graph that needs the tensor stays valid


class _KeptArray:
    """The values of an array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array, self._values = array, array.copy()

    def restore(self) -> None:
        self._array[...] = self._values


class RandomStates:
    """The states of Python's, NumPy's and torch's random number generators, and of those that were added, by name."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
            "python": (random.getstate, random.setstate),
            "numpy": (np.random.get_state, np.random.set_state),
            "torch": _as_bytes(torch.get_rng_state, torch.set_rng_state),
        }
        accelerator = torch.get_device_module()
        if hasattr(accelerator, "get_rng_state") and accelerator.is_initialized():
            self._sources["device"] = _as_bytes(accelerator.get_rng_state, accelerator.set_rng_state)

    def add(self, value: object, name: str = "") -> bool:
        """Return whether a value is a generator; its state counts from now on, under a name or its number."""
        source: tuple[Callable[[], Any], Callable[[Any], object]]
        if isinstance(value, torch.Generator):
            source = _as_bytes(value.get_state, value.set_state)
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            source = (value.getstate, value.setstate)
        elif isinstance(value, np.random.RandomState):
            source = (value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            source = (lambda: bits.state, functools.partial(setattr, bits, "state"))
        else:
            return False
        self._sources[f"variable {name or len(self._sources)}"] = source
        return True

    def get(self) -> tuple[bytes, ...]:
        """Return the states."""
        return tuple(pickle.dumps(get()) for get, _ in self._sources.values())

    def set(self, states: Iterable[bytes]) -> None:
        """Set the states."""
        for (_, put), state in zip(self._sources.values(), states, strict=True):
            put(pickle.loads(state))

    def plain(self) -> dict[str, Any]:
        """Return the states by name, without arrays: numbers, text, bytes, and tuples, lists and dicts of them."""
        return {name: _without_arrays(get()) for name, (get, _) in self._sources.items()}

    def set_plain(self, states: Mapping[str, Any]) -> None:
        """Set the states that have a name here."""
        for name, state in states.items():
            if name in self._sources:
                self._sources[name][1](state)


def _without_arrays(state: Any) -> Any:  # noqa: ANN401 - of any generator
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _without_arrays(each) for key, each in state.items()}
    return tuple(map(_without_arrays, state)) if isinstance(state, tuple) else state


def _as_bytes(
    get: Callable[[], torch.Tensor], put: Callable[[torch.Tensor], object]
) -> tuple[Callable[[], bytes], Callable[[bytes], object]]:
    """Return getter and setter of a state as bytes: a pickled tensor is not the same each time."""
    return (
        lambda: get().numpy().tobytes(),
        lambda state: put(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    )


# ---- iterators


class _Drawn:
    """The result of a draw, and its other changes.

    Args:
        draw: draws.
        random_states: the random number generators.
        holders: the references that it may change.

    Attributes:
        value: what it gave; the step gets copies.
    """

    def __init__(self, draw: Callable[[], Any], random_states: RandomStates, holders: Sequence[_Holder]) -> None:
        self._random = random_states
        before = [holder.now() for holder in holders]
        self._before = random_states.get()
        self.value = draw()
        self._after = random_states.get()
        after = zip(holders, before, strict=True)
        self._changes = [(each, old, new) for each, old in after if not _is_same(new := each.now(), old)]

    def repeat(self) -> Any:  # noqa: ANN401 - anything
        """Return the value, and change what the draw changed."""
        if self._before != self._after and self._random.get() == self._before:
            self._random.set(self._after)
        for holder, before, after in self._changes:
            holder.change(before, after)
        return self.value


_END = object()


class RewindableIterator:
    """An iterator in a variable of the program that gives again what it gave while it recorded.

    When it has given everything again, the variable refers to the iterator itself.

    Args:
        source: the iterator.
        tape: draws from it.

    Attributes:
        is_recording: whether it keeps what it gives.
        places: the references to it.
    """

    def __init__(self, source: Iterator[Any], tape: _Tape) -> None:
        self._source, self._tape = source, tape
        self._drawn: deque[_Drawn] = deque()
        self._position = 0
        self.is_recording = True
        self.places: list[tuple[_Holder, Any]] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of the iterator
        return getattr(self._source, name)

    def __iter__(self) -> RewindableIterator:
        """Return itself."""
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - whatever the iterator gives
        """Return what it gave before, then what the iterator gives."""
        if self.is_recording and self._position == len(self._drawn):
            self._drawn.append(self._tape.draw(lambda: next(self._source, _END)))
            value = _copied(self._drawn[-1].value)
        elif self.is_recording:
            value = _copied(self._drawn[self._position].repeat())
        elif self._drawn:
            value = self._drawn.popleft().repeat()
        else:
            return next(self._source)
        self._position += 1
        if not self._drawn:
            self._leave()
        if value is _END:
            raise StopIteration
        return value

    def _leave(self) -> None:
        for holder, key in self.places:
            if holder.now().get(key) is self:
                holder.put(key, self._source)
        self.places.clear()

    def take_up(self, tape: _Tape) -> None:
        """Record again, for another verify."""
        self._tape, self._position = tape, 0

    def rewind(self) -> None:
        """Give everything again from the beginning."""
        self._position = 0

    def end_recording(self) -> None:
        """Give everything again to the program, once."""
        self.is_recording = False
        del self._tape
        if not self._drawn:
            self._leave()


def _copied(value: Any) -> Any:  # noqa: ANN401 - anything
    """Return a copy, which the step may change; the value itself, if it has no copy."""
    if value is _END:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - a value's class may raise anything
        return value


class _Tape:
    """Draws from iterators, and the iterators that a step makes of :class:`DataLoader`: each run gets the same.

    Args:
        random_states: the random number generators.
        holders: the references that a draw may change.
    """

    def __init__(self, random_states: RandomStates, holders: Sequence[_Holder]) -> None:
        self._random, self._holders = random_states, holders
        self._made: list[tuple[DataLoader[Any], _Drawn]] = []
        self._position = 0
        self._is_drawing = False

    def draw(self, draw: Callable[[], Any]) -> _Drawn:
        """Draw; loaders that are read meanwhile belong to the iterator that is drawn from."""
        before, self._is_drawing = self._is_drawing, True
        try:
            return _Drawn(draw, self._random, self._holders)
        finally:
            self._is_drawing = before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the iterators that are made in the body, one run, or give those of the run before."""
        original = DataLoader.__iter__
        self._position = 0

        def iterate(loader: DataLoader[Any]) -> Any:  # noqa: ANN401 - an iterator
            return original(loader) if self._is_drawing else self._iterator_of(loader, lambda: original(loader))

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        try:
            yield
        finally:
            DataLoader.__iter__ = original  # type: ignore[method-assign]
            for _, drawn in self._made:
                drawn.value.rewind()

    def _iterator_of(self, loader: DataLoader[Any], make: Callable[[], Iterator[Any]]) -> RewindableIterator:
        place, self._position = self._position, self._position + 1
        if place < len(self._made) and self._made[place][0] is loader:
            found: RewindableIterator = self._made[place][1].repeat()
            return found
        del self._made[place:]
        drawn = self.draw(make)
        drawn.value = found = RewindableIterator(drawn.value, self)
        self._made.append((loader, drawn))
        return found
