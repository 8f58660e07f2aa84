"""The command ``verify``: compare one sharded step with the same step of an unsharded copy, then restore everything.

Both steps start from the same parameters, optimizer state and random numbers. The copy computes in the same precision
(``reference_precision.py``). It averages its gradients by an all-reduce over the ranks that see other data as soon as
they are accumulated; sharded training promises to equal this. Tensors that tensor parallelism has split stay split.
"""

from __future__ import annotations

import functools
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.engine._torch import drop_post_accumulate_hooks
from workbench.engine.errors import RanksDisagreeError
from workbench.engine.full_param import local_tensor
from workbench.engine.module_names import named_params
from workbench.engine.tensor_trees import tensors_in
from workbench.engine.unsharding import full_tensor
from workbench.errors import UsageError
from workbench.events import unit_words
from workbench.models.sharded_model import HoldingsDiffer, Largest, ShardedModel, average_over, local_tensors
from workbench.protocol.commands import CopyStep, Difference, StepCounter, StepDifferences, Verify, VerifyReply
from workbench.runtime.command_handlers import RankContext
from workbench.runtime.copy_observation import CopyObserver, settings_of
from workbench.runtime.ended_schedules import has_ended, initial_rates
from workbench.runtime.lint import own_units_words, sharded_models
from workbench.runtime.namespace import find_module, optimizers_of, user_namespace
from workbench.runtime.program_state import ProgramState
from workbench.runtime.reference_precision import UPDATE_TOLERANCE, coarsest_dtype, compute_alike
from workbench.runtime.repeated_step import repeated
from workbench.runtime.resume_check import resumed
from workbench.runtime.stacks import is_of_a_library, place_in_file
from workbench.runtime.step_counters import (
    Held,
    RaisedCounters,
    check_counted,
    held_params,
    reset_counters,
    step_counters,
)
from workbench.runtime.step_observation import (
    GradObserver,
    OutputObserver,
    ParamPiece,
    grads_of,
    grouped,
    local_values,
    modules_of,
    of_grads,
    of_sharded,
    pieces_of,
    ratio,
    relative,
    scaled_after_backward,
    tensors_of_pieces,
)
from workbench.runtime.trainer import find_step_function, loss_of

RTOL, ATOL = 1e-3, 1e-5  # of outputs and gradients in full precision
_SHARE = 5e-4  # of the size of a parameter's update: the largest difference in full precision
_APART = 0.05  # of the size of an update: copies that get the same gradients differ less, whatever their kernels
_FINE = 10**6  # factors are compared between ranks as integers
_FLIPS = 1e-3  # the share of elements that rounding may put one number further


def verify(command: Verify, rank: RankContext) -> VerifyReply:
    """Run both steps and compare every parameter; where they differ, run both again and find out where; collective.

    Args:
        command: the command.
        rank: this rank.

    Raises:
        UsageError: there is no sharded model, several without a name, no step function, the step function does not
            train the named variable, or an optimizer lost its counts of steps.
    """
    sharded = _alive_model(command.model, rank)
    step = find_step_function(command.fn, again=True)
    others = [_alive_model(name, rank) for name, each in sharded_models().items() if each is not sharded.model]
    for each in (sharded, *others):
        each.reshard()  # else the model would hold full parameters here, and those would be restored
    around = [functools.partial(_restored, each) for each in others]  # the step may train them too
    found = functools.partial(ProgramState, user_namespace(), [each.model for each in (sharded, *others)], around)
    program = found()
    optimizers = optimizers_of(sharded.model, program.optimizers)
    goes_on = not optimizers or not all(map(has_ended, optimizers))
    try:
        goes_on = bool(command.resume) or rank.groups.largest(int(goes_on)) > 0
    except BaseException:
        program.close()
        raise
    if goes_on:
        return _compared(command, sharded, step, program, rank)
    program.close()
    with initial_rates(optimizers) as rate:
        return replace(_compared(command, sharded, step, found(), rank), initial_rate=rate)


def _compared(
    command: Verify,
    sharded: ShardedModel,
    step: Callable[[], Any],
    program: ProgramState,
    rank: RankContext,
) -> VerifyReply:
    """Run and compare what a command says, from the state of the program; close that."""
    try:
        if command.resume:
            return resumed(Path(command.resume), step, program, rank, lambda: _restored(sharded))
        if command.repeat:
            return repeated(sharded, step, program, rank.groups.largest, _restored)
        try:
            return _verified(sharded, step, program, rank.groups.largest)
        except (RanksDisagreeError, HoldingsDiffer) as error:
            counters = _counters(sharded, program)[1]
            if _differ([each.steps or 0 for each in counters], rank.groups.largest):
                return _not_compared(sharded, counters)
            if isinstance(error, HoldingsDiffer):
                raise UsageError(str(error)) from None  # the notebook knows it by its name
            raise
    finally:
        program.close()


def _alive_model(name: str, rank: RankContext) -> ShardedModel:
    """Return the sharded model ``name``.

    Raises:
        UsageError: as :func:`verified_model`; or its process groups are destroyed.
    """
    try:
        model = verified_model(name, rank)
        for group in {group for groups in model.groups().values() for group in groups}:
            dist.get_process_group_ranks(group)
    except KeyError as error:
        if not isinstance(error.args[0], dist.ProcessGroup):
            raise
        raise UsageError(
            f"the process group of {name or 'the sharded model'} is destroyed, as that of a script is when the next "
            "one starts; run its script again, or delete the variable that still holds it"
        ) from None
    return model


def _verified(sharded: ShardedModel, step: Callable[[], Any], program: ProgramState, largest: Largest) -> VerifyReply:
    optimizers = optimizers_of(sharded.model, program.optimizers)
    # a mask of attention holds -inf
    buffers = tuple(name for name, buffer in sharded.buffers() if bool(buffer.isnan().any()))
    unmanaged = sharded.unmanaged
    replicas = sharded.replica_sums()
    random_crc32 = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    held, counters = _counters(sharded, program)
    check_counted(held, largest)
    reset, raised = reset_counters(held), RaisedCounters(held)
    with _restored(sharded), _Pair(sharded, optimizers, step, program, largest) as pair, pair.run(raised):
        found = pair.compare()
        found["ok"] = found["ok"] and pair.has_equal_norms()
        pair.check_scale(ok=bool(found["ok"]))
        left_out, losses = pair.left_out(), (pair.loss_sharded, pair.loss_reference)
        of_copy: dict[str, Any] = {
            "copy": pair.copy.steps(),
            "settings": settings_of(optimizers),
            "optimizer_steps": pair.copy.optimizer_steps,
            "num_inputs": pair.num_inputs,
        }
    if largest(int(bool(found["not_finite"]))):  # the average has spread what one rank may have caused
        with _restored(sharded), _Pair(sharded, optimizers, step, program, largest) as pair:
            of_copy["copy"] = pair.run_from_finite()
    differences = None
    if largest(int(not found["ok"])):
        with _restored(sharded), _Pair(sharded, optimizers, step, program, largest, keeps=True) as pair:
            differences = pair.run_and_locate()
    return VerifyReply(
        **found,
        **of_copy,
        buffers_not_finite=buffers,
        loss_sharded=losses[0],
        loss_reference=losses[1],
        unmanaged=unmanaged,
        differences=differences,
        replicas=replicas,
        random_crc32=random_crc32,
        left_out=left_out,
        counters=counters,
        reset=reset,
        uneven=raised.uneven(),
    )


def _counters(sharded: ShardedModel, program: ProgramState) -> tuple[Held, tuple[StepCounter, ...]]:
    """Return what the optimizers hold of a model, and the numbers of their steps."""
    owned = set().union(*(sharded.owned(unit.index) for unit in sharded.units))
    held = held_params(sharded.names, owned, optimizers_of(sharded.model, program.optimizers))
    return held, step_counters(held)


def _differ(steps: Sequence[int], largest: Largest) -> bool:
    """Return whether the smallest or largest number of steps is not the same on all ranks; collective."""
    ends = max(steps, default=0), min(steps, default=0)
    return any([largest(end) != -largest(-end) for end in ends])  # noqa: C419 - all ranks take part in both


def _not_compared(sharded: ShardedModel, counters: tuple[StepCounter, ...]) -> VerifyReply:
    """Return the reply of a model of which no copy can be made, because its ranks' optimizers have other steps."""
    return VerifyReply(
        num_params=len(sharded.names),
        max_abs_diff=0.0,
        max_rel_diff=0.0,
        worst_param="",
        equal_bits=0,
        ok=False,
        tolerance="not compared",
        loss_sharded=None,
        loss_reference=None,
        counters=counters,
    )


def verified_model(name: str, rank: RankContext) -> ShardedModel:
    """Return the sharded model ``name``, by default the only one.

    Raises:
        UsageError: there is none, or several without a name; or verify does not know how it is sharded.
    """
    models = sharded_models(name) if name else sharded_models()
    if len(models) > 1:
        raise UsageError(
            f"several models are sharded: {', '.join(models)}; name one: %fsdp verify {next(iter(models))}, or "
            f"--model {next(iter(models))} of workbench verify"
        )
    if not models and not name:
        raise UsageError(f"no model is sharded{own_units_words(rank.recorder)}; shard one first: %fsdp shard MODEL")
    found = name or next(iter(models))
    model = models.get(found) or find_module(found)
    rank.watch.note([model])
    parts = rank.watch.models_in(model)
    if not parts:
        raise UsageError(f"{found!r} is not sharded; shard it first: %fsdp shard {found}")
    if len(parts) > 1:
        engines = sorted(each.engine.name for each in parts)
        raise UsageError(
            f"parts of {found!r} are run by {' and '.join(engines)}; verify knows models that one of them runs"
        )
    parts[0].check_can_copy(found, rank.groups.largest)
    return parts[0]


class _Pair:
    """A step of an unsharded copy, and the same step of the sharded model; both start from the same state.

    Args:
        sharded: the sharded model.
        optimizers: its optimizers.
        step: the step function.
        program: the state that both steps start from.
        largest: returns the largest of a number that each rank passes.
        keeps: whether to keep gradients and the outputs of modules, else only the norms of gradients.

    Attributes:
        before: whole values of parameters before the step.
        after: parameters of the copy.
        loss_reference, loss_sharded: the losses; None: the step function returns none.
    """

    loss_reference: float | None = None
    loss_sharded: float | None = None

    def __init__(
        self,
        sharded: ShardedModel,
        optimizers: list[torch.optim.Optimizer],
        step: Callable[[], Any],
        program: ProgramState,
        largest: Largest,
        *,
        keeps: bool = False,
    ) -> None:
        self._sharded, self._optimizers, self._step, self._largest = sharded, optimizers, step, largest
        self._program = program
        self._reference, self._replaced = _unsharded_copies(sharded, optimizers, largest)
        self.after = dict(named_params(self._reference))
        self._dtype = coarsest_dtype(sharded.units)
        eps, share = torch.finfo(getattr(torch, self._dtype)).eps, UPDATE_TOLERANCE.get(self._dtype, _SHARE)
        self.copy = CopyObserver(self.after, eps, share / 5)
        own_grads = sharded.average(self._reference, self.copy.averaged)
        self.num_inputs = 0
        self._reference.register_forward_pre_hook(self._got_inputs, prepend=True, with_kwargs=True)
        self.before = {name: full_tensor(param) for name, param in self.after.items()}
        split = {name: param for name, param in self.after.items() if isinstance(param, DTensor)}
        self._own_before = self.before | {name: local_tensor(param).detach().clone() for name, param in split.items()}
        self._order: dict[str, None] = {}  # of the gradients in backward
        if keeps:
            for name, param in self.after.items():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(functools.partial(self._came, name))
        compute_alike(sharded.casts(), sharded.paths, self._reference)
        self._pieces = pieces = pieces_of(sharded.units, sharded.tensors, sharded.paths, self.after)
        self._expected = GradObserver(pieces, lambda: of_grads(pieces, grads_of(self.after)), keeps=keeps)
        self._actual = GradObserver(pieces, lambda: of_sharded(pieces, sharded.tensors, self.after), keeps=keeps)
        self._own = GradObserver(pieces, lambda: of_grads(pieces, own_grads()), keeps=keeps)
        self._whole_norms: dict[str, torch.Tensor] = {}

    def __enter__(self) -> _Pair:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the copy: the hooks of its parameters refer to it, and so it would stay."""
        for param in self.after.values():
            drop_post_accumulate_hooks(param)
        vars(self).clear()

    def _got_inputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        self.num_inputs += given[0].numel() if given else 0

    def _came(self, name: str, _: torch.Tensor) -> None:
        self._order.setdefault(name)

    @contextmanager
    def run(self, raised: RaisedCounters) -> Iterator[None]:
        """Run both steps, and compare them in the body; ``raised`` observes the sharded one.

        Raises:
            UsageError: the step does not train the copy on any rank.
        """
        with self._program.restored(self._replaced), self._completed(), self._expected.watching(), self.copy.watching():
            self.loss_reference = self._run_on_copy()
        with self._program.restored():
            with self._actual.watching(), raised.watching():
                self.loss_sharded = loss_of(self._step())
            yield

    @contextmanager
    def _completed(self) -> Iterator[None]:
        """Give the copy's parameters the gradients that the sharded model's get without being used."""
        hook = register_optimizer_step_pre_hook(lambda *_: self._sharded.complete_grads(self.after))
        try:
            yield
        finally:
            hook.remove()

    @torch.no_grad()
    def run_from_finite(self) -> tuple[CopyStep, ...]:
        """Run the copy's step from finite parameters, so that only a rank with a cause of its own gets NaN."""
        for param in self.after.values():
            local = local_tensor(param)
            places = torch.arange(local.numel(), device=local.device, dtype=torch.float64).view(local.shape)
            local.copy_(torch.where(local.isfinite(), local, 0.02 * places.sin()))
        in_copy = self._program.restored(self._replaced), self._completed(), self.copy.watching(), _whole_tensors()
        with torch.enable_grad(), ExitStack() as stack:
            for each in in_copy:
                stack.enter_context(each)
            loss_of(self._step())
        return self.copy.steps()

    def _run_on_copy(self) -> float | None:
        """Call the step function while the program refers to the copies; return its loss.

        Raises:
            UsageError: the step left the copy unchanged on every rank, or needs DTensors.
        """
        params = self.after.values()
        before = [local_tensor(p).detach().clone() for p in params]
        with warnings.catch_warnings():
            # schedulers count the steps of the optimizer that they were made with
            warnings.filterwarnings("ignore", module="torch.optim.lr_scheduler")
            try:
                with _whole_tensors():
                    loss = loss_of(self._step())
            except AttributeError as error:
                if isinstance(error.obj, torch.Tensor) and hasattr(DTensor, error.name or ""):
                    raise UsageError(_needs_dtensor(error)) from None
                raise
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise UsageError(_holds_dtensors(error)) from None
        moved = any(not torch.equal(a, local_tensor(b)) for a, b in zip(before, params, strict=True))
        if not self._largest(int(moved)):
            raise UsageError(f"the step did not train the model, so nothing can be compared: {self._why_untrained()}")
        return loss

    def _why_untrained(self) -> str:
        """Return why no parameter of the copy moved, and what to do."""
        if not self._expected.optimizer_steps:
            if not all(map(_is_finite, self._expected.norms.values())):
                return "its gradients are not finite, so a scaler skips optimizer.step(); train more steps first"
            return "it takes no optimizer step; call optimizer.step() in it, on each call"
        if not self._optimizers:
            return (
                "no optimizer that it can reach has a parameter of the model, as one that was made before sharding; "
                "make it after: torch.optim.AdamW(model.parameters(), ...)"
            )
        if not self._expected.norms:
            return (
                "its backward reaches no parameter of the model; compute the loss with this model, without detach(), "
                ".item() and no_grad()"
            )
        return "its gradients or learning rates are zero"

    def has_equal_norms(self) -> bool:
        """Return whether this rank's rows have gradients of the same norm in both steps, when an optimizer gets them.

        Adam's step hardly depends on the scale of gradients, so the parameters do not show it.
        """
        tolerance = UPDATE_TOLERANCE.get(self._dtype, RTOL)
        actual, expected = (_norm(each.norms) for each in (self._actual, self._expected))
        return not math.isfinite(expected) or abs(actual - expected) <= tolerance * expected + ATOL

    def check_scale(self, *, ok: bool) -> None:
        """Check that the step itself does not scale gradients by what it sums over ranks; collective.

        Raises:
            UsageError: it does: each rank of the copy has all rows, so they count several times in such a sum.
        """
        if not self._largest(int(not ok)):
            return
        factor = scaled_after_backward(self._actual, self._expected, self._tolerance)
        if self._largest(int(factor is None or not self._expected.calls_after_backward)):
            return
        scaled = None if factor is None or math.isnan(factor) else round(factor * _FINE)
        most = self._largest(0 if scaled is None else scaled)
        least = -self._largest(-_FINE * _FINE if scaled is None else -scaled)
        if not most or most - least > self._tolerance * most or abs(most / _FINE - 1) <= self._tolerance:
            return
        raise UsageError(
            "the gradients that backward leaves are those of the unsharded copy, but then the step itself scales them: "
            f"{most / _FINE:.4g} times as much as in the copy, on all ranks, as where it clips by a norm that it sums "
            "over ranks. Each rank of the copy has all rows, so that sum is too large there, and what the step does "
            "after backward is not compared. torch.nn.utils.clip_grad_norm_ can be compared, and is right with replicas"
        )

    def left_out(self) -> tuple[str, ...]:
        """Return the parts with gradients that no optimizer among the variables has, and that did not move."""
        held = {id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]}
        tensors = tensors_of_pieces(self._pieces, self._sharded.tensors)
        candidates: dict[str, bool] = {}
        for piece in self._pieces:
            shard = tensors[piece.name].shard
            if not self._values(piece, shard).numel():
                continue
            title, owned = self._sharded.part_of(piece.unit, piece.name)
            is_out = not owned & held and self._is_still(piece, shard)
            candidates[title] = candidates.get(title, True) and is_out
        return () if all(candidates.values()) else tuple(title for title, is_out in candidates.items() if is_out)

    def _is_still(self, piece: ParamPiece, shard: object) -> bool:
        """Return whether a piece has a gradient and did not move."""
        norm = self._actual.norms.get(piece.name)
        values = self._values(piece, shard)
        before = piece.of_whole(self._own_before[piece.name]).to(values)
        return norm is not None and bool(norm) and torch.equal(values, before)

    def _values(self, piece: ParamPiece, shard: object) -> torch.Tensor:
        return local_values(shard, piece.of_whole(local_tensor(self.after[piece.name])).shape)

    # ---- the comparison

    def compare(self) -> dict[str, Any]:
        """Compare whole parameters after the steps; return fields of the reply; collective."""
        worst, worst_name, worst_share, equal = 0.0, "", 0.0, 0
        not_finite: list[str] = []
        undecided: list[str] = []
        for name, actual in self._sharded.whole_values():
            expected = full_tensor(self.after[name])
            if not _is_finite(expected) and torch.allclose(actual, expected, rtol=RTOL, atol=ATOL, equal_nan=True):
                not_finite.append(name)
                continue
            known = self.copy.known(name)
            if known is not None:
                known = full_tensor(_like(known, self.after[name]))
                if known.numel() and not known.any():
                    undecided.append(name)
            share = self._share(actual, expected, self.before[name], known)
            equal += int(torch.equal(actual, expected))
            worst = max(worst, float((actual - expected).abs().max()) if actual.numel() else 0.0)
            if share > worst_share:
                worst_share, worst_name = share, name
        return {
            "num_params": len(self.after),
            "max_abs_diff": worst,
            "max_rel_diff": worst_share,
            "worst_param": worst_name,
            "equal_bits": equal,
            "ok": worst_share <= self._tolerance_of_update,
            "not_finite": tuple(not_finite),
            "uneven_copies": tuple(name for name in self.after if self._are_copies_uneven(name)),
            "undecided": tuple(undecided),
            "tolerance": f"{100 * self._tolerance_of_update:g}% of the size of each parameter's update ({self._dtype})",
        }

    def _are_copies_uneven(self, name: str) -> bool:
        """Return whether this rank's copy of a parameter moved otherwise than those of tensor parallelism; collective.

        A parameter that is split, or of which no other rank has a copy, has none.
        """
        param = self.after[name]
        if not isinstance(param, DTensor) or not all(isinstance(each, Replicate) for each in param.placements):
            return False
        update = (local_tensor(param) - self._own_before[name]).double()
        mean = update.clone()
        average_over(param.device_mesh.get_all_groups(), mean)
        known = self.copy.known(name)
        error, size = ((each if known is None else each * known).norm() for each in (update - mean, mean))
        return bool(error > _APART * size)

    @property
    def _tolerance_of_update(self) -> float:
        return UPDATE_TOLERANCE.get(self._dtype, _SHARE)

    @staticmethod
    def _share(actual: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, known: torch.Tensor | None) -> float:
        """Return the difference of a parameter relative to its update, without what rounding explains.

        Args:
            actual: its values after the step.
            expected: those of the copy.
            before: its values before the step.
            known: the elements that count; None: all.
        """
        if not actual.numel() or torch.equal(actual, expected):
            return 0.0
        error, update, size = (actual - expected).double(), (expected - before).double(), expected.double()
        if known is not None:
            error, update, size = error * known, update * known, size * known
        rounding = torch.finfo(actual.dtype).eps * max(_FLIPS**0.5 * float(size.norm()), float(size.abs().max()))
        excess = float(error.norm())
        if not math.isfinite(excess):
            return math.inf
        excess = max(0.0, excess - rounding)
        return excess / float(update.norm()) if excess and update.any() else (math.inf if excess else 0.0)

    # ---- where the steps differ

    def run_and_locate(self) -> StepDifferences:
        """Run both steps, and return where they differ first."""
        copies = modules_of(self._reference)
        originals = {path: module for module, path in self._sharded.paths.items()}  # the innermost of several
        both = {path: module for path, module in copies.items() if path in originals}
        expected = OutputObserver(both)
        actual = OutputObserver({path: originals[path] for path in both}, expected)
        with (
            self._program.restored(self._replaced),
            self._completed(),
            self._expected.watching(),
            self._own.watching(),
            expected.watching(),
            self._whole_grads(),
        ):
            self.loss_reference = self._run_on_copy()
        with self._program.restored():
            with self._actual.watching(), actual.watching():
                self.loss_sharded = loss_of(self._step())
            return self._located(actual)

    def _located(self, actual: OutputObserver) -> StepDifferences:
        titles = {unit.index: unit_words(unit.name) for unit in self._sharded.units}
        return StepDifferences(
            output=actual.first_difference(self._tolerance),
            grad=self._first_grad(),
            param=self._first_param(),
            differs_in_input=actual.differs_in_input,
            num_inputs=actual.num_inputs,
            ratios=grouped(self._ratios(), self._tolerance),
            norm=_norm(self._actual.norms),
            norm_reference=_norm(self._whole_norms),
            missing=tuple(name for name in self._order if self._is_missing(name)),
            unaveraged=tuple(name for name in self._order if self._is_unaveraged(name)),
            unreduced=tuple(titles[index] for index in self._sharded.unreduced()),
            optimizer_steps=self._actual.optimizer_steps,
            rounded_to=self._rounded_to(),
        )

    @property
    def _tolerance(self) -> float:
        return UPDATE_TOLERANCE.get(self._dtype, RTOL)

    @contextmanager
    def _whole_grads(self) -> Iterator[None]:
        """Take the norms of the copy's gradients when an optimizer gets them, or at the end of the body."""

        def take(*_: object) -> None:
            for piece in self._pieces:
                grad = self.after[piece.name].grad
                if grad is not None and piece.name not in self._whole_norms:
                    self._whole_norms[piece.name] = torch.linalg.vector_norm(local_tensor(grad).float())

        hook = register_optimizer_step_pre_hook(take)
        try:
            yield
            take()
        finally:
            hook.remove()

    def _is_missing(self, name: str) -> bool:
        expected = self._expected.values.get(name)
        return expected is not None and bool(expected.any()) and name not in self._actual.values

    def _is_unaveraged(self, name: str) -> bool:
        """Return whether a gradient is that of this rank alone, which differs from the average."""
        both, own = self._both(name), self._own.values.get(name)
        if both is None or own is None or name not in self._actual.values:
            return False
        return relative(*both) > self._tolerance and relative(both[0], own) <= self._tolerance

    def _both(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the gradients of this rank's rows, sharded and unsharded; None without them in the copy."""
        expected = self._expected.values.get(name)
        if expected is None:
            return None
        return self._actual.values.get(name, torch.zeros_like(expected)), expected

    def _ratios(self) -> dict[str, float | None]:
        found = {name: self._both(name) for name in self._order if name in self._actual.values}
        return {name: ratio(*both, self._tolerance) for name, both in found.items() if both is not None}

    def _first_grad(self) -> Difference | None:
        rows = {piece.name: piece.rows for piece in self._pieces}
        for position, name in enumerate(self._order):
            both = self._both(name)
            difference = 0.0 if both is None else relative(*both)
            if difference > self._tolerance:
                return Difference(
                    name=name, position=position, total=len(self._order), relative=difference, rows=rows[name]
                )
        return None

    def _first_param(self) -> Difference | None:
        tensors = tensors_of_pieces(self._pieces, self._sharded.tensors)
        for position, piece in enumerate(self._pieces):
            actual = self._values(piece, tensors[piece.name].shard)
            expected, before = (
                piece.of_whole(local_tensor(values).detach()).to(actual)
                for values in (self.after[piece.name], self._own_before[piece.name])
            )
            known = self.copy.known(piece.name)
            known = None if known is None else piece.of_whole(known)
            if self._share(actual, expected, before, known) > self._tolerance_of_update:
                return Difference(
                    name=piece.name,
                    position=position,
                    total=len(self._pieces),
                    relative=relative(actual - before, expected - before),
                    rows=piece.rows,
                )
        return None

    def _rounded_to(self) -> str:
        """Return the dtype in which all sharded gradients are exact and not all unsharded; full precision only."""
        if self._dtype in UPDATE_TOLERANCE:
            return ""
        found = (self._both(name) for name in self._order if name in self._actual.values)
        pairs = [both for both in found if both is not None and both[0].numel()]
        for dtype in (torch.bfloat16, torch.float16):
            exact = [[torch.equal(each.to(dtype).double(), each) for each in both] for both in pairs]
            if pairs and all(actual for actual, _ in exact) and not any(expected for _, expected in exact):
                return str(dtype).removeprefix("torch.")
        return ""


def _norm(norms: Mapping[str, torch.Tensor]) -> float:
    return math.hypot(*torch.stack(list(norms.values())).tolist()) if norms else 0.0


@contextmanager
def _whole_tensors() -> Iterator[None]:
    """Let plain tensors have ``full_tensor()`` in the body, as DTensors do: a tensor of the copy is whole."""
    name = "full_tensor"
    setattr(torch.Tensor, name, lambda tensor, **_: tensor.clone())  # not itself: the result may be changed in place
    try:
        yield
    finally:
        delattr(torch.Tensor, name)


def _holds_dtensors(error: RuntimeError) -> str:
    """Return that the step uses DTensors which it keeps beside the model, such as an average of its parameters."""
    calls = [place_in_file(*call) for call in walk_tb(error.__traceback__) if not is_of_a_library(call[0])]
    where = f", in {calls[-1]}" if calls else ""
    return (
        f"the step computes with DTensors that it keeps beside the model{where}, such as an average of its parameters: "
        "the unsharded copy has plain tensors, so it cannot take this step; call what keeps them outside of the step "
        "function. Sharded, the step runs as it is"
    )


def _needs_dtensor(error: AttributeError) -> str:
    calls = [place_in_file(*call) for call in walk_tb(error.__traceback__) if not is_of_a_library(call[0])]
    return (
        f"nothing can be compared: the step uses .{error.name} of a DTensor, in {calls[-1] if calls else 'a library'}, "
        "and the parameters and gradients of the unsharded copy are plain tensors. Let the step run with both: use "
        f".{error.name} only where isinstance(x, torch.distributed.tensor.DTensor), and else x itself"
    )


def _unsharded_copies(
    sharded: ShardedModel, optimizers: list[torch.optim.Optimizer], largest: Largest
) -> tuple[nn.Module, dict[int, Any]]:
    """Return a plain copy of a model, and the copies of the model and its optimizers by the id of the original."""
    memo: dict[int, Any] = {}
    reference, copied = sharded.copy(memo, optimizers, largest)
    for optimizer in copied:
        _take_one_by_one(optimizer)
    copies = {id(optimizer): plain for optimizer, plain in zip(optimizers, copied, strict=True)}
    own = (*sharded.model.modules(), *sharded.model.parameters(), *sharded.model.buffers())
    parts = {id(each): memo[id(each)] for each in own if id(each) in memo}
    return reference, {**parts, id(sharded.model): reference, **copies}


def _take_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer step parameters singly where a group mixes plain ones and DTensors, which torch refuses."""
    for group in optimizer.param_groups:
        if len({isinstance(param, DTensor) for param in group["params"]}) > 1:
            group.update({way: False for way in ("foreach", "fused") if way in group})


def _like(values: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's values as a tensor that is split as ``param``."""
    if not isinstance(param, DTensor):
        return values
    return DTensor.from_local(values, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


@contextmanager
def _restored(sharded: ShardedModel) -> Iterator[None]:
    """Restore parameters, gradients and buffers after the body."""
    tensors, params = local_tensors(sharded.model), sharded.params
    values = [t.clone() for t in tensors]
    grads = [p.grad for p in params]
    kept = [(g, g.detach().clone()) for g in grads if g is not None]
    unreduced = sharded.unreduced()
    try:
        yield
    finally:
        sharded.drop_full_grads(unit.index for unit in sharded.units if unit.index not in unreduced)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            for grad, value in kept:
                grad.copy_(value)
