"""The words of ``%fsdp``: what a person may ask, each declared once as a small frozen command.

A magic, a button and the Python API build the same command, and :meth:`workbench.workbench.Workbench.do` does it. The
declaration of a word is all there is of it on the way: its docstring is its help, its fields are its arguments, on the
line (:mod:`workbench.magics.command_lines` makes the parser) as in Python (:func:`workbench.workbench.Workbench` takes
its methods' signatures from here), and as plain data it goes to the ranks if it is for them.

To add one that ranks do: declare it here, with what a rank answers; write what a rank does in ``runtime/``, under
:func:`workbench.runtime.command_handlers.does`; and what is said in ``reports/results.py``, under ``@says``. It then
has its parser, its help, its completion and its method.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, ClassVar, Generic, Self, TypeVar

from workbench.codec import decode_named, encode
from workbench.devices import AUTO, CHOICES
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
from workbench.protocol.breakpoints import UNTIL, Breakpoint, read_event
from workbench.protocol.policy import (
    APIS,
    CLASSIC,
    DTYPES,
    HOSTS,
    OFF,
    RESHARD_AFTER_FORWARD,
    STRATEGIES,
    PrecisionNames,
    as_mesh,
    as_reshard_after_forward,
    check_api,
    check_classic,
    check_mesh,
    check_mesh_fits,
    check_not_classic,
    check_prefetch,
    check_reshard_after_forward,
    check_reshard_fits,
    check_strategy_fits,
    read_mesh,
)

R_co = TypeVar("R_co", covariant=True)

NEXT = ("event", "collective", "unit", "phase")
BREAK = ("add", "list", "clear", "on", "off")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Base of all words.

    Attributes:
        word: as it stands after ``%fsdp``.
        example: a line that works, without ``%fsdp``.
        more: what else its row in ``docs/commands.md`` says, in Markdown.
        method: of :class:`~workbench.workbench.Workbench` that does it; empty: that of the same name.
        on_ranks: whether every rank does it, in its main thread.
        needs_ranks: whether there is nothing to do before ranks were started, unless an argument says otherwise.
        reply: type of what a rank answers, if ranks do it.
    """

    word: ClassVar[str] = ""
    example: ClassVar[str] = ""
    more: ClassVar[str] = ""
    method: ClassVar[str] = ""
    on_ranks: ClassVar[bool] = False
    needs_ranks: ClassVar[bool] = True
    reply: ClassVar[Any] = NoneType

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the method of the workbench that does it, and its arguments."""
        return self.method or self.word, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def waits_for_start(self) -> bool:
        """Whether ranks have to be started first: the word says so, and no argument that was given says otherwise."""
        given = (argument_of(f) for f in dataclasses.fields(self) if getattr(self, f.name))
        return self.needs_ranks and not any(known.needs_no_ranks for known in given)


def summary(command: type[Command]) -> str:
    """Return what a word does, in one line: the first one of its docstring."""
    first = (command.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return first[:1].lower() + first[1:]


class RankRequest(Generic[R_co]):
    """Base of what a rank is asked, and answers, that is no word of a person's: mostly at its side door.

    Attributes:
        word: names it on its way.
        reply: type of the answer; None: it is answered when it is done.
        looks: whether it changes nothing, so that everybody may ask it.
    """

    word: ClassVar[str]
    reply: ClassVar[Any] = NoneType
    looks: ClassVar[bool] = False


# ---- the ranks


_INTERFACE = argument(
    "network interface on which hosts reach each other (default: that of the route between them)", metavar="NAME"
)


@dataclass(frozen=True, kw_only=True)
class Start(Command):
    """Start ranks."""

    word: ClassVar[str] = "start"
    example: ClassVar[str] = "start -n 4"
    more: ClassVar[str] = (
        "on other machines with `--engines ssh`, `slurm`, `mpi` or another launcher of ipyparallel, as `--profile P` "
        "configures it"
    )
    needs_ranks: ClassVar[bool] = False
    num_ranks: int = field(
        default=4, metadata=argument("ranks (default 4)", flags=("-n", "--num-ranks"), metavar="N", read=number)
    )
    device: str = field(default=AUTO, metadata=argument(f"where they compute (default {AUTO})", choices=CHOICES))
    profile: str | None = field(default=None, metadata=argument("ipyparallel profile (default: none is needed)"))
    engines: str = field(
        default="",
        metadata=argument(
            "ipyparallel launcher that starts them: ssh, slurm, mpi, ... (default: the profile's; if it has none, this "
            "machine's fast start)",
            metavar="LAUNCHER",
            completes="launchers",
        ),
    )
    interface: str = field(default="", metadata=_INTERFACE)


@dataclass(frozen=True, kw_only=True)
class Attach(Command):
    """Use engines that are already running as ranks; engines that are ranks already keep their variables."""

    word: ClassVar[str] = "attach"
    example: ClassVar[str] = "attach --profile mine"
    more: ClassVar[str] = (
        "of the cluster with `--cluster-id ID` or `--file ipcontroller-client.json`; ranks that another notebook "
        "controls can only be viewed"
    )
    method: ClassVar[str] = "join"
    needs_ranks: ClassVar[bool] = False
    num_ranks: int | None = field(
        default=None, metadata=argument("ranks (default: all)", flags=("-n", "--num-ranks"), metavar="N", read=number)
    )
    profile: str | None = field(default=None, metadata=argument("IPython profile that the cluster was started with"))
    cluster_id: str = field(default="", metadata=argument("which cluster of that profile", metavar="ID"))
    file: str = field(
        default="",
        metadata=argument("connection file for clients, instead of a profile", metavar="FILE", flags=("--file",)),
    )
    device: str = field(default=AUTO, metadata=argument(f"where ranks compute (default {AUTO})", choices=CHOICES))
    interface: str = field(default="", metadata=_INTERFACE)
    take: bool = field(default=False, metadata=argument("take ranks from a notebook that is gone"))


@dataclass(frozen=True, kw_only=True)
class Status(Command):
    """Say where the ranks are, what is sharded, and what is recorded."""

    word: ClassVar[str] = "status"
    example: ClassVar[str] = "status"


@dataclass(frozen=True, kw_only=True)
class Stop(Command):
    """Stop the ranks; what was recorded stays."""

    word: ClassVar[str] = "stop"
    example: ClassVar[str] = "stop"
    needs_ranks: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Detach(Command):
    """Leave attached ranks as they are, with their variables, for whoever attaches next."""

    word: ClassVar[str] = "detach"
    example: ClassVar[str] = "detach"


@dataclass(frozen=True, kw_only=True)
class Dashboard(Command):
    """Watch the ranks while they train, and at any event before; its buttons stop inside a step."""

    word: ClassVar[str] = "dashboard"
    example: ClassVar[str] = "dashboard"
    needs_ranks: ClassVar[bool] = False


# ---- how a model is sharded

_MODEL = argument("its variable on the ranks, such as model", metavar="MODEL", completes="modules")
_POLICY = {
    "api": Argument(
        about="which FSDP; classic: FullyShardedDataParallel, one flat parameter for each unit", choices=APIS
    ),
    "strategy": Argument(
        about="with classic: what is split; grad keeps full parameters until backward, as hybrid2 does within a copy",
        choices=tuple(STRATEGIES),
    ),
    "orig_params": Argument(about="with classic: the optimizer has a piece of each parameter, not one flat parameter"),
    "wrap": Argument(
        about="module classes of which each instance becomes a unit",
        metavar="CLASS,...",
        read=several,
        completes="classes",
    ),
    "mesh": Argument(
        about="ranks that share a copy, or copies x ranks that share one; hosts: a copy on each host",
        metavar="4|2x2|hosts",
        read=read_mesh,
        completes=(HOSTS,),
        joint="x",
    ),
    "reshard_after_forward": Argument(
        about="free full parameters after forward; auto: all but the root's; K: K ranks share them",
        metavar="auto|true|false|K",
        read=as_reshard_after_forward,
        completes=RESHARD_AFTER_FORWARD,
    ),
    "mp": Argument(
        about=f"compute and reduce in {', '.join(DTYPES)}; or {OFF}, also of one: reduce={OFF}",
        metavar="DTYPE[,reduce=DTYPE][,output=DTYPE]",
        completes=(*DTYPES, OFF),
    ),
    "offload": Argument(about="keep what is sharded in host memory"),
    "prefetch": Argument(
        about="gather N units ahead, in the order of the modules; 0: the engine's own order",
        metavar="N",
        read=count("0 or more"),
    ),
}


def _policy(name: str, default: str = "as it is") -> dict[str, Argument]:
    """Return the metadata of a field that ``shard`` and ``reshard`` have; ``default`` in words."""
    known = _POLICY[name]
    return {"argument": replace(known, about=f"{known.about} (default: {default})")}


@dataclass(frozen=True, kw_only=True)
class _Sharding(Command):
    """What ``shard`` and ``reshard`` have in common: a mesh, and names, as people write them."""

    wrap: Sequence[str] = ()
    mesh: int | str | Sequence[int] = ()
    reshard_after_forward: str | int = ""
    api: str = ""
    strategy: str = ""

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """``(F,)``: all F ranks share one copy; ``(R, F)``: R copies, each shared by F ranks. Empty: none is given.

        There is none of ``hosts`` until :meth:`on_hosts` has said what it is.
        """
        return as_mesh(self.mesh)

    def on_hosts(self, ranks_per_host: Sequence[int]) -> Self:
        """Return the same with the mesh ``hosts`` in numbers: copies across hosts, shards within.

        Args:
            ranks_per_host: number of ranks on each host; ranks of a host are neighbours.

        Raises:
            ValueError: hosts have different numbers of ranks, or something else that is given needs another mesh.
        """
        if self.mesh != HOSTS:
            return self
        if len(set(ranks_per_host)) > 1:
            there = ", ".join(map(str, ranks_per_host))
            raise ValueError(f"mesh {HOSTS} needs equally many ranks on every host, and there are {there}")
        mesh = (len(ranks_per_host), ranks_per_host[0]) if len(ranks_per_host) > 1 else tuple(ranks_per_host)
        return replace(self, mesh=mesh)

    def check_fits(self, world_size: int, shard_size: int) -> None:
        """Check that the mesh holds all ranks and a number of ranks splits a copy.

        Args:
            world_size: number of ranks.
            shard_size: ranks that share a copy where no mesh is given; 0: not known.

        Raises:
            ValueError: it does not; the message says what would.
        """
        check_mesh_fits(self.mesh_shape, world_size)
        shared_by = [shard_size, *self.mesh_shape][-1]
        if shared_by:
            check_reshard_fits(self.reshard_after_forward, shared_by)

    def _check(self, model: str) -> None:
        """Raise unless the fields hold what they may, or their default."""
        _check_model(model)
        _set(self, wrap=_tuple(self.wrap), mesh=read_mesh(self.mesh))
        for cls in self.wrap:
            if not _is_name(cls):
                raise ValueError(f"wrap takes names of module classes such as Block, not {cls!r}")
        if self.mesh and self.mesh != HOSTS:
            check_mesh(self.mesh_shape)
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        default = {f.name: f.default for f in dataclasses.fields(self)}
        if given["reshard_after_forward"] != default["reshard_after_forward"]:
            check_reshard_after_forward(given["reshard_after_forward"])
        if given["mp"] != default["mp"]:
            PrecisionNames.parse(given["mp"])
        for name in ("offload", "orig_params"):
            if not isinstance(given[name], bool) and given[name] is not default[name]:
                raise ValueError(f"{name} is true or false, not {given[name]!r}")
        if given["prefetch"] is not default["prefetch"]:
            check_prefetch(given["prefetch"])
        self._check_api(given["mp"], given["prefetch"], given["orig_params"])

    def _check_api(self, mp: str, prefetch: int | None, orig_params: bool | None) -> None:
        check_api(CLASSIC if self.api == type(self).api else self.api, self.strategy)
        if self.api == CLASSIC:
            check_classic(self.reshard_after_forward, mp, prefetch)
        elif self.api:
            check_not_classic(self.strategy, orig_params=orig_params)


@dataclass(frozen=True, kw_only=True)
class UnmanagedState:
    """What of a sharded model the engine does not manage, on one rank.

    Attributes:
        params: names of trainable parameters that belong to no unit: nothing averages their gradients.
        hooks: names of sharded parameters with a ``register_hook`` that is never called.
        buffers: checksum of each buffer by name.
    """

    params: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    buffers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ShardReply:
    """What a model has become on one rank.

    Attributes:
        model: its name on the ranks.
        units: paths of its units, ``(root)`` for the model's own.
        num_params: parameters (tensors).
        num_elements: elements of all parameters.
        bytes_unsharded: bytes of the whole model.
        bytes_at_rest: bytes of parameters that the rank keeps between steps, padding included.
        policy: how units are kept and computed, a phrase each; nothing for what is the plain way.
        optimizers: optimizers that go on with its parameters.
        unmanaged: what the engine does not manage.
        chosen: classes that were wrapped because the command named none; None if it named some.
    """

    model: str
    units: tuple[str, ...]
    num_params: int
    num_elements: int
    bytes_unsharded: int
    bytes_at_rest: int
    policy: tuple[str, ...]
    optimizers: int
    unmanaged: UnmanagedState = field(default_factory=UnmanagedState)
    chosen: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Shard(_Sharding):
    """Shard a model with fully_shard or the classic wrapper, one unit per module of a class.

    Raises:
        ValueError: a field holds something else than it may.
    """

    word: ClassVar[str] = "shard"
    example: ClassVar[str] = "shard model --wrap Block"
    on_ranks: ClassVar[bool] = True
    reply: ClassVar[Any] = ShardReply
    model: str = field(kw_only=False, metadata=_MODEL)
    api: str = field(default="fully_shard", metadata=_policy("api", "fully_shard"))
    strategy: str = field(default="", metadata=_policy("strategy", "full"))
    orig_params: bool = field(default=False, metadata=_policy("orig_params", "no"))
    wrap: Sequence[str] = field(default=(), metadata=_policy("wrap", "chosen from the model"))
    mesh: int | str | Sequence[int] = field(default=(), metadata=_policy("mesh", "all ranks share one"))
    reshard_after_forward: str | int = field(default="auto", metadata=_policy("reshard_after_forward", "auto"))
    mp: str = field(default=OFF, metadata=_policy("mp", OFF))
    offload: bool = field(default=False, metadata=_policy("offload", "no"))
    prefetch: int = field(default=0, metadata=_policy("prefetch", "0"))
    ignore: Sequence[str] = field(
        default=(), metadata=argument("parameters that stay whole, such as *.bias", metavar="GLOB,...", read=several)
    )

    def __post_init__(self) -> None:
        self._check(self.model)
        _set(self, ignore=_tuple(self.ignore))
        if not all(_is_pattern(glob) for glob in self.ignore):
            raise ValueError(
                f"ignore takes patterns of names without commas or outer spaces, such as *.bias, not {self.ignore}"
            )
        if self.api == CLASSIC and self.mesh != HOSTS:
            check_strategy_fits(self.strategy or "full", self.mesh_shape)


@dataclass(frozen=True, kw_only=True)
class Reshard(_Sharding):
    """Change how a sharded model is sharded, in place; optimizers go on with their state.

    What is not given stays as it is, of ``mp`` as well, and so do the parameters that ``shard`` left out. A name such
    as ``model.blocks.2`` is that of one unit alone: it has ``reshard_after_forward``, ``mp`` and ``offload`` by
    itself, and no other unit changes.

    Raises:
        ValueError: a field holds something else than it may.
    """

    word: ClassVar[str] = "reshard"
    example: ClassVar[str] = "reshard model --reshard-after-forward false"
    more: ClassVar[str] = "`reshard model.blocks.2`: of this unit alone"
    on_ranks: ClassVar[bool] = True
    reply: ClassVar[Any] = ShardReply
    model: str = field(
        kw_only=False,
        metadata=argument(
            "its variable on the ranks, such as model; with a unit, such as model.blocks.2: that one alone",
            metavar="MODEL",
            completes="parts",
        ),
    )
    api: str = field(default="", metadata=_policy("api"))
    strategy: str = field(default="", metadata=_policy("strategy"))
    orig_params: bool | None = field(default=None, metadata=_policy("orig_params"))
    wrap: Sequence[str] = field(default=(), metadata=_policy("wrap"))
    mesh: int | str | Sequence[int] = field(default=(), metadata=_policy("mesh"))
    reshard_after_forward: str | int = field(default="", metadata=_policy("reshard_after_forward"))
    mp: str = field(default="", metadata=_policy("mp"))
    offload: bool | None = field(default=None, metadata=_policy("offload"))
    prefetch: int | None = field(default=None, metadata=_policy("prefetch"))

    def __post_init__(self) -> None:
        self._check(self.model)


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


@dataclass(frozen=True, kw_only=True)
class Unshard(Command):
    """Make a sharded model a plain module again, with the same values.

    Raises:
        ValueError: ``model`` is not the name of one.
    """

    word: ClassVar[str] = "unshard"
    example: ClassVar[str] = "unshard model"
    on_ranks: ClassVar[bool] = True
    reply: ClassVar[Any] = UnshardReply
    model: str = field(kw_only=False, metadata=_MODEL)

    def __post_init__(self) -> None:
        _check_model(self.model)


# ---- training, and stopping inside of it

_FN = argument("step function (default train_step)", metavar="NAME", completes="variables", flags=("--fn",))


@dataclass(frozen=True, kw_only=True)
class StepReply:
    """The steps of one rank.

    Attributes:
        steps_done: how many.
        losses: of each step, None where it has none; None: no step has one.
        seconds: of each step, without the time it was held.
        optimizer_steps: since the rank was started.
        first_step: number of the first of the steps.
        unreduced: names of units, root ``""`` included, that held gradients after a step which no reduction took.
    """

    steps_done: int
    losses: tuple[float | None, ...] | None
    seconds: tuple[float, ...]
    optimizer_steps: int
    first_step: int
    unreduced: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step(Command):
    """Train: call train_step() on every rank, N times; a number that it returns is the loss.

    Raises:
        ValueError: ``count`` < 1, ``fn`` is not a name, or ``until`` not an event.
    """

    word: ClassVar[str] = "step"
    example: ClassVar[str] = "step 40"
    on_ranks: ClassVar[bool] = True
    reply: ClassVar[Any] = StepReply
    count: int = field(
        default=1, kw_only=False, metadata=argument("training steps (default 1)", metavar="N", read=number)
    )
    fn: str = field(default="train_step", kw_only=False, metadata=_FN)
    until: str = field(
        default="", metadata=argument("stop once, before this event: EVENT[:UNIT]", metavar="EVENT", completes="events")
    )
    background: bool = field(default=False, metadata=argument("go on with the notebook at once (default: no)"))

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"the number of steps is a whole number of at least 1, not {self.count!r}")
        _check_function(self.fn)
        try:
            _ = self.stop
        except UsageError as error:
            raise ValueError(str(error)) from error

    @property
    def stop(self) -> Breakpoint | None:
        """Where all ranks stop once, if ``until`` says so."""
        if not self.until:
            return None
        event, unit = read_event(self.until)
        return Breakpoint(id=UNTIL, event=event, unit=unit, once=True)


@dataclass(frozen=True, kw_only=True)
class Pause(Command, RankRequest[None]):
    """Stop all ranks at the same event of the step under way."""

    word: ClassVar[str] = "pause"
    example: ClassVar[str] = "pause"
    more: ClassVar[str] = "Ctrl-C in a step does the same, a second one aborts"


@dataclass(frozen=True, kw_only=True)
class Next(Command, RankRequest[None]):
    """Let stopped ranks go on to the next event, collective, unit or phase.

    Raises:
        ValueError: ``what`` is none of :data:`NEXT`.
    """

    word: ClassVar[str] = "next"
    example: ClassVar[str] = "next collective"
    what: str = field(
        default="event",
        kw_only=False,
        metadata=argument("default: event", metavar="|".join(NEXT), choices=NEXT),
    )

    def __post_init__(self) -> None:
        if self.what not in NEXT:
            raise ValueError(f"next goes to the next one of {', '.join(NEXT)}, not {self.what!r}")


@dataclass(frozen=True, kw_only=True)
class Continue(Command, RankRequest[None]):
    """Let stopped ranks go on, in the background if it began there."""

    word: ClassVar[str] = "continue"
    example: ClassVar[str] = "continue --background"
    more: ClassVar[str] = "`--background` and `--foreground` choose where"
    method: ClassVar[str] = "resume"
    foreground: bool = field(
        default=False, metadata=argument("wait also for a step that began with --background (default: no)")
    )
    background: bool = field(
        default=False, metadata=argument("leave the notebook free from now on, wherever it began (default: no)")
    )

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the method of the workbench that does it, and its arguments; of both, the background is chosen."""
        return self.method, {"background": self.background if self.foreground or self.background else None}


@dataclass(frozen=True, kw_only=True)
class Abort(Command):
    """Give up what the ranks do; they are ready again afterwards."""

    word: ClassVar[str] = "abort"
    example: ClassVar[str] = "abort"


@dataclass(frozen=True, kw_only=True)
class Where(Command):
    """Say where every rank is, and since when."""

    word: ClassVar[str] = "where"
    example: ClassVar[str] = "where"
    more: ClassVar[str] = "`--stacks`: what its Python threads run as well, your functions first"
    stacks: bool = field(default=False, metadata=argument("also each rank's Python threads (default: no)"))


@dataclass(frozen=True, kw_only=True)
class Break(Command):
    """Stop before every such event: add, list, clear breakpoints, or turn them on and off.

    Raises:
        ValueError: arguments that do not go together.
    """

    word: ClassVar[str] = "break"
    example: ClassVar[str] = "break add all_gather:blocks.2"
    more: ClassVar[str] = (
        "`--rank 1`, `--when 'num_bytes > 1e6'`; `break list`; `break clear 1`, likewise `off` and `on`"
    )
    action: str = field(kw_only=False, metadata=argument("what to do", metavar="|".join(BREAK), choices=BREAK))
    event: str = field(
        default="",
        kw_only=False,
        metadata=argument("such as backward:blocks.2", metavar="EVENT[:UNIT]|ID", completes="events"),
    )
    rank: int | None = field(
        default=None, metadata=argument("the only rank that stops (default: all)", metavar="R", read=rank)
    )
    when: str | None = field(
        default=None,
        metadata=argument("a condition such as 'num_bytes > 1e6' (default: always)", metavar="EXPR", is_code=True),
    )

    def __post_init__(self) -> None:
        if self.action not in BREAK:
            raise ValueError(f"after break comes {', '.join(BREAK[:-1])} or {BREAK[-1]}, not {self.action!r}")
        if self.action == "add" and not self.event:
            raise ValueError("add needs an event, such as all_gather:blocks.2 or backward")
        if self.action != "add" and (self.rank is not None or self.when is not None):
            raise ValueError(f"{self.action} takes no --rank and no --when")
        if self.action == "list" and self.event:
            raise ValueError("list takes no event")
        if self.action in {"clear", "on", "off"} and self.event and not self.event.isdecimal():
            raise ValueError(f"{self.action} takes a number that %fsdp break list shows, not {self.event!r}")

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the method of the workbench that does it, and its arguments."""
        if self.action == "add":
            return "break_add", {"event": self.event, "rank": self.rank, "when": self.when}
        if self.action == "list":
            return "break_list", {}
        return f"break_{self.action}", {"id": int(self.event) if self.event else None}


@dataclass(frozen=True, kw_only=True)
class Inspect(Command):
    """Say what every stopped rank has of a parameter, in a table."""

    word: ClassVar[str] = "inspect"
    example: ClassVar[str] = "inspect blocks.2.mlp.0.weight"
    fqn: str = field(
        kw_only=False,
        metadata=argument("a parameter, such as blocks.2.mlp.0.weight", metavar="FQN", completes="fqns"),
    )


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    """Evaluate an expression on stopped ranks, inside the step, with the variables of the functions under way.

    Raises:
        ValueError: ``expr`` is empty, or ``frame`` is no number of one.
    """

    word: ClassVar[str] = "eval"
    example: ClassVar[str] = "eval x.shape -t 0"
    more: ClassVar[str] = "`--frame 1`: those of the caller first"
    method: ClassVar[str] = "evaluate"
    expr: str = field(
        kw_only=False,
        metadata=argument(
            "a Python expression: the rest of the line as typed; after -- nothing of it is a flag",
            metavar="EXPR",
            completes="variables",
            is_code=True,
        ),
    )
    ranks: Sequence[int] = field(
        default=(),
        kw_only=False,
        metadata=argument(
            "ranks that evaluate it, such as 1,3 or 0-2 (default: all)",
            metavar="RANKS",
            flags=("-t", "--targets"),
            read=ranks,
        ),
    )
    frame: int = field(
        default=0,
        metadata=argument(
            "look names up in the N-th active function and its callers; 0: the innermost (default 0)",
            metavar="N",
            read=count("0 for the innermost"),
        ),
    )

    def __post_init__(self) -> None:
        _set(self, expr=self.expr.strip(), ranks=tuple(sorted(set(self.ranks))))
        if not self.expr:
            raise ValueError("eval needs an expression, such as x.shape")
        if type(self.frame) is not int or self.frame < 0:
            raise ValueError(f"a frame is a number, 0 for the innermost, not {self.frame!r}")

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the method of the workbench that does it, and its arguments."""
        return self.method, {"expr": self.expr, "ranks": self.ranks or None, "frame": self.frame}


@dataclass(frozen=True, kw_only=True)
class Back(Command):
    """Show what was recorded up to some events ago, 0: everything; undoes nothing."""

    word: ClassVar[str] = "back"
    example: ClassVar[str] = "back 3"
    n: int = field(
        default=1,
        kw_only=False,
        metadata=argument("events; 0: the newest (default 1)", metavar="N", read=count("0 for the newest event")),
    )


@dataclass(frozen=True, kw_only=True)
class VerifyReply:
    """One sharded step beside the same step of an unsharded copy, on one rank.

    Attributes:
        params: parameters compared.
        max_abs_diff: largest absolute difference of any element.
        max_rel_diff: largest relative difference.
        worst_param: the parameter that has the former.
        equal_bits: parameters that are equal bit by bit.
        ok: whether all differences are within the tolerance.
        tolerance: what is allowed, in words.
        loss_sharded, loss_reference: of both steps; None: they have none.
        not_finite: parameters that hold NaN or infinity in both, at the same places.
        buffers_not_finite: buffers of this rank that do before the step.
        since: first of the last steps in a row in which this rank's loss was not finite; None: the last one's was.
        unmanaged: what the engine does not manage, before the step.
    """

    params: int
    max_abs_diff: float
    max_rel_diff: float
    worst_param: str
    equal_bits: int
    ok: bool
    tolerance: str
    loss_sharded: float | None
    loss_reference: float | None
    not_finite: tuple[str, ...] = ()
    buffers_not_finite: tuple[str, ...] = ()
    since: int | None = None
    unmanaged: UnmanagedState = field(default_factory=UnmanagedState)


@dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Compare a step with the same step of an unsharded copy; training state is left as it was.

    Raises:
        ValueError: ``model`` or ``fn`` is not a name.
    """

    word: ClassVar[str] = "verify"
    example: ClassVar[str] = "verify"
    on_ranks: ClassVar[bool] = True
    reply: ClassVar[Any] = VerifyReply
    model: str = field(
        default="",
        kw_only=False,
        metadata=argument("default: the only sharded model there is", metavar="MODEL", completes="modules"),
    )
    fn: str = field(default="train_step", kw_only=False, metadata=_FN)

    def __post_init__(self) -> None:
        if self.model:
            _check_model(self.model)
        _check_function(self.fn)


# ---- what was recorded

_SIDE = (
    "a trace file; last: what is recorded so far; of either some steps, such as last:3..5, or last:-3.. for the newest "
    "three; 3..5 is of last"
)
TALK = argument("in sizes and colours for a projector")


@dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Say and draw what changed from one record, or some steps of it, to another."""

    word: ClassVar[str] = "compare"
    example: ClassVar[str] = "compare before.trace last"
    more: ClassVar[str] = "steps: `last:3..5`, `last:-3..`"
    needs_ranks: ClassVar[bool] = False
    a: str = field(kw_only=False, metadata=argument(_SIDE, metavar="A", completes="traces"))
    b: str = field(
        kw_only=False, metadata=argument("likewise: what to compare it with", metavar="B", completes="traces")
    )
    rank: int | None = field(
        default=None, metadata=argument("compare this rank (default: the one whose peak differs most)", read=rank)
    )
    talk: bool = field(default=False, metadata=TALK)


@dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Write what was recorded to a file: .trace to open again, .json for Perfetto, .html as a page that replays it."""

    word: ClassVar[str] = "export"
    example: ClassVar[str] = "export run.trace"
    more: ClassVar[str] = "`--steps 3..5`: only these"
    path: str = field(
        kw_only=False,
        metadata=argument("where to; its suffix says what to write", metavar="FILE", completes="files"),
    )
    steps: str = field(
        default="",
        metadata=argument("only these, such as 7, 3..5, 400.. or --steps=-3.. (the newest three)", metavar="STEPS"),
    )


@dataclass(frozen=True, kw_only=True)
class Open(Command):
    """Show a trace file again: every view, the dashboard, compare and export, without ranks."""

    word: ClassVar[str] = "open"
    example: ClassVar[str] = "open run.trace"
    more: ClassVar[str] = "takes the place of what was recorded before; ranks are to be stopped first"
    method: ClassVar[str] = "load"
    needs_ranks: ClassVar[bool] = False
    path: str = field(
        kw_only=False, metadata=argument("a file that export has written", metavar="FILE", completes="records")
    )


@dataclass(frozen=True, kw_only=True)
class History(Command):
    """List the commands of this notebook, those of the panel included, as lines to copy."""

    word: ClassVar[str] = "history"
    example: ClassVar[str] = "history 20"
    needs_ranks: ClassVar[bool] = False
    n: int = field(
        default=0,
        kw_only=False,
        metadata=argument("the newest of them; 0: all (default 0)", metavar="N", read=count("0 for all")),
    )


@dataclass(frozen=True, kw_only=True)
class Help(Command):
    """List the words, or explain one of them."""

    word: ClassVar[str] = "help"
    example: ClassVar[str] = "help shard"
    more: ClassVar[str] = "`-h` after a word explains it"
    needs_ranks: ClassVar[bool] = False
    topic: str = field(
        default="", kw_only=False, metadata=argument("default: all words", metavar="WORD", completes="words")
    )


@dataclass(frozen=True, kw_only=True)
class Cell(Command):
    """Run the cell on the ranks, all or -t RANKS."""

    word: ClassVar[str] = "%%fsdp"
    example: ClassVar[str] = "-t 0,2\nprint(rank)"
    ranks: Sequence[int] | None = field(
        default=None,
        metadata=argument(
            "ranks that run the cell, such as 1,3 or 0-2 (default: all)",
            metavar="RANKS",
            flags=("-t", "--targets"),
            read=ranks,
        ),
    )


_ALL: tuple[type[Command], ...] = (
    *(
        Start,
        Attach,
        Status,
        Detach,
        Stop,
        Dashboard,
        Shard,
        Reshard,
        Unshard,
        Step,
        Pause,
        Next,
        Continue,
        Abort,
        Where,
        Break,
    ),
    *(Inspect, Evaluate, Back, Verify, Compare, Export, Open, History, Help),
)
COMMANDS: Mapping[str, type[Command]] = {cls.word: cls for cls in _ALL}
"""All words but those that draw, which their views declare."""

ON_RANKS: Mapping[str, type[Command]] = {cls.word: cls for cls in _ALL if cls.on_ranks}


def to_dict(command: Command) -> dict[str, Any]:
    """Return ``command`` as plain data that JSON can hold."""
    data: dict[str, Any] = encode(command)
    return data


def from_dict(data: dict[str, Any]) -> Command:
    """Inverse of :func:`to_dict`, of what ranks do.

    Raises:
        ValueError: unknown word or field, one that is missing, or of another type.
    """
    command: Command = decode_named(ON_RANKS, data, "command")
    return command


def is_by_place(declared: dataclasses.Field[Any]) -> bool:
    """Return whether an argument is given by its place on the line."""
    return not declared.kw_only and not argument_of(declared).flags


_LIKE_A_FLAG = re.compile(r"(?<!\S)(--|-[^\W\d])")
"""Where a word of code reads as a flag, or as the ``--`` that ends them."""


def to_text(command: Command) -> str:
    """Return the line for ``command``; fields at their default are left out.

    Where what is given by place could be taken for a flag, it stands after ``--``, behind all flags.

    Example: ``Shard(model="m", wrap=("Block",))`` -> ``shard m --wrap Block``; ``Open("-x")`` -> ``open -- -x``.
    """
    places, flags, is_unclear = [], [], False
    for f in dataclasses.fields(command):
        value, known = getattr(command, f.name), argument_of(f)
        if value == f.default and type(value) is type(f.default):  # False and 0 are equal
            continue
        if not is_by_place(f):
            flags += _flag(f"--{f.name.replace('_', '-')}", value, known)
            continue
        text = str(value)
        places.append(text if known.is_code else shlex.quote(without_variables(text)))
        is_unclear |= bool(_LIKE_A_FLAG.search(text)) if known.is_code else text.startswith("-")
    return " ".join([command.word, *flags, "--", *places] if is_unclear else [command.word, *places, *flags])


def _flag(name: str, value: object, known: Argument) -> list[str]:
    """Return the words for one field: ``--mesh, (2, 4)`` -> ``--mesh 2x4``; ``--a, False`` -> ``--no-a``."""
    if isinstance(value, bool) and not known.flags:
        return [name if value else name.replace("--", "--no-", 1)]
    flag = known.flags[0] if known.flags else name
    text = known.joint.join(map(str, value)) if isinstance(value, tuple) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    word = shlex.quote(text if known.is_code else without_variables(text))
    # argparse takes a separate word that starts with a dash for a flag
    return [f"{flag}={word}"] if text.startswith("-") else [flag, word]


# ---- checks


def _set(command: Command, **fields: object) -> None:
    """Give fields of a command that is being made the form that all have."""
    for name, value in fields.items():
        object.__setattr__(command, name, value)


def _tuple(names: Sequence[str]) -> tuple[str, ...]:
    """One name is no sequence of letters."""
    return (names,) if isinstance(names, str) else tuple(names)


def _check_model(model: object) -> None:
    """Raise unless ``model`` is a Python name, or a dotted path of names and list places after one."""
    first, *rest = model.split(".") if isinstance(model, str) else [""]
    if not _is_name(first) or not all(_is_name(part) or part.isdecimal() for part in rest):
        raise ValueError(f"a model is named by its variable on the ranks, such as model or model.blocks, not {model!r}")


def _check_function(fn: object) -> None:
    if not _is_name(fn):
        raise ValueError(f"fn is the name of a function on the ranks, such as train_step, not {fn!r}")


def _is_name(text: object) -> bool:
    return isinstance(text, str) and text.isidentifier()


def _is_pattern(text: object) -> bool:
    return isinstance(text, str) and bool(text) and "," not in text and text == text.strip()
