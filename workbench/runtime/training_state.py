"""The state of a training, found once among the variables of cells, and copied or set as a whole.

It is the models that train, their optimizers, everything else with ``state_dict()`` and ``load_state_dict()``, such as
schedulers, scalers and loaders, the random number generators, and the number of steps. A snapshot is a copy in memory
(:func:`capture`, :func:`restore`); a checkpoint has the same state in files (``checkpoint.py``).
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from workbench.engine._torch import local_of
from workbench.engine.module_names import clean
from workbench.errors import UsageError
from workbench.models import garbage
from workbench.models.engines import is_sharded
from workbench.runtime.model_summary import outermost
from workbench.runtime.program_state import RandomStates, is_iterator, reachable

_INSIDE = ("workbench.", "torch.distributed.", "torch._", "torch.fx.")
"""Packages whose objects are no part of a program's state."""


@dataclass(frozen=True, kw_only=True)
class TrainingObjects:
    """The objects of a training, by variable; an optimizer in a list is called ``opts[0]``.

    Attributes:
        models: the models, none of which is part of another one.
        untrained: those of them that are neither sharded nor trained.
        optimizers: the optimizers.
        others: everything else with ``state_dict()`` and ``load_state_dict()``.
        random: the random number generators: the global ones, and those in variables and loaders.
        loaders: the loaders without a ``state_dict()``, whose position is not part of the state.
        iterators: the iterators, whose position is not part of it either.
    """

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    others: Mapping[str, Any]
    random: RandomStates
    untrained: frozenset[str] = frozenset()
    loaders: tuple[str, ...] = ()
    iterators: tuple[str, ...] = ()

    @classmethod
    def among(cls, variables: Mapping[str, object]) -> TrainingObjects:
        """Return those among variables, and in what they reach."""
        own = dict(reachable(variables))
        optimizers: dict[str, Optimizer] = {}
        for name, value in own.items():
            if isinstance(value, Optimizer) and not any(value is each for each in optimizers.values()):
                optimizers[name] = value
        trained = {id(p) for each in optimizers.values() for group in each.param_groups for p in group["params"]}
        in_order = sorted(own.items(), key=lambda each: (each[0] not in variables, each[0]))
        modules = outermost({name: value for name, value in in_order if isinstance(value, nn.Module)})
        others: dict[int, tuple[str, object]] = {}
        random, loaders, iterators = RandomStates(), [], []
        for name, value in own.items():
            if isinstance(value, DataLoader):
                random.add(value.generator, f"{name}.generator")
            if random.add(value, name) or isinstance(value, (nn.Module, Optimizer, type)):
                continue
            if all(callable(getattr(value, each, None)) for each in ("state_dict", "load_state_dict")):
                others.setdefault(id(value), (name, value))
            elif isinstance(value, DataLoader):
                loaders.append(name)
            elif is_iterator(value):
                iterators.append(name)
        models = {
            name: model
            for name, model in modules.items()
            if is_sharded(model) or any(id(p) in trained for p in model.parameters())
        }
        taken = {id(tensor) for model in models.values() for tensor in _tensors_of(model)}
        untrained = {
            name: model
            for name, model in modules.items()
            if name not in models and _is_plain(model) and any(id(tensor) not in taken for tensor in _tensors_of(model))
        }
        return cls(
            models=models | untrained,
            optimizers=optimizers,
            others=dict(others.values()),
            random=random,
            untrained=frozenset(untrained),
            loaders=tuple(loaders),
            iterators=tuple(iterators),
        )

    def all_are_sharded(self) -> bool:
        """Return whether every parameter of an optimizer belongs to a sharded model."""
        held = {id(p) for model in self.models.values() if is_sharded(model) for p in model.parameters()}
        return all(id(param) in held for each in self.optimizers.values() for param in params_of(each))


def unreached(variables: Mapping[str, object]) -> list[str]:
    """Return what has state that a training may need, and is in no variable, nor in what :func:`reachable` finds there.

    Such as a scheduler in a local variable of a generator. The result has a phrase for each class.
    """
    found = _unreached(variables)
    if found:
        garbage.collect()  # an object of an earlier model may only be waiting for this
        found = _unreached(variables)
    return sorted({f"an instance of {name} that no public variable reaches" for name in found})


def _unreached(variables: Mapping[str, object]) -> list[str]:
    reached: dict[int, object] = {}
    for _, value in reachable(variables):
        parts = value.modules() if isinstance(value, nn.Module) else _with_inner(value)
        reached |= {_identity(part): part for part in parts}
    has_state: dict[type, bool] = {}
    rest = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in has_state:
            has_state[kind] = _holds_state(kind)
        if has_state[kind] and _identity(each) not in reached:
            rest.append(each)
    inner = {id(part) for each in rest if isinstance(each, nn.Module) for part in [*each.modules()][1:]}
    return [
        type(each).__name__
        for each in rest
        if id(each) not in inner and not (isinstance(each, nn.Module) and next(_tensors_of(each), None) is None)
    ]


def _with_inner(value: object) -> Iterator[object]:
    """Yield a value and, if it has a ``state_dict()``, the objects in its attributes that this covers."""
    yield value
    if not isinstance(value, type) and _holds_state(type(value)):
        for each in getattr(value, "__dict__", {}).values():
            parts = each if isinstance(each, (list, tuple)) else [each]
            yield from (part for part in parts if not isinstance(part, Optimizer))


def _identity(value: object) -> int:
    """Return the id of a value; that of the groups of an optimizer, as a wrapper has those of the inner one."""
    return id(value.param_groups) if isinstance(value, Optimizer) else id(value)


def _holds_state(kind: type) -> bool:
    """Return whether instances of a class of the program or of an ordinary library have a state dict."""
    has_both = all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))
    return has_both and not kind.__module__.startswith(_INSIDE)


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


def _is_plain(model: nn.Module) -> bool:
    """Return whether a model that no engine runs has a state dict of tensors, and memory for them."""
    return all(isinstance(each, torch.Tensor) for each in model.state_dict().values()) and all(
        type(each) in {torch.Tensor, nn.Parameter} and not each.is_meta and each.layout == torch.strided
        for each in _tensors_of(model)
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSnapshot:
    """One rank's state of a training at the end of a step; a copy.

    Attributes:
        step: number of steps that led to it.
        tensors: this rank's parts of parameters, buffers and optimizer state, by variable and name, such as
            ``model.blocks.0.weight``; state of an optimizer by the place of its parameter: ``opt.0.exp_avg``.
        dtensors: the optimizer state of them that is a DTensor, laid out as its parameter.
        options: by variable, the options of an optimizer's groups, and its state that is no tensor.
        others: by variable, the state dict of everything else.
        random: states of random number generators, plain data.
    """

    step: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    dtensors: frozenset[str] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, buffer or optimizer state, which shares its memory."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def model_tensors(objects: TrainingObjects) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of the models, which must not be unsharded, each once with its name."""
    for variable, model in objects.models.items():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield f"{variable}.{clean(name)}", tensor


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def model_buffers(objects: TrainingObjects) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of the models, each once with its name."""
    for variable, model in objects.models.items():
        yield from ((f"{variable}.{clean(name)}", buffer) for name, buffer in model.named_buffers())


def state_tensors(objects: TrainingObjects) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of optimizer state, each with its name."""
    for variable, optimizer in objects.optimizers.items():
        for place, param in enumerate(params_of(optimizer)):
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{variable}.{place}.{key}", value


def capture(
    objects: TrainingObjects,
    step: int,
    into: TrainingSnapshot | None = None,
    tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> TrainingSnapshot:
    """Return a copy of this rank's state; needs no other rank. The models must not be unsharded.

    Args:
        objects: the objects of the training.
        step: number of steps that led to it.
        into: an older copy, whose memory is used again.
        tensors: the tensors that are copied, with their names; None: all.
    """
    kept = {} if into is None else into.tensors
    copies, dtensors = {}, set()
    for name, tensor in (*model_tensors(objects), *state_tensors(objects)) if tensors is None else tensors:
        now, old = local_part(tensor), kept.get(name)
        is_alike = old is not None and (old.shape, old.dtype, old.device) == (now.shape, now.dtype, now.device)
        copies[name] = old.copy_(now) if old is not None and is_alike else now.clone()
        if isinstance(tensor, DTensor):
            dtensors.add(name)
    return TrainingSnapshot(
        step=step,
        tensors=copies,
        dtensors=frozenset(dtensors),
        options={variable: _options(optimizer) for variable, optimizer in objects.optimizers.items()},
        others={variable: copy.deepcopy(each.state_dict()) for variable, each in objects.others.items()},
        random=objects.random.plain(),
    )


def _options(optimizer: Optimizer) -> dict[str, Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    params = params_of(optimizer)
    states: list[dict[str, Any]] = [optimizer.state.get(param, {}) for param in params]
    plain = [{key: v for key, v in state.items() if not isinstance(v, torch.Tensor)} for state in states]
    return {"num_params": len(params), "groups": copy.deepcopy(groups), "state": copy.deepcopy(plain)}


def restore(objects: TrainingObjects, state: TrainingSnapshot) -> None:
    """Give the objects the state of a copy, and drop gradients; needs no other rank. The copy stays as it is.

    Raises:
        UsageError: the copy is of other objects; nothing is changed then.
    """
    _check(objects, state)
    with torch.no_grad():
        for name, tensor in model_tensors(objects):
            local_part(tensor).copy_(state.tensors[name])
    for variable, optimizer in objects.optimizers.items():
        _restore_optimizer(optimizer, variable, state)
    for variable, each in objects.others.items():
        each.load_state_dict(copy.deepcopy(state.others[variable]))
    drop_gradients(objects)
    objects.random.set_plain(state.random)  # last: the calls above may draw


def drop_gradients(objects: TrainingObjects) -> None:
    """Drop the gradients of all parameters, as at the end of a step."""
    held = [param for optimizer in objects.optimizers.values() for param in params_of(optimizer)]
    for param in (*(param for model in objects.models.values() for param in model.parameters()), *held):
        param.grad = None


def _check(objects: TrainingObjects, state: TrainingSnapshot) -> None:
    found = {name: local_part(tensor).shape for name, tensor in model_tensors(objects)}
    for name, shape in found.items():
        if name not in state.tensors or state.tensors[name].shape != shape:
            copied = "none" if name not in state.tensors else f"shape {tuple(state.tensors[name].shape)}"
            raise UsageError(f"{name} has shape {tuple(shape)} on this rank, and the snapshot has {copied}")
    for word, now, then in (
        ("optimizers", objects.optimizers, state.options),
        ("objects with a state_dict()", objects.others, state.others),
    ):
        if now.keys() != then.keys():
            raise UsageError(f"the {word} are {', '.join(now) or 'none'}, and the snapshot has {', '.join(then)}")
    for variable, optimizer in objects.optimizers.items():
        options = state.options[variable]
        if (options["num_params"], len(options["groups"])) != (len(params_of(optimizer)), len(optimizer.param_groups)):
            raise UsageError(f"{variable} has other parameters than in the snapshot; make it as it was made before")


def _restore_optimizer(optimizer: Optimizer, variable: str, state: TrainingSnapshot) -> None:
    options = copy.deepcopy(state.options[variable])
    tensors: dict[int, dict[str, tuple[str, torch.Tensor]]] = {}
    for name, tensor in state.tensors.items():
        place, _, key = name.removeprefix(f"{variable}.").partition(".")
        if name.startswith(f"{variable}.") and place.isdecimal():
            tensors.setdefault(int(place), {})[key] = name, tensor
    for group, saved in zip(optimizer.param_groups, options["groups"], strict=True):
        group.update(saved)
    for number, param in enumerate(params_of(optimizer)):
        entries: dict[str, Any] = options["state"][number]
        now = optimizer.state.pop(param, {})
        for key, (name, tensor) in tensors.get(number, {}).items():
            old = now.get(key)
            if isinstance(old, torch.Tensor) and local_part(old).shape == tensor.shape:
                local_part(old).copy_(tensor)
                entries[key] = old
            else:
                entries[key] = _as_param(tensor.clone(), param) if name in state.dtensors else tensor.clone()
        if entries:
            optimizer.state[param] = entries


def _as_param(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is laid out as a parameter."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
