"""Names of modules and parameters: those that ``state_dict()`` has, without the parts that wrappers add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

Names = Mapping[nn.Module, str]
"""Names of every module in a tree, relative to its root."""

WRAPPED = "_fsdp_wrapped_module"
"""Attribute under which a wrapper of the first FSDP API holds its module."""

_CHECKPOINTED = "_checkpoint_wrapped_module"
"""The same of torch's wrapper for activation checkpointing."""


def clean(name: str, wrappers: Sequence[str] = (WRAPPED, _CHECKPOINTED)) -> str:
    """Return the name of a module or parameter without the parts that ``wrappers`` add.

    Example: ``"_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.bias"`` -> ``"blocks.0.bias"``.
    """
    if not any(wrapper in name for wrapper in wrappers):
        return name
    return ".".join(part for part in name.split(".") if part not in wrappers)


def names_below(modules: Sequence[nn.Module]) -> Names:
    """Return the name of every module in the tree of ``modules``; a list numbers them, as a ModuleList does.

    A wrapper has the name of the module in it.
    """
    if len(modules) == 1:
        return {module: clean(name) for name, module in modules[0].named_modules()}
    return {m: clean(name) for i, top in enumerate(modules) for name, m in top.named_modules(prefix=str(i))}


def full_name(names: Names, module: nn.Module, name: str) -> str:
    """Return the name of ``module``'s parameter ``name`` relative to the root."""
    prefix = names[module]
    return f"{prefix}.{name}" if prefix else name


def named_params(model: nn.Module, *, repeats: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model with their names; with ``repeats``, a tied one under each of its names."""
    for name, param in model.named_parameters(remove_duplicate=not repeats):
        yield clean(name), param
