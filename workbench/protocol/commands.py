"""The commands of ``%fsdp``, each declared once as a frozen dataclass.

A magic, a button and the Python API build the same command, and :meth:`workbench.workbench.Workbench.do` runs it. The
docstring of a command is its help, and its fields are its arguments, on the line
(:mod:`workbench.magics.command_lines` makes the parser) and in Python (:func:`workbench.workbench.Workbench` takes its
methods' signatures from here). A command for ranks is sent to them as plain data.

To add a command that runs on ranks: declare it here under :func:`command`, with the type of its reply; write its
handler in ``runtime/``, under :func:`workbench.runtime.command_handlers.does`; and the function that makes its report,
with a row in :mod:`workbench.reports.report_makers`. It then has a parser, a help text, completion and a method.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, ClassVar, Generic, Self, TypeVar, dataclass_transform, get_args

from workbench.base.codec import decode_named, encode
from workbench.base.devices import AUTO, CHOICES
from workbench.base.machines import DEFAULT, MACHINES
from workbench.errors import UsageError
from workbench.protocol.arguments import (
    Argument,
    argument,
    argument_of,
    count,
    number,
    rank,
    ranks,
    several,
    without_variables,
)
from workbench.protocol.breakpoints import UNTIL, Breakpoint, Condition, read_event, with_condition
from workbench.protocol.checkpoint_replies import LoadReply, ResumeCheck, SaveReply
from workbench.protocol.fault_kinds import NAMES as FAULTS
from workbench.protocol.fault_kinds import RANDOM, FaultReply, check_name
from workbench.protocol.lint_reply import LintReply
from workbench.protocol.policy import (
    APIS,
    AUTO_PREFETCH,
    DTYPES,
    ENGINES,
    HOSTS,
    OFF,
    RESHARD_AFTER_FORWARD,
    STRATEGIES,
    ModelPolicy,
    PrecisionNames,
    as_mesh,
    as_prefetch,
    as_reshard_after_forward,
    check_engine,
    check_given,
    check_mesh,
    check_mesh_fits,
    check_reshard_fits,
    check_strategy_fits,
    read_mesh,
)

R_co = TypeVar("R_co", covariant=True)
C = TypeVar("C", bound="Command")
Q = TypeVar("Q", bound="RankRequest[Any]")

NEXT = ("event", "collective", "unit", "phase")
BREAK = ("add", "list", "clear", "on", "off")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Base of all commands; their attributes are the arguments of :func:`command`.

    Attributes:
        on_ranks: whether every rank runs it, in its main thread.
        looks: whether it is read-only: it changes no rank and writes no file.
    """

    word: ClassVar[str] = ""
    example: ClassVar[str] = ""
    more: ClassVar[str] = ""
    method: ClassVar[str] = ""
    on_ranks: ClassVar[bool] = False
    needs_ranks: ClassVar[bool] = True
    looks: ClassVar[bool] = False
    reply: ClassVar[Any] = NoneType

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the method of the workbench that runs it, and its arguments."""
        return self.method or self.word, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def waits_for_start(self) -> bool:
        """Whether ranks must be started first: the command needs them, and no given argument waives that."""
        given = (argument_of(f) for f in dataclasses.fields(self) if getattr(self, f.name))
        return self.needs_ranks and not any(known.needs_no_ranks for known in given)


def summary(command: type[Command]) -> str:
    """Return the first line of a command's docstring."""
    first = (command.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return first[:1].lower() + first[1:]


class RankRequest(Generic[R_co]):
    """Base of the internal requests to a rank, most of them to its control thread, declared under :func:`request`.

    ``R_co`` is the type of the reply; None: it only reports completion.
    """

    word: ClassVar[str]
    reply: ClassVar[Any] = NoneType
    looks: ClassVar[bool] = False


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, argument))
def command(
    example: str,
    *,
    word: str = "",
    more: str = "",
    method: str = "",
    reply: Any = None,  # noqa: ANN401 - a type
    needs_ranks: bool = True,
    looks: bool = False,
) -> Callable[[type[C]], type[C]]:
    """Make a class a frozen dataclass that declares a command; its fields are keyword-only by default.

    Args:
        example: a valid line, without ``%fsdp``.
        word: its name after ``%fsdp``; empty: the first word of ``example``.
        more: further text of its row in ``docs/commands.md``, in Markdown.
        method: the method of :class:`~workbench.workbench.Workbench` that runs it; empty: that of the same name.
        reply: type of a rank's reply; every rank then runs the command, in its main thread. None: the notebook runs it.
        needs_ranks: whether it needs started ranks, unless an argument waives that.
        looks: whether it is read-only: it changes no rank and writes no file.
    """

    def declare(cls: type[C]) -> type[C]:
        cls.word, cls.example, cls.more, cls.method = word or example.split(maxsplit=1)[0], example, more, method
        cls.on_ranks, cls.needs_ranks, cls.looks = reply is not None, needs_ranks, looks
        cls.reply = NoneType if reply is None else reply
        return dataclass(frozen=True, kw_only=True)(cls)

    return declare


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, argument))
def request(word: str, *, looks: bool = False) -> Callable[[type[Q]], type[Q]]:
    """Make a class a frozen dataclass that declares a :class:`RankRequest`; its base names the type of the reply.

    Args:
        word: its name in the message.
        looks: whether it is read-only, so that a notebook that does not control the ranks may send it.
    """

    def declare(cls: type[Q]) -> type[Q]:
        cls.word, cls.looks, (cls.reply,) = word, looks, get_args(vars(cls)["__orig_bases__"][0])
        return dataclass(frozen=True, kw_only=True)(cls)

    return declare


# ---- the ranks


START_TIMEOUT_S = 60
"""Time that the start of ranks may take, in seconds, without progress."""

_INTERFACE = Argument(
    about="network interface between the hosts (default: that of the route between them)", metavar="NAME"
)


@command(
    "start -n 4",
    more="`--engines ssh`, `slurm`, `mpi` or another ipyparallel launcher: on other machines, configured by "
    "`--profile P`",
    needs_ranks=False,
)
class Start(Command):
    """Start ranks."""

    num_ranks: int = argument(
        "number of ranks (default 4)", default=4, flags=("-n", "--num-ranks"), metavar="N", read=number
    )
    device: str = argument(f"device kind of the ranks (default {AUTO})", default=AUTO, choices=CHOICES)
    profile: str | None = argument("IPython profile with the cluster's configuration (default: none)", default=None)
    engines: str = argument(
        "ipyparallel launcher of the engines: ssh, slurm, mpi, ... (default: the profile's, else the fast start "
        "on this machine)",
        default="",
        metavar="LAUNCHER",
        completes="launchers",
    )
    interface: str = argument(_INTERFACE, default="")
    start_timeout_s: int = argument(
        f"time that the start may take, in seconds, without progress (default {START_TIMEOUT_S})",
        default=START_TIMEOUT_S,
        flags=("--timeout",),
        metavar="S",
        read=number,
    )


@command(
    "attach --profile mine",
    more="`--cluster-id ID` or `--file ipcontroller-client.json`: choose the cluster; ranks that another notebook "
    "controls are view-only",
    method="join",
    needs_ranks=False,
)
class Attach(Command):
    """Use engines that are already running as ranks; engines that are ranks already keep their variables.

    Raises:
        ValueError: both ``take`` and ``look`` are given.
    """

    num_ranks: int | None = argument(
        "number of ranks (default: all)", default=None, flags=("-n", "--num-ranks"), metavar="N", read=number
    )
    profile: str | None = argument("IPython profile that the cluster was started with", default=None)
    cluster_id: str = argument("cluster of that profile", default="", metavar="ID")
    file: str = argument(
        "connection file for clients, instead of a profile", default="", metavar="FILE", flags=("--file",)
    )
    device: str = argument(f"device kind of the ranks (default {AUTO})", default=AUTO, choices=CHOICES)
    interface: str = argument(_INTERFACE, default="")
    take: bool = argument("take control of ranks whose notebook is gone", default=False)
    look: bool = argument("only view the ranks, also if no notebook controls them", default=False)

    def __post_init__(self) -> None:
        if self.take and self.look:
            raise ValueError("--take takes control of the ranks, and --look leaves them alone: choose one")


@command("status", looks=True)
class Status(Command):
    """Show the ranks, the sharded models, and the size of the trace."""


@command("detach", looks=True)
class Detach(Command):
    """Detach from attached ranks; they keep running, with their variables, and can be attached again."""


@command("stop", needs_ranks=False)
class Stop(Command):
    """Stop the ranks; the trace is kept."""


@command("heal")
class Heal(Command):
    """Replace ranks that died, repeat the cells on all ranks, and go on from the newest snapshot."""


@command("dashboard", needs_ranks=False, looks=True)
class Dashboard(Command):
    """Show the ranks live and at any past event, with buttons to stop inside a step."""


# ---- how a model is sharded

_MODEL = Argument(about="variable of the model on the ranks, such as model", metavar="MODEL", completes="modules")
_POLICY = {
    "api": Argument(about="FSDP API; classic: FullyShardedDataParallel, one flat parameter per unit", choices=APIS),
    "strategy": Argument(
        about="classic only: what is sharded; grad keeps full parameters until backward, hybrid2 does so within a "
        "replica",
        choices=tuple(STRATEGIES),
    ),
    "orig_params": Argument(
        about="classic only: the optimizer has the rank's shard of each parameter, not the flat parameter"
    ),
    "wrap": Argument(
        about="module classes; each instance becomes a unit",
        metavar="CLASS,...",
        read=several,
        completes="classes",
    ),
    "mesh": Argument(
        about="number of shard ranks, or replicas x shard ranks; hosts: one replica per host",
        metavar="4|2x2|hosts",
        read=read_mesh,
        completes=(HOSTS,),
        joint="x",
    ),
    "reshard_after_forward": Argument(
        about="free full parameters after forward; auto: except the root's; K: reshard them over K ranks",
        metavar="auto|true|false|K",
        read=as_reshard_after_forward,
        completes=RESHARD_AFTER_FORWARD,
    ),
    "mp": Argument(
        about=f"dtypes of compute, reduction and output: {', '.join(DTYPES)}; {OFF}: none, reduce={OFF}: none for "
        f"reduction; keep=*.norm*: parameters that compute in their own dtype (shard only)",
        metavar="DTYPE[,reduce=DTYPE][,output=DTYPE][,keep=GLOB]",
        completes=(*DTYPES, OFF),
    ),
    "offload": Argument(about="keep shards in host memory"),
    "prefetch": Argument(
        about="gather N units ahead, in module order; auto or 0: the engine's own order, which gathers one ahead",
        metavar="auto|N",
        read=as_prefetch,
        completes=(AUTO_PREFETCH,),
    ),
}


def _policy(name: str, default: str = "unchanged") -> Argument:
    """Return an argument that ``shard`` and ``reshard`` have; ``default`` in words."""
    return replace(_POLICY[name], about=f"{_POLICY[name].about} (default: {default})")


@dataclass(frozen=True, kw_only=True)
class _Sharding(Command):
    """Common fields of ``shard`` and ``reshard``, in user notation."""

    wrap: Sequence[str] = ()
    mesh: int | str | Sequence[int] = ()
    reshard_after_forward: str | int = ""
    api: str = ""
    strategy: str = ""

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """``(F,)``: all F ranks share one copy; ``(R, F)``: R copies, each shared by F ranks. Empty: none is given.

        For ``hosts``, :meth:`on_hosts` resolves it first.
        """
        return as_mesh(self.mesh)

    @property
    def given(self) -> dict[str, Any]:
        """The options of a policy that are not at their default."""
        names = ModelPolicy.__dataclass_fields__
        options = (f for f in dataclasses.fields(self) if f.name in names)
        values = {f.name: (getattr(self, f.name), f.default) for f in options}  # 0 is not False, but equal to it
        return {name: value for name, (value, usual) in values.items() if (type(value), value) != (type(usual), usual)}

    def on_hosts(self, ranks_per_host: Sequence[int]) -> Self:
        """Return the same with the mesh ``hosts`` in numbers: copies across hosts, shards within.

        Args:
            ranks_per_host: number of ranks on each host; ranks of a host are neighbours.

        Raises:
            ValueError: hosts have different numbers of ranks, or another given option needs another mesh.
        """
        if self.mesh != HOSTS:
            return self
        if len(set(ranks_per_host)) > 1:
            there = ", ".join(map(str, ranks_per_host))
            raise ValueError(f"mesh {HOSTS} needs the same number of ranks on every host, not {there}")
        mesh = (len(ranks_per_host), ranks_per_host[0]) if len(ranks_per_host) > 1 else tuple(ranks_per_host)
        return replace(self, mesh=mesh)

    def check_fits(self, world_size: int, shard_size: int) -> None:
        """Check that the mesh holds all ranks and a number of ranks splits a copy.

        Args:
            world_size: number of ranks.
            shard_size: ranks that share a copy where no mesh is given; 0: not known.

        Raises:
            ValueError: it does not; the message lists the values that fit.
        """
        check_mesh_fits(self.mesh_shape, world_size)
        shared_by = [shard_size, *self.mesh_shape][-1]
        if shared_by:
            check_reshard_fits(self.reshard_after_forward, shared_by)

    def _check(self, model: str) -> None:
        """Raise unless each field has a valid value or its default."""
        _check_model(model)
        self._read_python()
        _set(self, wrap=_tuple(self.wrap), mesh=read_mesh(self.mesh))
        _check_classes("wrap", self.wrap)
        if self.mesh and self.mesh != HOSTS:
            check_mesh(self.mesh_shape)
        check_given(self.api, self.given)

    def _read_python(self) -> None:
        """Replace what Python code writes as torch does, such as ``reshard_after_forward=False``, by its notation."""
        if isinstance(self.reshard_after_forward, bool):
            _set(self, reshard_after_forward=str(self.reshard_after_forward).lower())
        if getattr(self, "prefetch", None) == AUTO_PREFETCH:
            _set(self, prefetch=0)


@dataclass(frozen=True, kw_only=True)
class UnmanagedState:
    """State of a sharded model that the engine does not manage, on one rank.

    Attributes:
        params: names of trainable parameters that belong to no unit; their gradients are not averaged.
        hooks: names of sharded parameters with a ``register_hook`` that is never called.
        buffers: checksum of each buffer by name.
    """

    params: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    buffers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelSharding:
    """A model after sharding.

    Attributes:
        model: its name on the ranks.
        units: paths of its units, ``(root)`` for the model's own.
        num_params: parameters (tensors).
        num_elements: elements of all parameters.
        bytes_unsharded: bytes of the whole model.
        policy: a phrase for each non-default property of how units are sharded and computed.
        chosen: classes that were wrapped because the command named none; None if it named some.
    """

    model: str
    units: tuple[str, ...]
    num_params: int
    num_elements: int
    bytes_unsharded: int
    policy: tuple[str, ...] = ()
    chosen: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ShardReply(ModelSharding):
    """A model after sharding, on one rank.

    Attributes:
        bytes_at_rest: bytes of parameters that the rank keeps between steps, padding included.
        optimizers: number of optimizers that use its parameters.
        lint: what the rules of ``lint`` find.
        is_changed: whether the command changed anything.
        first_step: number of the next step, the first one under this policy.
    """

    bytes_at_rest: int
    optimizers: int
    lint: LintReply = field(default_factory=LintReply)
    is_changed: bool = True
    first_step: int = 0


@command("shard model --wrap Block", reply=ShardReply)
class Shard(_Sharding):
    """Shard a model with fully_shard or the classic wrapper, one unit per module of a class.

    Raises:
        ValueError: a field has an invalid value.
    """

    model: str = argument(_MODEL, kw_only=False)
    engine: str = argument(
        "what runs the model; torch: torch's own FSDP, without reshard and unshard (default: workbench)",
        default=ENGINES[0],
        choices=ENGINES,
    )
    api: str = argument(_policy("api", "fully_shard"), default="fully_shard")
    strategy: str = argument(_policy("strategy", "full"), default="")
    orig_params: bool = argument(_policy("orig_params", "no"), default=False)
    wrap: Sequence[str] = argument(_policy("wrap", "chosen from the model"), default=())
    mesh: int | str | Sequence[int] = argument(_policy("mesh", "one replica"), default=())
    reshard_after_forward: str | int = argument(_policy("reshard_after_forward", "auto"), default="auto")
    mp: str = argument(_policy("mp", OFF), default=OFF)
    offload: bool = argument(_policy("offload", "no"), default=False)
    prefetch: int = argument(_policy("prefetch", "0"), default=0)
    ignore: Sequence[str] = argument(
        "parameters to leave unsharded, such as *.bias", default=(), metavar="GLOB,...", read=several
    )

    def __post_init__(self) -> None:
        check_engine(self.engine)
        self._check(self.model)
        _set(self, ignore=_tuple(self.ignore))
        if not all(_is_pattern(glob) for glob in self.ignore):
            raise ValueError(
                f"ignore takes patterns of names without commas or outer spaces, such as *.bias, not {self.ignore}"
            )
        if self.mesh != HOSTS:
            check_strategy_fits(self.api, self.strategy, self.mesh_shape)


@command(
    "reshard model --reshard-after-forward false", more="`reshard model.blocks.2`: only this unit", reply=ShardReply
)
class Reshard(_Sharding):
    """Change the sharding of a model in place; optimizers keep their state.

    Options that are not given stay unchanged, also those within ``mp``, and so do the parameters that ``shard``
    ignored. A name such as ``model.blocks.2`` selects one unit: its ``reshard_after_forward``, ``mp`` and ``offload``
    change, and no other unit does.

    Raises:
        ValueError: a field has an invalid value.
    """

    model: str = argument(
        "variable of the model on the ranks, such as model, or one unit of it, such as model.blocks.2",
        kw_only=False,
        metavar="MODEL",
        completes="parts",
    )
    api: str = argument(_policy("api"), default="")
    strategy: str = argument(_policy("strategy"), default="")
    orig_params: bool | None = argument(_policy("orig_params"), default=None)
    wrap: Sequence[str] = argument(_policy("wrap"), default=())
    mesh: int | str | Sequence[int] = argument(_policy("mesh"), default=())
    reshard_after_forward: str | int = argument(_policy("reshard_after_forward"), default="")
    mp: str = argument(_policy("mp"), default="")
    offload: bool | None = argument(_policy("offload"), default=None)
    prefetch: int | None = argument(_policy("prefetch"), default=None)

    def __post_init__(self) -> None:
        self._check(self.model)
        if self.mp and PrecisionNames.parse(self.mp).keep:
            raise ValueError(f"mp {self.mp!r}: keep= is for shard; {OFF} and then shard choose other parameters")


@command(
    "plan model --ranks 64 --device a100-80gb",
    more="`--mesh 8x8`, `--mp bf16`, ...: sharded in another way; then `compare plan last`; `--fit 80GB`: what fits",
)
class Plan(Reshard):
    """Say what the program would need and take on other machines, which need not exist.

    The cells and commands that all ranks have completed run once more, on one planned rank, without any data; then the
    options change the sharding as ``reshard`` does (``shard``, if the model is not sharded), and two steps run. Bytes
    and collectives are exact; times are the least that the device's published peaks allow, or as measured at hand.

    Raises:
        ValueError: a field has an invalid value.
    """

    ranks: int = argument("number of ranks (default 8)", default=8, read=number)
    hosts: int | None = argument("number of hosts (default: as few as their devices need)", default=None, read=number)
    device: str = argument(
        f"device, such as a100-80gb, or a file that workbench calibrate has written (default {DEFAULT})",
        default=DEFAULT,
        metavar="NAME|FILE.json",
        completes=tuple(MACHINES),
    )
    fit: str = argument(
        "search the policies for what fits into that many bytes a rank; device: into the device's memory",
        default="",
        metavar="80GB|device",
    )
    checkpoint: Sequence[str] = argument(
        "module classes; each instance keeps only its inputs for backward, and computes forward again (default: none)",
        default=(),
        metavar="CLASS,...",
        read=several,
        completes="classes",
    )
    fn: str = argument("the step function (default train_step)", default="train_step", completes="variables")
    out: str = argument("trace file to write (default: none)", default="", metavar="FILE", completes="files")

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, checkpoint=_tuple(self.checkpoint))
        _check_classes("checkpoint", self.checkpoint)


@dataclass(frozen=True, kw_only=True)
class UnshardReply:
    """A model that is a plain module again.

    Attributes:
        model: its name on the ranks.
        num_params: parameters (tensors).
        optimizers: optimizers whose state was carried along.
    """

    model: str
    num_params: int
    optimizers: int


@command("unshard model", reply=UnshardReply)
class Unshard(Command):
    """Make a sharded model a plain module again, with the same values.

    Raises:
        ValueError: ``model`` is not the name of one.
    """

    model: str = argument(_MODEL, kw_only=False)

    def __post_init__(self) -> None:
        _check_model(self.model)


@command(
    "lint",
    more="`lint model`: only this model; `workbench lint train.py -n 2`: a script, with an exit status",
    reply=LintReply,
)
class Lint(Command):
    """Check sharded models without running them: optimizers, dtypes, units, meshes, buffers, data; name each fix.

    Raises:
        ValueError: ``model`` is not the name of one.
    """

    model: str = argument(
        "sharded model (default: all)", default="", kw_only=False, metavar="MODEL", completes="modules"
    )

    def __post_init__(self) -> None:
        if self.model:
            _check_model(self.model)


# ---- training, and stopping inside of it

_FN = Argument(about="step function (default train_step)", metavar="NAME", completes="variables", flags=("--fn",))
_UNTIL = Argument(
    about="stop once, before this event: EVENT[:UNIT], nan or 'grad_norm > 10'", metavar="EVENT", completes="events"
)
_SNAPSHOT = Argument(
    about="keep a snapshot in memory every K steps, from which heal goes on (default: none)",
    metavar="K",
    read=count("0 for none"),
)
_BACKGROUND = Argument(about="run in the background: the notebook stays free (default: no)")


@dataclass(frozen=True, kw_only=True)
class StepReply:
    """The steps of one rank.

    Attributes:
        steps_done: number of steps done.
        losses: loss of each step, None for a step without a loss; None: no step has one.
        seconds: duration of each step in seconds, without the time it was held.
        optimizer_steps: number of optimizer steps since the rank was started.
        first_step: number of the first of the steps.
        unreduced: names of units, root ``""`` included, with gradients that were not reduced after a step.
        never_cleared: optimizers, by variable, whose steps used gradients of their last step again.
        never_reduced: optimizers, by variable, whose newest step lacked gradients that were not reduced.
        saved: the checkpoints that were saved meanwhile.
        snapshot_bytes: bytes of the snapshots that it keeps; 0: none were taken.
        unsharded: variables of the models that optimizers trained, if no collective was issued and none is sharded.
        rows: rows of the batches that sharded models got in training forwards, by step.
    """

    steps_done: int
    losses: tuple[float | None, ...] | None
    seconds: tuple[float, ...]
    optimizer_steps: int
    first_step: int
    unreduced: tuple[str, ...] = ()
    unsharded: tuple[str, ...] = ()
    never_cleared: tuple[str, ...] = ()
    never_reduced: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    saved: tuple[SaveReply, ...] = ()
    snapshot_bytes: int = 0


@command(
    "step 40",
    more="`--save runs/a --every 10`: a checkpoint after every ten steps, written while training goes on",
    reply=StepReply,
)
class Step(Command):
    """Train: call train_step() N times on every rank; a number that it returns is the loss.

    Raises:
        ValueError: ``count`` < 1, ``snapshot`` < 0, ``fn`` is not a name, ``until`` not an event, or ``every`` given
            without ``save``.
    """

    count: int = argument("number of training steps (default 1)", default=1, kw_only=False, metavar="N", read=number)
    fn: str = argument(_FN, default="train_step", kw_only=False)
    until: str = argument(_UNTIL, default="")
    background: bool = argument(_BACKGROUND, default=False)
    save: str = argument(
        "save checkpoints into this folder (default: none)", default="", metavar="FOLDER", completes="files"
    )
    every: int = argument(
        "with --save: after every K steps (default: after the last one)", default=0, metavar="K", read=number
    )
    snapshot: int = argument(_SNAPSHOT, default=0)

    def __post_init__(self) -> None:
        if self.every < 0 or (self.every and not self.save):
            raise ValueError("--every K goes with --save FOLDER, and K is at least 1")
        if type(self.snapshot) is not int or self.snapshot < 0:
            raise ValueError(f"snapshots are taken every K steps, 0 for none, not {self.snapshot!r}")
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"the number of steps is a whole number of at least 1, not {self.count!r}")
        _check_function(self.fn)
        _check_until(self.until)

    @property
    def stop(self) -> Breakpoint | None:
        """The one-time breakpoint of ``until``; None if it is not given."""
        return _stop_at(self.until)

    def saves_after(self, done: int) -> bool:
        """Return whether a checkpoint is saved after so many of its steps."""
        return bool(self.save) and (done == self.count or (bool(self.every) and done % self.every == 0))


@dataclass(frozen=True, kw_only=True)
class SnapshotReply:
    """A snapshot of one rank.

    Attributes:
        num_bytes: bytes of this rank's state.
        kept_bytes: bytes of all snapshots that it keeps: its own and those of the rank before, the older ones included.
        seconds: how long it took.
        left_out: what has a state that is not part of it.
    """

    num_bytes: int
    kept_bytes: int
    seconds: float
    left_out: tuple[str, ...] = ()


@command("snapshot", more="`%fsdp step 300 --snapshot 10`: every 10 steps", reply=SnapshotReply)
class Snapshot(Command):
    """Keep the training state in memory, each rank also that of the rank before, for %fsdp heal."""


@dataclass(frozen=True, kw_only=True)
class RunReply:
    """A script that one rank has run.

    Attributes:
        steps_done: number of steps that its training loop did.
        seconds: duration in seconds, without the time it was held.
        models: variables of it that hold a model.
    """

    steps_done: int
    seconds: float
    models: tuple[str, ...] = ()


@command(
    "run train.py --lr 1e-3",
    more="`-m my_package.train`: a module; `--background` and `--until EVENT` precede the file",
    method="run_script",
    reply=RunReply,
)
class Run(Command):
    """Run a training script on the ranks, unchanged, as torchrun would; its variables stay.

    Raises:
        ValueError: ``script`` is empty, or ``until`` not an event.
    """

    script: str = argument("the script", kw_only=False, metavar="FILE", completes="scripts")
    args: Sequence[str] = argument(
        "arguments of the script: the rest of the line",
        default=(),
        kw_only=False,
        metavar="ARGS",
        takes_rest=True,
    )
    module: bool = argument("FILE is a module, as for python -m", default=False, flags=("-m",))
    until: str = argument(_UNTIL, default="")
    background: bool = argument(_BACKGROUND, default=False)

    def __post_init__(self) -> None:
        _set(self, args=tuple(map(str, _tuple(self.args))))
        if not self.script:
            raise ValueError("run needs a script, such as train.py")
        _check_until(self.until)

    @property
    def stop(self) -> Breakpoint | None:
        """The one-time breakpoint of ``until``; None if it is not given."""
        return _stop_at(self.until)


_FOLDER = Argument(about="folder of checkpoints, or one of them", metavar="FOLDER", completes="files")


@command("save runs/a", more="it becomes `runs/a/step-40`, by one rename when it is whole", reply=SaveReply)
class Save(Command):
    """Save a checkpoint: models, optimizers, schedulers, loaders, random numbers and the number of steps.

    Raises:
        ValueError: ``folder`` is empty.
    """

    folder: str = argument(_FOLDER, kw_only=False)

    def __post_init__(self) -> None:
        _check_folder(self.folder)


@command("load runs/a", more="the newest whole one in it, or `load runs/a/step-40`", reply=LoadReply)
class Load(Command):
    """Load a checkpoint into the variables that have the names of those in it: all of it, or nothing.

    Raises:
        ValueError: ``folder`` is empty.
    """

    folder: str = argument(_FOLDER, kw_only=False)

    def __post_init__(self) -> None:
        _check_folder(self.folder)


@command("pause", more="Ctrl-C during a step does the same, a second one aborts")
class Pause(Command, RankRequest[None]):
    """Stop all ranks at the same event of the running step."""


@command("next collective")
class Next(Command, RankRequest[None]):
    """Continue a stopped step to the next event, collective, unit or phase.

    Raises:
        ValueError: ``what`` is none of :data:`NEXT`.
    """

    what: str = argument(
        "where to stop next (default: event)", default="event", kw_only=False, metavar="|".join(NEXT), choices=NEXT
    )

    def __post_init__(self) -> None:
        if self.what not in NEXT:
            raise ValueError(f"next takes one of {', '.join(NEXT)}, not {self.what!r}")


@command("continue --background", more="`--background` and `--foreground` override this", method="resume")
class Continue(Command, RankRequest[None]):
    """Continue a stopped step, in the background if it was started there."""

    foreground: bool = argument(
        "wait for the step, even if it was started with --background (default: no)", default=False
    )
    background: bool = argument("run the rest in the background (default: no)", default=False)

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the method of the workbench that runs it, and its arguments; with both flags, background wins."""
        return self.method, {"background": self.background if self.foreground or self.background else None}


@command("abort", needs_ranks=False)
class Abort(Command):
    """Abort the running or stopped step or cell; the ranks are ready again afterwards."""


@command("where", more="`--stacks`: also the stacks of its Python threads, your functions first", looks=True)
class Where(Command):
    """Show where every rank is, and since when."""

    stacks: bool = argument("also the stacks of each rank's Python threads (default: no)", default=False)


@command(
    "break add all_gather:blocks.2",
    more="`break add nan`, `'grad_norm > 10'`; `--rank 1`, `--when 'num_bytes > 1e6'`; `break list`; `break clear 1`, "
    "`break off 1`, `break on 1`",
)
class Break(Command):
    """Add, list or clear breakpoints, or turn them on and off; ranks stop before each matching event.

    Raises:
        ValueError: arguments that do not go together.
    """

    action: str = argument("what to do", kw_only=False, metavar="|".join(BREAK), choices=BREAK)
    event: str = argument(
        "an event such as backward:blocks.2, a condition on gradients such as nan, or a breakpoint number",
        default="",
        kw_only=False,
        metavar="EVENT[:UNIT]|ID",
        completes="events",
    )
    rank: int | None = argument("stop only this rank (default: all)", default=None, metavar="R", read=rank)
    when: str | None = argument(
        "a condition such as 'num_bytes > 1e6' (default: always)", default=None, metavar="EXPR", is_code=True
    )

    def __post_init__(self) -> None:
        if self.action not in BREAK:
            raise ValueError(f"break takes {', '.join(BREAK[:-1])} or {BREAK[-1]}, not {self.action!r}")
        if self.action == "add" and not self.event:
            raise ValueError("add needs an event, such as all_gather:blocks.2 or backward")
        if self.action != "add" and (self.rank is not None or self.when is not None):
            raise ValueError(f"{self.action} takes no --rank and no --when")
        if self.action == "list" and self.event:
            raise ValueError("list takes no event")
        if self.action in {"clear", "on", "off"} and self.event and not self.event.isdecimal():
            raise ValueError(f"{self.action} takes a number that %fsdp break list shows, not {self.event!r}")

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the method of the workbench that runs it, and its arguments."""
        if self.action == "add":
            return "break_add", {"event": self.event, "rank": self.rank, "when": self.when}
        if self.action == "list":
            return "break_list", {}
        return f"break_{self.action}", {"id": int(self.event) if self.event else None}


@command("inspect blocks.2.mlp.0.weight")
class Inspect(Command):
    """Show each rank's shard of a parameter, between steps or inside a stopped one, in a table."""

    fqn: str = argument("a parameter, such as blocks.2.mlp.0.weight", kw_only=False, metavar="FQN", completes="fqns")


@command("eval x.shape -t 0", more="`--frame 1`: from the caller's frame", method="evaluate")
class Evaluate(Command):
    """Evaluate an expression inside the stopped step, with the variables of its active functions.

    Raises:
        ValueError: ``expr`` is empty, or ``frame`` is no number of one.
    """

    expr: str = argument(
        "a Python expression: the rest of the line as typed; after --, no part of it is read as a flag",
        kw_only=False,
        metavar="EXPR",
        completes="variables",
        is_code=True,
    )
    ranks: Sequence[int] = argument(
        "ranks that evaluate it, such as 1,3 or 0-2 (default: all)",
        default=(),
        kw_only=False,
        metavar="RANKS",
        flags=("-t", "--targets"),
        read=ranks,
    )
    frame: int = argument(
        "look names up in the N-th active function and its callers; 0: the innermost (default 0)",
        default=0,
        metavar="N",
        read=count("0 for the innermost"),
    )

    def __post_init__(self) -> None:
        _set(self, expr=self.expr.strip(), ranks=tuple(sorted(set(self.ranks))))
        if not self.expr:
            raise ValueError("eval needs an expression, such as x.shape")
        if type(self.frame) is not int or self.frame < 0:
            raise ValueError(f"frame is a number, 0 for the innermost, not {self.frame!r}")

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the method of the workbench that runs it, and its arguments."""
        return self.method, {"expr": self.expr, "ranks": self.ranks or None, "frame": self.frame}


@command("back 3", looks=True)
class Back(Command):
    """Show the trace as of N events ago, 0: the newest event; the ranks' work is not undone."""

    n: int = argument(
        "number of events to go back; 0: to the newest (default 1)",
        default=1,
        kw_only=False,
        metavar="N",
        read=count("0 for the newest event"),
    )


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """A sharded step compared with the same step of an unsharded copy.

    Attributes:
        num_params: number of parameters compared.
        max_abs_diff: largest absolute difference of any element.
        max_rel_diff: largest difference of a parameter relative to its update, as 2-norms; 0.0: no more than rounding.
        worst_param: the parameter with that.
        equal_bits: number of bitwise equal parameters.
        ok: whether all differences are within the tolerance.
        tolerance: the tolerance, in words.
        loss_sharded, loss_reference: the losses of both steps; None: they have none.
        not_finite: parameters with NaN or infinity in both, at the same positions.
        undecided: parameters whose gradient is rounding noise: the sum over ranks or micro-batches is nearly zero.
    """

    num_params: int
    max_abs_diff: float
    max_rel_diff: float
    worst_param: str
    equal_bits: int
    ok: bool
    tolerance: str
    loss_sharded: float | None
    loss_reference: float | None
    not_finite: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first value of its kind that differs between the two steps, on one rank.

    Attributes:
        name: module or parameter; empty: the root module.
        position: index in its order: of execution, of backward, or of the parameters.
        total: number of values in that order.
        relative: norm of the difference relative to that of the unsharded value.
        rows: this rank's rows of the parameter, as text; empty for a module.
    """

    name: str
    position: int
    total: int
    relative: float
    rows: str = ""


@dataclass(frozen=True, kw_only=True)
class GradRatio:
    """Parameters whose gradients have the same ratio to those of the unsharded copy, on this rank's rows.

    Attributes:
        ratio: the ratio, 1.0 where they are equal; None: it differs between elements.
        num_params: number of parameters.
        first: the first of them.
    """

    ratio: float | None
    num_params: int
    first: str


@dataclass(frozen=True, kw_only=True)
class StepCounter:
    """Parameters whose optimizer state has the same number of steps, or has got as many more.

    Attributes:
        steps: the number; None for parameters without state, or whose state counts no steps.
        params: their names.
    """

    steps: int | None
    params: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StepDifferences:
    """Where a sharded step first differs from that of the unsharded copy, on one rank, and what tells the cause.

    Attributes:
        output: first module whose output differs, in the order of execution.
        grad: first parameter whose gradient differs when an optimizer gets it, in the order of backward.
        param: first parameter that differs after the step.
        differs_in_input: whether the root module got other inputs in the two steps.
        num_inputs: elements of the first input of the root module on this rank.
        ratios: ratios of gradients, by parameters.
        norm: 2-norm of the gradients of this rank's rows.
        norm_reference: 2-norm of the unsharded gradients, all rows.
        missing: parameters with a gradient only in the unsharded copy.
        unaveraged: parameters whose gradient is that of this rank alone, which differs from the average.
        unreduced: units that hold gradients that were not reduced, or not over all replicas.
        optimizer_steps: steps of optimizers in the sharded step.
        rounded_to: dtype to which the sharded gradients are rounded, and the unsharded are not; empty if to none.
    """

    output: Difference | None
    grad: Difference | None
    param: Difference | None
    differs_in_input: bool
    num_inputs: int
    ratios: tuple[GradRatio, ...]
    norm: float
    norm_reference: float
    missing: tuple[str, ...] = ()
    unaveraged: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()
    optimizer_steps: int
    rounded_to: str = ""


@dataclass(frozen=True, kw_only=True)
class ReplicaSum:
    """Checksum of this rank's shards of a unit that several groups of ranks have a copy of, before the step.

    Attributes:
        unit: the unit.
        first_rank: lowest of the ranks that should have equal shards.
        crc32: CRC-32 of their bytes.
    """

    unit: str
    first_rank: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """What two tensors of one shape have in common only if they are equal, but for chance and rounding.

    Attributes:
        norm: 2-norm.
        dot: product with a fixed vector.
    """

    norm: float
    dot: float


@dataclass(frozen=True, kw_only=True)
class CopyStep:
    """One parameter in the step of one rank's copy. The copies of ranks that average together should do the same.

    Attributes:
        name: the parameter.
        peers: the ranks that average its gradient together.
        own: this rank's gradient before the average; None: it has none.
        averaged: the average.
        grad: the gradient that an optimizer gets; None: none steps.
        stepped: the parameter after the last step of an optimizer.
        end: the parameter at the end of the step function.
    """

    name: str
    peers: tuple[int, ...]
    own: Sketch | None
    averaged: Sketch | None
    grad: Sketch | None
    stepped: Sketch | None
    end: Sketch


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Where the second of two equal sharded steps first differs from the first, on one rank, and what tells the cause.

    Attributes:
        output: first module whose output differs, in the order of execution.
        grad: first parameter whose gradient differs when an optimizer gets it.
        param: first parameter that differs after the step.
        differs_in_input: whether the root module got other inputs.
        order: first module that is not called in the same place in both steps; None: the orders are equal.
        random: first module at whose call the random numbers' states differ; None: they never do.
        changed: first parameter whose full values differ, before any output does; None: none.
        gathered: checksum of each parameter's full values at its first use, by name.
        operations: operations that have no deterministic implementation here.
        is_deterministic: whether the steps are equal with deterministic operations; None: it was not tried.
    """

    output: Difference | None
    grad: Difference | None
    param: Difference | None
    differs_in_input: bool
    order: str | None = None
    random: str | None = None
    changed: str | None = None
    gathered: dict[str, int] = field(default_factory=dict)
    operations: tuple[str, ...] = ()
    is_deterministic: bool | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyReply(StepComparison):
    """The comparison on one rank.

    Attributes:
        buffers_not_finite: buffers of this rank with NaN before the step.
        since: first step of the current run of steps whose loss was not finite on this rank; None: the last was finite.
        unmanaged: state that the engine does not manage, before the step.
        differences: where the steps differ; None: they do not.
        replicas: checksums of units with several copies.
        uneven_copies: parameters that tensor parallelism copies and of which this rank's copy moved otherwise than
            another rank's.
        left_out: units or modules with gradients whose parameters are in no optimizer and did not move, though others
            did, with their noun: ``unit 0``.
        counters: numbers of steps in the optimizers' state before the step, of parameters of which this rank has rows.
        reset: of these, parameters with 0 steps and moments that are not zero.
        uneven: by how much an optimizer's one step raised them, if not by one for all parameters with a gradient.
        copy: the parameters in the step of the copy, in the order of backward.
        settings: the values of the options of optimizers' groups, as text, by optimizer, group and option.
        optimizer_steps: steps of optimizers in the step of the copy.
        num_inputs: elements of the first input of the root module.
        random_crc32: CRC-32 of the state of torch's random number generator before the step.
        arguments: names of the step function's arguments, if it got the values of the script's last call.
        initial_rate: the learning rate of both steps, with which a schedule began that has ended at 0; 0: none has.
        repetition: the comparison of two equal sharded steps, instead of with a copy; None: with a copy.
        resume: the comparison with a step from a checkpoint, instead of with a copy; None: with a copy.
    """

    buffers_not_finite: tuple[str, ...] = ()
    since: int | None = None
    unmanaged: UnmanagedState = field(default_factory=UnmanagedState)
    differences: StepDifferences | None = None
    replicas: tuple[ReplicaSum, ...] = ()
    uneven_copies: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    counters: tuple[StepCounter, ...] = ()
    reset: tuple[str, ...] = ()
    uneven: tuple[StepCounter, ...] = ()
    copy: tuple[CopyStep, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    optimizer_steps: int = 0
    num_inputs: int = 0
    random_crc32: int = 0
    arguments: tuple[str, ...] = ()
    initial_rate: float = 0.0
    repetition: Repetition | None = None
    resume: ResumeCheck | None = None


@command("verify", more="`--resume runs/a`: prove the checkpoint there", reply=VerifyReply)
class Verify(Command):
    """Compare a step with the same step of an unsharded copy; the training state is not changed.

    Raises:
        ValueError: ``model`` or ``fn`` is not a name, or both ``repeat`` and ``resume`` are given.
    """

    model: str = argument(
        "sharded model (default: the only one)", default="", kw_only=False, metavar="MODEL", completes="modules"
    )
    fn: str = argument(_FN, default="train_step", kw_only=False)
    repeat: bool = argument("run the sharded step twice instead, and compare all bits", default=False)
    resume: str = argument(
        "compare with the step from this checkpoint instead (default: none)",
        default="",
        metavar="FOLDER",
        completes="files",
    )

    def __post_init__(self) -> None:
        if self.repeat and self.resume:
            raise ValueError("--repeat and --resume are two checks: give one of them")
        if self.model:
            _check_model(self.model)
        _check_function(self.fn)


@command(
    "fault straggler --rank 1",
    more="`fault random --seed 3`: one that is not named; `fault off`: remove it, and name it",
    reply=FaultReply,
)
class InjectFault(Command):
    """Inject a fault into the training of the ranks, to see what names it.

    Raises:
        ValueError: there is no such fault, ``ms`` is not positive, or a number is negative.
    """

    name: str = argument(
        "the fault (%fsdp faults lists them), random or off", kw_only=False, metavar="NAME", completes=FAULTS
    )
    rank: int | None = argument("the rank that has it (default: drawn with the seed)", default=None, read=rank)
    ms: int = argument("straggler: milliseconds that it sleeps (default 200)", default=200, metavar="MS", read=number)
    unit: str = argument(
        "the unit that has it (default: drawn with the seed)", default="", metavar="UNIT", completes="units"
    )
    seed: int = argument(
        "seed that draws what is not given (default 0)", default=0, metavar="S", read=count("0 or more")
    )

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.ms < 1 or self.seed < 0 or (self.rank or 0) < 0:
            raise ValueError("--ms is at least 1, --rank and --seed are at least 0")
        if self.name == RANDOM and (self.rank is not None or self.unit):
            raise ValueError(f"{RANDOM} draws rank and unit itself: it takes --seed and --ms only")


@command("faults", needs_ranks=False, looks=True)
class Faults(Command):
    """List the faults that can be injected, and which check detects each."""


# ---- what was recorded

_SIDE = (
    "a trace file, or last: the trace so far; with steps: last:3..5, or last:-3.. (the newest three); 3..5 means "
    "last:3..5"
)
TALK = Argument(about="use sizes and colours for a projector")


@command(
    "explain step",
    more="`explain`: what matters most; `explain peak`, `wait`, `blocks.2`, `rank 1`; `--step 3`",
    looks=True,
)
class Explain(Command):
    """Say what set the peak, where a step's time went, why compute waits or a unit is unsharded, and what to type.

    Every number is read off the trace; what a setting would save is by formula, and marked so. A rank is called slow
    only if the others wait for it in step after step.

    Raises:
        ValueError: ``which`` follows something else than ``rank`` or ``unit``.
    """

    subject: str = argument(
        "peak, step, wait, a unit, or a rank (default: what matters most)",
        default="",
        kw_only=False,
        metavar="peak|step|wait|UNIT|RANK",
        completes="explained",
    )
    which: str = argument(
        "after rank or unit: which one (default: none)", default="", kw_only=False, metavar="RANK|UNIT"
    )
    step: int | None = argument(
        "which step (default: the newest)", default=None, metavar="STEP", read=count("0 for the first step")
    )

    def __post_init__(self) -> None:
        if self.which and self.subject not in {"rank", "unit"}:
            raise ValueError(f"explain takes one unit or rank, not {self.subject!r} and {self.which!r}")


@command(
    "compare before.trace last",
    more="`compare`: the last two policies; steps: `last:3..5`, `last:-3..`",
    needs_ranks=False,
    looks=True,
)
class Compare(Command):
    """Show what changed from one trace, or some of its steps, to another.

    Without A, the steps under the last policy with those under the policy before it, each without its first step. If A
    is the beginning of B, as a file that was exported earlier in the same run, the later steps of B count.

    Raises:
        ValueError: ``b`` is given without ``a``.
    """

    a: str = argument(
        f"{_SIDE} (default: the steps under the last policy but one)",
        default="",
        kw_only=False,
        metavar="A",
        completes="traces",
    )
    b: str = argument(
        "the trace to compare A with, in the same form (default: last)",
        default="",
        kw_only=False,
        metavar="B",
        completes="traces",
    )
    rank: int | None = argument("compare this rank (default: the one whose peak differs most)", default=None, read=rank)
    talk: bool = argument(TALK, default=False)

    def __post_init__(self) -> None:
        if self.b and not self.a:
            raise ValueError("compare takes A, the trace before, and B, the trace after")


@command(
    "export run.trace",
    more="`--steps 3..5`: only these steps; `export train.py`: a script for `torchrun`, with `--engine torch` "
    "for torch's FSDP",
)
class Export(Command):
    """Write the trace (.trace, .json for Perfetto, .html to replay), or what the ranks have done as a script (.py).

    ``torchrun`` starts the script, which has the cells and commands that all ranks have completed since their start,
    and gives the same losses. Cells that raised, aborted steps, cells with ``-t`` and views are left out.
    """

    path: str = argument("output file; its suffix selects the format", kw_only=False, metavar="FILE", completes="files")
    steps: str = argument(
        "only these steps, such as 7, 3..5, 400.. or --steps=-3.. (the newest three)", default="", metavar="STEPS"
    )
    engine: str = argument("a script's FSDP engine (default: the one that ran)", default="", choices=ENGINES)


@command(
    "open run.trace",
    more="replaces the current trace; stop the ranks first",
    method="open_record",
    needs_ranks=False,
    looks=True,
)
class Open(Command):
    """Show a trace file or a recorded run, without ranks: every view, the dashboard, compare and export."""

    path: str = argument(
        "a trace file, the folder of a recorded run, or a profile", kw_only=False, metavar="FILE", completes="records"
    )


@command("history 20", needs_ranks=False, looks=True)
class History(Command):
    """List the commands of this notebook and its panel, as lines to copy."""

    n: int = argument(
        "only the newest N; 0: all (default 0)", default=0, kw_only=False, metavar="N", read=count("0 for all")
    )


@command(
    "output --rank 2",
    more="also what no front end showed: `--lines 0` shows all that is kept",
    needs_ranks=False,
    looks=True,
)
class ShowOutput(Command):
    """Show the newest lines that ranks printed, and how cells and commands ended."""

    rank: int | None = argument("only that rank (default: all)", default=None, read=rank)
    lines: int = argument("the newest N lines; 0: all (default 100)", default=100, metavar="N", read=count("0 for all"))


@command("example", needs_ranks=False, looks=True)
class Example(Command):
    """Insert a cell with a small model, an optimizer and train_step(); in a terminal, print it."""


@command("help shard", more="`-h` after a command explains it", needs_ranks=False, looks=True)
class Help(Command):
    """List the commands, or explain one of them."""

    topic: str = argument("default: all commands", default="", kw_only=False, metavar="COMMAND", completes="words")


@command("-t 0,2\nprint(rank)", word="%%fsdp")
class Cell(Command):
    """Run the cell on all ranks, or on -t RANKS."""

    ranks: Sequence[int] | None = argument(
        "ranks that run the cell, such as 1,3 or 0-2 (default: all)",
        default=None,
        metavar="RANKS",
        flags=("-t", "--targets"),
        read=ranks,
    )


COMMANDS: Mapping[str, type[Command]] = {
    cls.word: cls
    for cls in tuple(vars().values())
    if isinstance(cls, type) and issubclass(cls, Command) and cls.word.isalpha()
}
"""All commands except the drawing ones, which their views declare, in the order of the help."""

ON_RANKS: Mapping[str, type[Command]] = {word: cls for word, cls in COMMANDS.items() if cls.on_ranks}


def to_dict(command: Command) -> dict[str, Any]:
    """Return ``command`` as plain data that JSON can hold."""
    data: dict[str, Any] = encode(command)
    return data


def from_dict(data: dict[str, Any]) -> Command:
    """Inverse of :func:`to_dict`, for commands that run on ranks.

    Raises:
        ValueError: an unknown command or field, a missing field, or a wrong type.
    """
    command: Command = decode_named(ON_RANKS, data, "command")
    return command


def is_by_place(declared: dataclasses.Field[Any]) -> bool:
    """Return whether an argument is positional."""
    return not declared.kw_only and not argument_of(declared).flags


_LIKE_A_FLAG = re.compile(r"(?<!\S)(--|-[^\W\d])")
"""Matches a word of code that argparse would read as a flag, or as the ``--`` that ends flags."""


def to_text(command: Command) -> str:
    """Return the line for ``command``, without fields at their default.

    Positional arguments that could be read as flags are placed after ``--``, behind all flags. Flags precede an
    argument that takes the rest of the line.

    Example: ``Shard(model="m", wrap=("Block",))`` -> ``shard m --wrap Block``; ``Open("-x")`` -> ``open -- -x``.
    """
    places, flags, is_unclear, ends_flags = [], [], False, False
    for f in dataclasses.fields(command):
        value, known = getattr(command, f.name), argument_of(f)
        ends_flags |= known.takes_rest
        if value == f.default and type(value) is type(f.default):  # False and 0 are equal
            continue
        if known.takes_rest:
            places += [shlex.quote(without_variables(text)) for text in value]
            continue
        if not is_by_place(f):
            flags += _flag(f"--{f.name.replace('_', '-')}", value, known)
            continue
        text = str(value)
        places.append(text if known.is_code else shlex.quote(without_variables(text)))
        is_unclear |= bool(_LIKE_A_FLAG.search(text)) if known.is_code else text.startswith("-")
    if is_unclear:
        return " ".join([command.word, *flags, "--", *places])
    return " ".join([command.word, *flags, *places] if ends_flags else [command.word, *places, *flags])


def _flag(name: str, value: object, known: Argument) -> list[str]:
    """Return the arguments for one field: ``--mesh, (2, 4)`` -> ``--mesh 2x4``; ``--a, False`` -> ``--no-a``."""
    if isinstance(value, bool) and known.is_switch:
        return list(known.flags) or [name if value else name.replace("--", "--no-", 1)]
    flag = known.flags[0] if known.flags else name
    text = known.joint.join(map(str, value)) if isinstance(value, tuple) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    word = shlex.quote(text if known.is_code else without_variables(text))
    # argparse takes a separate word that starts with a dash for a flag
    return [f"{flag}={word}"] if text.startswith("-") else [flag, word]


# ---- checks


def _set(command: Command, **fields: object) -> None:
    """Set normalised fields on a frozen command in ``__post_init__``."""
    for name, value in fields.items():
        object.__setattr__(command, name, value)


def _tuple(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names as a tuple; a single string is one name."""
    return (names,) if isinstance(names, str) else tuple(names)


def _check_classes(option: str, names: Sequence[str]) -> None:
    """Raise unless an option has names of classes."""
    for name in names:
        if not _is_name(name):
            raise ValueError(f"{option} takes names of module classes such as Block, not {name!r}")


def _check_folder(folder: str) -> None:
    if not folder:
        raise ValueError("a checkpoint needs a folder, such as runs/a")


def _check_model(model: object) -> None:
    """Raise unless ``model`` is a Python name, or a dotted path of names and list places after one."""
    first, *rest = model.split(".") if isinstance(model, str) else [""]
    if not _is_name(first) or not all(_is_name(part) or part.isdecimal() for part in rest):
        raise ValueError(f"model is a variable on the ranks, such as model or model.blocks, not {model!r}")


def _check_function(fn: object) -> None:
    if not isinstance(fn, str) or not all(map(_is_name, fn.split("."))):
        raise ValueError(f"fn is the name of a function on the ranks, such as train_step, not {fn!r}")


def _check_until(until: str) -> None:
    try:
        _stop_at(until)
    except UsageError as error:
        raise ValueError(str(error)) from error


def _stop_at(until: str) -> Breakpoint | None:
    """Return the one-time breakpoint of an ``--until``; None if it is empty."""
    if not until:
        return None
    text, when = with_condition(until)
    event, unit = read_event(text)
    if when is not None:
        Condition.parse(when, None)
    return Breakpoint(id=UNTIL, event=event, unit=unit, when=when, once=True)


def _is_name(text: object) -> bool:
    return isinstance(text, str) and text.isidentifier()


def _is_pattern(text: object) -> bool:
    return isinstance(text, str) and bool(text) and "," not in text and text == text.strip()
