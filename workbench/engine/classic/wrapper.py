"""``FullyShardedDataParallel``: a wrapper module that stores its module's parameters in one flat parameter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, Self, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from workbench.engine._torch import tell_checkpoints, traversal_of_checkpoints
from workbench.engine.classic import comm_hooks, materialize
from workbench.engine.classic.attributes import WrapperAttributes, check_flags
from workbench.engine.classic.clip import clip_grad_norm
from workbench.engine.classic.cost_warnings import caution, check_gradient_memory, check_is_called, check_splits
from workbench.engine.classic.flat_param import FlatParam
from workbench.engine.classic.full_params import summon_full_params
from workbench.engine.classic.ignored_params import IgnoredStates
from workbench.engine.classic.optim_state import OptimStateDicts
from workbench.engine.classic.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    check_kind,
)
from workbench.engine.classic.shard_inventory import check_alike, check_same_grads, sharded_flats
from workbench.engine.classic.state_dict import (
    as_saved,
    begin_load,
    end_load,
    finish,
    is_kept,
    loading,
    named_flat,
    own_values,
    shown,
    with_versions,
)
from workbench.engine.classic.state_dict_settings import settings_of
from workbench.engine.classic.torch_checkpoint import Checkpoints
from workbench.engine.classic.wrap import UnitWrapPolicy, WrapPolicy, auto_wrap
from workbench.engine.classic.wrapper_mesh import HYBRID, ProcessGroups, mesh_for
from workbench.engine.classic.wrapper_state import KEEPS_AFTER_FORWARD, WrapperState, flat_of, wrapper_states_below
from workbench.engine.dtensor_param import joined_with_tp
from workbench.engine.fsdp_state import attach, state_of, units_of
from workbench.engine.managed_params import _get_managed_modules, _get_param_module_infos, mark_taken
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.module_names import WRAPPED, clean
from workbench.engine.param import check_uniform
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnitPolicy


class FullyShardedDataParallel(WrapperAttributes, OptimStateDicts, nn.Module):
    """Wrapper that shards the parameters of ``module``, except those in wrappers below it, as one flat parameter.

    Forward, backward, gradients and recording work as with ``fully_shard``: one all-gather before the module's forward,
    one before its backward, and one reduce-scatter after it. Create the optimizer after wrapping.

    Parameters may be DTensors of tensor parallelism, on another axis of the mesh that contains ``device_mesh``: the
    flat parameter holds this rank's part of them, and modules compute with DTensors as without the wrapper.

    Args:
        module: the module to wrap; changed in place.
        process_group: the ranks to shard over; for the hybrid strategies a pair (to shard over, to replicate over);
            None: all ranks.
        sharding_strategy: see :class:`ShardingStrategy`; None: FULL_SHARD.
        cpu_offload: see :class:`CPUOffload`.
        auto_wrap_policy: chooses modules in ``module`` to wrap as well, with the same arguments.
        backward_prefetch: see :class:`BackwardPrefetch`; None: no prefetch in backward.
        mixed_precision: see :class:`MixedPrecision`.
        ignored_modules: modules that, with everything in them, keep their parameters and buffers as they are.
        param_init_fn: initialises a module on the meta device; None: call its ``reset_parameters``.
        device_id: the device to compute on, its name or its index; None: this process's current device.
        sync_module_states: start with the parameters and buffers of the first rank.
        forward_prefetch: while a unit computes forward, prefetch the unit that came next in the last iteration.
        limit_all_gathers: must be a bool; at most one unit is ever prefetched.
        use_orig_params: keep the original parameters on the modules and in the optimizer, each as this rank's piece; a
            parameter that tensor parallelism has split is replaced by a plain one.
        ignored_states: parameters, or modules, to leave as they are.
        device_mesh: a 1-D mesh instead of ``process_group``; 2-D (replicate, shard) for the hybrid strategies.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a unit has parameters of several dtypes, or trained and frozen ones without ``use_orig_params``; a
            parameter is a scalar or non-contiguous, is already sharded, or is tied to one of another unit; a DTensor is
            not of tensor parallelism, or its mesh has no common parent with ``device_mesh``; arguments are
            incompatible.
        RuntimeError: ``torch.distributed`` is not initialised.

    Modules that were not wrapped yet when an error was raised are unchanged.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the arguments are torch's, in torch's order
        self,
        module: nn.Module,
        process_group: ProcessGroups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: UnitWrapPolicy | WrapPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"FullyShardedDataParallel wraps a module, got {type(module).__name__}")
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        offload, precision = cpu_offload or CPUOffload(), mixed_precision or MixedPrecision()
        check_kind("sharding_strategy", strategy, ShardingStrategy)
        check_kind("cpu_offload", offload, CPUOffload)
        check_kind("mixed_precision", precision, MixedPrecision)
        if backward_prefetch is not None:
            check_kind("backward_prefetch", backward_prefetch, BackwardPrefetch)
        check_flags(
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
        )
        if state_of(module) is not None:
            raise ValueError(
                f"this {type(module).__name__} is sharded already; wrap its children, or undo its sharding first"
            )
        ignored = IgnoredStates.of(module, ignored_modules, ignored_states)
        if strategy in HYBRID and process_group is None and device_mesh is None and auto_wrap_policy is None:
            raise ValueError(
                f"{strategy.name} without auto_wrap_policy needs process_group=(shard group, replicate group) or "
                "device_mesh=: every wrapper must have the same groups"
            )
        check_is_called(module)
        mesh = mesh_for(strategy, process_group, device_mesh, _device(device_id))
        check_splits(mesh.mesh.size(), strategy)
        options: dict[str, Any] = {
            "process_group": None,
            "sharding_strategy": strategy,
            "cpu_offload": offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,  # None keeps batch norms in the policy's units
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "ignored_states": ignored.params,
            "device_mesh": mesh.mesh,
        }
        _check_laid_out(_managed(module, ignored), ignored, mesh)
        materialize.check(_managed(module, ignored), param_init_fn, ignored.ids)
        if auto_wrap_policy is not None:
            auto_wrap(
                module,
                auto_wrap_policy,
                type(self),
                options,
                ignored_modules=ignored.modules,
                ignored_params=ignored.params,
            )
        managed = _managed(module, ignored)
        materialize.materialize(managed, mesh.device, param_init_fn, ignored.ids)
        materialize.move(managed, mesh.device, ignored.ids)
        given = _get_param_module_infos(managed, ignored.ids)
        named = [(info.path, param) for param, info in given]
        check_params(named, use_orig_params=use_orig_params)
        check_gradient_memory(named)
        if sync_module_states:
            materialize.sync(managed, mesh, ignored.ids)
        setattr(self, WRAPPED, module)
        unit = None
        if given:
            low = precision.reduce_dtype or precision.param_dtype
            kept = low if precision.keep_low_precision_grads else None
            flat = FlatParam(given, module, mesh, use_orig_params=use_orig_params, grad_dtype=kept)
            unit = FSDPParamGroup([flat], mesh, _policy(strategy, offload, precision))
        mark_taken(given, type(module).__name__, WrapperState)
        state = WrapperState(
            self,
            unit,
            mesh=mesh,
            strategy=strategy,
            precision=precision,
            cpu_offload=offload,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
        )
        attach(self, state)
        state.name_units()
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]

    # ---- behave like the wrapped module

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - what the module takes and returns
        """Run the module."""
        return self.module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return cast("nn.Module", self._modules[WRAPPED])

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise NotImplementedError: process groups and other ranks' parts cannot be copied or saved."""
        raise NotImplementedError(
            f"FullyShardedDataParallel around {type(self.module).__name__} can be neither copied nor pickled: save "
            "its state_dict(), or copy the plain module before wrapping or after workbench.engine.classic.unwrap"
        )

    @property
    def _is_summoned(self) -> bool:
        state = state_of(self)  # None during __init__
        return isinstance(state, WrapperState) and state.is_summoned

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the module
        """Return the attribute of the wrapper, or else of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if WRAPPED not in self.__dict__.get("_modules", ()):
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: int) -> Any:  # noqa: ANN401 - any item of the module
        """Return the wrapped module's item at ``key``."""
        return cast("Any", self.module)[key]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:  # noqa: ANN401 - as nn.Module
        """Yield (name, parameter); within ``summon_full_params`` the names omit wrappers."""
        if traversal_of_checkpoints() and kwargs.get("recurse") is False:
            yield from named_flat(self._state)
            return
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean(name, (WRAPPED,)) if self._is_summoned else name, param

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, module); for checkpoints, a single module whose parameters have the names of the state dict."""
        if traversal_of_checkpoints() == "named_parameters":
            yield prefix, as_saved(self._state)
        else:
            yield from super().named_modules(memo, prefix, remove_duplicate)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401 - as nn.Module
        """Yield (name, buffer); within ``summon_full_params`` the names omit wrappers."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean(name, (WRAPPED,)) if self._is_summoned else name, buffer

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` with every module while its parameters are whole; changes to them are kept."""
        with nullcontext() if self._is_summoned else self.summon_full_params(self, recurse=False):
            return super().apply(fn)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Convert parameters (``.to``, ``.double`` ...), then adopt the new ones."""
        states = wrapper_states_below(self)
        flats = sharded_flats(states)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for unit, _ in flats:
            unit.adopt_registered(fresh=True)
        return self

    def check_is_root(self) -> bool:
        """Return whether this is the outermost wrapper; before the first forward, make it the root."""
        self._as_root()
        return bool(self._state.is_root)

    def _as_root(self) -> None:
        if self._state.is_root is None:
            self._state.lazy_init()

    def _check_root(self, what: str) -> None:
        self._as_root()
        if not self._state.is_root:
            raise RuntimeError(f"{what} was called on a wrapper inside another; call it on the outermost one")

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers in ``module``'s tree, parents first; ``root_only``: only those in no other wrapper."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        inner = {id(m) for wrapper in found for m in wrapper.module.modules()}
        return [wrapper for wrapper in found if id(wrapper) not in inner]

    # ---- state dicts

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the state dict type of all wrappers in the tree of ``module``; the default is FULL_STATE_DICT.

        Args:
            module: a wrapper, or a module that contains some.
            state_dict_type: see :class:`StateDictType`.
            state_dict_config: config of the class that belongs to the type; None: its defaults.
            optim_state_dict_config: the same for optimizer state dicts.

        Returns:
            The previous settings.

        Raises:
            TypeError: an argument is not a state dict type or a config.
            ValueError: a config belongs to another type; there is no wrapper, or the wrappers had different types.
        """
        before = settings_of(module)
        settings = StateDictSettings.of(state_dict_type, state_dict_config, optim_state_dict_config)
        for state in wrapper_states_below(module):
            state.settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the settings of the wrappers in ``module``'s tree; ValueError as in :meth:`set_state_dict_type`."""
        return settings_of(module)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Do what :meth:`set_state_dict_type` does for the duration of a ``with``; raises the same errors."""
        api = FullyShardedDataParallel
        before = api.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for state in wrapper_states_below(module):
                state.settings = before

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # noqa: ANN401 - as nn.Module
        """Return the state dict, of the type that is set; collective, except for LOCAL_STATE_DICT.

        Names and dtypes are those of the plain model. Values by type:

        - FULL_STATE_DICT: whole tensors in separate memory. Parameters that tensor parallelism has split stay DTensors
          over its axis.
        - SHARDED_STATE_DICT: DTensors split along dim 0, even without a device mesh (torch's wrapper returns the
          deprecated ShardedTensor there), and over the axis of tensor parallelism as well. On one rank, no DTensors.
        - LOCAL_STATE_DICT: one ``_flat_param`` per wrapper, a DTensor ``[numel]`` of all its parameters that shares the
          wrapper's memory. Refused with tensor parallelism.

        With the strategy NO_SHARD values are always whole. Within ``summon_full_params`` the modules' current
        parameters are returned.

        Args:
            args: the other arguments by position; deprecated.
            destination: dict to fill and return; None: a new dict.
            prefix: prefix of all names.
            keep_vars: do not detach values.

        Raises:
            RuntimeError: an iteration is in progress; LOCAL_STATE_DICT with tensor parallelism.
            RanksDisagreeError: an iteration is in progress on some ranks only.
        """
        if args:
            caution("state_dict: positional arguments are deprecated, pass them by name", FutureWarning)
            named: tuple[Any, ...] = (destination, prefix, keep_vars)
            destination, prefix, keep_vars = args + named[len(args) :]
        state = self._state
        kept = state.was_kept = is_kept(state)
        is_outermost = destination is None and not state.is_summoned
        if is_outermost and state.settings.state_dict_type is not StateDictType.LOCAL_STATE_DICT:
            check_alike(self, wrapper_states_below(self), "state_dict")
        with nullcontext() if state.is_summoned else shown(state):
            made = super().state_dict(
                destination=destination if kept else OrderedDict(), prefix=prefix, keep_vars=keep_vars
            )
        finish(state, made, prefix)
        if kept:
            return made
        return OrderedDict() if destination is None else destination

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(own_values(self._state, prefix))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Register wrappers with ``torch.distributed.checkpoint.state_dict``, which calls this first.

        Returns:
            A dict that marks the child whose name is left out of fqns.
        """
        tell_checkpoints(FullyShardedDataParallel, Checkpoints)
        return {"": WRAPPED}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: ANN401 - as nn.Module
        """Load a state dict of the type that is set; see ``nn.Module.load_state_dict``.

        Except with LOCAL_STATE_DICT, values may be plain tensors, DTensors or ShardedTensors of any sharding, for
        either type; with the last two it is collective. Every rank needs the state dict. Parameters keep their dtype
        and memory, even with ``assign``.

        Raises:
            RuntimeError: a value does not have its parameter's shape, or with LOCAL_STATE_DICT has another sharding
                (nothing is loaded); an iteration is in progress; with ``strict``, names are missing or unexpected.
            RanksDisagreeError: ranks have different DTensors; nothing is loaded.
            CollectiveFailed: another rank was interrupted; no rank has loaded anything.
        """
        with loading(self, state_dict):
            return super().load_state_dict(with_versions(self, state_dict), strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # noqa: ANN401 - as nn.Module
        begin_load(self._state, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ---- parameters and gradients

    def reset_iter_state(self) -> None:
        """Make the next iteration clean after an exception in forward or backward.

        Raises:
            RuntimeError: this is not the outermost wrapper.
        """
        self._state.reset_iter_state()

    summon_full_params = staticmethod(summon_full_params)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate full gradients in backwards within the body; the first backward after it reduces them. Root only.

        Until then ``zero_grad`` can drop ``.grad``, but ``.grad`` cannot be read if parameters are sharded.

        Raises:
            RuntimeError: this is not the outermost wrapper.
        """
        self._check_root("no_sync")
        before = [
            (state, unit, unit.sync.reduce_grads, unit.reshard_after_backward)
            for state in wrapper_states_below(self)
            for unit in state.units
        ]
        for state, unit, *_ in before:
            unit.sync.reduce_grads = False
            unit.reshard_after_backward = state.strategy not in KEEPS_AFTER_FORWARD  # the others keep full parameters
        try:
            yield
        finally:
            for _, unit, reduces, reshards in before:  # another no_sync may enclose this one
                unit.sync.reduce_grads, unit.reshard_after_backward = reduces, reshards

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``; collective.

        Parameters that tensor parallelism has split count with all their parts; see :func:`clip_grad_norm`.

        Args:
            max_norm: maximum norm.
            norm_type: p of the p-norm; ``inf``: the largest element.

        Returns:
            The norm before scaling, a scalar of the widest dtype among the gradients.

        Raises:
            RuntimeError: this is not the outermost wrapper, or an iteration is in progress.
            RanksDisagreeError: only some ranks hold a gradient. No gradient is scaled.
        """
        self._check_root("clip_grad_norm_")
        check_same_grads(self, wrapper_states_below(self), "clip_grad_norm_")
        units = units_of(self._state.tree)
        flats = {param: flat for flat in map(flat_of, units) for param in flat.owned}
        device = self._state.comm_ctx.device
        return clip_grad_norm(list(self.parameters()), flats, float(max_norm), float(norm_type), device)

    def register_comm_hook(self, state: object, hook: comm_hooks.CommHook) -> None:
        """Make ``hook`` reduce the gradients of all wrappers instead of the engine; the hook also divides them.

        Args:
            state: the hook's first argument.
            hook: ``hook(state, grad, output)`` writes this rank's part ``[c]`` of the average of ``grad`` ``[F * c]``,
                padding included, to ``output``. If nothing is split, ``hook(state, grad)`` writes the average to
                ``grad``. Both have the dtype of the reduction.

        Raises:
            TypeError: ``hook`` is not callable.
            RuntimeError: this is not the outermost wrapper, or it already has a hook.
            ValueError: a wrapper has a hybrid strategy.
        """
        self._check_root("register_comm_hook")
        if not callable(hook):
            raise TypeError(f"register_comm_hook takes a function hook(state, grad, ...), got {hook!r:.80}")
        states = wrapper_states_below(self)
        hybrid = next((each for each in states if each.strategy in HYBRID), None)
        if hybrid is not None:
            raise ValueError(
                f"register_comm_hook does not support {hybrid.strategy.name}, which reduces gradients twice; use "
                "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
            )
        units = units_of(states)
        if any(unit.sync.comm_hook is not None for unit in units):
            raise RuntimeError(
                "register_comm_hook: a communication hook is registered already, and only one is possible"
            )
        for unit in units:
            comm_hooks.install(unit, state, hook)


def _loaded(wrapper: nn.Module, incompatible: Any) -> None:  # noqa: ANN401 - nn.Module's lists of names
    """End the load of a wrapper once it and all modules below it have loaded."""
    end_load(cast("FullyShardedDataParallel", wrapper)._state, keep=True)
    for keys in incompatible:
        keys[:] = map(clean, keys)


def _managed(module: nn.Module, ignored: IgnoredStates) -> list[tuple[str, nn.Module]]:
    """Return (path, module) for ``module`` and the modules in it that are neither ignored nor in a wrapper."""
    return [(path, m) for path, m in _get_managed_modules([module]) if m not in ignored.modules]  # with all in them


def _check_laid_out(managed: Sequence[tuple[str, nn.Module]], ignored: IgnoredStates, mesh: FSDPMeshInfo) -> None:
    """Check the DTensor parameters of ``managed`` (path, module) pairs.

    Raises:
        ValueError: a DTensor is not of tensor parallelism, which shards or replicates along other mesh axes.
    """
    for param, info in _get_param_module_infos(managed, ignored.ids):
        if not isinstance(param, DTensor):
            continue
        wrong = next((each for each in param.placements if type(each) not in {Shard, Replicate}), None)
        if wrong is not None:
            raise ValueError(
                f"parameter {info.path!r} is a DTensor with the placement {wrong!r}; a flat parameter supports only "
                "Shard and Replicate: redistribute it first, or exclude it with ignored_states"
            )
        joined_with_tp(info.path, param, mesh)


def _policy(strategy: ShardingStrategy, offload: CPUOffload, precision: MixedPrecision) -> UnitPolicy:
    return UnitPolicy(
        reshard_after_forward=strategy not in KEEPS_AFTER_FORWARD,
        mp_policy=MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype),
        offload_policy=CPUOffloadPolicy() if offload.offload_params else OffloadPolicy(),
    )


def check_params(named: Sequence[tuple[str, nn.Parameter]], *, use_orig_params: bool) -> None:
    """Check that the (name, parameter) pairs can form one flat parameter.

    Raises:
        ValueError: they differ in dtype or device, or without ``use_orig_params`` in whether they are trained.
    """
    check_uniform(named)
    trained = [path for path, param in named if param.requires_grad]
    frozen = [path for path, param in named if not param.requires_grad]
    if trained and frozen and not use_orig_params:
        raise ValueError(
            f"{trained[0]!r} is trained and {frozen[0]!r} is frozen, but one flat parameter is either trained or "
            "frozen: pass use_orig_params=True, or wrap the frozen modules separately"
        )


def _device(device_id: object) -> torch.device | None:
    if device_id is None or isinstance(device_id, torch.device):
        return device_id
    if isinstance(device_id, str):
        return torch.device(device_id)
    if isinstance(device_id, int) and not isinstance(device_id, bool):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise ValueError(f"device_id={device_id}: there is no accelerator here; pass torch.device('cpu')")
        return torch.device(accelerator.type, device_id)
    raise TypeError(f"device_id must be a torch.device, its name or an index, got {device_id!r}")
