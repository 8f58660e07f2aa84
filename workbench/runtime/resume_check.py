"""``verify --resume``: take a step, take it again from a checkpoint of the same state, and compare all bits.

What the checkpoint should set is made wrong first, so that an entry that is not loaded shows. Everything is restored
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from workbench.engine.backends.memory_aliasing import storage_address
from workbench.models.engines import is_wrapper
from workbench.protocol.checkpoint_replies import ResumeCheck
from workbench.protocol.commands import VerifyReply
from workbench.runtime.checkpoints import Checkpoint, training_objects
from workbench.runtime.command_handlers import RankContext
from workbench.runtime.program_state import ProgramState
from workbench.runtime.step_observation import relative
from workbench.runtime.trainer import loss_of
from workbench.runtime.training_state import TrainingObjects, local_part, model_tensors

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
        before, numbers = _values(objects), objects.random.plain()
        loss = loss_of(step())
        draws = any(numbers[kind] != state for kind, state in objects.random.plain().items() if kind in _TORCHS)
        expected = _values(training_objects(rank))
    with ExitStack() as stack:
        stack.callback(setattr, rank.trainer, "trained_steps", now)
        stack.enter_context(restored())
        stack.enter_context(program.restored())
        _spoil(objects, with_random=checkpoint.num_saved == rank.groups.world_size)
        reply = checkpoint.load_into(objects, rank)
        loaded = [name for name, value in _values(objects).items() if not _is_equal(value, before[name])]
        fresh = [name for name, optimizer in objects.optimizers.items() if steps_of[name] > _num_entries(optimizer)]
        resumed_loss = loss_of(step())
        found = _values(training_objects(rank))
    wrong = [name for name, value in found.items() if not _is_equal(value, expected[name])]
    worst = max((relative(found[name], expected[name]) for name in wrong), default=0.0)
    check = ResumeCheck(
        folder=str(checkpoint.folder),
        saved_step=now if checkpoint.record is None else checkpoint.record.step,
        step=now,
        first_param=wrong[0] if wrong else "",
        relative=relative(found[wrong[0]], expected[wrong[0]]) if wrong else 0.0,
        loaded=tuple(loaded[:_SHOWN]),
        fresh=tuple(fresh),
        has_equal_random=draws and _has_equal_random(checkpoint.of_ranks),
        detached=tuple(detached),
        notes=reply.notes,
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


def _values(objects: TrainingObjects) -> dict[str, torch.Tensor]:
    return {name: local_part(tensor).detach().to("cpu", copy=True) for name, tensor in model_tensors(objects)}


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and relative(a, b) == 0.0


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
def _spoil(objects: TrainingObjects, *, with_random: bool) -> None:
    """Make parameters, saved buffers, optimizers and random numbers wrong."""
    for model in objects.models.values():
        state = get_model_state_dict(model)
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        set_model_state_dict(model, {**state, **{key: _other(value) for key, value in tensors.items()}})
    for optimizer in objects.optimizers.values():
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group.update({key: value / 2 for key, value in group.items() if isinstance(value, float)})
    if with_random:
        torch.rand(7)
        np.random.rand(7)


def _other(values: torch.Tensor) -> torch.Tensor:
    return ~values if values.dtype == torch.bool else values + 1


def _has_equal_random(of_ranks: Mapping[int, Mapping[str, Any]]) -> bool:
    states = [[held["random"].get(kind) for kind in _TORCHS] for held in of_ranks.values()]
    return len(states) > 1 and all(state == states[0] for state in states)
