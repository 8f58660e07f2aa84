"""Entry points of one rank. The cluster calls these functions by name, in the engine's process.

:func:`boot`, :func:`connect`, :func:`execute`, :func:`give_up_step`, :func:`recover`, :func:`begin_replay`,
:func:`end_replay` and :func:`shutdown` run in the main thread.
:func:`handle_request` runs in the control thread while the main thread may be busy: it only reads state or sets flags.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch._dynamo  # the first DTensor imports it in 0.7 s: do so once, before ranks are forked
from torch.utils.hooks import RemovableHandle

from workbench.base.clock import clock_here
from workbench.base.codec import decode, encode
from workbench.engine import backends, process_groups
from workbench.engine._torch import untried
from workbench.engine.backends import backend_of
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.process_groups import GROUP_NUMBERS
from workbench.errors import ClusterError
from workbench.events import UNIT_INDICES, Category, Edge, Kind, Phase, Unit
from workbench.models import garbage
from workbench.models.c10d import sees_all_collectives
from workbench.models.engines import Watch
from workbench.models.own import log_metric
from workbench.protocol.commands import (
    Command,
    RankRequest,
    Reshard,
    Run,
    Shard,
    Snapshot,
    SnapshotReply,
    Step,
    Verify,
    VerifyReply,
    from_dict,
)
from workbench.protocol.rank_messages import (
    CellLine,
    Drain,
    DrainReply,
    EventInfo,
    GiveUp,
    ListModels,
    ListNames,
    Locate,
    LocateLine,
    Names,
    Position,
    PreviewUnits,
    RecordSummary,
    ReplicaMark,
    Shut,
    SnapshotMark,
    Stacks,
    StepPosition,
    read_request,
)
from workbench.protocol.starting import Boot, Connect, ConnectReply, private_file
from workbench.runtime import (
    error_notes,
    faults,
    no_keyboard,
    process_reset,
    shard_planning,
    sharding,
    text_bars,
    tracebacks,
)
from workbench.runtime.checkpoint_reads import SHARDING, CheckpointReads
from workbench.runtime.checkpoint_writer import CheckpointWriter
from workbench.runtime.checkpoints import Saver
from workbench.runtime.command_handlers import DOES, ActiveFault, does
from workbench.runtime.distributed import ProcessGroups
from workbench.runtime.emptied_tensors import EmptiedTensors
from workbench.runtime.flush_before_hold import FlushBeforeHold
from workbench.runtime.gate import Gate, GateRequest
from workbench.runtime.group_membership import GroupMembership
from workbench.runtime.lint import history_of
from workbench.runtime.model_summary import outermost, run_variables
from workbench.runtime.namespace import OFFERED, exchange, find_module, module_names, user_namespace, variables
from workbench.runtime.private_state import PrivateState, PrivateStates
from workbench.runtime.recorder import NO_STEP, Recorder
from workbench.runtime.rss_sampler import RssSampler
from workbench.runtime.script_runner import ScriptRunner
from workbench.runtime.snapshots import SNAPSHOTS, flat_bytes, plain_variables
from workbench.runtime.stacks import raised_line, stacks, user_line
from workbench.runtime.step_calls import step_names
from workbench.runtime.trainer import Trainer, passed_again
from workbench.runtime.training_history import TrainingHistory
from workbench.runtime.training_state import TrainingObjects, capture, unreached
from workbench.runtime.verify import verify
from workbench.trace import header_from_dict, header_to_dict, key_frame_from_dict, key_frame_to_dict
from workbench.trace.row_compression import to_wire
from workbench.trace.schema import Header, RankInfo

_OUTSIDE = SnapshotMark(entry=-1, count=0)
"""The mark of a private state that no step command wrote."""


@dataclass(frozen=True)
class ReplayedSteps:
    """Where a rank goes on when it has repeated, off the record, what was done before.

    Attributes:
        next_step: number of the next step.
        optimizer_steps: number of optimizer steps.
        held: ends what is off the record when it closes.
    """

    next_step: int
    optimizer_steps: int
    held: ExitStack


@dataclass
class RankRuntime:
    """The state of the workbench in one rank's process.

    Attributes:
        groups: its process groups.
        recorder: its recorder.
        gate: its gate, which may hold it.
        trainer: runs its steps.
        scripts: runs its scripts.
        watch: watches models that torch shards, and every collective of c10d.
        emptied: marks the tensors that ``to_empty`` makes.
        reads: notes the checkpoints that models take.
        membership: lets the user's code join and leave the default process group.
        history: notes what the rules of ``lint`` need of the training so far.
        hooks: handles of the hooks on every optimizer.
        doing: word of the current command, empty between commands.
        raised: the line of a cell or script in which the newest command or cell raised, and the time on this rank's
            clock, in nanoseconds; None: there is no such line.
        commands: number of commands it has begun.
        fault: the fault that it has injected; None if there is none.
        faulty_steps: the steps taken while faults were on that have been removed.
        writer: the newest checkpoint that it saves or saved; None: it saved none.
        models: ids of the modules that variables held when models were announced last.
        replay: what it goes on from when it has repeated what was done before; None: it does not repeat anything.
        entry: number of entries of the program that were done before its current command.
        snapshot_at: number of entries of the program at which the newest snapshot is of the state now.
        snapshot_bytes: bytes of snapshots that are recorded.
        replicas: ranks that hold the same parameters and optimizer state, this one included; empty: there are none.
        private: writes what they do not hold; None: no file was named.
    """

    groups: ProcessGroups
    recorder: Recorder
    gate: Gate
    trainer: Trainer
    scripts: ScriptRunner
    watch: Watch
    emptied: EmptiedTensors
    reads: CheckpointReads
    membership: GroupMembership
    history: TrainingHistory
    hooks: Sequence[RemovableHandle] = ()
    doing: str = ""
    raised: tuple[CellLine, int] | None = None
    commands: int = 0
    fault: ActiveFault | None = None
    faulty_steps: set[int] = field(default_factory=set)
    writer: CheckpointWriter | None = None
    models: set[int] = field(default_factory=set)
    replay: ReplayedSteps | None = None
    entry: int = 0
    snapshot_at: int = -1
    snapshot_bytes: int = 0
    replicas: tuple[int, ...] = ()
    private: PrivateStates | None = None

    def execute(self, command: Command) -> object:
        """Run one command in the calling thread, and return its reply."""
        self.doing, self.raised = command.word, None
        self.commands += 1
        if not isinstance(command, Step) or not command.snapshot:
            self.snapshot_at = -1
        try:
            if isinstance(command, Step):
                self.history.watch_gradients()
                with self.gate.stepping(command.stop):
                    saver = Saver(Path(command.save), self)
                    reply = self.trainer.run(command, partial(self._between, command, saver))
                    saved = saver.end()
                    if command.snapshot:
                        SNAPSHOTS.finish()
                        self.account_snapshots()
                kept = SNAPSHOTS.num_bytes if command.snapshot else 0
                sharded = {unit.index for unit in self.recorder.header.units if unit.shard_size > 1}
                return replace(
                    reply,
                    never_cleared=self.history.never_cleared(),
                    never_reduced=self.history.never_reduced(sharded),
                    saved=saved,
                    snapshot_bytes=kept,
                )
            if isinstance(command, Run):
                self.history.forget()
                with self.gate.stepping(command.stop):
                    ran = self.scripts.run(command)
                self.note_models()
                return ran
            with self.gate.passing(), self.gate.interrupts.guarded(), self.watch.paused():
                result = DOES[type(command)](command, self)
                self.account_optimizers()
                self.account_snapshots()
                self.note_models()
                self.write_private()
                return result
        finally:
            self.doing = ""

    def _between(self, command: Step, saver: Saver, done: int) -> None:
        """Save or take a snapshot if a command asks for it after so many of its steps; one step later it is whole."""
        if done and command.saves_after(done):
            saver.begin()
        if command.snapshot and done % command.snapshot == 0:
            if done or self.snapshot_at != self.entry:
                self.take_snapshot(done)
            self.snapshot_at = self.entry + 1 if done == command.count else -1
        elif command.snapshot:
            SNAPSHOTS.finish()
        self.account_snapshots()
        self.write_private(SnapshotMark(entry=self.entry, count=done))

    def write_private(self, mark: SnapshotMark = _OUTSIDE) -> None:
        """Write what only this rank holds, if others hold the rest; no-op while what was done before is repeated."""
        if self.private is not None and len(self.replicas) > 1 and self.replay is None:
            trainer = self.trainer
            try:
                objects = TrainingObjects.among(variables())
                self.private.write(mark, objects, trainer.trained_steps, plain_variables(), trainer.optimizer_steps)
            except Exception:  # noqa: BLE001 - a state_dict() of the program may raise anything; training goes on
                self.private.remove()

    def hold_replica(self) -> ReplicaMark | None:
        """Keep the state of the last completed step for the replicas of this rank; None: it has been lost."""
        if SNAPSHOTS.replica is None and self.private is not None and len(self.replicas) > 1 and self.replay is None:
            with self.watch.paused():
                self.reshard_models()
                objects = TrainingObjects.among(variables())
                private = self.private.newest(objects, self.trainer.optimizer_steps)
                if private is not None and objects.all_are_sharded():
                    SNAPSHOTS.hold(capture(objects, private.state.step), private, self.replicas)
        found, ranks = SNAPSHOTS.replica, SNAPSHOTS.replicas
        return None if found is None else ReplicaMark(step=found.state.step, mark=found.mark, ranks=ranks)

    def _replicas(self) -> tuple[int, ...]:
        """Return the ranks that hold the same shards of all models as this one, itself included; empty: unknown."""
        models = [each for model in run_variables().values() for each in self.watch.models_in(model)]
        try:
            found = [{*each.replicas(unit.index)} for each in models for unit in each.units]
        except (KeyError, ValueError):  # of torch: a group of a model, or the default one, is destroyed
            return ()
        return tuple(sorted(set.intersection(*found))) if found else ()

    def take_snapshot(self, done: int) -> SnapshotReply:
        """Take a snapshot after ``done`` steps of the program's next entry; collective."""
        begin = time.monotonic()
        with self.watch.paused():
            self.reshard_models()
            mark = SnapshotMark(entry=self.entry, count=done)
            new = SNAPSHOTS.take(mark, self.trainer.trained_steps, self.groups)
        return SnapshotReply(num_bytes=new.num_bytes, kept_bytes=SNAPSHOTS.num_bytes, seconds=time.monotonic() - begin)

    def reshard_models(self) -> None:
        """Free the full parameters of all models."""
        for model in run_variables().values():
            for each in self.watch.models_in(model):
                each.reshard()

    def note_models(self) -> None:
        """Announce the units of models, which of them are gone, and what no engine manages."""
        models = {name: find_module(name) for name in module_names()}
        now = {id(model) for model in models.values()}
        if self.models - now:
            garbage.collect()  # modules, hooks and parameters of a model refer to each other
        self.models = now
        self.watch.note(outermost(models).values())
        self.recorder.note_gone()
        self.trainer.note_models()
        self.replicas = self._replicas()

    def account_optimizers(self) -> None:
        """Record the bytes of optimizer state after a command replaced it."""
        for value in variables().values():
            if isinstance(value, torch.optim.Optimizer):
                self.trainer.account(value, changed=True)

    def account_snapshots(self) -> None:
        """Record the bytes of snapshots where they have changed."""
        before, self.snapshot_bytes = self.snapshot_bytes, SNAPSHOTS.num_bytes
        if self.snapshot_bytes != before:
            self.recorder.memory(Category.SNAPSHOTS, -1, self.snapshot_bytes - before)

    def plan(self, command: Shard | Reshard) -> tuple[Unit, ...]:
        """Return the units that ``command`` would make, without any change.

        Raises:
            UsageError, ValueError, NotImplementedError: the command is not possible.
        """
        return shard_planning.plan(command, self.groups.world_size)

    def position(self) -> Position:
        """Return where this rank is; thread-safe."""
        held, recorder = self.gate.held, self.recorder
        return Position(
            rank=self.groups.rank,
            now_ns=time.monotonic_ns(),
            doing=self.doing,
            commands=self.commands,
            place=StepPosition(recorder.step, recorder.ordinal) if held is None else held.place,
            held=held,
            waiting=self.gate.is_waiting,
            newest=_event_of(recorder.last_event()),
            raised_in=self.watch.raised_in(),
            unfinished=process_groups.num_unfinished(),
            given_up=cancellation.is_set,
            optimizer_steps=self.trainer.optimizer_steps,
            saving="" if self.writer is None else self.writer.words,
            snapshot_bytes=SNAPSHOTS.num_bytes,
            fault="" if self.fault is None else self.fault.reply.shown_name,
            tickets=self.gate.tickets,
        )

    def drain(self, known: RecordSummary) -> DrainReply:
        """Return what was recorded since ``known``, and the rank's position."""
        self.watch.settle()
        drained = self.recorder.drain(known.next_seq)
        version, header = self.recorder.header_since(known.header_version)
        return DrainReply(
            rows=memoryview(to_wire(drained.rows)),
            lost=drained.lost,
            key_frame=key_frame_to_dict(drained.key_frame),
            header=None if header is None else header_to_dict(header),
            header_version=version,
            position=self.position(),
        )

    def _raised_line(self) -> CellLine | None:
        """Return the line in which the newest command or cell raised; thread-safe."""
        raised = self.raised
        if raised is None:
            return None
        line, at_ns = raised
        return replace(line, ago_ns=time.monotonic_ns() - at_ns)

    def answer(self, request: RankRequest[Any]) -> object:
        """Handle a request of the control thread: read state, set a flag, or queue a job.

        Raises:
            UsageError: as :meth:`Gate.request`.
        """
        answer: object = None
        match request:
            case Drain(known=known):
                answer = self.drain(known[self.groups.rank])
            case Locate():
                answer = self.position()
            case Stacks():
                answer = stacks()
            case LocateLine():
                answer = user_line() or self._raised_line()
            case ListNames():
                answer = Names(
                    modules=tuple(module_names()),
                    variables=tuple(sorted(variables())),
                    classes=tuple(sharding.class_names()),
                    steps=step_names(),
                )
            case ListModels():
                answer = shard_planning.models(self.watch.models_in, self.history.never_cleared)
            case PreviewUnits(command=command):
                answer = self.plan(command)
            case GiveUp(reason=reason):
                self.groups.abort(reason)
                self.gate.check_soon()
            case Shut():
                self.groups.shut()
            case _:
                answer = self.gate.request(cast("GateRequest", request))
        return answer


def _event_of(row: np.void | None) -> EventInfo | None:
    """Return the event of a row of the trace."""
    if row is None:
        return None
    return EventInfo(
        kind=Kind(row["kind"]),
        edge=Edge(row["edge"]),
        phase=Phase(row["phase"]),
        unit=int(row["unit"]),
        since_ns=int(row["t_ns"]),
    )


@does(Snapshot)
def _snapshot(_: Snapshot, rank: RankRuntime) -> SnapshotReply:
    """Take a snapshot, and wait until it has arrived."""
    reply = rank.take_snapshot(0)
    SNAPSHOTS.finish()
    return replace(reply, kept_bytes=SNAPSHOTS.num_bytes, left_out=tuple(unreached(variables())))


@does(Verify)
def _verify(command: Verify, rank: RankRuntime) -> VerifyReply:
    """Compare a step with an unsharded one; the step is neither recorded nor counted."""
    steps_before = rank.trainer.optimizer_steps
    try:
        with rank.recorder.unrecorded():
            found, given = verify(command, rank), passed_again(command.fn)
            return replace(found, since=rank.trainer.not_finite_since, arguments=given)
    finally:
        rank.trainer.optimizer_steps = steps_before
        rank.account_optimizers()


_runtime: RankRuntime | None = None


def this_rank() -> RankRuntime:
    """Return what this process holds as a rank.

    Raises:
        ClusterError: it is none yet.
    """
    if _runtime is None:
        raise ClusterError("this process is not a rank yet: boot it first")
    return _runtime


def current_step() -> int | None:
    """Return the training step that this process is in; None: in none."""
    step = NO_STEP if _runtime is None else _runtime.recorder.step
    return None if step == NO_STEP else step


def boot(data: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON data
    """Make this process a rank, for a :class:`~workbench.protocol.starting.Boot` as data; return the reply as data.

    Raises:
        ValueError: ``data`` is not such a request.
    """
    global _runtime  # noqa: PLW0603 - one rank per process, by definition
    request: Boot = decode(Boot, data, "boot")
    past = request.past
    shutdown(goes_on=past is not None)  # the last stop may have missed it: it was busy, or its host was unreachable
    backend = backends.choose(request.device, request.local_rank)
    process_groups = ProcessGroups(
        rank=request.rank,
        world_size=request.world_size,
        local_rank=request.local_rank,
        local_world_size=request.local_world_size,
        device=backend.device,
        device_name=request.device if backend.device.index is None else f"{request.device}:{backend.device.index}",
        host=request.host,
    )
    backends.tell_host(request.host.identity)
    process_reset.note_birth()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // request.local_world_size))
    GROUP_NUMBERS.next = 0 if past is None else len(header_from_dict(past.header).comm_groups)
    recorder = Recorder(Header(world_size=request.world_size), now_ns=backend.now_ns)
    trainer = Trainer(recorder)
    private = PrivateStates(private_file(request.session, request.rank)) if request.session else None
    if past is None:
        SNAPSHOTS.forget()
    else:
        process_reset.begin_again()
        recorder.resume(header_from_dict(past.header), key_frame_from_dict(past.key_frame), past.next_step)
        UNIT_INDICES.next, trainer.optimizer_steps = past.next_unit, past.optimizer_steps
    hooks = trainer.install()
    gate = Gate(recorder, request.rank, FlushBeforeHold(backend))
    gate.install()
    tracebacks.install(_note_line)
    error_notes.install(recorder)
    text_bars.install()
    no_keyboard.install()
    _look_after_cells()
    membership = GroupMembership(process_groups).install()
    scripts = ScriptRunner(membership, recorder, trainer)
    emptied, watch = EmptiedTensors().install(), Watch().begin()
    reads = CheckpointReads().install()
    history = history_of(recorder, watch).install()
    _runtime = RankRuntime(
        process_groups, recorder, gate, trainer, scripts, watch, emptied, reads, membership, history, hooks
    )
    _runtime.private = private
    atexit.register(shutdown)
    return encode(process_groups.listen() if request.rank == 0 else None)


def _look_after_cells() -> None:
    """Have IPython, if this process runs it, name units after each cell and note what the engine does not manage."""
    get_ipython = user_namespace().get("get_ipython")
    if get_ipython is not None:
        events = get_ipython().events  # each is registered once, even if the process was a rank before
        events.register("pre_run_cell", _before_cell)
        events.register("post_run_cell", _after_cell)


def _note_line(error: BaseException) -> None:
    """Keep the line of an error: its frames are dropped before its reply arrives, while others may still wait."""
    line = raised_line(error)
    if _runtime is not None and line is not None:
        _runtime.raised = line, time.monotonic_ns()


def _before_cell(_: object) -> None:
    if _runtime is not None:
        _runtime.raised = None
        no_keyboard.install()
        _runtime.gate.watch_gradients()
        _runtime.membership.begin_cell()


def _after_cell(_: object) -> None:
    if _runtime is not None:
        _runtime.membership.end_cell()
        with suppress(RuntimeError):  # after a device error nothing can be read from the device
            _runtime.note_models()
            _runtime.write_private()


def connect(data: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON data
    """Join the process group and define the cells' variables, for a :class:`~workbench.protocol.starting.Connect`.

    Collective. Return the reply as data.

    Raises:
        ValueError: ``data`` is not such a request.
    """
    request: Connect = decode(Connect, data, "connect")
    runtime = this_rank()
    runtime.groups.join(request.address)
    runtime.recorder.device_clock = clock = backend_of(runtime.groups.device).clock()
    mine = RankInfo(
        rank=runtime.groups.rank,
        host=runtime.groups.host.name,
        device=runtime.groups.device_name,
        pid=os.getpid(),
        baseline_bytes=_sample_memory(runtime),
        device_error_ns=0 if clock is None else clock.error_ns,
        sees_cpp=sees_all_collectives(),
    )
    runtime.recorder.set_run(mine, mesh_shape=(runtime.groups.world_size,), mesh_axes=("shard",))
    groups = runtime.groups
    values = (groups.rank, groups.world_size, groups.device, groups.mesh, log_metric)
    user_namespace().update(zip(OFFERED, values, strict=True))
    return encode(
        ConnectReply(
            rank=mine.rank,
            host=mine.host,
            device=mine.device,
            pid=mine.pid,
            clock=clock_here(),
            notice=untried(),
            refuses=runtime.groups.refuse(),
        )
    )


def _sample_memory(runtime: RankRuntime) -> int:
    """Sample this process's memory from now on, and return its size before anything is sharded.

    If the engine's bytes are on a device with its own memory, sample nothing and return 0.
    """
    if not backend_of(runtime.groups.device).is_host:
        return 0
    resident = RssSampler(runtime.recorder.resident)
    runtime.recorder.on_phase = resident.sample
    runtime.reads.on_read = resident.sample
    runtime.recorder.on_unit = partial(resident.sample, SHARDING)
    return resident.num_bytes()


def execute(command: dict[str, Any], entry: int = 0) -> dict[str, Any]:
    """Run one command (``commands.to_dict``) in this thread and return its reply as data; raises what it raises.

    Args:
        command: the command.
        entry: number of entries of the program that are done.
    """
    this_rank().entry = entry
    data: dict[str, Any] = encode(this_rank().execute(from_dict(command)))
    return data


def give_up_step() -> None:
    """Discard the step that was under way when another rank died: models hold this rank's shards again.

    It needs no other rank. The process groups stay as they are, so collectives keep raising.
    """
    runtime = this_rank()
    _discard_step(runtime)
    with runtime.watch.paused():
        runtime.watch.renew(())


def _discard_step(runtime: RankRuntime) -> None:
    """Drop what is left of the step under way, without waiting for anything."""
    runtime.gate.forget_requests()
    runtime.recorder.give_up_step()
    runtime.watch.discard_step()


def recover(generation: str) -> None:
    """Rebuild the process groups after a failure and make the next step clean; collective over all ranks.

    Variables that held an old group then hold its replacement.

    Args:
        generation: a name that no earlier call used, equal on all ranks.
    """
    runtime = this_rank()
    _discard_step(runtime)
    SNAPSHOTS.leave()
    with runtime.watch.paused():
        replaced = runtime.groups.rebuild(generation)
        exchange(replaced)
        runtime.watch.renew(replaced)
        # some ranks may have begun a step that others have not: a step must have the same number on all ranks
        runtime.recorder.next_step = runtime.groups.largest(runtime.recorder.next_step)


def begin_replay() -> None:
    """Run what follows off the record, until :func:`end_replay`: it repeats what is recorded."""
    runtime = this_rank()
    runtime.replay = ReplayedSteps(runtime.recorder.next_step, runtime.trainer.optimizer_steps, ExitStack())
    runtime.replay.held.enter_context(runtime.recorder.unrecorded())
    runtime.trainer.is_repeating = True


def marks() -> Any:  # noqa: ANN401 - JSON data
    """Return when the snapshots that this rank keeps were taken (:class:`~workbench.protocol.rank_messages.Marks`).

    It keeps the state of the last completed step too, for its replicas.
    """
    return encode(replace(SNAPSHOTS.marks(), replica=this_rank().hold_replica()))


def snapshot_bytes() -> dict[str, Any]:
    """Return the bytes of a snapshot's tensors now, whether an optimizer has none yet, and what it would leave out."""
    runtime = this_rank()
    with runtime.watch.paused():
        runtime.reshard_models()
    objects = TrainingObjects.among(variables())
    grows = any(not optimizer.state for optimizer in objects.optimizers.values())
    return {"num_bytes": flat_bytes(objects), "grows": grows, "left_out": unreached(variables())}


def private_steps() -> list[int]:
    """Return after which steps this rank, or the process whose place it took, wrote what only it held."""
    private = this_rank().private
    return [] if private is None else [each.state.step for each in private.read()]


def lacks_objects(mark: dict[str, Any], step: int | None) -> bool:
    """Return whether the state that this rank holds, as of :func:`put_back`, has objects that no cell has made."""
    state = SNAPSHOTS.state_of(decode(SnapshotMark, mark, "mark") if step is None else None)
    objects = TrainingObjects.among(variables())
    return state is not None and bool(state.options.keys() - objects.optimizers or state.others.keys() - objects.others)


def put_back(mark: dict[str, Any], sources: dict[int, int], step: int | None) -> None:
    """Give this rank the state of a snapshot, or that which replicas hold; collective.

    Args:
        mark: the snapshot's :class:`~workbench.protocol.rank_messages.SnapshotMark`, as data.
        sources: the ranks that do not have it, and from which ranks they get it.
        step: number of steps that led to it, if replicas hold it; None: it is a snapshot.
    """
    runtime = this_rank()
    with runtime.watch.paused():
        runtime.reshard_models()
        if step is None:
            step = SNAPSHOTS.put_back(decode(SnapshotMark, mark, "mark"), sources, runtime.groups)
        else:
            written = [] if runtime.private is None else runtime.private.read()
            private = max((each for each in written if each.state.step <= step), key=_step_of, default=None)
            step = SNAPSHOTS.put_back_replica(sources, private, runtime.replicas, runtime.groups)
    runtime.trainer.trained_steps = step
    runtime.account_optimizers()


def _step_of(private: PrivateState) -> int:
    return private.state.step


def end_replay() -> dict[str, Any]:
    """Record again, from the next step on.

    Return its number, which variables were kept, and which are other than before.
    """
    runtime = this_rank()
    if runtime.replay is not None:
        runtime.replay.held.close()
        runtime.recorder.next_step = runtime.replay.next_step
        runtime.trainer.optimizer_steps = runtime.replay.optimizer_steps
        runtime.replay = None
        runtime.trainer.is_repeating = False
    SNAPSHOTS.replica = None
    runtime.account_snapshots()
    runtime.note_models()
    found = process_reset.give_back()
    runtime.write_private()
    return {**found, "next_step": runtime.recorder.next_step}


def shutdown(*, goes_on: bool = False) -> None:
    """Leave the process groups; safe to call more than once.

    Args:
        goes_on: keep what a heal needs.
    """
    global _runtime  # noqa: PLW0603 - see boot
    if _runtime is not None:
        if _runtime.replay is not None:  # another rank was lost meanwhile
            _runtime.replay.held.close()
        error_notes.uninstall()
        faults.remove(_runtime)
        _runtime.gate.uninstall()
        _runtime.watch.end()
        _runtime.reads.remove()
        _runtime.emptied.remove()
        _runtime.membership.uninstall()
        _runtime.history.remove()
        for hook in _runtime.hooks:  # the process may become another rank
            hook.remove()
        SNAPSHOTS.leave()
        if _runtime.private is not None and not goes_on:
            _runtime.private.remove()
        _runtime.groups.leave()
        _runtime = None


def handle_request(data: dict[str, Any]) -> tuple[Any, list[memoryview]]:
    """Handle a request of the control thread (:mod:`workbench.protocol.rank_messages`): return data and its buffers.

    Raises:
        ValueError: ``data`` is not a request.
        UsageError: as :meth:`Gate.request`.
    """
    buffers: list[memoryview] = []
    return encode(this_rank().answer(read_request(data)), buffers), buffers
