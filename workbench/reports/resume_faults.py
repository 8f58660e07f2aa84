"""Why a step from a checkpoint is not the same as the step without it: what the ranks measured decides it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.fault import Fault, listed
from workbench.protocol.checkpoint_replies import ResumeCheck
from workbench.replay.grouping import label

OTHER_STEP = "other-step"
"""The rule of a checkpoint that is not of the current state, so that nothing can be compared."""


def resume_faults(by_rank: Sequence[ResumeCheck]) -> tuple[Fault, ...]:
    """Return what is wrong with a checkpoint, the most important first."""
    found = (_other_step(by_rank), _fresh(by_rank), _detached(by_rank), _differs(by_rank), _equal_random(by_rank))
    faults = [each for each in found if each is not None]
    is_other = any(each.rule == OTHER_STEP for each in faults)
    return tuple(each for each in faults if not is_other or each.rule != "other-after-resume")


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
    names = tuple(dict.fromkeys(name for each in by_rank for name in each.fresh))
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
    names = tuple(dict.fromkeys(name for each in by_rank for name in each.detached))
    if not names:
        return None
    return Fault(
        rule="detached-entries",
        verdict=f"the state dict has entries that share no memory with a parameter or buffer: {listed(names)}",
        evidence=("torch.distributed.checkpoint.load() fills the entry, and the parameter stays as it is",),
        fix="let no hook of state_dict() copy; load by set_model_state_dict() or %fsdp load, which copy back",
    )


def _differs(by_rank: Sequence[ResumeCheck]) -> Fault | None:
    ranks = [rank for rank, each in enumerate(by_rank) if each.first_param]
    if not ranks:
        return None
    first = by_rank[ranks[0]]
    loaded = {name for each in by_rank for name in each.loaded}
    why = (
        f"before the step, {listed(sorted(loaded))} differ already: the checkpoint is of other values"
        if loaded
        else "before the step, parameters and buffers were equal: optimizer, schedule, data or random numbers are not"
    )
    return Fault(
        rule="other-after-resume",
        verdict=f"{first.first_param} differs first after a step from the checkpoint",
        evidence=(f"by {first.relative:.3g} of its norm on {label(ranks)}", why),
        fix="let the step depend only on what a checkpoint holds: models, optimizers, objects with state_dict(), "
        "generators in variables",
    )


def _equal_random(by_rank: Sequence[ResumeCheck]) -> Fault | None:
    if not any(each.has_equal_random for each in by_rank):
        return None
    return Fault(
        rule="equal-random-numbers",
        verdict="all ranks saved the same random numbers, so dropout drops the same places of each rank's rows",
        evidence=("the states of torch's generator are equal",),
        fix="after the model is built, in a cell: torch.manual_seed(1234 + rank)",
    )
