"""Numbers and phrases that describe a sharded model, for the replies of ``shard`` and ``reshard``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import nn

from workbench.engine.fsdp_state import FSDPState, roots_below, state_of, states_below, units_of
from workbench.engine.module_names import clean, full_name, names_below
from workbench.events import Param, Unit, unit_words
from workbench.models.engines import is_sharded
from workbench.models.ours import WorkbenchModel, params_in_no_unit
from workbench.models.sharded_model import ShardedModel, join
from workbench.protocol.commands import ShardReply, UnmanagedState
from workbench.protocol.policy import policy_words
from workbench.runtime.namespace import find_module, module_names


def describe(name: str, model: nn.Module, *, prefetch: int, optimizers: int) -> ShardReply:
    """Return the description of a sharded model.

    Args:
        name: its variable on the ranks.
        model: the root.
        prefetch: units prefetched by explicit lists, 0 without.
        optimizers: number of optimizers that continue with its parameters.
    """
    sizes, output = sizes_of(model), _output_dtype(state for _, state in roots_below(model))
    return replace(
        described(name, unit_infos(model), sizes, [size for size in sizes if not size.is_managed], prefetch, output),
        units=tuple(_unit_names(model)),
        optimizers=optimizers,
    )


def described(
    name: str,
    units: Sequence[Unit],
    sizes: Sequence[ParamSize],
    rest: Sequence[ParamSize] = (),
    prefetch: int = 0,
    output: str = "",
) -> ShardReply:
    """Return the description of a sharded model, whichever engine runs it.

    Args:
        name: its variable on the ranks.
        units: its units.
        sizes: those of all its parameters.
        rest: those of parameters that are in no unit.
        prefetch: units prefetched by explicit lists, 0 without.
        output: dtype to which modules cast their outputs; empty if none does.
    """
    return ShardReply(
        model=name,
        units=tuple(unit_words(unit.name) for unit in units),
        num_params=len(sizes),
        num_elements=sum(size.numel for size in sizes),
        bytes_unsharded=sum(size.num_bytes for size in sizes),
        bytes_at_rest=sum(_bytes_at_rest(param) for unit in units for param in unit.params)
        + sum(size.num_bytes for size in rest),
        policy=tuple(policy_words(units, prefetch, output)),
        optimizers=0,
    )


def unmanaged(models: Mapping[str, nn.Module], *, buffers: bool = True) -> UnmanagedState:
    """Return what the engine does not manage of all :func:`sharded_variables`, names prefixed with the variable.

    Args:
        models: the models, by variable.
        buffers: whether to read and checksum buffers.

    Example: ``"model.scale"``: what ``model.get_parameter("scale")`` returns.
    """
    found = {name: WorkbenchModel(model) for name, model in models.items()}
    sums = {name: model.buffer_sums() if buffers else {} for name, model in found.items()}
    return UnmanagedState(
        params=tuple(f"{name}.{param}" for name, model in found.items() for param in model.in_no_unit()),
        hooks=tuple(f"{name}.{param}" for name, model in found.items() for param in model.uncalled_hooks()),
        buffers={f"{name}.{buffer}": crc32 for name, own in sums.items() for buffer, crc32 in own.items()},
    )


def sharded_variables() -> dict[str, nn.Module]:
    """Return the models among the variables that our engine shards, without those that are part of another model."""
    return _variables(lambda model: bool(states_below(model)))


def run_variables() -> dict[str, nn.Module]:
    """Return the models among the variables that any engine runs, without those that are part of another model."""
    return _variables(is_sharded)


def _variables(matches: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    models = {name: find_module(name) for name in module_names()}
    return outermost({name: model for name, model in models.items() if matches(model)})


def name_from_models(models: Iterable[nn.Module]) -> None:
    """Name units and parameters by their paths in ``models``, the sharded variables, wherever their roots are.

    Example: if the ``encoder`` and ``decoder`` of a plain ``model`` are sharded separately, their units are called
    ``encoder`` and ``decoder`` instead of being two roots.
    """
    for model in models:
        for path, root in roots_below(model):
            is_one = len(root.modules) == 1  # the units of a call on a list are named by its modules
            for unit in units_of({state: None for module in root.modules for state in states_below(module)}):
                unit.set_above(path if is_one else "")


def outermost(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models that are not part of another one, each under its first name.

    Several variables may hold one model, and a loop over a model's blocks leaves a block in a variable.
    """
    once: dict[int, tuple[str, nn.Module]] = {}
    for name, model in models.items():
        once.setdefault(id(model), (name, model))
    if len(once) > 1:  # every training forward of a cell calls this: do not walk a single model
        for _, model in tuple(once.values()):
            for part in model.modules():
                if part is not model:
                    once.pop(id(part), None)
    return dict(once.values())


def _output_dtype(states: Iterable[FSDPState]) -> str:
    """Return the dtype to which modules cast their outputs, as text; empty if none does."""
    found = {getattr(state.mp_policy, "output_dtype", None) for state in states} - {None}
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))


def describe_unit(name: str, state: FSDPState) -> ShardReply:
    """Return the description of a part of a model, as :func:`describe` does; ``name``: variable on the ranks."""
    units = [unit.describe() for unit in units_of([state])]
    params = (param for unit in units for param in unit.params)
    sizes = [ParamSize(names=(param.fqn,), shape=param.global_shape, itemsize=param.itemsize) for param in params]
    return described(name, units, sizes, output=_output_dtype([state]))


@dataclass(frozen=True, kw_only=True)
class ParamSize:
    """Size of one parameter of a model, sharded or not.

    Attributes:
        names: its names at every place, without wrappers.
        shape: shape of the whole parameter.
        itemsize: bytes per element.
        is_managed: whether it belongs to a unit.
    """

    names: tuple[str, ...]
    shape: Sequence[int]
    itemsize: int
    is_managed: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.itemsize

    @property
    def above(self) -> set[str]:
        """Paths of the modules that contain it, without the root."""
        return {name[:end] for name in self.names for end, letter in enumerate(name) if letter == "."}


def sizes_of(model: nn.Module, others: Iterable[ShardedModel] = ()) -> list[ParamSize]:
    """Return the size of each parameter once; for a flat parameter, the sizes of its parts instead.

    Args:
        model: the model.
        others: it again, for each other engine whose parameters are flat: the modules have only pieces of them.
    """
    managed = [param for unit in units_of(states_below(model)) for param in unit.fsdp_params]
    names = names_below((model,))
    found: list[ParamSize] = []
    for param in managed:
        known = param.describe()
        shapes = [each.global_shape for each in known.parts or (known,)]
        for info, shape in zip(param.infos, shapes, strict=True):
            places = tuple(full_name(names, module, name) for module, name in info.places if module in names)
            found.append(ParamSize(names=places, shape=shape, itemsize=known.itemsize, is_managed=True))
    flat_units = [(each, unit) for each in others for unit in each.units]
    held = {owned for each, unit in flat_units for owned in each.owned(unit.index)}
    found += (size for each, unit in flat_units for size in _sizes_of_parts(each, unit))
    return [
        *found,
        *(
            ParamSize(names=tuple(names), shape=p.shape, itemsize=p.itemsize)
            for p, names in params_in_no_unit(model).items()
            if id(p) not in held
        ),
    ]


def unit_infos(model: nn.Module) -> list[Unit]:
    """Return the engine's description of each unit in the tree."""
    return [unit.describe() for unit in units_of(states_below(model))]


def _sizes_of_parts(model: ShardedModel, unit: Unit) -> Iterator[ParamSize]:
    """Yield the size of each parameter that is a part of a unit's flat ones."""
    tensors = model.tensors(unit.index)
    for flat in unit.params:
        for part in flat.parts:
            places = ((model.paths[cast("nn.Module", owner)], name) for owner, name in tensors[part.fqn].places)
            names = tuple(join(path, name) for path, name in places)
            yield ParamSize(names=names, shape=part.global_shape, itemsize=flat.itemsize, is_managed=True)


def _unit_names(model: nn.Module) -> list[str]:
    """Return the paths of the units, ``(root)`` for the model's own; a call without parameters makes no unit."""
    states = ((clean(name), state_of(module)) for name, module in model.named_modules())
    return [unit_words(name) for name, s in states if s is not None and s._fsdp_param_group is not None]


def _bytes_at_rest(param: Param) -> int:
    """Return the bytes of one shard, including padding."""
    others = (size for dim, size in enumerate(param.shape) if dim != param.shard_dim)
    return param.padded_rows * math.prod(others) * param.itemsize
