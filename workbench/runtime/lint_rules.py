"""The rules of ``lint``; adding one is adding a function here (see ``lint_target.py``).

Rules about sizes are silent on toys: on models below :data:`TOY_NBYTES` every layout is as good as another. Above it
they compare a unit with its model, not with a number of bytes, so that a small copy of a large model is judged alike.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import math
import os
import sys
import textwrap
import weakref
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset, TensorDataset

from workbench.base.fault import Fault, added_late, buffers_differ, hook_never_called, in_no_unit, listed
from workbench.base.text_formats import plural
from workbench.engine._torch import is_fake
from workbench.engine.full_param import local_tensor
from workbench.engine.module_names import clean
from workbench.events import Engine, Param, ParamTensors, unit_words
from workbench.models._torch_private import checkpoint_wrappers_below
from workbench.models.engines import class_name, fully_shard_of
from workbench.protocol.lint_reply import RankComparison
from workbench.runtime.emptied_tensors import EmptiedTensors, Place, at, digest, held
from workbench.runtime.lint_target import (
    RULES,
    Abstains,
    Damage,
    Finding,
    LintTarget,
    LintUnit,
    Rule,
    full_nbytes,
    rule,
)
from workbench.runtime.step_counters import count_in
from workbench.runtime.training_history import OptimizerHistory
from workbench.runtime.training_inputs import LoaderInputs, splits_rows

TOY_NBYTES = 1 << 20
"""Bytes of a model, all its units unsharded, below which no rule about sizes speaks."""

SMALL_NBYTES = 128 << 10
"""Bytes of a unit whose all-gather takes less time than its launch: 13 us at 10 GB/s, against 20 us and more."""

LARGE_NBYTES = 64 << 20
"""Bytes from which half a model in one unit is worth splitting even where no class repeats."""

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_16_BIT = ("bfloat16", "float16")


def rules() -> list[Rule]:
    """Return all rules, those that find the worst damage first."""
    return sorted(RULES, key=lambda each: each.damage)


def _size(nbytes: int) -> str:
    return f"{nbytes:,} B"


# ---- wrong numbers


@rule(Damage.NUMBERS)
def optimizer_before_shard(target: LintTarget) -> Iterator[Finding]:
    """An optimizer that was made before sharding: it updates parameters that the model no longer has.

    It holds parameters of no module among the variables, all with the shapes of trained parameters of the model that
    no optimizer holds.
    """
    for name, optimizer, stale, free in _stale(target):
        if not _are_replaced(target, stale, free):
            yield Fault(
                rule="optimizer-before-shard",
                verdict=f"{name} was made before {target.name} was sharded, so its steps do not train the model",
                evidence=_of_stale(target, name, optimizer, stale, free),
                fix=f"after sharding: {name} = {_made(optimizer)}({target.name}.parameters(){_rate(optimizer)})",
            )


@rule(Damage.NUMBERS)
def parameters_replaced(target: LintTarget) -> Iterator[Finding]:
    """An optimizer whose parameters were replaced later: by to_empty, load_state_dict(assign=True) or a new module.

    Or one whose state belongs to parameters that it no longer holds, while it began anew with those that it holds.
    """
    for name, optimizer, stale, free in _stale(target):
        if _are_replaced(target, stale, free):
            yield Fault(
                rule="parameters-replaced",
                verdict=f"{name} was made before parameters of {target.name} were replaced, and does not train them",
                evidence=_of_stale(target, name, optimizer, stale, free),
                fix=f"make it after the last replacement: {name} = {_made(optimizer)}({target.name}.parameters()"
                f"{_rate(optimizer)})",
            )
    for name, optimizer in target.optimizers.items():
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        left = [param for param in optimizer.state if id(param) not in held and id(param) not in _everywhere(target)]
        shapes = Counter(_shape(param) for group in optimizer.param_groups for param in group["params"])
        if left and held & target.owned.keys() and Counter(map(_shape, left)) <= shapes:
            yield Fault(
                rule="parameters-replaced",
                verdict=f"the state of {name} belongs to {plural(len(left), 'parameter')} that it no longer holds, "
                "so it began anew with those that it holds",
                evidence=(f"entries of state: {len(optimizer.state)}, parameters in its groups: {len(held)}",),
                fix=f"make {name} after sharding, and load its state with torch.distributed.checkpoint.state_dict."
                "set_optimizer_state_dict, which finds parameters by name",
            )


_Stale = tuple[str, Optimizer, list[torch.Tensor], dict[str, tuple[int, ...]]]


def _everywhere(target: LintTarget) -> set[int]:
    """Return the ids of the parameters of all modules among the variables, and of the units."""
    modules = (value for value in target.variables.values() if isinstance(value, nn.Module))
    return {id(param) for module in modules for param in module.parameters()} | target.owned.keys()


def _stale(target: LintTarget) -> Iterator[_Stale]:
    """Yield each optimizer that holds parameters of no module, with these, and with those that no optimizer holds."""
    free = {
        name: shape
        for unit in target.units
        for _, param, tensors in unit.named()
        if id(tensors.shard) not in target.held
        for name, shape, trained in parts_of(param)
        if trained and id(target.params.get(name)) not in target.held
    }
    everywhere = _everywhere(target)
    for name, optimizer in target.optimizers.items():
        params = [param for group in optimizer.param_groups for param in group["params"]]
        stale = [param for param in params if id(param) not in everywhere]
        is_emptied = all(not param.numel() for param in stale) and len(stale) <= len(free)  # as a wrapper leaves them
        if stale and (is_emptied or Counter(_shape(param) for param in stale) <= Counter(free.values())):
            yield name, optimizer, stale, free


def _are_replaced(target: LintTarget, stale: Sequence[torch.Tensor], free: Iterable[str]) -> bool:
    """Return whether stale parameters were of the model as it is sharded now, not of the plain one."""
    wanted = [target.params[name] for name in free if name in target.params]
    return all(isinstance(param, DTensor) for param in stale) or not (
        target.sharded and (not wanted or any(isinstance(param, DTensor) for param in wanted))
    )


def _of_stale(
    target: LintTarget, name: str, optimizer: Optimizer, stale: Sequence[torch.Tensor], free: Iterable[str]
) -> tuple[str, str]:
    return (
        f"{name} ({type(optimizer).__name__}) holds {plural(len(stale), 'parameter')} that {target.name} no longer "
        f"has, {_size(sum(param.nbytes for param in stale))}",
        f"in no optimizer: {listed(list(free))}",
    )


def parts_of(param: Param) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield name, whole shape and trainability of a parameter, or of each in a flat one."""
    if not param.parts:
        yield param.fqn, tuple(param.global_shape), param.trainable
    yield from ((part.fqn, tuple(part.global_shape), param.trainable and part.trainable) for part in param.parts)


def _shape(param: torch.Tensor) -> tuple[int, ...]:
    return tuple(param.shape) or (1,)


def _made(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    return f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__


def _rate(optimizer: Optimizer) -> str:
    rate = optimizer.defaults.get("lr")
    return f", lr={rate:g}" if isinstance(rate, float) else ""


@rule(Damage.NUMBERS)
def never_written(target: LintTarget) -> Iterator[Finding]:
    """Parameters or buffers that to_empty allocated and nothing has written since.

    Told where their version and bytes are unchanged, and the bytes are zeros, not finite or absurd. Buffers outside
    state dicts, such as rotary frequencies, are the usual case: a checkpoint does not restore them.
    """
    tensors = {**target.params, **_buffers(target)}
    names = [name for name, tensor in tensors.items() if EmptiedTensors.is_unwritten(tensor)]
    if names:
        yield Fault(
            rule="never-written",
            verdict=f"{target.name} computes with memory that nothing has written since to_empty",
            evidence=(f"{listed(names)}: {_size(sum(local_tensor(tensors[n]).nbytes for n in names))}",),
            fix="call reset_parameters() of the modules that have it; set the others, and buffers outside the state "
            f"dict, by hand: {target.name}.get_{'buffer' if names[-1] in _buffers(target) else 'parameter'}"
            f"({names[-1]!r}).copy_(...)",
        )


def _buffers(target: LintTarget) -> dict[str, torch.Tensor]:
    return {clean(name): buffer for name, buffer in target.model.named_buffers()}


@rule(Damage.NUMBERS, named="in-no-unit")
def trained_in_no_unit(target: LintTarget) -> Iterator[Finding]:
    """Trained parameters in no unit: nothing averages their gradients."""
    unknown, late = target.ignored, target.late
    found = [name for name in target.in_no_unit if name not in unknown and name not in late]
    if found:
        yield in_no_unit(target.name, found)
    if late:
        yield added_late(late)
    if unknown:
        raise Abstains(f"what averages the gradients of {listed(unknown)}, which the wrapper ignores, is unknown")


@rule(Damage.NUMBERS)
def sync_left_off(target: LintTarget) -> Iterator[Finding]:
    """Gradients that were not reduced before the step: gradient synchronisation stayed off for the last micro-batch.

    Told by what waited at the newest step of an optimizer, not by the flag of a module, which a loop may turn off
    again at once. Or torch's wrapper, told to replicate over shard groups of one rank, reduces over none.
    """
    left = [unit for unit in target.units if unit.is_left_unaveraged]
    if left:
        yield Fault(
            rule="sync-left-off",
            verdict=f"torch does not average the gradients of {target.name} between its copies: it makes NO_SHARD of a "
            "hybrid strategy with one rank in each shard group, and reduces within that group alone",
            evidence=(f"units {_names(left)}",),
            fix="shard over groups of two ranks or more, or replicate with DistributedDataParallel; then load one "
            "checkpoint on every rank",
        )
    for name, _, past in target.trained:
        units = [unit for unit in target.units if unit.info.index in past.unreduced]
        steps = f"{past.num_unreduced} of {plural(past.num_steps, 'step')} of {name}"
        sharded = [unit for unit in units if unit.is_sharded]
        between = [unit for unit in sharded if _waits_between_copies(unit)]
        if between:
            yield Fault(
                rule="sync-left-off",
                verdict=f"{name} steps while gradients of {target.name} are not reduced between its copies",
                evidence=(f"units {_names(between)}: sums of one copy wait, and no step gets them", steps),
                fix=f"before the last micro-batch of each step: {target.name}.set_requires_all_reduce(True)",
            )
        elif sharded:
            is_flat = any(unit.info.is_flat for unit in sharded)
            yield Fault(
                rule="sync-left-off",
                verdict=f"{name} steps while gradients of {target.name} are not reduced: synchronisation stayed off",
                evidence=(f"units {_names(sharded)}: each rank's own gradients wait, and no step gets them", steps),
                fix=f"no no_sync() around the last micro-batch before {name}.step()"
                if is_flat
                else f"before the last micro-batch of each step: {target.name}.set_requires_gradient_sync(True)",
            )
        for unit in units:
            if not unit.is_sharded:
                yield RankComparison(
                    fault=Fault(
                        rule="sync-left-off",
                        verdict=f"ranks train {target.name} apart: {name} steps with gradients from no_sync(), which "
                        f"nothing averages ({steps})",
                        fix=f"no no_sync() around the last micro-batch before {name}.step(); then load one checkpoint "
                        "on every rank",
                    ),
                    digests=_digests(unit),
                )


def _waits_between_copies(unit: LintUnit) -> bool:
    """Return whether what waits are sums of the gradients of one copy of the model, not gradients of one rank."""
    full = (grad for tensors in unit.tensors.values() for grad in tensors.full_grads)
    return unit.info.replicate_size > 1 and next(full, None) is None


@rule(Damage.NUMBERS)
def wrapper_bypassed(target: LintTarget) -> Iterator[Finding]:
    """A model in ``DistributedDataParallel`` trained by ``model.module(x)``, so that nothing averages its gradients.

    A fault only if the ranks' parameters differ: the program may average the gradients by itself.
    """
    for name, _, past in target.trained:
        for unit in target.units:
            number = _num_bypassed(unit, past)
            if number:
                yield RankComparison(
                    fault=Fault(
                        rule="wrapper-bypassed",
                        verdict=f"ranks train {target.name} apart: at {number} of {plural(past.num_steps, 'step')} of "
                        f"{name} its gradients were of a backward without a forward of {unit.info.runner.short_name}, "
                        "which averages none of those",
                        fix=f"call {target.name}(x) for what is trained, not {target.name}.module(x); then load one "
                        "checkpoint on every rank",
                    ),
                    digests=_digests(unit),
                )


def _num_bypassed(unit: LintUnit, past: OptimizerHistory) -> int:
    """Return the steps of an optimizer for which a backward of ``DistributedDataParallel`` was missing."""
    if unit.num_backwards is None or unit.info.index in past.unreduced:
        return 0
    return past.num_bypassed.get(unit.info.index, 0) if unit.num_backwards else past.num_steps


@rule(Damage.NUMBERS)
def kept_by_zero_grad(target: LintTarget) -> Iterator[Finding]:
    """A micro-batch without synchronisation that zero_grad() was to discard: its gradients were in the next step.

    ``zero_grad`` clears the gradients of the sharded parameters; those that wait for a reduction stay.
    """
    for name, _, past in target.trained:
        mixed = {unit.info.name: past.mixed[unit.info.index] for unit in target.units if unit.info.index in past.mixed}
        if mixed:
            yield Fault(
                rule="kept-by-zero-grad",
                verdict=f"zero_grad() kept gradients that waited for a reduction: the next step of {name} used them",
                evidence=(
                    f"units {listed(list(mixed))}: last in step {max(mixed.values())} of {name}, counted from 0",
                ),
                fix="decide before the backward whether a micro-batch counts: if skip: continue; or clear after a "
                f"synchronised backward: {target.name}.set_requires_gradient_sync(True)",
            )


@rule(Damage.NUMBERS)
def no_zero_grad(target: LintTarget) -> Iterator[Finding]:
    """An optimizer whose gradients nothing clears: each step uses those of all earlier steps again."""
    for name, _, past in target.trained:
        if past.added_to is not None:
            yield Fault(
                rule="no-zero-grad",
                verdict=f"nothing clears the gradients that {name} has used, and the next backward adds to them",
                evidence=(
                    f"step {past.added_to} of {name}, counted from 0, used those of step {past.added_to - 1} again",
                ),
                fix=f"once in each step, before backward or after {name}.step(): {name}.zero_grad()",
            )


_EQUAL_AT_FIRST = (
    "find what changed them on some ranks alone since DistributedDataParallel made them equal, such as a checkpoint "
    "that not all ranks have loaded; then load one on every rank"
)


def _digests(unit: LintUnit, left_out: Container[str] = ()) -> dict[str, int]:
    """Return a checksum of each parameter of a unit, by name and the ranks that should have the same."""
    ranks = ", ".join(map(str, unit.replicas or ()))
    return {
        f"{name} on ranks {ranks}": digest(_tensor(tensors))
        for name, param, tensors in unit.named()
        # else tensor parallelism has split it, in another way on each rank
        if param.shape == param.global_shape and name not in left_out
    }


@rule(Damage.NUMBERS)
def replicas_differ(target: LintTarget) -> Iterator[Finding]:
    """Replicated parameters whose values differ between ranks: copies of HSDP, DDP models, ignored parameters."""
    digests: dict[str, int] = {}
    unknown = []
    for unit in target.units:
        if unit.info.replicate_size == 1:
            continue
        if unit.replicas is None:
            unknown.append(unit_words(unit.info.name))
            continue
        are_causes = (unit.info.index in past.unreduced or _num_bypassed(unit, past) for *_, past in target.trained)
        if not any(are_causes):
            digests |= _digests(unit, target.in_no_unit)
    if not _has_tensor_parallelism(target):
        apart = {clean(name) for unit in target.units for name in unit.tensors} | {*target.in_no_unit}
        digests |= {
            name: digest(param)
            for name, param in target.params.items()
            if name not in apart and id(param) not in target.owned_by_units and not isinstance(param, DTensor)
        }
    yield RankComparison(
        fault=Fault(
            rule="replicas-differ",
            verdict=f"ranks hold different values of replicated parameters of {target.name}",
            fix=_EQUAL_AT_FIRST
            if not any(unit.info.runner.splits for unit in target.units)
            else f"give all ranks the same: torch.manual_seed(0) before {target.name} is built, or load one checkpoint "
            "on every rank",
        ),
        digests=digests,
        model=target.name,
    )
    if unknown:
        raise Abstains(f"the ranks that replicate {listed(unknown)} are unknown")


def _has_tensor_parallelism(target: LintTarget) -> bool:
    return any(unit.info.shard_size * unit.info.replicate_size != target.world_size for unit in target.units)


def _tensor(tensors: ParamTensors) -> torch.Tensor:
    shard = tensors.shard
    assert isinstance(shard, torch.Tensor)
    return shard


@rule(Damage.NUMBERS, named="buffers-differ")
def unequal_buffers(target: LintTarget) -> Iterator[Finding]:
    """Buffers that differ between ranks."""
    unwritten = {name for name, buffer in _buffers(target).items() if EmptiedTensors.is_unwritten(buffer)}
    digests = {name: found for name, found in target.buffer_sums.items() if name not in unwritten}
    yield RankComparison(fault=buffers_differ(target.name), digests=digests)  # never-written names the others


@rule(Damage.NUMBERS)
def tied_in_two_units(target: LintTarget) -> Iterator[Finding]:
    """Tied parameters in two units, where each unit has a copy of its own: they are trained apart.

    Told by one parameter at places of two units, or by equal matrices of modules of different classes, such as an
    embedding and the head, in two units, now or when an optimizer took its first step. Layers that were copied are of
    one class.
    """
    pairs = (*_held_twice(target), *_copied(target.units), *_copied_once(target))
    for (a, name_a), (b, name_b) in {
        frozenset(names): pair for pair in pairs if (names := (pair[0][1], pair[1][1]))
    }.values():
        yield Fault(
            rule="tied-in-two-units",
            verdict=f"{name_a} and {name_b} are tied but in two units, which train them apart",
            evidence=(f"{name_a} in unit {unit_words(a.info.name)}", f"{name_b} in unit {unit_words(b.info.name)}"),
            fix=f"make one unit of both: fully_shard([{_holder(target, name_a)}, {_holder(target, name_b)}]) on the "
            "plain model, or leave both to the unit of the model",
        )


_Named = tuple[LintUnit, str]


def _held_twice(target: LintTarget) -> Iterator[tuple[_Named, _Named]]:
    """Yield pairs of names, in two units, of one registered parameter of which the units have shards of their own."""
    registered: dict[int, tuple[LintUnit, str, ParamTensors]] = {}
    for unit, name, tensors, module, attribute in _placed(target.units):
        param = held(module, attribute)
        other, first, known = registered.setdefault(id(param), (unit, name, tensors))
        if param is not None and other is not unit and not _is_one(_tensor(known), _tensor(tensors)):
            yield (other, first), (unit, name)


def _copied_once(target: LintTarget) -> Iterator[tuple[_Named, _Named]]:
    """Yield such pairs that were equal when an optimizer took its first step."""
    names = {(id(module), attribute): (unit, name) for unit, name, _, module, attribute in _placed(target.units)}
    for pair in target.history.copies:
        first, second = (names.get((id(owner()), attribute)) for owner, attribute in pair)
        if first is not None and second is not None:
            yield first, second


def copied_places(units: Iterable[LintUnit]) -> Iterator[tuple[Place, Place]]:
    """Yield the places of equal matrices of modules of different classes, in two units."""
    places = {(unit.info.index, name): (weakref.ref(owner), attr) for unit, name, _, owner, attr in _placed(units)}
    for (a, name_a), (b, name_b) in _copied(units):
        yield places[a.info.index, name_a], places[b.info.index, name_b]


def _copied(units: Iterable[LintUnit]) -> Iterator[tuple[_Named, _Named]]:
    """Yield pairs of names, in two units, of equal matrices of modules of different classes."""
    by_shape: dict[Any, dict[type, list[tuple[LintUnit, str, torch.Tensor]]]] = {}
    for unit, name, tensors, module, _ in _placed(units):
        shard = _tensor(tensors)
        if shard.ndim > 1 and local_tensor(shard).numel() and not shard.is_meta:
            classes = by_shape.setdefault((tuple(shard.shape), shard.dtype), {})
            classes.setdefault(type(module), []).append((unit, name, shard))
    for classes in by_shape.values():
        for some, others in combinations(classes.values(), 2):
            for (a, name_a, one), (b, name_b, two) in product(some, others):
                if a is not b and _are_copies(one, two):
                    yield (a, name_a), (b, name_b)


def _placed(units: Iterable[LintUnit]) -> Iterator[tuple[LintUnit, str, ParamTensors, nn.Module, str]]:
    """Yield each place of each parameter: unit, name, tensors, module and attribute."""
    for unit in units:
        for name, _, tensors in unit.named():
            for module, attribute in tensors.places:
                if isinstance(module, nn.Module):
                    yield unit, name, tensors, module, attribute


def _are_copies(one: torch.Tensor, other: torch.Tensor) -> bool:
    a, b = local_tensor(one).detach(), local_tensor(other).detach()
    if is_fake(a) or is_fake(b):  # of a plan
        return False
    is_equal = a.shape == b.shape and torch.equal(a, b) and bool((a != a.reshape(-1)[0]).any())
    return is_equal and not _is_one(one, other)


def _is_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two units share a shard: torch's units take a parameter that was tied after ``fully_shard``."""
    return local_tensor(one).is_set_to(local_tensor(other))


def _holder(target: LintTarget, name: str) -> str:
    return ".".join((target.name, *name.split(".")[:-1]))


@rule(Damage.NUMBERS)
def tie_lost(target: LintTarget) -> Iterator[Finding]:
    """Parameters that were tied until to_empty or load_state_dict(assign=True) split them: they are trained apart."""
    for places, by in target.lost_ties:
        names = [_join(target.modules.get(owner), attribute) for place in places for owner, attribute in _owner(place)]
        if len(names) == len(places) and len({id(at(place)) for place in places}) > 1:
            first, *others = names
            again = "; ".join(f"{target.name}.{other} = {target.name}.{first}" for other in others)
            yield Fault(
                rule="tie-lost",
                verdict=f"{listed(names)} were tied before {by}, and are trained apart since",
                evidence=(f"{len(names)} places of one parameter then, each with its own now",),
                fix=f"after {by}, before sharding: {again}",
            )


def _owner(place: Place) -> Iterator[tuple[nn.Module, str]]:
    owner = place[0]()
    if owner is not None:
        yield owner, place[1]


def _join(path: str | None, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


@rule(Damage.NUMBERS)
def same_data(target: LintTarget) -> Iterator[Finding]:
    """A DataLoader that draws the same rows in the same order on every rank.

    After training, the inputs of the model's first forwards tell it: they were equal, bit for bit, but not to each
    other. Before, a loader without a DistributedSampler is judged that shuffles the same TensorDataset with the same
    state of its generator. One without ``shuffle`` is not: evaluation on every rank reads the same rows on purpose.
    A DistributedSampler is judged by its rank; equal seeds of it are right.
    """
    samplers = dict(_samplers(target))
    if not _has_tensor_parallelism(target):
        yield RankComparison(
            fault=Fault(
                rule="same-data",
                verdict="{names} has the same rank on several ranks, so they draw the same rows",
                fix="{first} = torch.utils.data.DistributedSampler(dataset), which takes the rank of the process group",
            ),
            digests={
                # hash(None) differs between processes
                name: hash((sampler.rank, sampler.seed, sampler.epoch, _data_digest(sampler.dataset) or 0))
                for name, sampler in samplers.items()
            },
            wants_equal=False,
        )
    inputs = target.history.inputs.of(target.model)
    loaders = {
        name: value
        for name, value in target.variables.items()
        if isinstance(value, DataLoader) and type(value.sampler) is RandomSampler
    }
    if _has_tensor_parallelism(target) and (loaders or inputs is not None):
        raise Abstains("which ranks of the mesh should see different data is unknown with tensor parallelism")
    if inputs is not None:
        yield from _same_inputs(target, inputs)
    elif loaders:
        yield from _same_rows(loaders)


def _same_inputs(target: LintTarget, inputs: LoaderInputs) -> Iterator[Finding]:
    """Compare what ranks trained on; raises Abstains where a model may split its inputs itself."""
    iterated, loader = inputs.iterated, inputs.iterated.loader()
    if iterated.splits_rows:
        return
    if target.sends_activations(inputs.since_ns):
        raise Abstains("ranks that send each other activations within a forward may get the same inputs on purpose")
    known = target.variables.items() if loader is not None else ()
    name = next((name for name, value in known if value is loader), "")
    kind, rows = iterated.dataset, f"{name}.dataset" if name else "dataset"
    fix = _SPLIT_STREAM if iterated.is_stream else _SPLIT_ROWS
    yield RankComparison(
        fault=Fault(
            rule="same-data",
            verdict="{names} gave several ranks the same rows to train on: the inputs of the first "
            f"{len(inputs.digests)} forwards of {target.name} are equal",
            fix=fix.format(rows=rows, kind=kind),
        ),
        digests={name or f"the DataLoader of a {kind}": hash(tuple(inputs.digests))},
        wants_equal=False,
    )


_SPLIT_STREAM = (
    "let {kind}.__iter__ yield each rank its own part, such as itertools.islice(rows, rank, None, world_size); where a "
    "DataLoader has workers, each of them reads a part of it (torch.utils.data.get_worker_info())"
)
_SPLIT_ROWS = (
    "sampler = torch.utils.data.DistributedSampler({rows}); pass sampler=sampler to the DataLoader instead of "
    "shuffle=True, and call sampler.set_epoch(epoch) in each epoch"
)


def _same_rows(loaders: Mapping[str, DataLoader[Any]]) -> Iterator[Finding]:
    """Compare what loaders will draw; raises Abstains where their rows are unknown."""
    known = {name: _data_digest(loader.dataset) for name, loader in loaders.items()}
    generators = {name: getattr(loader.sampler, "generator", None) for name, loader in loaders.items()}
    yield RankComparison(
        fault=Fault(
            rule="same-data",
            verdict="{names} draws the same rows in the same order on several ranks",
            fix=_SPLIT_ROWS.format(rows="{first}.dataset"),
        ),
        digests={
            name: hash((rows, digest((generators[name] or torch.default_generator).get_state())))
            for name, rows in known.items()
            if rows is not None
        },
        wants_equal=False,
    )
    unread = [name for name, rows in known.items() if rows is None]
    if unread:
        kinds = ", ".join(sorted({type(loaders[name].dataset).__name__ for name in unread}))
        raise Abstains(f"whether {listed(unread)} has the same rows on every rank is unknown without reading a {kinds}")


def _samplers(target: LintTarget) -> Iterator[tuple[str, DistributedSampler[Any]]]:
    """Yield the DistributedSamplers among the variables, and of their loaders, that split data over several ranks."""
    seen: set[int] = set()
    for name, value in target.variables.items():
        sampler, text = value, name
        if isinstance(value, DataLoader):
            sampler, text = value.sampler, f"{name}.sampler"
        if splits_rows(sampler) and id(sampler) not in seen:
            seen.add(id(sampler))
            yield text, sampler


@rule(Damage.NUMBERS)
def sampler_seeds_differ(target: LintTarget) -> Iterator[Finding]:
    """DistributedSamplers that shuffle by another seed or epoch on each rank: some rows are drawn twice, some never."""
    yield RankComparison(
        fault=Fault(
            rule="sampler-seeds-differ",
            verdict="{names} shuffles in another order on each rank, so ranks draw some rows twice and some never",
            fix="give {first} the same seed on all ranks, and call {first}.set_epoch(epoch) on all of them",
        ),
        digests={name: hash((each.seed, each.epoch)) for name, each in _samplers(target) if each.shuffle},
    )


@rule(Damage.NUMBERS, named="options-differ")
def unequal_options(target: LintTarget) -> Iterator[Finding]:
    """Options of an optimizer, such as its learning rate, or its number of steps, that differ between ranks.

    Or will: torch's ``GradScaler`` with flat parameters looks at a rank's own shards.
    """
    yield RankComparison(
        fault=Fault(
            rule="options-differ",
            verdict="ranks take steps with different {names}",
            fix="load one checkpoint, of the optimizer and its scheduler too, on every rank; all-reduce what decides "
            "about options, such as the loss that ReduceLROnPlateau.step() gets",
        ),
        digests={
            f"{name}.param_groups[{place}]['{option}']": hash(value)
            for name, optimizer, _ in target.trained
            for place, group in enumerate(optimizer.param_groups)
            for option, value in _numbers(group)
            if option != "lr"
        }
        | {
            f"learning rates of {name} in {plural(past.num_steps, 'step')}": hash((past.rates, *_rates(optimizer)))
            for name, optimizer, past in target.trained
        },
        model=target.name,
    )
    scalers = [name for name, value in target.variables.items() if type(value) is GradScaler and value.is_enabled()]
    if scalers and any(unit.info.is_flat and unit.info.shard_size > 1 for unit in target.units):
        yield Fault(
            rule="options-differ",
            verdict=f"{scalers[0]} looks for gradients that are not finite in a rank's own shards alone, so each rank "
            "skips other steps, and scales otherwise",
            evidence=(f"{scalers[0]} is a torch.amp.GradScaler, and parameters of {target.name} are flat",),
            fix=f"{scalers[0]} = ShardedGradScaler(), of torch.distributed.fsdp.sharded_grad_scaler: it asks all ranks",
        )
        return
    steps = {name: _num_steps(optimizer) for name, optimizer, _ in target.trained}
    yield RankComparison(
        fault=Fault(
            rule="options-differ",
            verdict="the state of {names} is of other steps on each rank, as after a resume of some ranks alone",
            fix="load one checkpoint of the model and the optimizer on every rank",
        ),
        digests={name: number for name, number in steps.items() if number},
        model=target.name,
    )


def _rates(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the learning rates that an optimizer has now."""
    for group in optimizer.param_groups:
        yield from (value for option, value in _numbers(group) if option == "lr")


def _num_steps(optimizer: Optimizer) -> int:
    """Return the most steps that an optimizer has counted for a parameter; 0 if it counts none."""
    return max((count_in(state) or 0 for state in optimizer.state.values()), default=0)


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a group of parameters that are numbers, or several: their hashes are equal on all ranks."""
    for option, value in group.items():
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        several = plain if isinstance(plain, tuple | list) else (plain,)
        if option != "params" and all(isinstance(each, int | float) for each in several):
            yield option, tuple(several)


@rule(Damage.NUMBERS)
def no_set_epoch(target: LintTarget) -> Iterator[Finding]:
    """A DistributedSampler that shuffles in the same order in each epoch, because nothing calls set_epoch.

    Two whole passes, during which one optimizer took steps, had the same epoch. Passes without steps are evaluations,
    which may repeat their order.
    """
    for name, sampler in _samplers(target):
        past = target.history.samplers.get(sampler)
        if past is not None and past.num_repeated and sampler.shuffle:
            yield Fault(
                rule="no-set-epoch",
                verdict=f"{name} draws the same order in each epoch",
                evidence=(
                    f"{plural(past.num_repeated, 'epoch')} repeated the order of the one before: epoch {past.epoch}",
                ),
                fix=f"at the begin of each epoch: {name}.set_epoch(epoch)",
            )


@rule(Damage.NUMBERS)
def same_random_numbers(target: LintTarget) -> Iterator[Finding]:
    """Random numbers that differed between ranks until set_rng_state made them equal, so dropout masks are equal too.

    Equal seeds from the begin on are usual, and no fault.
    """
    drops = [name for module, name in target.modules.items() if isinstance(module, DROPOUTS) and module.p > 0]
    before = target.history.rng_before
    if before is not None and drops and not _has_tensor_parallelism(target):
        name = "torch's default generator"
        yield RankComparison(
            fault=Fault(
                rule="same-random-numbers",
                verdict=f"since set_rng_state, ranks draw the same random numbers, such as the dropout masks of "
                f"{target.name}",
                fix="save the state of each rank, and load it by rank: torch.set_rng_state(states[rank]); or seed "
                "again: torch.manual_seed(seed + rank)",
            ),
            digests={name: digest(torch.get_rng_state())},
            wants_equal=False,
            before={name: before},
        )


def _data_digest(dataset: object) -> int | None:
    """Return a checksum of the rows of a data set that is known without reading it; None: it is not."""
    if isinstance(dataset, TensorDataset):
        return hash(tuple((tuple(each.shape), digest(each)) for each in dataset.tensors))
    if isinstance(dataset, Subset):
        whole = _data_digest(dataset.dataset)
        return None if whole is None else hash((whole, tuple(map(int, dataset.indices))))
    return None


@rule(Damage.NUMBERS)
def optimizer_not_resumed(target: LintTarget) -> Iterator[Finding]:
    """An optimizer that started from nothing although training was resumed: its state was not loaded.

    A resume shows in what goes on: a schedule, an epoch or a step. Loaded parameters alone show none.
    """
    for name, optimizer in target.optimizers.items():
        past = next((each for _, other, each in target.trained if other is optimizer), None)
        signs = past.resumed if past is not None else ()
        if past is None and not optimizer.state and _trains(target, optimizer):
            signs = tuple(target.history.signs_of_resume(optimizer, target.variables.items()))
        if signs and (past is None or optimizer.state):  # without a state after steps, it keeps none
            yield Fault(
                rule="optimizer-not-resumed",
                verdict=f"{name} started from nothing although training was resumed: its state was not loaded",
                evidence=(*signs, f"{name} ({type(optimizer).__name__}) had no state at its first step"),
                fix="save and load it with the model: from torch.distributed.checkpoint.state_dict import "
                f"get_state_dict, set_state_dict; both take ({target.name}, {name})",
            )


def _trains(target: LintTarget, optimizer: Optimizer) -> bool:
    return any(id(param) in target.owned for group in optimizer.param_groups for param in group["params"])


@rule(Damage.NUMBERS)
def left_out_of_optimizer(target: LintTarget) -> Iterator[Finding]:
    """Trained parameters that no optimizer holds, while one holds others of the model."""
    of_model = {id(each.shard) for unit in target.units for each in unit.tensors.values()} | target.owned.keys()
    holding = sorted({name for param, name in target.held.items() if param in of_model})
    if not holding:
        return
    stale = {name for *_, free in _stale(target) for name in free}
    names, nbytes = [], 0
    for unit in target.units:
        for name, param, tensors in unit.named():
            if stale.issuperset(part for part, *_ in parts_of(param)):
                continue
            parts = [part for part, _, trained in parts_of(param) if trained]
            held = id(tensors.shard) in target.held or any(id(target.params.get(n)) in target.held for n in parts)
            if parts and not held and id(target.params.get(name)) not in target.held:
                names.append(name)
                nbytes += full_nbytes(param)
    if names:
        optimizer = target.optimizers[holding[0]]
        again = f"{holding[0]} = {_made(optimizer)}({target.name}.parameters(){_rate(optimizer)})"
        params = f"[{target.name}.get_parameter(name) for name in {names!r}]"
        is_short = len(names) < 4 and all(name in target.params for name in names)
        yield Fault(
            rule="left-out-of-optimizer",
            verdict=f"no optimizer among the variables trains {listed(names)}",
            evidence=(
                f"{plural(len(names), 'parameter')}, {_size(nbytes)}, take gradients",
                f"optimizers: {listed(holding)}",
            ),
            fix=f"{holding[0]}.add_param_group({{'params': {params}}})" if is_short else again,
        )


@rule(Damage.NUMBERS, named="hook-never-called")
def uncalled_hook(target: LintTarget) -> Iterator[Finding]:
    """A register_hook on a sharded parameter, which autograd never calls."""
    hooked = [name for model in target.models for name in model.uncalled_hooks()]
    if hooked:
        yield hook_never_called(hooked)


@rule(Damage.NUMBERS)
def low_precision_master(target: LintTarget) -> Iterator[Finding]:
    """Trained parameters in bfloat16 or float16 under an optimizer of torch, which keeps no float32 copy.

    An update below half a unit in the last place, 1/512 of a weight in bfloat16, is lost.
    """
    trained = {
        name: (param, tensors)
        for unit in target.units
        for name, param, tensors in unit.named()
        if param.dtype in _16_BIT and any(is_trained for _, _, is_trained in parts_of(param))
    }
    by_optimizer: dict[str, list[str]] = {}
    for name, (param, tensors) in trained.items():
        parts = (id(target.params.get(part)) for part, _, _ in parts_of(param))
        held = next((target.held[each] for each in (id(tensors.shard), *parts) if each in target.held), None)
        if held is not None:
            by_optimizer.setdefault(held, []).append(name)
    if trained and not by_optimizer:
        raise Abstains(f"{target.name} has 16-bit parameters, and no optimizer among the variables holds them yet")
    for name, names in by_optimizer.items():
        if not type(target.optimizers[name]).__module__.startswith("torch.optim"):
            raise Abstains(f"whether {name} ({type(target.optimizers[name]).__name__}) keeps float32 copies is unknown")
        dtypes = ", ".join(sorted({trained[each][0].dtype for each in names}))
        nbytes = sum(full_nbytes(trained[each][0]) for each in names)
        yield Fault(
            rule="low-precision-master",
            verdict=f"{name} updates {dtypes} parameters of {target.name}, which round small updates away",
            evidence=(f"{plural(len(names), 'parameter')}, {_size(nbytes)}: {listed(names)}",),
            fix=f"{target.name}.float() before sharding, then %fsdp shard {target.name} --mp bf16 (in code: "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
        )


# ---- errors and hangs


@rule(Damage.STOPS, after_shard=False)
def still_on_meta(target: LintTarget) -> Iterator[Finding]:
    """Parameters or buffers that are still on the meta device."""
    tensors = {**target.params, **_buffers(target)}
    names = [name for name, tensor in tensors.items() if tensor.is_meta]
    if names:
        yield Fault(
            rule="still-on-meta",
            verdict=f"{target.name} is still on the meta device: {listed(names)}",
            evidence=(f"{plural(len(names), 'tensor')} without values",),
            fix=f"{target.name}.to_empty(device=device), then initialise them or load a state dict",
        )


@rule(Damage.STOPS)
def method_without_hooks(target: LintTarget) -> Iterator[Finding]:
    """A method other than forward that computes with parameters of its unit, which nothing gathers then.

    Told where a function of the cells, or the script that ran, calls it on the model's variable or on a part of the
    model, and its source calls a module or uses a parameter of the unit itself, or where the part is called. Methods
    that reach the parameters through ``self(...)`` are fine, and so is a program that calls ``unshard()``.
    """
    for module, name, engine in _sharded_modules(target):
        variables = target.variables_of.get(id(module))
        if not variables:
            continue
        own = _own_tensors(target, module)
        calls = sorted({call for code in target.programs for call in _calls(code, variables)})
        for call in [] if ("unshard",) in calls else calls:
            *path, method = call
            owner: Any = functools.reduce(lambda above, part: getattr(above, part, None), path, cast("Any", module))
            used = _used_by_call(target, owner, method, own) if isinstance(owner, nn.Module) else ""
            if used:
                expression = ".".join((variables[0], *call))
                new = call[-1] if isinstance(getattr(module, call[-1], None), MethodType) else "METHOD"
                yield Fault(
                    rule="method-without-hooks",
                    verdict=f"{expression}() computes with sharded parameters: only forward gathers them",
                    evidence=(f"{class_name(owner)}.{method} uses {used} of unit {unit_words(name)}",)
                    if used != method
                    else (f"{expression} is a part of unit {unit_words(name)}",),
                    fix=f"{'' if new == call[-1] else 'call it in a method of the model, and '}from {engine.package} "
                    f"import register_fsdp_forward_method; register_fsdp_forward_method({variables[0]}, {new!r})",
                )


def _sharded_modules(target: LintTarget) -> Iterator[tuple[nn.Module, str, Engine]]:
    """Yield the modules on which ``fully_shard`` was called, with their names and what runs them."""
    for module, name in target.modules.items():
        engine = fully_shard_of(module)
        if engine is not None:
            yield module, name, engine


def _own_tensors(target: LintTarget, module: nn.Module) -> set[int]:
    """Return the ids of the parameters that the units of a module itself hold, full or sharded."""
    units = [unit for unit in target.units if any(each is module for each in unit.modules)]
    return {
        id(held(cast("nn.Module", owner), attribute))
        for unit in units
        for tensors in unit.tensors.values()
        for owner, attribute in tensors.places
    }


def _calls(code: CodeType, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of what code, and the functions in it, call below variables of these names.

    Example: ``("encoder", "encode")`` for ``model.encoder.encode(x)`` and ``self.model.encoder.encode(x)``.
    """
    path: list[str] | None = None  # below the variable
    for instruction in dis.get_instructions(code):
        if instruction.opname in {"LOAD_ATTR", "LOAD_METHOD"} and path is not None:
            path.append(instruction.argval)
            if instruction.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and (instruction.arg or 0) & 1):
                yield tuple(path)
        elif instruction.opname.startswith("LOAD_"):
            loaded = instruction.argval
            path = [] if (loaded[-1] if isinstance(loaded, tuple) and loaded else loaded) in names else None
        else:
            path = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _calls(constant, names)


def _used_by_call(target: LintTarget, owner: nn.Module, name: str, own: set[int]) -> str:
    """Return what of the parameters ``own`` a call of ``owner.name`` uses; ``name`` itself: it is a module."""
    found = getattr(owner, name, None)
    if isinstance(found, nn.Module):
        return name if _computes_with(found, own) else ""
    if not _is_own_method(owner, name) or name == "forward" or name in vars(owner):
        return ""
    if fully_shard_of(owner) is not None:
        own = _own_tensors(target, owner)
    return _uses(owner, name, own, set())


def _computes_with(module: nn.Module, own: set[int]) -> bool:
    """Return whether the forward of a module uses parameters that nothing gathers."""
    return fully_shard_of(module) is None and _holds(module, own)


def _uses(module: nn.Module, method: str, own: set[int], seen: set[tuple[int, str]]) -> str:
    """Return what of the parameters ``own`` a method uses, as source, also through other methods; empty: nothing."""
    seen.add((id(module), method))
    function = inspect.unwrap(getattr(type(module), method))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    expressions = [each for node in ast.walk(tree) for each in _computed_with(node)]
    if any(ast.unparse(each) == "self.unshard" for each in expressions):
        return ""
    for expression in expressions:
        found = _resolved(module, expression)
        if isinstance(found, nn.Parameter) and id(found) in own:
            return ast.unparse(expression)
        if isinstance(found, nn.Module) and found is not module and _computes_with(found, own):
            return ast.unparse(expression)
        owner = found.__self__ if isinstance(found, MethodType) else None
        if isinstance(owner, nn.Module) and isinstance(found, MethodType):
            is_plain = owner is module or fully_shard_of(owner) is None
            name = found.__name__
            if is_plain and _is_own_method(owner, name) and name not in vars(owner) and (id(owner), name) not in seen:
                used = _uses(owner, name, own, seen)
                if used:
                    return used if owner is module else f"{ast.unparse(expression)}: {used}"
    return ""


def _computed_with(node: ast.AST) -> Iterable[ast.expr]:
    """Return the expressions that a node calls, computes with, or passes on to a function that computes with them."""
    match node:
        case ast.Call(func=func, args=args):
            return (func, *(args if _computes(func) else ()))
        case ast.BinOp(left=left, right=right):
            return (left, right)
        case ast.For(target=ast.Name(id=name), iter=iterated):
            return (iterated,) if _is_called(name, node) else ()
        case ast.ListComp(generators=loops) | ast.GeneratorExp(generators=loops) | ast.SetComp(generators=loops):
            return [
                each.iter for each in loops if isinstance(each.target, ast.Name) and _is_called(each.target.id, node)
            ]
    return ()


def _computes(func: ast.expr) -> bool:
    """Return whether a function may compute with its arguments: no builtin, none of ``torch.nn.init``."""
    text = ast.unparse(func)
    name = text.rpartition(".")[2]
    return not (text in dir(builtins) or name.endswith("_") or name.startswith(("get", "set", "register")))


def _is_called(name: str, node: ast.AST) -> bool:
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(isinstance(func, ast.Name) and func.id == name for func in calls)


def _is_own_method(module: nn.Module, name: str) -> bool:
    """Return whether the class of a module defines a method that :class:`torch.nn.Module` does not have."""
    return isinstance(getattr(type(module), name, None), FunctionType) and not hasattr(nn.Module, name)


def _resolved(module: nn.Module, expression: ast.expr) -> object:
    """Return what ``self.a.b`` refers to; None for anything else."""
    if isinstance(expression, ast.Name):
        return module if expression.id == "self" else None
    if isinstance(expression, ast.Attribute):
        above = _resolved(module, expression.value)
        return getattr(above, expression.attr, None) if isinstance(above, nn.Module) else None
    return None


def _holds(module: nn.Module, own: set[int]) -> bool:
    return any(id(param) in own for param in module.parameters())


# ---- memory


@rule(Damage.MEMORY)
def unsplit_unit(target: LintTarget) -> Iterator[Finding]:
    """One unit that is the whole model, or more than half its bytes, and could be split.

    It can where a class repeats in it that makes half its bytes. Where none does, as with a large embedding, only a
    unit of :data:`LARGE_NBYTES` with several children of a tenth of its bytes each is named.
    """
    if target.nbytes < TOY_NBYTES:
        return
    for unit in target.sharded:
        if 2 * unit.full_nbytes <= target.nbytes:
            continue
        kind, members, nbytes = _repeated(target, unit)
        share = f"{unit.full_nbytes / target.nbytes:.0%}"
        evidence = (
            f"unit {unit_words(unit.info.name)}: {_size(unit.full_nbytes)} of {_size(target.nbytes)}",
            "each rank holds all of it while any part computes",
        )
        verdict = f"unit {unit_words(unit.info.name)} holds {share} of {target.name}, so sharding saves little memory"
        if 2 * nbytes >= unit.full_nbytes:
            yield Fault(
                rule="unsplit-unit",
                verdict=verdict,
                evidence=(*evidence, f"{len(members)} x {kind} in it: {listed(members)}"),
                fix=_wrap_fix(target, unit, kind),
            )
        elif unit.full_nbytes >= LARGE_NBYTES and (children := _large_children(target, unit)):
            calls = "; ".join(f"fully_shard({target.name}.{child})" for child in children[:-1])
            yield Fault(
                rule="unsplit-unit",
                verdict=verdict,
                evidence=(*evidence, f"its largest modules: {listed(children)}"),
                fix=f"before fully_shard({target.name}): {calls}",
            )


def _wrap_fix(target: LintTarget, unit: LintUnit, kind: str) -> str:
    if unit.info.runner.can_reshard:
        return f"%fsdp reshard {target.name} --wrap {kind}"
    return f"build the model again, then: %fsdp shard {target.name} --wrap {kind}"


def _in_unit(target: LintTarget, unit: LintUnit, prefix: str) -> int:
    """Return the elements of a unit's parameters below a module's name."""
    return sum(
        math.prod(shape)
        for param in unit.info.params
        for name, shape, _ in parts_of(param)
        if clean(name).startswith(f"{prefix}.")
    )


def _repeated(target: LintTarget, unit: LintUnit) -> tuple[str, list[str], int]:
    """Return the class that repeats with most of a unit's bytes, the names of its modules, and these bytes."""
    found: dict[str, dict[str, int]] = {}
    for module in target.modules:
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for child in module:
                own = target.modules[child]
                if own and (size := _in_unit(target, unit, own)):
                    found.setdefault(class_name(child), {})[own] = size
    several = {kind: sizes for kind, sizes in found.items() if len(sizes) > 1}
    kind = max(several, key=lambda kind: sum(several[kind].values()), default="")
    sizes = several.get(kind, {})
    return kind, list(sizes), sum(sizes.values()) * unit.info.compute_itemsize


def _large_children(target: LintTarget, unit: LintUnit) -> list[str]:
    """Return the leaf modules with a tenth of a unit's bytes or more each, the smallest last; empty: fewer than two."""
    leaves = [name for module, name in target.modules.items() if name and not any(True for _ in module.children())]
    sizes = {name: _in_unit(target, unit, name) * unit.info.compute_itemsize for name in leaves}
    large = sorted((name for name in sizes if 10 * sizes[name] >= unit.full_nbytes), key=lambda name: -sizes[name])
    return large if len(large) > 1 else []


@rule(Damage.MEMORY)
def checkpoint_on_every_rank(target: LintTarget) -> Iterator[Finding]:
    """A checkpoint of the whole model that several ranks of a host read into their memory.

    Told where the model, or the module that was sharded, took most of its elements from tensors that ``torch.load`` has
    allocated, or from copies of a file's tensors, such as in another dtype, also within ``from_pretrained``. What is
    mapped from a file is neither, with ``mmap=True`` or safetensors: ranks share its pages.
    """
    whole = sum(
        math.prod(shape) for unit in target.sharded for param in unit.info.params for _, shape, _ in parts_of(param)
    )
    if target.nbytes < TOY_NBYTES or all(unit.info.shard_size == 1 for unit in target.sharded):
        return
    host = target.rank // target.local_world_size
    taken = [each for module in target.modules if (each := target.reads.taken.get(module)) is not None]
    read = next((each for each in taken if each.num_elements >= _MOST * whole), None)
    if read is not None:
        yield RankComparison(
            fault=Fault(
                rule="checkpoint-on-every-rank",
                verdict=f"ranks of one host each read the whole checkpoint of {target.name} into memory: {{names}}",
                fix=(_PRETRAINED_FIX if read.is_pretrained else _READ_FIX).format(target.name),
            ),
            digests={read.words: zlib.crc32(repr((host, read.paths)).encode())},  # hash() of text differs by process
            wants_equal=False,
        )
    elif target.rank % target.local_world_size:
        for file in target.reads.unclaimed():
            if file.num_elements >= _MOST * whole:
                raise Abstains(
                    f"{os.path.basename(file.path)} is in memory, and what {target.name} took of it is unknown"
                )


_BROADCAST = (
    "after sharding, on all ranks: set_model_state_dict({0}, state, options=StateDictOptions(full_state_dict=True, "
    "broadcast_from_rank0=True)), of torch.distributed.checkpoint.state_dict. Or no rank reads all: build on the meta "
    "device, shard, to_empty, torch.distributed.checkpoint.load of a folder that"
)
_READ_FIX = (
    "read it on rank 0 alone: state = torch.load(file) if rank == 0 else {{}}; "
    f"{_BROADCAST} python -m torch.distributed.checkpoint.format_utils torch_to_dcp has made. Or torch.load(mmap=True)"
)
_PRETRAINED_FIX = (
    "from_pretrained(path, dtype='auto'), without disable_mmap, maps the files, and ranks share their pages; after "
    "sharding, {0}.float() casts the shards alone. Or read it on rank 0 alone, and build it on the meta device: "
    "state = from_pretrained(path).state_dict() if rank == 0 else {{}}; "
    f"{_BROADCAST} torch.distributed.checkpoint.save has made; buffers that are not saved are then to be set"
)

_MOST = 0.9
"""The share of a model's elements from which a checkpoint is one of the whole model."""


@rule(Damage.MEMORY)
def nothing_sharded(target: LintTarget) -> Iterator[Finding]:
    """An HSDP mesh whose shard axis has one rank: fully_shard replicates, and every rank holds all.

    A replicate axis of one rank costs nothing and is not named: on one host, a mesh of hosts x ranks has it.
    """
    units = [
        unit
        for unit in target.sharded
        if unit.info.shard_size == 1 < unit.info.replicate_size and not unit.info.is_flat
    ]
    if units and target.nbytes >= TOY_NBYTES:
        copies = units[0].info.replicate_size
        kind = next((str(p.device_mesh.device_type) for p in target.params.values() if isinstance(p, DTensor)), "cuda")
        mesh = f'init_device_mesh("{kind}", (1, {copies}), mesh_dim_names=("replicate", "shard"))'
        yield Fault(
            rule="nothing-sharded",
            verdict=f"the mesh of {target.name} has {copies} copies of one shard each, so nothing is sharded",
            evidence=(f"each rank holds {_size(sum(unit.full_nbytes for unit in units))} of {_names(units)}",),
            fix=f"mesh = {mesh}, or %fsdp reshard {target.name} --mesh {copies}"
            if units[0].info.runner.can_reshard
            else f"mesh = {mesh}",
        )


def _names(units: Sequence[LintUnit]) -> str:
    return listed([unit.info.name for unit in units])


@rule(Damage.MEMORY)
def rows_lost_to_padding(target: LintTarget) -> Iterator[Finding]:
    """Parameters with fewer rows than ranks, or padding of more than a tenth of the model.

    Small parameters, such as biases, may leave ranks without rows: only one of :data:`TOY_NBYTES` or more counts.
    """
    few, lost, padded = {}, 0, {}
    for unit in target.sharded:
        for name, param, _ in unit.named():
            whole = full_nbytes(param)
            waste = whole - math.prod(param.shape) * param.itemsize
            lost += waste
            if waste:
                padded[name] = waste
            if whole >= TOY_NBYTES and 0 in param.rows_per_rank:
                few[name] = param
    if few:
        name, param = next(iter(few.items()))
        rows, size = param.shape[param.shard_dim], len(param.rows_per_rank)
        empty = [place for place, own in enumerate(param.rows_per_rank) if not own]
        dim = max(range(len(param.shape)), key=lambda dim: param.shape[dim])
        yield Fault(
            rule="rows-lost-to-padding",
            verdict=f"{listed(list(few))} has fewer rows than ranks, so some ranks hold nothing of it",
            evidence=(
                f"{name}: {rows} rows of dim {param.shard_dim} for {size} ranks; place "
                f"{', '.join(map(str, empty))} of the shard axis holds none of {_size(full_nbytes(param))}",
            ),
            fix=f"split dim {dim}: from torch.distributed.tensor import Shard; fully_shard(module, "
            f"shard_placement_fn=lambda p: Shard({dim}) if p.shape[0] < {size} and p.ndim > {dim} else None)",
        )
    elif lost >= TOY_NBYTES and 10 * lost > target.nbytes:
        worst = sorted(padded, key=lambda name: -padded[name])
        yield Fault(
            rule="rows-lost-to-padding",
            verdict=f"{lost / target.nbytes:.0%} of the bytes of {target.name} are padding",
            evidence=(f"{_size(lost)} in {listed(worst)}",),
            fix="split a dim that the ranks divide: fully_shard(module, shard_placement_fn=lambda p: Shard(1))",
        )


@rule(Damage.MEMORY)
def frozen_in_flat_parameter(target: LintTarget) -> Iterator[Finding]:
    """Frozen and trained parameters in one flat parameter: gradients of all of it are allocated and reduced.

    Units of ``fully_shard`` reduce only what is trained, so that adapters in each block cost nothing there.
    """
    found = {}
    for unit in target.sharded:
        trained = frozen = 0
        for param in unit.info.params:
            for name, shape, is_trained in parts_of(param) if param.parts else ():
                held = target.params.get(name)
                takes = is_trained and (held is None or held.requires_grad)
                nbytes = math.prod(shape) * unit.info.reduce_itemsize
                trained, frozen = (trained + nbytes, frozen) if takes else (trained, frozen + nbytes)
        if trained and frozen >= max(TOY_NBYTES, trained):
            found[unit_words(unit.info.name)] = f"{_size(trained + frozen)} reduced for {_size(trained)} trained"
    if found:
        yield Fault(
            rule="frozen-in-flat-parameter",
            verdict=f"flat parameters of {target.name} reduce gradients of frozen parameters: {listed(list(found))}",
            evidence=tuple(f"unit {name}: {text}" for name, text in found.items())[:3],
            fix=f"%fsdp shard {target.name} --api fully_shard, or wrap the frozen modules separately",
        )


@rule(Damage.MEMORY)
def checkpoint_around_units(target: LintTarget) -> Iterator[Finding]:
    """Activation checkpointing around several units: backward recomputes, and gathers, all of them at once.

    One checkpoint for each unit, inside or around it, is right.
    """
    for path, inner in _checkpointed(target.model):
        names = {name: module for module, name in _sharded_below(target, inner)}
        outermost = [n for n in names if not any(n.startswith(f"{other}.") for other in names if other != n)]
        if len(outermost) > 1:
            kind = class_name(names[outermost[0]])
            yield Fault(
                rule="checkpoint-around-units",
                verdict=f"activation checkpointing of {path or target.name} spans {len(outermost)} units",
                evidence=(f"units in it: {listed(outermost)}",),
                fix=f"checkpoint each unit instead: apply_activation_checkpointing({target.name}, "
                f"check_fn=lambda module: isinstance(module, {kind})) before sharding",
            )


def _checkpointed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that torch's wrapper checkpoints, or Hugging Face's layer, with their names."""
    yield from checkpoint_wrappers_below(model)
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "GradientCheckpointingLayer" in kinds and getattr(module, "gradient_checkpointing", False):
            yield clean(path), module


def _sharded_below(target: LintTarget, inner: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    below = set(inner.modules())
    for unit in target.sharded:
        for module in unit.modules:
            if module in below and module is not inner:
                yield module, target.modules.get(module, unit.info.name)


# ---- speed


@rule(Damage.SPEED)
def tiny_units(target: LintTarget) -> Iterator[Finding]:
    """Units so small that the launch of their collectives takes longer than the transfer.

    More of the units than not are below :data:`SMALL_NBYTES`, at least 8, and hold together at most 5 % of the model:
    the enclosing units could hold them at no cost.
    """
    inner = [unit for unit in target.sharded if unit.info.name]  # the model itself is a unit in any case
    small = [unit for unit in inner if unit.full_nbytes < SMALL_NBYTES]
    together = sum(unit.full_nbytes for unit in small)
    many = len(small) >= 8 and 2 * len(small) > len(inner)
    if many and target.nbytes >= TOY_NBYTES and 20 * together <= target.nbytes:
        kinds = sorted({class_name(unit.modules[0]) for unit in small if unit.modules})
        yield Fault(
            rule="tiny-units",
            verdict=f"{len(small)} of {len(target.sharded)} units of {target.name} are too small to be worth "
            "collectives of their own",
            evidence=(
                f"{_names(small)}: {_size(together)} together, of {_size(target.nbytes)}",
                f"{len(small)} all-gathers more in each forward and backward, and reduce-scatters",
            ),
            fix=f"leave {', '.join(kinds) or 'them'} to the enclosing units: no fully_shard on them, and not in --wrap",
        )


@rule(Damage.SPEED)
def mesh_turned_round(target: LintTarget) -> Iterator[Finding]:
    """An HSDP mesh that replicates within hosts and shards across them: all-gathers cross the network.

    Ranks of a host are neighbours, and each host has as many.
    """
    on_host = target.local_world_size
    hybrid = [unit for unit in target.sharded if unit.info.shard_size > 1 and unit.info.replicate_size > 1]
    if not hybrid or on_host >= target.world_size:
        return
    if target.world_size % on_host:
        raise Abstains("hosts have different numbers of ranks, so which ranks share a host is unknown")
    for unit in hybrid:
        if unit.shard_ranks is None or unit.replicas is None:
            raise Abstains(f"the ranks of unit {unit_words(unit.info.name)} are unknown")
        crosses, stays = (len({rank // on_host for rank in of}) for of in (unit.shard_ranks, unit.replicas))
        if crosses > 1 and stays == 1:
            size, copies = unit.info.shard_size, unit.info.replicate_size
            hosts = target.world_size // on_host
            yield Fault(
                rule="mesh-turned-round",
                verdict=f"{target.name} is sharded across hosts and replicated within them",
                evidence=(
                    f"units {_names(hybrid)}: one copy is split over {crosses} hosts, and one host has {copies} copies",
                    f"{copies} copies x {size} shards on {hosts} hosts of {on_host} ranks",
                ),
                fix=f'mesh = init_device_mesh(device, ({hosts}, {on_host}), mesh_dim_names=("replicate", "shard")), or '
                "%fsdp shard MODEL --mesh hosts",
            )
            return
