"""Plans of scripts: a process runs the script's first steps as one rank of many, and its trace is described."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import takewhile
from pathlib import Path
from typing import TypeGuard

from workbench.base.codec import encode
from workbench.errors import UsageError
from workbench.protocol.commands import Plan, Reshard, Shard, ShardReply, Step, StepReply, Unshard
from workbench.protocol.planning import CALLED, PlannedRanks, PlannedRun, planned_ranks
from workbench.protocol.rank_messages import ModelInfo
from workbench.reports.plan_report import PlanReport, described
from workbench.script.script_writer import write_script
from workbench.session.outputs import OnOutput
from workbench.session.program import CompletedCommand, Entry, Program
from workbench.session.script_ranks import ScriptRanks
from workbench.trace import load

_STEPS = 2
_UNKNOWN = StepReply(steps_done=_STEPS, losses=None, seconds=(), optimizer_steps=_STEPS, first_step=0)
"""A reply without losses, so that the script's loop does not send them."""


class PlannedRank(ScriptRanks):
    """The process from which planned ranks are forked, one for each plan.

    Args:
        on_output: called with the output of the scripts.
    """

    main = "workbench.plan.planning_rank"

    def __init__(self, on_output: OnOutput) -> None:
        super().__init__(1, on_output)

    def _connect(self) -> None:
        """Do nothing: the rank has no peers."""

    def run(self, planned: PlannedRun) -> tuple[int, tuple[str, ...]]:
        """Run a script's first steps; return their number, and the class of the model's repeated block, if any."""
        reply = self._call("plan", encode(planned))[0]
        return reply["steps"], tuple(reply["blocks"])


def plan_script(
    script: str,
    args: Sequence[str],
    command: Plan,
    out: str | os.PathLike[str],
    rank: PlannedRank,
    *,
    module: bool = False,
    steps: int = 2,
) -> PlanReport:
    """Plan a script; write the trace of its first steps to ``out``.

    Args:
        script: path of the script, or name of a module.
        args: its arguments.
        command: the cluster, and how the first model that the script calls is sharded then; what is not given stays as
            it is. Its model is :data:`CALLED`.
        out: the trace file.
        rank: runs the script.
        module: whether ``script`` is a module.
        steps: how many steps; the last one is described, as an optimizer makes its state in the first.

    Raises:
        UsageError: there is no such script, or it took no step.
        RankError, RankDied, Interrupted: it failed, or was interrupted.
    """
    if steps < 1:
        raise UsageError(f"a plan needs at least 1 step, not {steps}")
    ranks = planned_ranks(command.device, command.ranks, command.hosts)
    planned = PlannedRun(
        script=script if module else os.path.abspath(script),
        args=tuple(args),
        module=module,
        device=os.path.abspath(command.device) if ranks.machine.calibration else command.device,
        num_ranks=ranks.num_ranks,
        num_hosts=ranks.num_hosts,
        steps=steps,
        out=os.path.abspath(out),
        change=change_of(command, ranks),
        checkpoint=tuple(command.checkpoint),
    )
    taken, blocks = rank.run(planned)
    if not taken:
        raise UsageError(f"{Path(script).name} took no training step: a step ends with an optimizer's step()")
    return replace(described(load(out), ranks, os.fspath(out)), blocks=blocks)


def plan_program(program: Program, model: ModelInfo, command: Plan, folder: Path, rank: PlannedRank) -> PlanReport:
    """Plan what the ranks of a notebook have run so far, with another sharding of a model.

    Args:
        program: what they have run; its steps are left out.
        model: the model.
        command: the cluster, the step function, and how the model would be sharded; what is not given stays as it is.
        folder: a folder for the script and the trace, ``plan.trace``.
        rank: runs the program.

    Raises:
        UsageError: the program cannot be written as a script, or as :func:`plan_script`.
    """
    if (
        model.units and model.policy is None
    ):  # cells of its own made its units, such as one with DistributedDataParallel
        untrained = tuple(entry for entry in program.entries if not _trains(entry))
        return _plan_entries(replace(program, entries=untrained), replace(command, model=CALLED), folder, rank)
    changes = [entry for entry in program.entries if _changes(entry, model.name)]
    shards = [entry.command for entry in changes if isinstance(entry.command, Shard)]
    ranks = planned_ranks(command.device, command.ranks, command.hosts)
    shard = planned_shard(model, change_of(command, ranks), ranks.num_ranks, shards[-1].ignore if shards else ())
    before = takewhile(lambda entry: not _changes(entry, model.name), program.entries)
    place = sum(not _trains(entry) for entry in before)
    kept = [entry for entry in program.entries if not (_trains(entry) or _changes(entry, model.name))]
    entries = [*kept[:place], CompletedCommand(command=shard, reply=_sharded(shard)), *kept[place:]]
    named = Plan(CALLED, ranks=command.ranks, hosts=command.hosts, device=command.device, checkpoint=command.checkpoint)
    return _plan_entries(replace(program, entries=tuple(entries)), replace(named, fn=command.fn), folder, rank)


def _plan_entries(program: Program, command: Plan, folder: Path, rank: PlannedRank) -> PlanReport:
    """Plan what ranks have run, and two steps after it."""
    step = CompletedCommand(command=Step(_STEPS, fn=command.fn), reply=_UNKNOWN)
    file = folder / "planned.py"
    text = write_script(replace(program, entries=(*program.entries, step)), Shard.engine, file.name).text
    file.write_text(text, "utf-8")
    return plan_script(str(file), (), command, folder / "plan.trace", rank)


def change_of(command: Plan, ranks: PlannedRanks) -> Reshard:
    """Return how a plan changes the sharding of its model.

    Raises:
        UsageError: the mesh does not hold these ranks, or ``hosts`` does not fit another option.
    """
    change = Reshard(**{f.name: getattr(command, f.name) for f in fields(Reshard)})
    try:
        change = change.on_hosts([ranks.ranks_per_host] * ranks.num_hosts)
        change.check_fits(ranks.num_ranks, 0)
    except ValueError as error:
        raise UsageError(f"{error} (the plan is for {ranks.num_ranks} ranks)") from error
    return change


def planned_shard(model: ModelInfo, change: Reshard, num_ranks: int, ignore: Sequence[str] = ()) -> Shard:
    """Return the ``shard`` that makes a plain model what ``change`` would make of it, as it is now.

    Args:
        model: the model.
        change: how it would be sharded; what is not given stays as it is.
        num_ranks: number of ranks.
        ignore: patterns of the parameters that were left unsharded.

    Raises:
        UsageError: its copies do not fit the number of ranks, or its units differ and the change does not make them
            equal.
    """
    try:
        if model.policy is None:
            command = Shard(model.name, **{"wrap": model.suggested} | change.given)
        else:
            command = Shard(ignore=tuple(ignore), **model.policy.changed(model.name, change.given))
            if not change.mesh and len(command.mesh_shape) == 1:  # one copy, over all ranks
                command = replace(command, mesh=())
        command.check_fits(num_ranks, 0 if command.mesh_shape else num_ranks)
    except ValueError as error:
        raise UsageError(f"{error} (the plan is for {num_ranks} ranks)") from error
    return command


def _sharded(command: Shard) -> ShardReply:
    return ShardReply(
        model=command.model,
        units=(),
        num_params=0,
        num_elements=0,
        bytes_unsharded=0,
        chosen=tuple(command.wrap),
        bytes_at_rest=0,
        optimizers=1,
    )


def _changes(entry: Entry, model: str) -> TypeGuard[CompletedCommand]:
    """Whether a command has changed how a model, or a unit of it, is sharded."""
    command = entry.command if isinstance(entry, CompletedCommand) else None
    return isinstance(command, (Shard, Reshard, Unshard)) and f"{command.model}.".startswith(f"{model}.")


def _trains(entry: Entry) -> bool:
    return isinstance(entry, CompletedCommand) and isinstance(entry.command, Step)
