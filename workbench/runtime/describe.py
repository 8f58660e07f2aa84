"""What a sharded model is, in numbers and words: what ``shard`` and ``reshard`` answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import nn

from workbench.engine.state import state_of, states_below, units_of
from workbench.events import Param, Unit, unit_words
from workbench.protocol.commands import Sharded


def describe(name: str, model: nn.Module, *, prefetch: int, optimizers: int) -> Sharded:
    """Return the facts of a sharded model.

    Args:
        name: what the ranks call it.
        model: the root.
        prefetch: units asked for ahead by explicit lists, 0 without.
        optimizers: how many go on with its parameters.
    """
    infos = unit_infos(model)
    params = list(model.parameters())
    return Sharded(
        model=name,
        units=tuple(_unit_names(model)),
        num_params=len(params),
        num_elements=sum(math.prod(p.shape) for p in params),
        bytes_unsharded=sum(math.prod(p.shape) * p.itemsize for p in params),
        bytes_at_rest=sum(_bytes_at_rest(param) for info in infos for param in info.params),
        policy=tuple(policy_words(infos, prefetch)),
        optimizers=optimizers,
    )


def unit_infos(model: nn.Module) -> list[Unit]:
    """Return what the engine says of each unit in the tree."""
    return [unit.describe() for unit in units_of(states_below(model))]


def policy_words(infos: Sequence[Unit], prefetch: int = 0) -> list[str]:
    """Return how units are kept and computed, a phrase each; nothing for what is the plain way.

    Example: two copies, computed in bfloat16 -> ``["2 copies, each on 2 ranks", "computes in bfloat16"]``.
    """
    copies, size = max((info.replicate_size, info.shard_size) for info in infos)
    own = {param.dtype for info in infos for param in info.params}
    compute, reduce = ({getattr(info, f"{what}_dtype") for info in infos} for what in ("compute", "reduce"))
    said = [
        f"{copies} copies, each on {size} {'ranks' if size > 1 else 'rank'}" if copies > 1 else "",
        _after_forward(infos),
        f"computes in {_listed(compute)}" if compute != own else "",
        f"reduces in {_listed(reduce)}" if reduce != compute else "",
        "rests in host memory" if any(info.offload for info in infos) else "",
        f"gathers {prefetch} {'units' if prefetch > 1 else 'unit'} ahead" if prefetch else "",
    ]
    return [phrase for phrase in said if phrase]


def _after_forward(infos: Iterable[Unit]) -> str:
    policies = {info.reshard_after_forward for info in infos}
    numbers = {policy for policy in policies if not isinstance(policy, bool)}
    if numbers:
        return f"on {_listed(map(str, numbers))} ranks after forward"
    return "unsharded from forward to backward" if policies == {False} else ""


def _listed(words: Iterable[str]) -> str:
    return " and ".join(sorted(words))


def _unit_names(model: nn.Module) -> list[str]:
    """Return the paths of the units, ``(root)`` for the model's own; a call that found no parameters made none."""
    states = ((name, state_of(module)) for name, module in model.named_modules())
    return [unit_words(name) for name, s in states if s is not None and s._fsdp_param_group is not None]


def _bytes_at_rest(param: Param) -> int:
    """Return the bytes of one shard, with padding."""
    others = (size for dim, size in enumerate(param.shape) if dim != param.shard_dim)
    return param.padded_rows * math.prod(others) * param.itemsize
