"""The command ``fault`` on a rank: put a fault into the user's training, from outside of its code, and remove it.

A fault is a function under :func:`injects` in ``fault_injectors.py``. All ranks choose the same fault, rank and unit.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from workbench.engine.full_param import local_tensor
from workbench.errors import UsageError
from workbench.protocol.breakpoints import chosen_units
from workbench.protocol.commands import InjectFault
from workbench.protocol.fault_kinds import KINDS, RANDOM, REMOVE, FaultKind, FaultReply
from workbench.runtime.command_handlers import ActiveFault, RankContext, does
from workbench.runtime.fault_injectors import INJECTORS, FaultScene
from workbench.runtime.lint import sharded_models, target_of
from workbench.runtime.lint_target import LintTarget, LintUnit
from workbench.runtime.namespace import optimizers_of


@does(InjectFault)
def fault(command: InjectFault, rank: RankContext) -> FaultReply:
    """Inject a fault, or remove it.

    Raises:
        UsageError: a fault is on, or none is to be removed; no model is sharded; there is no such rank or unit, or the
            fault needs something that this training does not have. Nothing is changed then.
    """
    if command.name == REMOVE:
        removed = remove(rank)
        if removed is None:
            raise UsageError("no fault is on; %fsdp faults lists them, and %fsdp fault straggler injects one")
        return removed
    if rank.fault is not None:
        on = rank.fault.reply
        known = "a drawn fault is on" if on.is_hidden else f"{on.name} is on: {on.words}"
        raise UsageError(f"{known}; remove it first: %fsdp fault off")
    kind, scene = _chosen(command, rank)
    with ExitStack() as held:
        if kind.spoils:
            held.enter_context(_values_kept(scene))
        held.enter_context(INJECTORS[kind.name].inject(scene))
        reply = FaultReply(
            name=kind.name,
            rank=scene.at,
            unit=scene.unit.info.name,
            ms=command.ms,
            is_on=True,
            is_hidden=command.name == RANDOM,
        )
        rank.fault = ActiveFault(reply, held.pop_all(), rank.recorder.next_step)
    return reply


def remove(rank: RankContext) -> FaultReply | None:
    """Remove the fault of this rank, and return which it was; None if there is none."""
    if rank.fault is None:
        return None
    active, rank.fault = rank.fault, None
    active.held.close()
    rank.history.forget()
    rank.faulty_steps.update(range(active.first_step, rank.recorder.next_step))
    kind = KINDS[active.reply.name]
    restored = "parameters and optimizer state are those from before the fault"
    notes = [*([restored] if kind.spoils else []), *([kind.lasting] if kind.lasting else [])]
    return FaultReply(**{**vars(active.reply), "is_on": False, "notes": tuple(notes)})


# ---- which fault, where


def _chosen(command: InjectFault, rank: RankContext) -> tuple[FaultKind, FaultScene]:
    """Return the fault and where it goes; whatever is not given is drawn, equally on all ranks."""
    size = rank.groups.world_size
    if command.rank is not None and command.rank >= size:
        raise UsageError(f"there is no rank {command.rank}: the ranks are 0 to {size - 1}")
    targets = [target_of(name, model, rank) for name, model in sharded_models().items()]
    if not targets:
        raise UsageError("no model is sharded, and faults are those of sharded training: first %fsdp shard MODEL")
    draw = random.Random(command.seed)
    at = draw.randrange(size) if command.rank is None else command.rank
    scenes = [
        FaultScene(rank=rank, target=target, unit=unit, at=at, ms=command.ms)
        for target, unit in _units(command.unit, targets)
    ]
    if command.name != RANDOM:
        return KINDS[command.name], draw.choice(_possible(command.name, scenes))
    found = {kind.name: scenes_of for kind in KINDS.values() if (scenes_of := _drawable(kind, scenes))}
    name = draw.choice(list(found))
    return KINDS[name], draw.choice(found[name])


def _units(name: str, targets: Sequence[LintTarget]) -> list[tuple[LintTarget, LintUnit]]:
    """Return the units of this name; all but roots if it is empty."""
    having = [(target, unit) for target in targets for unit in target.sharded if unit.modules]
    if not having:
        engines = sorted({model.engine.short_name for target in targets for model in target.models})
        raise UsageError(
            f"faults go into units of FSDP, and a model in {' and '.join(engines)} has none: to try one, run the cell "
            "that builds the plain model, then %fsdp shard MODEL"
        )
    if name:
        chosen = chosen_units(name, [unit.info.name for _, unit in having])
        return [each for each in having if each[1].info.name in chosen]
    return [each for each in having if each[1].info.name] or having


def _possible(name: str, scenes: Sequence[FaultScene]) -> list[FaultScene]:
    """Return where a fault can be injected; raises UsageError if nowhere."""
    found: list[FaultScene] = []
    for scene in scenes:
        try:
            INJECTORS[name].check(scene)
            found.append(scene)
        except UsageError as error:
            reason = error
    if not found:
        raise reason
    return found


def _drawable(kind: FaultKind, scenes: Sequence[FaultScene]) -> list[FaultScene]:
    """Return where a fault can be drawn: where it can be injected, and named by its instrument."""
    if not kind.is_drawn:
        return []
    try:
        return _possible(kind.name, scenes)
    except UsageError:
        return []


# ---- values


@contextmanager
def _values_kept(scene: FaultScene) -> Iterator[None]:
    """Restore parameters and optimizer state after the body, and drop all gradients."""
    model = scene.target.model
    optimizers = optimizers_of(model)
    _reshard(scene)
    kept = {name: local_tensor(param).detach().clone() for name, param in model.named_parameters()}
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    try:
        yield
    finally:
        _reshard(scene)
        with torch.no_grad():
            for name, param in model.named_parameters():
                local, value = local_tensor(param), kept.get(name)
                if value is not None and local.shape == value.shape:  # else it was resharded meanwhile
                    local.copy_(value)
                param.grad = None
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        for each in scene.rank.watch.models_in(model):
            each.drop_full_grads(unit.index for unit in each.units)
        scene.rank.watch.renew(())  # forgets a step of torch's engine that raised


def _reshard(scene: FaultScene) -> None:
    """Free full parameters, which would be taken for the shards."""
    for each in scene.rank.watch.models_in(scene.target.model):
        each.reshard()
