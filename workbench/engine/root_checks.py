"""Checks of the tree below a root, done once when the root of a model first runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from workbench.engine.model_check import check_same_units
from workbench.engine.module_names import Names, full_name
from workbench.engine.param import ShardedState
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.process_groups import CommGroup


def check_tree(root: str, ran: Iterable[nn.Module], units: Sequence[FSDPParamGroup], names: Names) -> None:
    """Check that no module ran before its root, and that every module with a managed parameter is below it.

    Args:
        root: name of the root's class.
        ran: modules of ``fully_shard`` calls below the root that already ran.
        units: all units of the tree.
        names: names of its modules.

    Raises:
        RuntimeError: a module ran before the root, or is not below it.
    """
    early = [module for module in ran if module in names]
    if early:
        raise RuntimeError(
            f"module {names[early[0]]!r} ran before its FSDP root {root}; "
            "run the root first, or give the modules one root: shard their common parent as well"
        )
    held = [(m, p.fqn) for u in units for p in u.fsdp_params for m, _ in p.info.places]
    lost = {fqn: type(m).__name__ for m, fqn in held if m not in names}
    if lost:
        fqn, module = next(iter(lost.items()))
        raise RuntimeError(
            f"parameter {fqn!r} belongs to a unit of the FSDP root {root}, but the {module} that held it is not "
            "below that root: call fully_shard after the last change to the model's modules, and on a common parent "
            "of all modules of a list"
        )


def check_not_tied(units: Iterable[FSDPParamGroup], names: Names) -> None:
    """Check that no parameters were tied after ``fully_shard``.

    Raises:
        ValueError: two parameters were tied.
    """
    seen: dict[int, str] = {}
    for param in (p for unit in units for p in unit.fsdp_params):
        fqn = full_name(names, param.info.module, param.info.name)
        first = seen.setdefault(id(param.registered() if param.state is ShardedState.SHARDED else param), fqn)
        if first != fqn:
            raise ValueError(
                f"parameters {first!r} and {fqn!r} were tied after fully_shard; tie them before, and put both into "
                "one unit: call fully_shard on a module that holds both, or on a list of the two"
            )


def check_no_meta(units: Iterable[FSDPParamGroup]) -> None:
    """Check that every parameter has values.

    Raises:
        RuntimeError: some parameters are on the meta device; names them.
    """
    meta = [p.fqn for u in units for p in u.fsdp_params if p.state is ShardedState.SHARDED and p.registered().is_meta]
    if meta:
        raise RuntimeError(
            f"parameters still on the meta device: {', '.join(meta)}; call module.to_empty(device=...) and "
            "initialise them, or load a state dict with assign=True, before the first forward"
        )


def check_ranks_agree(units: Iterable[FSDPParamGroup]) -> None:
    """Compare units across every group that communicates for them; collective.

    Raises:
        RanksDisagreeError: ranks hold different units.
    """
    by_group: dict[CommGroup, list[FSDPParamGroup]] = {}
    for unit in units:
        for group in (unit.mesh_info.shard_group, unit.mesh_info.replicate_group):
            if group is not None:
                by_group.setdefault(group, []).append(unit)
    for group, members in by_group.items():
        check_same_units([u.describe() for u in members], group)
