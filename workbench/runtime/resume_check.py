"""``verify --resume``: take a step, take it again from a checkpoint of the same state, and compare all bits.

What the checkpoint should set is made wrong first, so that an entry that is not loaded shows. Everything is restored
afterwards.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from workbench.engine._torch import is_of_old_shards
from workbench.engine.backends.memory_aliasing import storage_address
from workbench.engine.module_names import clean
from workbench.models.engines import is_wrapper
from workbench.protocol.checkpoint_replies import ResumeCheck
from workbench.protocol.commands import VerifyReply
from workbench.runtime.checkpoints import Checkpoint, LoadingPlan, owners_of, training_objects
from workbench.runtime.command_handlers import RankContext
from workbench.runtime.lint_rules import DROPOUTS
from workbench.runtime.namespace import variables
from workbench.runtime.program_state import ProgramState, fingerprint, reachable
from workbench.runtime.step_observation import is_equal, relative
from workbench.runtime.trainer import loss_of
from workbench.runtime.training_state import (
    TrainingObjects,
    TrainingSnapshot,
    capture,
    local_part,
    model_tensors,
    params_of,
    unreached,
)

_SHOWN = 3
_TORCHS = ("torch", "device")  # the generators that dropout draws from


def resumed(
    folder: Path,
    step: Callable[[], Any],
    program: ProgramState,
    rank: RankContext,
    restored: Callable[[], AbstractContextManager[None]],
) -> VerifyReply:
    """Take the step from the current state and from a checkpoint, and compare parameters and buffers; collective.

    Args:
        folder: the checkpoint, or a folder of some.
        step: the step function.
        program: the state that both steps start from.
        rank: this rank.
        restored: returns what restores all models after its body.

    Raises:
        UsageError: there is no checkpoint of these models.
    """
    checkpoint = Checkpoint.at(folder)
    objects, now = training_objects(rank), rank.trainer.trained_steps
    steps_of = {name: _num_entries(optimizer) for name, optimizer in objects.optimizers.items()}
    detached = _detached(objects)
    with restored(), program.restored():
        before, live = _values(objects), capture(objects, now)
        variables_before = _fingerprints(objects)
        with _observed(objects) as (stepped, dropouts):
            loss = loss_of(step())
        draws = any(live.random[kind] != state for kind, state in objects.random.plain().items() if kind in _TORCHS)
        expected = _values(training_objects(rank))
        changed = _changed(variables_before, _fingerprints(objects))
    with ExitStack() as stack:
        stack.callback(setattr, rank.trainer, "trained_steps", now)
        stack.enter_context(restored())
        stack.enter_context(program.restored())
        reply = checkpoint.load_into(objects, rank, functools.partial(_spoil, objects))
        different = _differences(live, capture(objects, now), checkpoint.others)
        held = {name: each for name, each in objects.optimizers.items() if name in reply.variables}
        fresh = [name for name, each in objects.optimizers.items() if steps_of[name] > _num_entries(each)]
        resumed_loss = loss_of(step())
        found = _values(training_objects(rank))
    wrong = [name for name, value in found.items() if not is_equal(value, expected[name])]
    worst = max((relative(found[name], expected[name]) for name in wrong), default=0.0)
    has_equal_random = draws and _has_equal_random(checkpoint.of_ranks)
    equal = ["all ranks saved the same random numbers"] if has_equal_random and not dropouts else []
    check = ResumeCheck(
        folder=str(checkpoint.folder),
        saved_step=now if checkpoint.record is None else checkpoint.record.step,
        step=now,
        first_param=wrong[0] if wrong else "",
        relative=relative(found[wrong[0]], expected[wrong[0]]) if wrong else 0.0,
        different=tuple(itertools.islice(different, _SHOWN)),
        fresh=tuple(fresh),
        not_held=tuple(name for name in _not_held(stepped, objects, held) if name not in fresh),
        changed=(*changed, *unreached(variables())),
        has_changed=any(not is_equal(value, before[name]) for name, value in expected.items()),
        dropout=next(iter(dropouts), "") if has_equal_random else "",
        detached=tuple(detached),
        notes=(*reply.notes, *equal),
    )
    return VerifyReply(
        num_params=len(found),
        max_abs_diff=max((_difference(found[name], expected[name]) for name in wrong), default=0.0),
        max_rel_diff=worst,
        worst_param=check.first_param,
        equal_bits=len(found) - len(wrong),
        ok=not wrong and not fresh,
        tolerance="none: all bits are compared",
        loss_sharded=resumed_loss,
        loss_reference=loss,
        resume=check,
    )


@contextmanager
def _observed(objects: TrainingObjects) -> Iterator[tuple[list[Optimizer], list[str]]]:
    """Note the optimizers that step in the body, and the dropout modules that drop."""
    stepped: list[Optimizer] = []
    dropouts: list[str] = []

    def note(name: str, module: nn.Module, *_: Any) -> None:  # noqa: ANN401 - hook signature
        if module.training and getattr(module, "p", False):
            dropouts.append(name)

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer)).remove)
        for variable, model in objects.models.items():
            for name, module in model.named_modules():
                if isinstance(module, DROPOUTS):
                    hook = functools.partial(note, f"{variable}.{clean(name)}")
                    stack.callback(module.register_forward_pre_hook(hook).remove)
        yield stepped, dropouts


def _not_held(stepped: Iterable[Optimizer], objects: TrainingObjects, held: Mapping[str, Optimizer]) -> Iterator[str]:
    """Yield the optimizers that stepped and are not in the checkpoint, each once."""
    names = {id(each.param_groups): name for name, each in objects.optimizers.items()}  # a wrapper's are the inner's
    known = {id(each.param_groups) for each in held.values()}
    for optimizer in {id(each.param_groups): each for each in stepped if id(each.param_groups) not in known}.values():
        yield names.get(
            id(optimizer.param_groups), f"an instance of {type(optimizer).__name__} that no public variable reaches"
        )


class _TensorState(NamedTuple):
    """A tensor, and how often it was changed in place."""

    tensor: torch.Tensor
    version: int


def _fingerprints(objects: TrainingObjects) -> dict[str, Any]:
    """Return what shows whether a variable changes, by expression; nothing of those in a checkpoint."""
    held = (*objects.models, *objects.optimizers, *objects.others)
    own = (
        *(tensor for _, tensor in model_tensors(objects)),
        *itertools.chain(*map(params_of, objects.optimizers.values())),
    )
    addresses = {storage_address(local_part(tensor)) for tensor in own}
    found: dict[str, Any] = {}
    for name, value in reachable(variables()):
        if any(name == each or name.startswith((f"{each}.", f"{each}[")) for each in held):
            continue
        if isinstance(value, torch.Tensor):
            if not value.is_inference() and storage_address(local_part(value)) not in addresses:
                found[name] = _TensorState(value, value._version)
        elif (shown := fingerprint(value)) is not None:
            found[name] = shown
    return found


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the variables that changed, without the places in them."""

    def is_same(a: Any, b: Any) -> bool:  # noqa: ANN401 - anything
        are_tensors = isinstance(a, _TensorState) and isinstance(b, _TensorState)
        return a.tensor is b.tensor and a.version == b.version if are_tensors else a == b

    names = (name for name, value in before.items() if name not in after or not is_same(value, after[name]))
    return list(dict.fromkeys(name.partition("[")[0] for name in names))


def _differences(live: TrainingSnapshot, loaded: TrainingSnapshot, others: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the state after a load differs from the live one, the first entry of each object, a sentence each."""
    for name, tensor in live.tensors.items():
        if name in loaded.tensors and not is_equal(tensor, loaded.tensors[name]):
            yield f"{name} has other values in the checkpoint"
    for name, options in live.options.items():
        yield from _different(options["groups"], loaded.options[name]["groups"], f"{name}.param_groups")
    for name, saved in others.items():
        yield from _different(live.others[name], saved, name)


def _different(live: Any, saved: Any, name: str) -> Iterator[str]:  # noqa: ANN401 - plain data
    """Yield the first entry that differs in two states, as a sentence; nothing if none does."""
    if isinstance(live, dict) and isinstance(saved, dict) and live.keys() == saved.keys():
        pairs = [(f"{name}.{key}", value, saved[key]) for key, value in live.items()]
    elif isinstance(live, (list, tuple)) and isinstance(saved, (list, tuple)) and len(live) == len(saved):
        pairs = [(f"{name}[{place}]", *both) for place, both in enumerate(zip(live, saved, strict=True))]
    elif isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if not is_equal(local_part(live).cpu(), local_part(saved).cpu()):
            yield f"{name} has other values in the checkpoint"
        return
    else:
        if repr(live) != repr(saved):
            yield f"{name} is {live!r:.40} now, and {saved!r:.40} in the checkpoint"
        return
    yield from itertools.islice((each for pair in pairs for each in _different(pair[1], pair[2], pair[0])), 1)


def _values(objects: TrainingObjects) -> dict[str, torch.Tensor]:
    return {name: local_part(tensor).detach().to("cpu", copy=True) for name, tensor in model_tensors(objects)}


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() and a.shape == b.shape else 0.0


def _num_entries(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(state) for state in optimizer.state.values())


def _detached(objects: TrainingObjects) -> list[str]:
    """Return the entries of the models' state dicts without memory of a parameter or buffer.

    Entries of a wrapper are copies by design, and those of a quantised model may all be.
    """
    found = []
    for name, model in objects.models.items():
        if any(map(is_wrapper, model.modules())):
            continue
        own = {storage_address(local_part(tensor)) for tensor in (*model.parameters(), *model.buffers())}
        entries = {key: v for key, v in get_model_state_dict(model).items() if isinstance(v, torch.Tensor)}
        local = {key: local_part(value) for key, value in entries.items()}
        apart = [key for key, value in local.items() if value.numel() and storage_address(value) not in own]
        found += [f"{name}.{key}" for key in apart if len(apart) < len(entries)]
    return found


@torch.no_grad()
def _spoil(objects: TrainingObjects, plan: LoadingPlan, with_random: bool) -> None:
    """Make what a plan sets wrong: parameters, saved buffers, optimizers and random numbers."""
    for variable in plan.keys.keys() & objects.models.keys():
        model = objects.models[variable]
        state = get_model_state_dict(model)
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        set_model_state_dict(model, {**state, **{key: _other(value) for key, value in tensors.items()}})
    for name in owners_of(objects)[0]:
        objects.optimizers[name].state.clear()  # one that the checkpoint lacks starts from nothing
        for group in objects.optimizers[name].param_groups if name in plan.keys else ():
            group.update({key: value / 2 for key, value in group.items() if isinstance(value, float)})
    if with_random:
        torch.rand(7)
        np.random.rand(7)


def _other(values: torch.Tensor) -> torch.Tensor:
    if is_of_old_shards(values):
        for shard in cast("Any", values).local_shards():
            shard.tensor.add_(1)
        return values
    return ~values if values.dtype == torch.bool else values + 1


def _has_equal_random(of_ranks: Mapping[int, Mapping[str, Any]]) -> bool:
    states = [[held["random"].get(kind) for kind in _TORCHS] for held in of_ranks.values()]
    return len(states) > 1 and all(state == states[0] for state in states)
