"""Auto-wrapping: choosing the modules that become units, and replacing each with its wrapper.

A policy decides on every module below the root before anything is wrapped, so an error of the policy changes nothing.
Children come before their parents. A module with several parents is decided on at its first occurrence, wrapped once,
and replaced by the same wrapper everywhere.

Differences from torch: with a ``mixed_precision``, modules that :func:`size_based_auto_wrap_policy` keeps as leaves
stay leaves; modules that keep their own precision cast their inputs to the dtype of their parameters, not always to
float32; and :func:`enable_wrap` can be nested.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from workbench.engine.classic.cost_warnings import check_own_precision
from workbench.engine.classic.options import module_classes_of
from workbench.engine.tensor_trees import cast_floats, tensors_in

WrapPolicy = Callable[..., bool]
"""Called with ``module``, ``recurse`` and ``nonwrapped_numel``; returns whether to descend, or to make a unit."""


class UnitWrapPolicy(ABC):
    """A policy that decides module by module."""

    def descends(self, module: nn.Module, numel: int) -> bool:
        """Return whether the policy decides on ``module``, of ``numel`` elements, and the modules below it."""
        return True

    @abstractmethod
    def options(self, module: nn.Module, numel: int) -> Mapping[str, object] | None:
        """Return the options that the unit of ``module`` overrides; None if ``module`` does not become a unit.

        Args:
            module: the module.
            numel: elements of its parameters that are in no unit below it.
        """


class ModuleWrapPolicy(UnitWrapPolicy):
    """A policy that makes every module of the given classes a unit.

    Args:
        module_classes: subclasses of ``nn.Module``.

    Raises:
        TypeError: ``module_classes`` contains something else.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = module_classes_of("ModuleWrapPolicy: module_classes", module_classes)

    def options(self, module: nn.Module, numel: int) -> Mapping[str, object] | None:
        """Return empty overrides for a module of the classes, None for any other."""
        return {} if isinstance(module, self._module_classes) else None

    def __call__(self, module: nn.Module, recurse: bool, *_: object, **__: object) -> bool:
        """Decide like a policy function, for use in ``_or_policy``."""
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        names = ", ".join(sorted(kind.__name__ for kind in self._module_classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy(UnitWrapPolicy):
    """A policy that calls a function.

    Args:
        lambda_fn: takes a module; returns False or an empty dict to leave it, True to make it a unit, or a dict of
            options in which this unit differs from the root.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def options(self, module: nn.Module, numel: int) -> Mapping[str, object] | None:
        """Return the function's decision.

        Raises:
            TypeError: the function returned neither a bool nor a dict.
        """
        answer = self._lambda_fn(module)
        if not isinstance(answer, (bool, dict)):
            raise TypeError(
                f"CustomPolicy: lambda_fn must return a bool or a dict of options, got {answer!r} "
                f"for a {type(module).__name__}"
            )
        if not answer:
            return None
        return answer if isinstance(answer, dict) else {}


@dataclass(frozen=True)
class _FunctionPolicy(UnitWrapPolicy):
    function: WrapPolicy

    def descends(self, module: nn.Module, numel: int) -> bool:
        return bool(self.function(module=module, recurse=True, nonwrapped_numel=numel))

    def options(self, module: nn.Module, numel: int) -> Mapping[str, object] | None:
        return {} if self.function(module=module, recurse=False, nonwrapped_numel=numel) else None


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Make every module a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Make every module a unit for which ``lambda_fn`` returns True; bind it with ``functools.partial``."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Collection[type[nn.Module]]
) -> bool:
    """Make every module of the given classes a unit; bind them with ``functools.partial``."""
    classes = module_classes_of("transformer_auto_wrap_policy: transformer_layer_cls", transformer_layer_cls)
    return recurse or isinstance(module, classes)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Make a module a unit if enough elements remain; bind the arguments from the fourth on with ``functools.partial``.

    Args:
        module: the module to decide on.
        recurse: True to decide whether to descend into the module, False to decide whether it becomes a unit.
        nonwrapped_numel: elements of its parameters, without those of units below if ``recurse`` is False.
        min_num_params: minimum number of elements.
        force_leaf_modules: modules of these classes, and all modules below them, do not become units; None:
            ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``.
        exclude_wrap_modules: modules of these classes do not become units; None:
            ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``.
    """
    default = size_based_auto_wrap_policy
    if recurse:
        excepted = default.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules  # type: ignore[attr-defined]
    else:
        excepted = default.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules  # type: ignore[attr-defined]
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(excepted))


# multi-head attention computes with the parameters of its child, which it never calls
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
# a container is never called
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[WrapPolicy]) -> bool:
    """Return True if any of ``policies`` does."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


@dataclass(frozen=True)
class PlannedUnit:
    """A module to wrap.

    Attributes:
        name: name from the root; the first, if the module occurs several times.
        module: the module.
        params: its parameters that are in no unit below it.
        kwargs: arguments for its wrapper.
        own_precision: the module computes in the dtype of its parameters.
    """

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]
    kwargs: Mapping[str, object]
    own_precision: bool


def plan_units(
    root: nn.Module,
    policy: UnitWrapPolicy | WrapPolicy,
    kwargs: Mapping[str, Any],
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
) -> list[PlannedUnit]:
    """Return the units that a policy makes of the modules below ``root``; nothing is changed.

    Args:
        root: the root of the tree; the policy does not decide on the root itself.
        policy: a policy of this file, or a function of ``module``, ``recurse`` and ``nonwrapped_numel``.
        kwargs: the root's options, which units inherit unless the policy overrides them. With a ``mixed_precision``,
            modules of its ``_module_classes_to_ignore`` become separate units without one.
        ignored_modules: modules that, with everything below them, neither become units nor count.
        ignored_params: parameters that do not count.

    Returns:
        Units, children before parents, otherwise in the order of registration.

    Raises:
        TypeError: ``policy`` is not a policy, or it returned something invalid.
        ValueError: the policy overrides an option that is not in ``kwargs``.
    """
    precision = kwargs.get("mixed_precision")
    ignored = {module for top in ignored_modules for module in top.modules()}
    walk = _Walk(
        policy=_as_unit_policy(policy),
        own_precision=tuple(precision._module_classes_to_ignore) if precision is not None else (),
        ignored=ignored,
        ignored_params={*ignored_params, *(p for module in ignored for p in module.parameters())},
        names={module: name for name, module in root.named_modules()},
        kwargs=kwargs,
    )
    walk.below(root, is_queried=True)
    return walk.units


def _as_unit_policy(policy: UnitWrapPolicy | WrapPolicy) -> UnitWrapPolicy:
    if isinstance(policy, UnitWrapPolicy):
        return policy
    if isinstance(policy, type) or not callable(policy):
        raise TypeError(
            "auto_wrap_policy must be a ModuleWrapPolicy, a CustomPolicy or a function of module, recurse and "
            f"nonwrapped_numel, got {policy!r}; for all modules of a class pass ModuleWrapPolicy({{Class}})"
        )
    return _FunctionPolicy(policy)


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """State of the tree walk in :func:`plan_units`."""

    policy: UnitWrapPolicy
    own_precision: tuple[type[nn.Module], ...]
    ignored: set[nn.Module]
    ignored_params: set[nn.Parameter]
    names: Mapping[nn.Module, str]
    kwargs: Mapping[str, Any]
    units: list[PlannedUnit] = field(default_factory=list)
    taken: dict[nn.Module, set[nn.Parameter]] = field(default_factory=dict)  # parameters of units at or below a module

    def below(self, module: nn.Module, is_queried: bool) -> tuple[bool, set[nn.Parameter]]:
        """Decide on all modules below one; return whether the policy decides on itself, and the units' parameters."""
        is_queried = is_queried and self.policy.descends(module, _numel(self._params(module)))
        for child in module.children():
            if child not in self.ignored and child not in self.taken:
                self.taken[child] = set()  # ends the recursion for a module that contains itself
                self.taken[child] = self._at(child, is_queried)
        taken: set[nn.Parameter] = set()
        return is_queried, taken.union(*(self.taken.get(child, ()) for child in module.children()))

    def _at(self, module: nn.Module, is_queried: bool) -> set[nn.Parameter]:
        is_queried, taken = self.below(module, is_queried)
        params = self._params(module)
        left = tuple(p for p in params if p not in taken)
        own_precision = isinstance(module, self.own_precision)
        options = self.policy.options(module, _numel(left)) if is_queried else None
        if options is None and not own_precision:
            return taken
        kwargs = self._kwargs(module, options or {})
        if own_precision:
            kwargs["mixed_precision"] = None
        self.units.append(PlannedUnit(self.names[module], module, left, kwargs, own_precision))
        return set(params)

    def _params(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p not in self.ignored_params]

    def _kwargs(self, module: nn.Module, options: Mapping[str, object]) -> dict[str, object]:
        unknown = [name for name in options if name not in self.kwargs]
        if unknown:
            raise ValueError(
                f"auto_wrap_policy returned the unknown option {unknown[0]!r} for module {self.names[module]!r}; the "
                f"options are {', '.join(self.kwargs)}"
            )
        return {**self.kwargs, **options}


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def check_frozen(root: nn.Module, units: Iterable[PlannedUnit]) -> None:
    """Check that each unit's parameters are all trained or all frozen, as a flat parameter requires.

    Raises:
        ValueError: a unit has both trained and frozen parameters.
    """
    names = {param: name for name, param in root.named_parameters()}
    for unit in units:
        by_kind = {kind: [names[p] for p in unit.params if p.requires_grad is kind] for kind in (True, False)}
        if all(by_kind.values()):
            raise ValueError(
                f"unit {unit.name!r} has parameters with requires_grad=True, such as {by_kind[True][0]!r}, and with "
                f"requires_grad=False, such as {by_kind[False][0]!r}: pass use_orig_params=True, or have the policy "
                "wrap the frozen modules separately"
            )


def check_shared(root: nn.Module, units: Iterable[PlannedUnit]) -> None:
    """Check that all modules that share a parameter are in one unit.

    Raises:
        ValueError: modules that share a parameter are in several units, or in a unit and in the root's remainder.
    """
    units = list(units)
    wrapped, managed = {unit.module for unit in units}, {param for unit in units for param in unit.params}
    modules = dict(root.named_modules(remove_duplicate=False))
    first: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        if param not in managed:
            continue  # ignored, or in the root's remainder only
        above = (modules[path] for path in _paths_above(name))
        unit = next((module for module in above if module in wrapped), root)
        other, taken_by = first.setdefault(param, (name, unit))
        if unit is not taken_by:
            raise ValueError(
                f"parameters {other!r} and {name!r} are tied, but would be in two units: have the policy wrap a "
                "module that contains both, or neither of the modules that contain them"
            )


def _paths_above(name: str) -> Iterator[str]:
    """Yield the names of the modules around a parameter, innermost first, without the root."""
    while name := name.rpartition(".")[0]:
        yield name


def wrap_units(root: nn.Module, units: Sequence[PlannedUnit], wrapper_cls: Callable[..., nn.Module]) -> None:
    """Replace each unit's module everywhere below ``root`` with ``wrapper_cls(module, **kwargs)``, unit by unit.

    Raises:
        ValueError: the tree already has a wrapper; nothing is changed.
    """
    _check_not_wrapped(root, wrapper_cls)
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {unit.module: [] for unit in units}
    for path, module in root.named_modules(remove_duplicate=False):
        if module in places:
            parent, _, name = path.rpartition(".")
            places[module].append((root.get_submodule(parent), name))
    for unit in units:
        if unit.own_precision:
            _InOwnPrecision.around(unit.module)
        wrapper = wrapper_cls(unit.module, **unit.kwargs)
        for parent_module, name in places[unit.module]:
            setattr(parent_module, name, wrapper)


def auto_wrap(
    root: nn.Module,
    policy: UnitWrapPolicy | WrapPolicy,
    wrapper_cls: Callable[..., nn.Module],
    kwargs: Mapping[str, Any],
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
) -> None:
    """Wrap the modules below ``root`` that a policy chooses; arguments as in :func:`plan_units` and :func:`wrap_units`.

    Nothing is changed if this raises one of the following errors.

    Raises:
        TypeError: ``policy`` is not a policy, or it returned something invalid.
        ValueError: the policy overrides an option that is not in ``kwargs``, the tree already has a wrapper, a
            parameter would be in two units, or without ``use_orig_params`` a unit is partly frozen.
    """
    _check_not_wrapped(root, wrapper_cls)
    units = plan_units(root, policy, kwargs, ignored_modules=ignored_modules, ignored_params=ignored_params)
    check_shared(root, units)
    if not kwargs.get("use_orig_params", False):
        check_frozen(root, units)
    check_own_precision(type(unit.module) for unit in units if unit.own_precision)
    wrap_units(root, units, wrapper_cls)


def _check_not_wrapped(root: nn.Module, wrapper_cls: Callable[..., nn.Module]) -> None:
    if not isinstance(wrapper_cls, type):
        return  # a function: its wrappers cannot be recognised
    wrapped = [name for name, module in root.named_modules() if isinstance(module, wrapper_cls)]
    if wrapped:
        raise ValueError(
            f"auto_wrap_policy: module {wrapped[0]!r} is wrapped in {wrapper_cls.__name__} already; wrap with a "
            "policy or by hand, not both"
        )


class _InOwnPrecision:
    """Hooks that cast a module's inputs to the dtype of its parameters, and its outputs back to the input dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._came: torch.dtype | None = None

    @classmethod
    def around(cls, module: nn.Module) -> None:
        """Register the hooks on a module."""
        held = (t.dtype for t in chain(module.parameters(), module.buffers()) if t.is_floating_point())
        casts = cls(next(held, torch.float32))
        module.register_forward_pre_hook(casts.before, with_kwargs=True)
        module.register_forward_hook(casts.after)

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cast the inputs, and remember their dtype."""
        came = (t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point())
        self._came = next(came, None)
        return cast_floats((args, kwargs), self._dtype)  # type: ignore[no-any-return]

    def after(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401 - any structure
        """Cast the output back."""
        return cast_floats(output, self._came)


@dataclass(frozen=True)
class _Wrapping:
    wrapper_cls: Callable[..., nn.Module]
    kwargs: Mapping[str, Any]


_wrapping: ContextVar[_Wrapping | None] = ContextVar("wrapping", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:  # noqa: ANN401
    """Make :func:`wrap` wrap modules within the ``with`` statement.

    Args:
        wrapper_cls: the wrapper class, such as ``FullyShardedDataParallel``.
        **wrapper_kwargs: arguments for the wrapper.
    """
    token = _wrapping.set(_Wrapping(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:  # noqa: ANN401 - whatever the wrapper takes
    """Return ``module`` wrapped as the enclosing :func:`enable_wrap` specifies; outside of one, ``module`` itself.

    Args:
        module: the module to wrap.
        **wrap_overrides: arguments for its wrapper that override or extend those of ``enable_wrap``.
    """
    wrapping = _wrapping.get()
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **{**wrapping.kwargs, **wrap_overrides})
