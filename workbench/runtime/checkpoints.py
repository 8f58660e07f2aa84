"""The commands ``save`` and ``load`` on a rank, and the checkpoints that ``step --save`` writes on the way.

A checkpoint has, under the name of each variable, the state dict of a model or an optimizer, with the names of
``torch.distributed.checkpoint.state_dict``; the state of a scheduler or another object, if all ranks had the same, as a
tuple of one; and under ``ranks.0``, ``ranks.1``, ... what only one rank had: other states, and random numbers.
"""

from __future__ import annotations

import copy
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workbench.base.text_formats import plural
from workbench.engine.module_names import clean
from workbench.errors import UsageError
from workbench.models.engines import is_sharded
from workbench.protocol.checkpoint_replies import LoadReply, SaveReply
from workbench.protocol.commands import Load, Save
from workbench.runtime.checkpoint_files import CheckpointRecord, SafePlanner, SafeReader, checkpoint_at, dumped
from workbench.runtime.checkpoint_writer import CheckpointWriter, agree, begin_checkpoint
from workbench.runtime.command_handlers import RankContext, does
from workbench.runtime.namespace import lookup, optimizers_of, variables
from workbench.runtime.training_state import (
    TrainingObjects,
    capture,
    drop_gradients,
    local_part,
    params_of,
    restore,
    unreached,
)

RANKS = "ranks"
"""The part of a checkpoint that has what single ranks had."""


@does(Save)
def save(command: Save, rank: RankContext) -> SaveReply:
    """Save a checkpoint, and wait until it is whole; collective.

    Raises:
        UsageError: it cannot be saved; older ones are as they were.
    """
    saver = Saver(Path(command.folder), rank)
    saver.begin()
    return saver.end()[-1]


@does(Load)
def load(command: Load, rank: RankContext) -> LoadReply:
    """Load a checkpoint; collective.

    Raises:
        UsageError: it cannot be loaded; nothing is changed then.
    """
    with aside(rank):
        return Checkpoint.at(Path(command.folder)).load_into(training_objects(rank), rank)


@contextmanager
def aside(rank: RankContext) -> Iterator[None]:
    """Run the body off the record: the optimizer steps that torch takes to make state dicts are no steps."""
    steps_before = rank.trainer.optimizer_steps
    try:
        with rank.recorder.unrecorded(), rank.watch.paused():
            yield
    finally:
        rank.trainer.optimizer_steps = steps_before


def training_objects(rank: RankContext) -> TrainingObjects:
    """Return the objects of the training among the variables; no model is unsharded then.

    Raises:
        UsageError: no model is sharded or trained.
    """
    found = TrainingObjects.among(variables())
    if found.untrained == found.models.keys():
        raise UsageError("there is no model that is sharded or trained: first %fsdp shard MODEL")
    for model in found.models.values():
        for each in rank.watch.models_in(model):
            each.reshard()
    return found


# ---- saving


class Saver:
    """Saves checkpoints one after another: staging the next one waits for the one before.

    Args:
        folder: where they become folders.
        rank: this rank.
    """

    def __init__(self, folder: Path, rank: RankContext) -> None:
        self._folder, self._rank = folder, rank
        self._writer: CheckpointWriter | None = None
        self._notes: tuple[str, ...] = ()
        self._failed: tuple[str, ...] = ()
        self._models: tuple[str, ...] = ()
        self._saved: list[SaveReply] = []

    def begin(self) -> None:
        """Stage a checkpoint of the state now, and write it while the caller goes on; collective.

        Raises:
            UsageError: it cannot be saved, or the one before failed.
        """
        self._await()
        with aside(self._rank):
            objects = training_objects(self._rank)
            state, notes = state_to_save(objects)
            self._notes = (*self._failed, *notes, *_gradients_left_out(objects, self._rank))
            self._models = tuple(_verifiable(objects))
            record = CheckpointRecord(
                step=self._rank.trainer.trained_steps,
                world_size=self._rank.groups.world_size,
                saved_ns=0,
                models=tuple(objects.models),
                optimizers=tuple(name for name in objects.optimizers if name in state),
                others=tuple(objects.others),
                files={},
            )
            self._rank.writer = self._writer = begin_checkpoint(self._folder, record, state).start()

    def end(self) -> tuple[SaveReply, ...]:
        """Wait until the newest checkpoint is whole; return what was saved; collective.

        Raises:
            UsageError: it failed.
        """
        self._await()
        return tuple(self._saved)

    def _await(self) -> None:
        """Wait for the checkpoint before; for one of an earlier command, which raised, without the other ranks."""
        if self._rank.writer is not None and self._rank.writer is not self._writer:
            self._rank.writer.wait_alone()
            earlier, self._rank.writer = self._rank.writer, None
            if earlier.error:
                self._failed = () if earlier.is_abandoned else (f"an earlier save failed: {earlier.error}",)
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                with self._rank.watch.paused():
                    writer.wait()
            finally:
                if not writer.is_running:  # what it raises is reported now
                    self._rank.writer = None
            self._saved.append(_reply(writer, self._notes, self._models))


def _gradients_left_out(objects: TrainingObjects, rank: RankContext) -> Iterator[str]:
    """Yield that gradients wait for a step of an optimizer, if they do."""
    if rank.trainer.has_stepped:
        return
    for variable, model in objects.models.items():
        for name, param in model.named_parameters():
            if param.grad is not None and bool(local_part(param.grad).count_nonzero()):
                yield (
                    f"gradients, such as that of {variable}.{clean(name)}, are left out: a forward ran after the last "
                    "step of an optimizer"
                )
                return


def _verifiable(objects: TrainingObjects) -> Iterator[str]:
    """Yield the names of the models that ``verify`` knows."""
    for name, model in objects.models.items():
        with suppress(UsageError):
            if is_sharded(model) and lookup(name) is model:
                yield name


def _reply(writer: CheckpointWriter, notes: tuple[str, ...], models: tuple[str, ...]) -> SaveReply:
    record = writer.record
    return SaveReply(
        folder=str(writer.target),
        step=record.step,
        num_bytes=writer.num_bytes,
        blocked_s=writer.blocked_s,
        variables=(*record.models, *record.optimizers, *record.others),
        notes=notes,
        models=models,
    )


def state_to_save(objects: TrainingObjects) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the state dict of a checkpoint, and remarks on what it lacks; collective.

    Raises:
        UsageError: something cannot be saved.
    """
    owners, stray = owners_of(objects)
    others = {name: each.state_dict() for name, each in objects.others.items()}
    options = {name: _options_of(optimizer) for name, optimizer in objects.optimizers.items()}
    whole = dict(whole_tensors(objects))

    def sums_of() -> dict[str, int]:
        found = {name: zlib.crc32(dumped(state, name)) for name, state in others.items()}
        return found | {name: zlib.crc32(_bytes_of(tensor)) for name, tensor in whole.items()}

    sums, by_rank = agree(sums_of), agree(lambda: options)
    shared = {name for name in sums[0] if all(each.get(name) == sums[0][name] for each in sums)}
    state: dict[str, Any] = {name: get_model_state_dict(model) for name, model in objects.models.items()}
    for name, optimizer in objects.optimizers.items():
        if name in owners:
            state[name] = optimizer_state(objects.models[owners[name]], optimizer)
    state |= {name: (others[name],) for name in sorted(shared & others.keys())}
    own = {
        "others": {name: each for name, each in others.items() if name not in shared},
        "tensors": {name: tensor.cpu().clone() for name, tensor in whole.items() if name not in shared},
        "random": objects.random.plain(),
    }
    state[RANKS] = {str(dist.get_rank()): (own,)}
    notes = [f"{name} is left out: it trains no parameter of a model" for name in stray]
    notes += [f"the position of {name} is left out: it has no state_dict()" for name in objects.loaders]
    notes += positions_left_out(objects)
    notes += [f"{each} is left out" for each in unreached(variables())]
    notes += [note for name in owners for note in _options_differ(name, [each.get(name, {}) for each in by_rank])]
    return state, tuple(notes)


def positions_left_out(objects: TrainingObjects) -> list[str]:
    """Return that the positions of iterators are not part of a checkpoint, a sentence each."""
    return [f"the position of {name} is left out: an iterator cannot be saved" for name in objects.iterators]


def whole_tensors(objects: TrainingObjects) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what each rank has whole: buffers, and parameters of models that are neither sharded nor trained."""
    for variable, model in objects.models.items():
        params = model.named_parameters() if variable in objects.untrained else ()
        for name, tensor in (*params, *model.named_buffers()):
            if not isinstance(tensor, DTensor) and not tensor.is_meta:
                yield f"{variable}.{clean(name)}", tensor.detach()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _options_of(optimizer: Optimizer) -> dict[str, str]:
    """Return the options of an optimizer's groups as text, by group and option."""
    groups = enumerate(optimizer.param_groups)
    return {
        f"{option} of group {n}": f"{v}" for n, group in groups for option, v in group.items() if option != "params"
    }


def _options_differ(name: str, by_rank: list[dict[str, str]]) -> Iterator[str]:
    """Yield which options of an optimizer differ between ranks, a sentence each."""
    for option, value in by_rank[0].items():
        other = next((rank for rank, each in enumerate(by_rank) if each.get(option) != value), None)
        if other is not None:
            yield (
                f"{name} has {option} {value} on rank 0 and {by_rank[other].get(option)} on rank {other}, and a load "
                "gives all ranks one of them"
            )


def owners_of(objects: TrainingObjects) -> tuple[dict[str, str], list[str]]:
    """Return the model of each optimizer, by their variables, and the optimizers that have none.

    Raises:
        UsageError: an optimizer trains several models.
    """
    found: dict[str, list[str]] = {name: [] for name in objects.optimizers}
    for variable, model in objects.models.items():
        own = set(map(id, optimizers_of(model, objects.optimizers.values())))
        for name, optimizer in objects.optimizers.items():
            if id(optimizer) in own:
                found[name].append(variable)
    for name, models in found.items():
        if len(models) > 1:
            raise UsageError(f"{name} trains {' and '.join(models)}, and a checkpoint has one model for each optimizer")
    return {name: models[0] for name, models in found.items() if models}, [n for n, m in found.items() if not m]


def optimizer_state(model: nn.Module, optimizer: Optimizer, *, with_new: bool = False) -> dict[str, Any]:
    """Return the state dict of an optimizer by the names of parameters, and leave the optimizer as it is.

    Args:
        model: its model.
        optimizer: it.
        with_new: whether an optimizer without state gets the state of its first step in the state dict.
    """
    is_new = not optimizer.state
    options = [dict(group) for group in optimizer.param_groups]
    found = get_optimizer_state_dict(model, optimizer)
    if is_new:
        optimizer.state.clear()  # torch has taken a step to make it
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.update(before)
        if not with_new:
            found = {**found, "state": {}}
    return found


# ---- loading


@dataclass
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        folder: its folder.
        record: what is in it; None: the workbench did not save it.
        reader: reads it.
        of_ranks: what single ranks had, by rank, once it was loaded.
        others: the states of objects that were loaded, by variable.
    """

    folder: Path
    record: CheckpointRecord | None
    reader: SafeReader
    of_ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    _keys: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._keys = self.reader.metadata.state_dict_metadata

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """Return the checkpoint that a path means, the same on all ranks; collective.

        Raises:
            UsageError: there is none, or the ranks see different ones.
        """
        mine: list[Checkpoint] = []

        def find() -> tuple[str, int]:
            folder = checkpoint_at(path)
            mine.append(cls(folder, CheckpointRecord.read(folder), SafeReader(folder)))
            return str(folder), mine[0]._sum()

        seen = agree(find)
        for rank, each in enumerate(seen):
            if each != seen[0]:
                raise UsageError(
                    f"rank {rank} finds {each[0]} and rank 0 {seen[0][0]}, or another content: the ranks do not share "
                    "this file system"
                )
        return mine[0]

    def _sum(self) -> int:
        return zlib.crc32(repr(sorted(self._keys)).encode() + repr(self.record).encode())

    def load_into(
        self,
        objects: TrainingObjects,
        rank: RankContext,
        before: Callable[[LoadingPlan, bool], object] = lambda plan, with_random: None,
    ) -> LoadReply:
        """Load all of it, or nothing; collective.

        Args:
            objects: what is loaded.
            rank: this rank.
            before: called before anything is set, with the plan and whether random numbers will be set.

        Raises:
            UsageError: it is of another model, or cannot be read; nothing is changed then.
        """
        with _without_gradients(objects) as dropped:
            plan = self._plan(objects)
            self._read(plan.state)
            agree(lambda: plan.check(self))
            self.of_ranks = {int(number): held[0] for number, held in plan.state[RANKS].items() if held}
            before(plan, len(self.of_ranks) == dist.get_world_size())
            notes = self._apply(objects, plan)
            dropped.clear()
        step = None if self.record is None else self.record.step
        if step is not None:
            rank.trainer.trained_steps = step
        drop_gradients(objects)
        return LoadReply(
            folder=str(self.folder),
            step=step,
            saved_ranks=dist.get_world_size() if self.record is None else self.record.world_size,
            variables=(*plan.keys, *plan.others),
            notes=(*plan.notes, *notes, *self._left_out(objects), *positions_left_out(objects)),
        )

    def _apply(self, objects: TrainingObjects, plan: LoadingPlan) -> list[str]:
        """Set what was read on all ranks, or restore all of them; return what stays as it is, a sentence each."""
        state = capture(objects, 0)

        def apply() -> list[str]:
            try:
                for name, model in objects.models.items():
                    if name in plan.keys:
                        set_model_state_dict(model, plan.state[plan.keys[name]])
                for name, optimizer in objects.optimizers.items():
                    if name in plan.keys:
                        self._set_optimizer(objects.models[plan.owners[name]], optimizer, plan.state[plan.keys[name]])
                return list(self._set_rest(objects, plan))
            except Exception as error:  # the program's load_state_dict() may raise anything
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
                where = traceback.extract_tb(error.__traceback__)[-1]
                raise UsageError(
                    f"{self.folder} cannot be loaded, and nothing is changed: {why} (in {where.name})"
                ) from error

        try:
            return agree(apply)[dist.get_rank()]
        except BaseException:
            for name, each in objects.others.items():
                with suppress(Exception):  # it raised above
                    each.load_state_dict(state.others[name])
            restore(replace(objects, others={}), replace(state, others={}))
            raise

    @staticmethod
    def _set_optimizer(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if state["state"]:
            set_optimizer_state_dict(model, optimizer, state)
            return
        optimizer.state.clear()
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _plan(self, objects: TrainingObjects) -> LoadingPlan:
        """Return what is read into what; raises UsageError on all ranks if the checkpoint is of another model."""
        owners, stray = owners_of(objects)
        plan = LoadingPlan(owners={}, notes=[f"{name} is left as it is: it trains no model" for name in stray])

        models = {name: _copied(get_model_state_dict(model)) for name, model in objects.models.items()}

        trained = set(owners.values())

        def find() -> None:
            keys = self._keys_of(models)
            for name, wanted in models.items():
                if name not in keys and name not in trained and (keys or name in objects.untrained):
                    plan.notes.append(f"{name} stays as it is: the checkpoint has no state of it")
                    continue
                self._check_same(name, keys.get(name, name), wanted)
                plan.add(name, keys.get(name, name), wanted)
                plan.notes += self._dtypes_differ(name, keys.get(name, name), wanted)

        def find_state() -> None:
            wanted = {
                name: [f"{param}.{entry}" for param, own in state["state"].items() for entry in own]
                for name, state in states.items()
            }
            keys = self._keys_of(wanted, "state.")
            for name, state in states.items():
                kind = type(objects.optimizers[name]).__name__
                self._plan_optimizer(plan, name, keys.get(name, name), owners[name], kind, state, wanted[name])

        agree(find)
        states = {
            name: _copied(optimizer_state(objects.models[owner], objects.optimizers[name], with_new=True))
            for name, owner in owners.items()
        }
        agree(find_state)
        plan.others = [name for name in objects.others if name in self._keys]
        for name in plan.others:
            plan.state[name] = ()
        plan.state[RANKS] = {key.partition(".")[2]: () for key in self._keys if key.startswith(f"{RANKS}.")}
        return plan

    def _keys_of(self, wanted: Mapping[str, Iterable[str]], infix: str = "") -> dict[str, str]:
        """Return under which key each model or optimizer is: its own, or the one left over for the one left over."""
        found = {name: name for name in wanted if any(key.startswith(f"{name}.{infix}") for key in self._keys)}
        left = [name for name, names in wanted.items() if name not in found and any(True for _ in names)]
        if len(left) == 1:
            end = f".{infix}{next(iter(wanted[left[0]]))}"
            keys = {key[: -len(end)] for key in self._keys if key.endswith(end)} - found.keys()
            keys = {each for each in keys if infix or (".state." not in each and not each.endswith(".state"))}
            if len(keys) == 1:
                found[left[0]] = keys.pop()
        return found

    def _dtypes_differ(self, name: str, key: str, wanted: Mapping[str, Any]) -> Iterator[str]:
        """Yield that a load converts a model, if it does."""
        for entry, value in wanted.items():
            saved = self._keys.get(f"{key}.{entry}")
            if isinstance(saved, TensorStorageMetadata) and saved.properties.dtype != value.dtype:
                there, here = (str(dtype).removeprefix("torch.") for dtype in (saved.properties.dtype, value.dtype))
                yield f"{name}.{entry} was saved as {there}, and is converted to {here}"
                return

    def _check_same(self, name: str, key: str, wanted: Mapping[str, Any]) -> None:
        """Raise UsageError unless the checkpoint has the entries of a model, with their shapes, and no others."""
        saved = {
            each.removeprefix(f"{key}."): found for each, found in self._keys.items() if each.startswith(f"{key}.")
        }
        if not saved:
            kept = sorted({each.partition(".")[0] for each in self._keys} - {RANKS})
            raise UsageError(f"{self.folder} has no {name}: it has {', '.join(kept)}")
        wrong = f"{self.folder} is of another model than {name}"
        for entry, value in wanted.items():
            if not isinstance(value, torch.Tensor):
                continue
            found = saved.get(entry)
            if found is None:
                raise UsageError(f"{wrong}: it has no {entry}{_shape_words(value.shape)}")
            if isinstance(found, TensorStorageMetadata) and found.size != value.shape:
                raise UsageError(f"{wrong}: {entry} is {tuple(found.size)} there, and {tuple(value.shape)} here")
        for entry, found in saved.items():
            if entry not in wanted and isinstance(found, TensorStorageMetadata):
                raise UsageError(f"{wrong}: it has {entry}{_shape_words(found.size)}, which {name} lacks")

    def _plan_optimizer(
        self,
        plan: LoadingPlan,
        name: str,
        key: str,
        owner: str,
        kind: str,
        state: dict[str, Any],
        entries: Sequence[str],
    ) -> None:
        saved = {each.removeprefix(f"{key}.state.") for each in self._keys if each.startswith(f"{key}.state.")}
        has_any = bool(saved)
        begin = f"{key}.param_groups."
        groups = {each.removeprefix(begin).partition(".")[0] for each in self._keys if each.startswith(begin)}
        if not has_any and not groups:
            plan.notes.append(f"{name} starts from nothing: {self.folder} has no state of it")
            return
        if groups and len(groups) != len(state["param_groups"]):
            here = plural(len(state["param_groups"]), "group")
            raise UsageError(
                f"{self.folder} is of another optimizer than {name}: it has {plural(len(groups), 'group')} there, and "
                f"{here} of parameters here"
            )
        self._check_options(name, f"{key}.param_groups.0.", kind, state["param_groups"])
        if not has_any:
            state["state"] = {}
        else:
            wrong = f"{self.folder} is of another optimizer than {name}, an instance of {kind}"
            if all(entry.partition(".")[0].isdecimal() for entry in saved) and not saved & set(entries):
                raise UsageError(
                    f"{self.folder} has numbers instead of names of parameters in the state of {name}: "
                    f"{name}.state_dict() was saved; save it by "
                    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(), or by %fsdp save"
                )
            missing = [entry for entry in entries if entry not in saved]
            if missing:
                raise UsageError(f"{wrong}: it has no state {missing[0]}")
            own = {entry.rpartition(".")[2] for entry in entries}
            extra = [entry for entry in sorted(saved) if entry.rpartition(".")[2] not in own]
            if extra:
                raise UsageError(f"{wrong}: it has state {extra[0]}, which {name} lacks")
        plan.owners[name] = owner
        plan.params[name] = [list(group["params"]) for group in state["param_groups"]]
        plan.add(name, key, state)

    def _check_options(self, name: str, begin: str, kind: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise UsageError if the saved options of the first group are of another class of optimizer."""
        saved = {each.removeprefix(begin).partition(".")[0] for each in self._keys if each.startswith(begin)}
        own, added = set(groups[0]), {"initial_lr"}  # by a scheduler
        there, here = sorted(saved - own - added), sorted(own - saved - added)
        if there and here:
            raise UsageError(
                f"{self.folder} is of another optimizer than {name}, an instance of {kind}: it has the option "
                f"{there[0]} there, and {here[0]} here"
            )

    def _read(self, state: dict[str, Any]) -> None:
        """Read the values of a state dict; raises UsageError on all ranks."""
        try:
            # flattening drops the ShardedTensors of which this rank has no part, and then takes lists for values
            planner = SafePlanner(allow_partial_load=True, flatten_sharded_tensors=False)
            load_state(state, storage_reader=self.reader, planner=planner)
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            why = str(cause) if isinstance(cause, UsageError) else f"{type(cause).__name__}: {cause}"
            raise UsageError(f"rank {rank} cannot read {self.folder}: {why.partition(chr(10))[0]}") from None

    def _left_out(self, objects: TrainingObjects) -> Iterator[str]:
        """Yield what of the checkpoint has no variable here, a sentence each."""
        if self.record is not None:
            here = {*objects.optimizers, *objects.others}
            for name in (*self.record.optimizers, *self.record.others):
                if name not in here:
                    yield f"the checkpoint has {name}, and no such variable is here"

    def _set_rest(self, objects: TrainingObjects, plan: LoadingPlan) -> Iterator[str]:
        """Set everything but models and optimizers; yield what stays as it is, a sentence each."""
        by_rank = self.of_ranks
        is_same_number = len(by_rank) == (now := dist.get_world_size())
        own = by_rank.get(dist.get_rank(), {}) if is_same_number else {}
        here = f"is {now}" if now == 1 else f"are {now}"
        for name, each in objects.others.items():
            if name in plan.others or name in own.get("others", {}):
                self.others[name] = plan.state[name][0] if name in plan.others else own["others"][name]
                each.load_state_dict(copy.deepcopy(self.others[name]))
                plan.others += [name] * (name not in plan.others)
            elif any(name in held["others"] for held in by_rank.values()):
                yield f"{name} stays as it is: {plural(len(by_rank), 'rank')} saved a state each, and now there {here}"
            else:
                yield f"{name} stays as it is: the checkpoint has no state of it"
        if own:
            objects.random.set_plain(own["random"])
        elif by_rank:
            yield (
                f"random numbers stay as they are: {plural(len(by_rank), 'rank')} saved theirs, and now there {here}"
            )
        different = {name for held in by_rank.values() for name in held.get("tensors", {})}
        for name, tensor in whole_tensors(objects):
            if own and name in own.get("tensors", {}) and own["tensors"][name].shape == tensor.shape:
                tensor.copy_(own["tensors"][name])
            elif name in different:
                yield f"{name} was different on each rank that saved it, and has the values of one of them"


@dataclass
class LoadingPlan:
    """The tensors to read from a checkpoint, and the memory for each.

    Attributes:
        owners: the model of each optimizer that is read.
        keys: the key in the checkpoint of each model and optimizer that is read.
        params: the names of parameters of each optimizer, by group.
        others: the variables of everything else that all ranks read alike.
        state: the state dict that is filled; none of its memory is in use.
        notes: what is not as the user may expect, a sentence each.
    """

    owners: dict[str, str]
    keys: dict[str, str] = field(default_factory=dict)
    params: dict[str, list[list[str]]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, key: str, state: dict[str, Any]) -> None:
        """Add a model or an optimizer."""
        self.keys[name] = key
        self.state[key] = state

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise UsageError if what was read does not fit; name the parameters of groups as they are here.

        Each API has its own order of them, and some have frozen ones too.
        """
        for name, wanted in self.params.items():
            groups = self.state[self.keys[name]]["param_groups"]
            for number, (group, own) in enumerate(zip(groups, wanted, strict=True)):
                here, there = (sorted(set(a) - set(b)) for a, b in ((own, group["params"]), (group["params"], own)))
                if here and there:
                    raise UsageError(
                        f"{checkpoint.folder} is of another optimizer than {name}: group {number} has {there[0]} "
                        f"there, and {here[0]} here"
                    )
                group["params"] = own


def _shape_words(shape: Iterable[int]) -> str:
    return f" of shape {tuple(shape)}"


def _copied(state: Any) -> Any:  # noqa: ANN401 - a state dict
    """Return a state dict with memory of its own, of the same shapes."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_copied(value) for value in state]
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


@contextmanager
def _without_gradients(objects: TrainingObjects) -> Iterator[list[tuple[nn.Parameter, torch.Tensor | None]]]:
    """Take the gradients away in the body, in which torch makes state only without; give back those still listed."""
    held = [param for optimizer in objects.optimizers.values() for param in params_of(optimizer)]
    kept = [(param, param.grad) for param in held]
    for param in held:
        param.grad = None
    try:
        yield kept
    finally:
        for param, grad in kept:
            param.grad = grad
