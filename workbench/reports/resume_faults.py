"""Why a step from a checkpoint is not the same as the step without it: what the ranks measured decides it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.base.fault import Fault, listed
from workbench.protocol.checkpoint_replies import ResumeCheck
from workbench.replay.grouping import label

OTHER_STEP = "other-step"
"""The rule of a checkpoint that is not of the current state, so that nothing can be compared."""


NO_CHANGE = "no-change"
"""The rule of a step that changes nothing, and so proves nothing."""

NOT_COMPARED = frozenset({OTHER_STEP, NO_CHANGE})


def resume_faults(by_rank: Sequence[ResumeCheck]) -> tuple[Fault, ...]:
    """Return what is wrong with a checkpoint, the most important first."""
    rules = (_other_step, _no_change, _fresh, _not_held, _detached, _differs, _equal_random)
    faults = [fault for rule in rules if (fault := rule(by_rank)) is not None]
    if any(fault.rule in NOT_COMPARED for fault in faults):
        return tuple(fault for fault in faults if fault.rule not in {"other-after-resume", "other-state"})
    return tuple(faults)


def _once(by_rank: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return what ranks named, each once."""
    return tuple(dict.fromkeys(name for names in by_rank for name in names))


def _other_step(by_rank: Sequence[ResumeCheck]) -> Fault | None:
    first = by_rank[0]
    if first.saved_step == first.step:
        return None
    return Fault(
        rule=OTHER_STEP,
        verdict=f"{first.folder} is of step {first.saved_step}, and the training is at step {first.step}",
        fix="save now, and verify that one: %fsdp save FOLDER, then %fsdp verify --resume FOLDER",
    )


def _fresh(by_rank: Sequence[ResumeCheck]) -> Fault | None:
    names = _once(each.fresh for each in by_rank)
    if not names:
        return None
    return Fault(
        rule="optimizer-from-nothing",
        verdict=f"the optimizer starts from nothing: the checkpoint has no state of {listed(names)}, or only some",
        evidence=(f"{names[0]} has state now, and less after the load",),
        fix="save it by torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or by %fsdp save: the "
        "state_dict() of an optimizer that has taken no step is empty, and nothing is loaded into it",
    )


def _detached(by_rank: Sequence[ResumeCheck]) -> Fault | None:
    names = _once(each.detached for each in by_rank)
    if not names:
        return None
    return Fault(
        rule="detached-entries",
        verdict=f"the state dict has entries that share no memory with a parameter or buffer: {listed(names)}",
        evidence=("torch.distributed.checkpoint.load() fills the entry, and the parameter stays as it is",),
        fix="let no hook of state_dict() copy; load by set_model_state_dict() or %fsdp load, which copy back",
    )


def _no_change(by_rank: Sequence[ResumeCheck]) -> Fault | None:
    if any(each.has_changed or each.different for each in by_rank):
        return None
    return Fault(
        rule=NO_CHANGE,
        verdict="the step changes no parameter and no buffer",
        fix="verify with a step function that trains: %fsdp verify --fn NAME --resume FOLDER",
    )


def _not_held(by_rank: Sequence[ResumeCheck]) -> Fault | None:
    names = _once(each.not_held for each in by_rank)
    if not names:
        return None
    return Fault(
        rule="optimizer-not-held",
        verdict=f"the step uses {listed(names)}, which the checkpoint does not hold",
        fix="keep each optimizer in a variable of a cell, and save again: %fsdp save FOLDER",
    )


def _differs(by_rank: Sequence[ResumeCheck]) -> Fault | None:
    ranks = [rank for rank, each in enumerate(by_rank) if each.first_param or each.different]
    if not ranks:
        return None
    after = [rank for rank in ranks if by_rank[rank].first_param]
    different = _once(by_rank[rank].different for rank in ranks)
    fix = (
        "let the step depend only on what a checkpoint holds: models, optimizers, objects with state_dict(), "
        "generators in variables"
    )
    if different:
        fix = "load the checkpoint after all objects are made; or save again, if the live state is the right one"
    if not after:
        return Fault(rule="other-state", verdict=different[0], evidence=(f"on {label(ranks)}", *different[1:]), fix=fix)
    first = by_rank[after[0]]
    why = different or ("before the step, models, optimizers and objects with state_dict() were equal",)
    return Fault(
        rule="other-after-resume",
        verdict=f"{first.first_param} differs first after a step from the checkpoint",
        evidence=(f"by {first.relative:.3g} of its norm on {label(after)}", *why),
        fix=fix,
    )


def _equal_random(by_rank: Sequence[ResumeCheck]) -> Fault | None:
    dropout = next((each.dropout for each in by_rank if each.dropout), "")
    if not dropout:
        return None
    return Fault(
        rule="equal-random-numbers",
        verdict=f"all ranks saved the same random numbers, so {dropout} drops the same places of each rank's rows",
        evidence=("the states of torch's generator are equal",),
        fix="after the model is built, in a cell: torch.manual_seed(1234 + rank)",
    )
