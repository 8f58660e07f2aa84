"""Agreement of ranks on what each holds before a collective operation on a model, and on its outcome after it.

After a step that failed or was aborted, some ranks hold gradients or optimizer state that others lack. A rank that
gathers such a tensor alone waits for ever, or receives another tensor's bytes. So :meth:`Agreement.check` compares a
description of everything to gather before any data moves.

An operation that replaces parameters gathers first and replaces last. Between the two, :meth:`Agreement.all_or_none`
takes a vote in the store: every rank replaces them or none does, even if a rank is interrupted while it votes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workbench.engine._torch import default_store
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.collective_order import FIRST_POLL_S, LAST_POLL_S, Collective
from workbench.engine.comm import all_reduce_in_place
from workbench.engine.errors import CollectiveFailed, RanksDisagreeError
from workbench.engine.model_check import holders, name_ranks
from workbench.engine.module_names import full_name, names_below
from workbench.engine.param import ParamModuleInfo
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.process_groups import CommGroup, group_of

Rows = dict[str, str | None]
"""Descriptions by name; None: this rank holds no elements, so any description matches."""

_NONE = "none"
_SHOWN = 3
_NOBODYS, _LOWEST = -1, -(2**62)  # highest and lowest code of ranks without elements


@dataclass(frozen=True)
class Holdings:
    """Descriptions of one rank's part of a model.

    Attributes:
        params: its parameters.
        grads: their gradients.
        held: the parameters that an optimizer holds.
        states: the optimizers' state for them.
        given: the state in a state dict to load.
    """

    params: Rows = field(default_factory=dict)
    grads: Rows = field(default_factory=dict)
    held: Rows = field(default_factory=dict)
    states: Rows = field(default_factory=dict)
    given: Rows = field(default_factory=dict)


_CURES = {
    "parameter": "build the same model on every rank, and shard it in the same way",
    "gradient": (
        "a failed or aborted step left this gradient; clear the gradients on every rank with model.zero_grad() (in a "
        "notebook, in a %%fsdp cell)"
    ),
    "optimizer": "create it from the same parameters on every rank",
    "optimizer state": (
        "some ranks did not apply the optimizer's step; load a checkpoint, or clear the state on every rank with "
        "optimizer.state.clear() (in a notebook, in a %%fsdp cell)"
    ),
    "loaded optimizer state": (
        "load the same state dict on every rank, or rank 0's: with rank0_only=True in the optim_state_dict_config, or "
        "with scatter_full_optim_state_dict"
    ),
}


def holdings(named: Iterable[tuple[str, torch.Tensor]], optimizers: Sequence[torch.optim.Optimizer] = ()) -> Holdings:
    """Describe parameters that are the same kind of tensor on every rank, with their gradients and optimizer state."""
    found = Holdings()
    if optimizers:
        found.states["the optimizers"] = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    for name, param in named:
        found.params[name] = f"{describe(param)}{'' if param.requires_grad else ' frozen'}"
        found.grads[name] = _NONE if param.grad is None else describe(param.grad)
        found.states.update({f"{owner}{name}": text for owner, text in _states_of(param, optimizers)})
    return found


def _states_of(param: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, str]]:
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        owner = f"{kind} {number}: " if len(optimizers) > 1 else f"{kind}: "
        yield owner, describe_state(optimizer.state.get(param))


def describe_state(state: Mapping[str, Any] | None) -> str:
    """Describe an optimizer's state of one parameter, key by key; None for no state."""
    if not state:
        return _NONE
    return ", ".join(f"{key} {_described(state[key])}" for key in sorted(state, key=str))


def _described(value: object) -> str:
    """Describe a value of an optimizer's state; a number, such as that of its steps, by its value."""
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim == 0 and not value.is_meta:
        return f"{describe(value)} {value.item()!r}"
    return describe(value)


def describe(value: object) -> str:
    """Describe a tensor: ranks with equal descriptions can gather it together. For other values return the type."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    split = f" {' '.join(map(str, value.placements))}" if isinstance(value, DTensor) else ""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{split}"


def names_from(module: nn.Module) -> Callable[[ParamModuleInfo, str], str]:
    """Return a function that names a parameter by its path from ``module``; outside ``module`` it returns the fallback.

    Names from the roots are not enough: several roots in ``module`` may have parameters of the same name.
    """
    names = names_below((module,))
    return lambda info, otherwise: full_name(names, info.module, info.name) if info.module in names else otherwise


class Agreement:
    """An operation that all ranks of some units do together.

    Args:
        what: name of the operation, for messages.
        units: units whose ranks take part.
    """

    def __init__(self, what: str, units: Iterable[FSDPParamGroup]) -> None:
        self._what = what
        of = list(units)
        self._device = of[0].device if of else None
        self._group, self._has_all = _group_over(of)

    def check(self, holds: Callable[[], Holdings]) -> None:
        """Return once all ranks are known to hold the same; collective.

        Args:
            holds: returns this rank's holdings; raises if this rank cannot take part.

        Raises:
            RanksDisagreeError: on every rank: ranks hold different things, or ``holds`` raised on some ranks.
            Exception: what ``holds`` raised, if it raised the same on every rank.
        """
        own, error = Holdings(), None
        try:
            own = holds()
        except Exception as raised:  # noqa: BLE001 - the other ranks must learn of any error
            error = raised
        refusal = "" if error is None else f"{type(error).__name__}: {error}"
        every = (own.params, own.grads, own.held, own.states, own.given)
        rows = dict(zip(_CURES, every, strict=True))
        text = json.dumps([refusal, self._has_all, {} if error else rows])
        texts = self.texts(text)
        if len(set(texts)) > 1 and self._group is not None:
            difference = self._difference([json.loads(each) for each in texts], self._group.ranks)
            if difference:
                raise RanksDisagreeError(difference) from error
        if error is not None:
            raise error

    def is_same(self, codes: Callable[[], Sequence[int | None]], count: int) -> bool:
        """Return whether all ranks have the same codes; collective, one small all-reduce without the store.

        Args:
            codes: returns ``count`` integers >= 0; None matches any code; raises if this rank cannot take part.
            count: number of codes, equal on all ranks.

        Returns:
            False on every rank if ranks differ or one cannot take part; :meth:`check` then finds the difference.

        Raises:
            Exception: the error of ``codes``, if there is only one rank.
            StepAborted, CollectiveFailed, RanksDisagreeError: another rank runs another collective or was interrupted.
        """
        if self._group is None:
            codes()
            return True
        try:
            own = torch.tensor([_NOBODYS if code is None else code for code in codes()], dtype=torch.int64)
            highest = torch.cat([own, torch.where(own < 0, _LOWEST, -own), torch.tensor([0])])
        except Exception:  # noqa: BLE001 - check meets it again
            highest = torch.full((2 * count + 1,), 1)
        highest = highest.to(self._device)
        pending = self._group.issue(all_reduce_in_place, highest, collective=self._collective, op=dist.ReduceOp.MAX)
        pending.wait()
        pending.finish()
        if self._group.purpose:  # the engine does not end iterations of such a group
            self._group.end_iteration()
        spread = highest[:count] + highest[count:-1]  # highest minus lowest code of all ranks
        return not (bool(highest[-1]) or bool((spread > 0).any()))

    def texts(self, own: str) -> list[str]:
        """Return the text of each rank, in the order of ranks; collective. Ranks send texts only if they differ."""
        return [own] if self._group is None else self._group.compare(self._collective, own)

    @property
    def _collective(self) -> Collective:
        return Collective(f"agreement of the ranks before {self._what}", None, 0)

    def _difference(self, answers: Sequence[tuple[str, bool, dict[str, Rows]]], ranks: Sequence[int]) -> str:
        """Return a sentence for each kind of thing in which the ranks differ; "" if in none that matters."""
        unable = [rank for rank, (refusal, *_) in zip(ranks, answers, strict=True) if refusal]
        if unable:
            refusal = next(refusal for refusal, *_ in answers if refusal)
            return f"{self._what} is not possible on {name_ranks(unable)}, so no rank did it: {refusal}"
        missing = "no entry of this name" if all(has_all for _, has_all, _ in answers) else None
        found = []
        for kind, cure in _CURES.items():
            of_ranks = [rows[kind] for *_, rows in answers]
            rows = _by_name(of_ranks, missing)
            differing = [(name, texts) for name, texts in rows if len({*texts} - {None}) > 1]
            if differing:
                name, texts = differing[0]
                known = [(rank, text) for rank, text in zip(ranks, texts, strict=True) if text is not None]
                text_of_ranks = holders([text for _, text in known], [rank for rank, _ in known])
                others = [other for other, _ in differing[1:_SHOWN]]
                more = f" (likewise {', '.join(others)}" if others else ""
                more += f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
                more += ")" if others else ""
                found.append(f"{self._what}: ranks differ in the {kind} of {name!r}: {text_of_ranks}{more}; {cure}")
                if kind == "parameter":
                    break  # the rest differs with it
        return "\n".join(found)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Complete the body on every rank or on none; collective.

        Raises:
            CollectiveFailed: the body raised on another rank.
            BaseException: the body's own error, or the one that ended the wait for the other ranks.
        """
        vote = None if self._group is None or dist.get_backend() == "fake" else _Vote(self._what, self._group)
        try:
            yield
        except BaseException as error:
            if vote is not None:
                vote.give_up(error)
            raise
        if vote is not None:
            vote.settle()


def _by_name(of_ranks: Sequence[Rows], missing: str | None) -> Iterator[tuple[str, list[str | None]]]:
    """Yield every name of any rank with each rank's description; ``missing`` where a rank lacks the name."""
    for name in dict.fromkeys(name for rows in of_ranks for name in rows):
        yield name, [rows.get(name, missing) for rows in of_ranks]


def _group_over(units: Iterable[FSDPParamGroup]) -> tuple[CommGroup | None, bool]:
    """Return the group of all ranks that share the units, and whether each of these ranks has a part of every unit.

    The group is None for one rank. Experts, for example, are on only some of the ranks.
    """
    meshes: dict[int, DeviceMesh] = {}  # by id: units share meshes, and reading one is slow
    known: dict[tuple[int, ...], CommGroup] = {}
    device_type = "cpu"
    for unit in units:
        info = unit.mesh_info
        device_type = info.mesh.device_type
        own = [info.spmd_mesh or info.mesh, *(mesh for param in unit.fsdp_params for mesh in param.meshes)]
        meshes |= {id(mesh): mesh for mesh in own}
        known |= {group.ranks: group for group in (info.shard_group, info.replicate_group) if group is not None}
    sets = {tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist())) for mesh in meshes.values()}
    ranks = tuple(sorted(set().union(*sets)))
    if len(ranks) < 2:
        return None, True
    return known.get(ranks) or group_of(ranks, device_type, "agreement"), len(sets) == 1


@dataclass
class _Serial:
    """Number of votes a group has taken in its current incarnation and store."""

    store: Store
    incarnation: int
    count: int = 0


_serials: WeakKeyDictionary[CommGroup, _Serial] = WeakKeyDictionary()
_DONE = "done"


class _Vote:
    """A vote of a group's ranks: each votes when it is ready, and the first to write the outcome decides for all."""

    def __init__(self, what: str, group: CommGroup) -> None:
        self._what = what
        self._size = group.size
        store = default_store()
        serial = _serials.get(group)
        if serial is None or serial.store is not store or serial.incarnation != group.incarnation:
            serial = _serials[group] = _Serial(store, group.incarnation)
        name = f"workbench/vote/{group.purpose}/{'-'.join(map(str, group.ranks))}/{group.incarnation}"
        self._store = PrefixStore(f"{name}/{serial.count}", store)
        if serial.count and group.rank == 0:
            before = PrefixStore(f"{name}/{serial.count - 1}", store)  # all ranks are done with it: they agreed since
            for key in ("ready", "outcome"):
                before.delete_key(key)
        serial.count += 1

    def settle(self) -> None:
        """Return once all ranks are ready; raise on all of them if one fails.

        An interrupt after every rank is ready is too late: the operation completes.
        """
        try:
            delay_s = FIRST_POLL_S
            num_ready = self._store.add("ready", 1)
            while num_ready < self._size:
                cancellation.sleep(delay_s)
                delay_s = min(2 * delay_s, LAST_POLL_S)
                num_ready = self._store.add("ready", 0)
        except BaseException as error:
            if self.give_up(error) == _DONE:
                return
            raise
        outcome = self._decide(_DONE)
        if outcome != _DONE:
            raise CollectiveFailed(f"{self._what} was aborted on every rank because {outcome}")

    def give_up(self, error: BaseException) -> str:
        """Abort the operation on every rank unless all are ready already; return the outcome."""
        outcome = ""
        with suppress(RuntimeError):  # without the store the other ranks cannot get ready either
            outcome = self._decide(f"rank {dist.get_rank()} raised {type(error).__name__}: {str(error)[:200]}")
            if outcome != _DONE:
                self._store.add("ready", self._size)  # ends the others' wait
        return outcome

    def _decide(self, outcome: str) -> str:
        """Write the outcome if there is none yet; return the final one."""
        return bytes(self._store.compare_set("outcome", "", outcome)).decode()


def units_holdings(
    module: nn.Module, units: Iterable[FSDPParamGroup], optimizers: Sequence[torch.optim.Optimizer]
) -> Holdings:
    """Describe the sharded parameters of ``fully_shard``'s units in ``module``, which must be sharded now."""
    name_of = names_from(module)
    named = [(name_of(p.info, p.fqn), own) for u in units for p in u.fsdp_params for own in p.owned]
    return holdings(named, optimizers)
