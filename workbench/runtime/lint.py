"""The command ``lint`` on a rank: run the rules of ``lint_rules.py`` on sharded models, here and after ``shard``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import CodeType

import numpy as np
from torch import nn
from torch.optim import Optimizer

from workbench.base.fault import Fault
from workbench.errors import UsageError
from workbench.events import ENGINES, Kind, Phase, Unit
from workbench.models.engines import Watch, is_sharded
from workbench.models.sharded_model import ShardedModel
from workbench.protocol.commands import Lint
from workbench.protocol.lint_reply import LintReply, RankComparison
from workbench.runtime.command_handlers import RankContext, does
from workbench.runtime.lint_rules import copied_places, rules
from workbench.runtime.lint_target import Abstains, Finding, LintTarget, LintUnit
from workbench.runtime.loop_steps import held_ids
from workbench.runtime.model_summary import outermost
from workbench.runtime.namespace import find_module, module_names, variables
from workbench.runtime.recorder import CAPACITY, Recorder
from workbench.runtime.training_history import TrainingHistory

_MOVE_ACTIVATIONS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.SEND, Kind.RECV)


@does(Lint)
def lint(command: Lint, rank: RankContext) -> LintReply:
    """Check a sharded model, or all of them, without running it.

    Raises:
        UsageError: there is no such model, or it is not sharded.
    """
    sharded = sharded_models(command.model)
    if not sharded:
        raise UsageError(
            f"{command.model!r} is not sharded; shard it first: %fsdp shard {command.model}"
            if command.model
            else f"no model is sharded{own_units_words(rank.recorder)}, so there is nothing to lint; shard one first: "
            "%fsdp shard MODEL"
        )
    return checked(sharded, rank)


def own_units_words(recorder: Recorder) -> str:
    """Return a remark on units that a program announces itself, or nothing if there are none."""
    own = sorted({unit.engine for unit in recorder.header.units if unit.in_use} - {"", *ENGINES})
    return f" (the units that {', '.join(own)} announces belong to no known model)" if own else ""


def sharded_models(name: str = "") -> dict[str, nn.Module]:
    """Return the models among the variables, or the one of this name, that any engine has sharded.

    Raises:
        UsageError: there is no model of this name.
    """
    found = {each: find_module(each) for each in ([name] if name else module_names())}
    return {each: model for each, model in outermost(found).items() if is_sharded(model)}


def checked(models: Mapping[str, nn.Module], rank: RankContext, *, after_shard: bool = False) -> LintReply:
    """Return what the rules find in sharded models, by variable; ``after_shard``: only those for ``shard``."""
    ran = [each for each in rules() if each.after_shard or not after_shard]
    targets = [target_of(name, model, rank) for name, model in models.items()]
    findings: list[Finding] = []
    abstained: list[str] = []
    for each in ran:
        for target in targets:
            try:
                findings += each.check(target)
            except Abstains as reason:
                abstained.append(f"{each.name}: {reason}")
    return LintReply(
        models=tuple(models),
        rules=tuple(each.name for each in ran),
        faults=tuple(finding for finding in findings if isinstance(finding, Fault)),
        comparisons=tuple(finding for finding in findings if isinstance(finding, RankComparison) and finding.digests),
        abstained=tuple(abstained),
    )


def target_of(name: str, model: nn.Module, rank: RankContext) -> LintTarget:
    """Return a sharded model and its surroundings, whichever engine runs it.

    Args:
        name: its variable.
        model: the model.
        rank: this rank.
    """
    found, models = variables(), rank.watch.models_in(model)
    return LintTarget(
        name=name,
        model=model,
        models=models,
        units=tuple(_units_of(models)),
        optimizers=dict(_optimizers(found)),
        variables=found,
        programs=(*rank.scripts.programs, *_functions(found)),
        history=rank.history,
        lost_ties=rank.emptied.lost_ties,
        reads=rank.reads,
        sends_activations=partial(_sends_activations, rank.recorder),
        rank=rank.groups.rank,
        world_size=rank.groups.world_size,
        local_world_size=rank.groups.local_world_size,
    )


def _sends_activations(recorder: Recorder, since_ns: int) -> bool:
    rows = recorder.newest(CAPACITY)
    own = (rows["unit"] < 0) & (rows["phase"] == Phase.FORWARD) & (rows["t_ns"] >= since_ns)
    return bool((own & np.isin(rows["kind"], _MOVE_ACTIVATIONS)).any())


def history_of(recorder: Recorder, watch: Watch) -> TrainingHistory:
    """Return the history of the training of this rank, which is not noted before it is installed."""

    def known() -> list[LintUnit]:
        units = (unit for unit in recorder.header.units if unit.in_use)
        return [LintUnit(info=unit, tensors=recorder.tensors(unit.index)) for unit in units]

    return TrainingHistory(
        unreduced=watch.unreduced,
        backwards=watch.backwards,
        held=lambda index, ids: not ids.isdisjoint(held_ids(recorder, index)),
        survives=lambda index: _keeps_waiting_grads(recorder.header.units[index]),
        copies=lambda: copied_places(known()),
        is_aside=lambda: recorder.is_aside,
    )


def _keeps_waiting_grads(unit: Unit) -> bool:
    """Return whether gradients of a unit that wait for a reduction survive ``zero_grad``; no flat ones do."""
    return unit.runner.keeps_waiting_grads and not unit.is_flat


def _units_of(models: Sequence[ShardedModel]) -> Iterator[LintUnit]:
    for model in models:
        for unit in model.units:
            yield LintUnit(
                info=unit,
                tensors=model.tensors(unit.index),
                num_backwards=model.num_backwards(unit.index),
                is_left_unaveraged=model.is_left_unaveraged(unit.index),
                **vars(model.layout_of(unit.index)),
            )


def _optimizers(found: Mapping[str, object]) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers among variables, and in their lists, tuples and dicts, each with its expression, once."""
    seen: set[int] = set()
    for name, value in found.items():
        if name.startswith("_"):
            continue
        items: list[tuple[str, object]] = [(name, value)]
        if isinstance(value, (list, tuple)):
            items = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, dict) and type(value) is dict:
            items = [(f"{name}[{key!r}]", item) for key, item in value.items()]
        for expression, item in items:
            if isinstance(item, Optimizer) and id(item) not in seen:
                seen.add(id(item))
                yield expression, item


def _functions(found: Mapping[str, object]) -> Iterator[CodeType]:
    """Yield the code of the functions that cells have defined."""
    for value in found.values():
        if inspect.isfunction(value) and value.__module__ == "__main__":
            yield value.__code__
