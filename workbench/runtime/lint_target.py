"""A model as rules see it, and the table of rules.

A rule is a generator function under :func:`rule`. Its name, with dashes, is the name of the rule; the first line of its
docstring is the description in the documents. It yields a :class:`~workbench.base.fault.Fault` for what this rank sees,
or a :class:`~workbench.protocol.lint_reply.RankComparison` for what only several ranks can show, and raises
:class:`Abstains` where it lacks a signal. No rule runs the model, communicates or changes anything.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import CodeType

from torch import nn
from torch.optim import Optimizer

from workbench.base.fault import Fault
from workbench.engine.module_names import clean, named_params
from workbench.events import Param, ParamTensors, Unit
from workbench.models.sharded_model import ShardedModel
from workbench.protocol.lint_reply import RankComparison
from workbench.runtime.checkpoint_reads import CheckpointReads
from workbench.runtime.emptied_tensors import LostTie
from workbench.runtime.training_history import OptimizerHistory, TrainingHistory

Finding = Fault | RankComparison


class Damage(IntEnum):
    """The cost of a fault; the worst comes first."""

    NUMBERS = 0  # wrong results, without an error
    STOPS = 1  # an error or a hang
    MEMORY = 2
    SPEED = 3


class Abstains(Exception):
    """A rule cannot decide; the message names the missing signal."""


@dataclass(frozen=True, kw_only=True)
class LintUnit:
    """A unit, whichever engine runs it.

    Attributes:
        info: its description.
        tensors: its parameters' tensors on this rank, by name.
        modules: its modules; empty if unknown.
        shard_ranks: ranks that share one copy with this one; None: unknown.
        replicas: ranks that hold the same shard as this one; None: unknown.
        num_backwards: of a model in ``DistributedDataParallel``: backwards that it averaged; None: unknown.
        is_left_unaveraged: whether its engine replicates it without averaging its gradients.
    """

    info: Unit
    tensors: Mapping[str, ParamTensors]
    modules: tuple[nn.Module, ...] = ()
    shard_ranks: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None
    num_backwards: int | None = None
    is_left_unaveraged: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP runs it: a DistributedDataParallel model is a unit that is whole on every rank."""
        return self.info.runner.splits

    @property
    def full_nbytes(self) -> int:
        """Bytes that a rank holds of it while it is unsharded, padding included."""
        unit = self.info
        return sum(full_nbytes(param) // param.itemsize * unit.gathered_itemsize(param) for param in unit.params)

    def named(self) -> Iterator[tuple[str, Param, ParamTensors]]:
        """Yield each parameter that the unit shards with its name, description and tensors."""
        for param in self.info.params:
            if param.fqn in self.tensors:
                yield param.fqn, param, self.tensors[param.fqn]


def full_nbytes(param: Param) -> int:
    """Return the bytes of a parameter as the unit stores it on all ranks together, padding included."""
    others = (n for dim, n in enumerate(param.shape) if dim != param.shard_dim)
    return math.prod(others) * param.padded_rows * len(param.rows_per_rank) * param.itemsize


@dataclass(frozen=True, kw_only=True)
class LintTarget:
    """A sharded model and its surroundings on this rank, as rules see them.

    Attributes:
        name: its variable.
        model: the model.
        models: the model, for each engine that runs parts of it.
        units: its units.
        optimizers: the optimizers among the variables, by variable; ``opts[0]`` for one in a list.
        variables: all variables of the cells.
        programs: code of the cells' functions and of the script that ran last.
        history: of the training so far.
        lost_ties: of parameters of any model.
        reads: the checkpoints that models have taken.
        sends_activations: whether the program itself moved data between ranks within a forward, after a time in ns.
        rank, world_size, local_world_size: of this rank.
    """

    name: str
    model: nn.Module
    models: tuple[ShardedModel, ...]
    units: tuple[LintUnit, ...]
    optimizers: Mapping[str, Optimizer]
    variables: Mapping[str, object]
    programs: tuple[CodeType, ...]
    history: TrainingHistory
    lost_ties: Sequence[LostTie]
    reads: CheckpointReads
    sends_activations: Callable[[int], bool]
    rank: int
    world_size: int
    local_world_size: int

    @functools.cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters that the modules hold now, by name without wrappers."""
        return dict(named_params(self.model))

    @functools.cached_property
    def modules(self) -> dict[nn.Module, str]:
        """The name of each module, without wrappers."""
        return {module: clean(name) for name, module in self.model.named_modules()}

    @functools.cached_property
    def variables_of(self) -> dict[int, list[str]]:
        """The variables that hold a module, by its id."""
        found: dict[int, list[str]] = {}
        for name, value in self.variables.items():
            if isinstance(value, nn.Module):
                found.setdefault(id(value), []).append(name)
        return found

    @functools.cached_property
    def in_no_unit(self) -> Sequence[str]:
        """The names of the trained parameters whose gradients no engine averages."""
        first, *others = (model.unaveraged() for model in self.models)
        return [name for name in first if all(name in names for names in others)]

    @functools.cached_property
    def ignored(self) -> Sequence[str]:
        """Those parameters in no unit that the user excluded from an engine: other code may average their gradients."""
        return self._among(model.ignored() for model in self.models)

    @functools.cached_property
    def late(self) -> Sequence[str]:
        """Those parameters in no unit that were added or unfrozen after an engine took the model."""
        return self._among(model.late() for model in self.models)

    def _among(self, names: Iterable[Sequence[str]]) -> Sequence[str]:
        told = set().union(*names)
        return [name for name in self.in_no_unit if name in told]

    @functools.cached_property
    def buffer_sums(self) -> Mapping[str, int]:
        """The CRC-32 of each buffer, by name."""
        return self.models[0].buffer_sums()

    @functools.cached_property
    def sharded(self) -> tuple[LintUnit, ...]:
        """The units that FSDP runs."""
        return tuple(unit for unit in self.units if unit.is_sharded)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the whole model while all its units are unsharded."""
        return sum(unit.full_nbytes for unit in self.sharded)

    @functools.cached_property
    def owned(self) -> dict[int, str]:
        """The name of each parameter that an optimizer may hold, by its id."""
        flat = {
            id(tensors.shard): name
            for unit in self.units
            for name, tensors in unit.tensors.items()
            if isinstance(tensors.shard, nn.Parameter)
        }
        return {**{id(param): name for name, param in self.params.items()}, **flat}

    @functools.cached_property
    def owned_by_units(self) -> frozenset[int]:
        """The ids of the tensors of all units."""
        return frozenset(id(tensors.shard) for unit in self.units for tensors in unit.tensors.values())

    @functools.cached_property
    def trained(self) -> tuple[tuple[str, Optimizer, OptimizerHistory], ...]:
        """The optimizers that have taken steps with parameters of the model, each with its variable and its history."""
        names = {id(each.param_groups): name for name, each in self.optimizers.items()}  # a wrapper's are the inner's
        return tuple(
            (names.get(id(optimizer.param_groups), "the optimizer"), optimizer, past)
            for optimizer, past in tuple(self.history.optimizers.items())
            if past.num_steps and any(id(p) in self.owned for group in optimizer.param_groups for p in group["params"])
        )

    @functools.cached_property
    def held(self) -> dict[int, str]:
        """The variable of the optimizer that holds it, by the id of each parameter of any model."""
        return {
            id(param): name
            for name, optimizer in self.optimizers.items()
            for group in optimizer.param_groups
            for param in group["params"]
        }


RuleFunction = Callable[[LintTarget], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule.

    Attributes:
        name: its name, such as ``optimizer-before-shard``.
        damage: what its faults cost.
        check: yields what it finds in a model.
        after_shard: whether ``shard`` runs it too: what it finds is not a usual state of a model just sharded.
    """

    name: str
    damage: Damage
    check: RuleFunction
    after_shard: bool

    @property
    def about(self) -> str:
        """Its description: the first line of its docstring."""
        return (inspect.getdoc(self.check) or "").partition("\n")[0].rstrip(".")


RULES: list[Rule] = []
"""All rules, in the order of their definition."""


def rule(damage: Damage, *, named: str = "", after_shard: bool = True) -> Callable[[RuleFunction], RuleFunction]:
    """Enter the decorated function into :data:`RULES`; ``named``: under another name than its own."""

    def enter(check: RuleFunction) -> RuleFunction:
        name = named or check.__name__.replace("_", "-")
        RULES.append(Rule(name=name, damage=damage, check=check, after_shard=after_shard))
        return check

    return enter
