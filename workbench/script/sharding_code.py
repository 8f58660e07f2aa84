"""The commands ``shard``, ``reshard`` and ``unshard`` as code of a script: what ``runtime/sharding.py`` does, in lines.

Both engines have the same ``fully_shard`` and ``FullyShardedDataParallel``. Torch's cannot undo them or move a sharded
model, so some commands have no code with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.base.devices import HOST
from workbench.errors import UsageError
from workbench.events import ROOT
from workbench.protocol.commands import Reshard, Shard, ShardReply, Unshard, UnshardReply, to_text
from workbench.protocol.policy import (
    CLASSIC,
    DTYPES,
    STRATEGIES,
    TORCH,
    PrecisionNames,
    as_mesh,
    mesh_words,
)
from workbench.script.script_names import ScriptNames
from workbench.session.program import CompletedCommand, Entry

WIDTH = 88
"""Longest line that the writer produces itself, the default of formatters."""

_AFTER_FORWARD = {"auto": "None", "true": "True", "false": "False"}

_OPTIMIZERS_OF = '''\
def {name}(model):
    """Return the optimizers among the variables that hold a parameter of the model."""
    params, found = set(model.parameters()), []
    for value in globals().values():
        if not isinstance(value, {torch}.optim.Optimizer) or value in found:
            continue
        held = {{p for group in value.param_groups for p in group["params"]}}
        if held & params:
            found.append(value)
    return found'''

_CARRY_OVER = '''\
def {name}(optimizers, params_before, model):
    """Let optimizers continue with the sharded parameters; their state is sharded too."""
    params = dict(model.named_parameters())
    new_params = {{params_before[path]: params[path] for path in params}}
    for optimizer in optimizers:
        {remap_optimizer}(optimizer, new_params)'''

_REMAP_OPTIMIZER = '''\
def {name}(optimizer, new_params):
    """Replace the parameters of an optimizer, and shard its state as they are."""
    for group in optimizer.param_groups:
        group["params"] = [new_params.get(p, p) for p in group["params"]]
    for old, new in new_params.items():
        if old is not new and old in optimizer.state:
            state = optimizer.state.pop(old)
            for key, value in state.items():
                if {torch}.is_tensor(value) and value.shape == new.shape:
                    state[key] = {distribute_tensor}(
                        value, new.device_mesh, new.placements, src_data_rank=None
                    )
            optimizer.state[new] = state'''

_CLASS_NAME = '''\
def {name}(module):
    """Return the name of a module's own class, also if fully_shard has replaced it."""
    classes = type(module).__mro__
    return next(cls.__name__ for cls in classes if not issubclass(cls, {FSDPModule}))'''

_UNITS_OF = '''\
def {name}(module, backward=False):
    """Return the sharded modules, outer before inner, in order of definition or in reverse."""
    found = [module] if isinstance(module, {FSDPModule}) else []
    children = list(module.children())
    for child in reversed(children) if backward else children:
        found += {name}(child, backward)
    return list(dict.fromkeys(found))'''

_SET_PREFETCH = '''\
def {name}(model, ahead):
    """Have each sharded module gather those that follow it, in forward and backward."""
    forward, backward = {units_of}(model), {units_of}(model, backward=True)
    for place, module in enumerate(forward, start=1):
        following = forward[place : place + ahead]
        module.set_modules_to_forward_prefetch(following{off})
    for place, module in enumerate(backward, start=1):
        module.set_modules_to_backward_prefetch(backward[place : place + ahead])'''


def call(function: str, arguments: Sequence[str], *, before: str = "", indent: str = "") -> list[str]:
    """Return the lines of a call, on one line if it is short enough: ``call("f", ["x", "y=1"])`` -> ``["f(x, y=1)"]``.

    Args:
        function: the expression that is called.
        arguments: its arguments; one of several lines has them indented as if its first one were not.
        before: text before the call, such as ``"model = "``.
        indent: spaces before each line.
    """
    line = f"{indent}{before}{function}({', '.join(arguments)})"
    if len(line) <= WIDTH and "\n" not in line:
        return [line]
    inner = [f"{indent}    {part}" for each in arguments for part in f"{each},".split("\n")]
    return [f"{indent}{before}{function}(", *inner, f"{indent})"]


def expression(model: str) -> str:
    """Return the expression for a model's name in a command: ``model.blocks.2`` -> ``model.blocks[2]``."""
    first, *rest = model.split(".")
    return first + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in rest)


def with_setters(entries: Sequence[Entry], engine: str) -> Sequence[Entry]:
    """Return the entries with an ``unshard`` and the next ``shard`` as one ``reshard``, where torch has setters for it.

    These are the options ``reshard_after_forward`` and ``prefetch``: all others must be as before. For the workbench's
    engine nothing changes.
    """
    if engine != TORCH:
        return entries
    kept: list[Entry] = []
    sharded: dict[str, Shard] = {}
    for entry in entries:
        kept.append(entry)
        if not isinstance(entry, CompletedCommand) or not isinstance(entry.command, Shard):
            continue
        now, undone = entry.command, [each.command for each in kept[-2:-1] if isinstance(each, CompletedCommand)]
        before = sharded.get(now.model)
        sharded[now.model] = now
        if before is None or undone != [Unshard(now.model)]:
            continue
        after, ahead = before.reshard_after_forward, before.prefetch
        if now.api != CLASSIC and replace(now, reshard_after_forward=after, prefetch=ahead) == before:
            reshard = Reshard(
                now.model,
                reshard_after_forward="" if now.reshard_after_forward == after else now.reshard_after_forward,
                prefetch=None if now.prefetch == ahead else now.prefetch,
            )
            kept[-2:] = [replace(entry, command=reshard)]
    return kept


class ShardingCode:
    """Writer of the commands that change how a model is sharded.

    Args:
        names: the names of the script.
        engine: ``workbench`` or ``torch``.
        kind: kind of the ranks' device.

    Attributes:
        helpers: definitions of the functions that the lines call, by their usual names.
    """

    def __init__(self, names: ScriptNames, engine: str, kind: str) -> None:
        self._names, self._engine, self._kind = names, engine, kind
        self.helpers: dict[str, str] = {}
        self._helper_names: dict[str, str] = {}
        self._known: dict[str, Shard] = {}  # the policy of each model that a command has sharded
        self._meshes: set[str] = set()
        self._casts_output = False

    @property
    def _is_torch(self) -> bool:
        return self._engine == TORCH

    def lines(self, entry: CompletedCommand) -> list[str]:
        """Return the lines for a ``shard``, ``reshard`` or ``unshard``.

        Raises:
            UsageError: the engine has nothing for it.
        """
        match entry.command:
            case Shard() as command:
                return self._shard(command, entry.reply)
            case Reshard() as command:
                return self._reshard(command, entry)
            case Unshard() as command:
                return self._unshard(command, entry.reply)
        raise TypeError(entry.command)

    # ---- shard

    def _shard(self, command: Shard, reply: ShardReply) -> list[str]:
        classes = tuple(sorted(command.wrap or reply.chosen or ()))
        self._known[command.model] = replace(command, wrap=classes)
        self._casts_output |= bool(PrecisionNames.parse(command.mp).output)
        lines, ignored = self._ignored(command)
        mesh_lines, mesh = self._mesh(command.mesh_shape)
        write = self._classic if command.api == CLASSIC else self._fully_shard
        return [*mesh_lines, *lines, *write(command, classes, mesh, ignored, has_optimizers=bool(reply.optimizers))]

    def _fully_shard(
        self, command: Shard, classes: Sequence[str], mesh: str, ignored: str, *, has_optimizers: bool
    ) -> list[str]:
        name, model, fully_shard = self._names.own, expression(command.model), self._names.imported("fully_shard")
        precision = PrecisionNames.parse(command.mp)
        chosen, kept = self._kept_params(model, precision)
        lines, of_inner = self._precision("precision", replace(precision, output=""), kept)
        of_root = of_inner
        if precision.output:  # only the model casts its output
            cast, of_root = self._precision("root_precision", precision, kept)
            lines = [*(lines if classes else []), *cast]
        lines = [*chosen, *lines]
        same = [f"mesh={mesh}", *(f"{key}={value}" for key, value in self._policy(command).items())]
        same += [f"ignored_params={ignored}"] if ignored else []
        if has_optimizers:
            optimizers, before = name("optimizers"), name("params_before")
            lines.append(f"{optimizers} = {self._optimizers_of(model)}")
            lines.append(f"{before} = dict({model}.named_parameters())")
        if classes:
            module = name("module")
            lines += [
                f"for {module} in reversed(list({model}.modules())[1:]):  # inner modules first",
                f"    if {_is_one(f'type({module}).__name__', classes)}:",
                *call(fully_shard, [module, *same, *of_inner], indent=" " * 8),
            ]
        lines += call(fully_shard, [model, *same, *of_root])
        if has_optimizers:
            lines.append(f"{self._carry_over()}({optimizers}, {before}, {model})")
            lines.append(f"del {before}  # else the full parameters would stay in memory")
        return lines + (self._prefetch(model, command.prefetch) if command.prefetch else [])

    def _classic(
        self, command: Shard, classes: Sequence[str], mesh: str, ignored: str, *, has_optimizers: bool
    ) -> list[str]:
        names, model, optimizers = self._names, expression(command.model), self._names.own("optimizers")
        if self._is_torch and has_optimizers:
            raise UsageError(
                f"%fsdp {to_text(command)} carried over an optimizer made before it; torch's FullyShardedDataParallel "
                "cannot: make the optimizer after sharding, or leave out --engine torch"
            )
        arguments = [model]
        if classes:
            condition = _is_one("type(module).__name__", classes)
            arguments.append(f"auto_wrap_policy={names.imported('CustomPolicy')}(lambda module: {condition})")
        arguments.append(f"device_mesh={mesh}")
        if self._is_torch:
            arguments.append(f"device_id={names.own('device')}")  # else it takes no CPU
        arguments += self._classic_options(command)
        if ignored:
            arguments.append(f"ignored_states={ignored}")
        lines = call(names.imported("FullyShardedDataParallel"), arguments, before=f"{model} = ")
        if has_optimizers:
            lines.insert(0, f"{optimizers} = {self._optimizers_of(model)}")
            lines.append(f"{names.imported('rewrap_optimizers')}({model}, {optimizers})")
        return lines

    def _classic_options(self, command: Shard) -> list[str]:
        imported, found = self._names.imported, []
        if command.strategy:
            found.append(f"sharding_strategy={imported('ShardingStrategy')}.{STRATEGIES[command.strategy]}")
        if dtypes := self._dtypes(PrecisionNames.parse(command.mp)):
            found.append(f"mixed_precision={imported('MixedPrecision')}({', '.join(dtypes)})")
        if command.offload:
            found.append(f"cpu_offload={imported('CPUOffload')}(offload_params=True)")
        if command.prefetch:
            found.append("forward_prefetch=True")
        if command.orig_params:
            found.append("use_orig_params=True")
        return found

    # ---- reshard and unshard

    def _reshard(self, command: Reshard, entry: CompletedCommand) -> list[str]:
        reply: ShardReply = entry.reply
        if not reply.is_changed:
            return []
        whole = command.model in self._known or ROOT in reply.units
        if self._is_torch:
            return self._torch_reshard(command, is_whole=whole)
        if not whole:
            return self._reshard_unit(command)
        before = self._known.get(command.model)
        now = entry.policy
        if now is None:
            raise UsageError(
                f"how %fsdp {to_text(command)} left {command.model!r} is not known, so no script can repeat it: keep "
                "the model in a variable of its own"
            )
        if CLASSIC in {now.api, before.api if before else command.api and CLASSIC}:
            return self._shard_anew(command, entry)
        self._known[command.model] = replace(
            before or Shard(model=command.model),
            wrap=now.wrap,
            mesh=as_mesh(now.mesh) if now.mesh else (),
            prefetch=now.prefetch,
        )
        return self._reshard_module(command, reply, is_known=before is not None)

    def _shard_anew(self, command: Reshard, entry: CompletedCommand) -> list[str]:
        """Return lines that unshard a model and shard it again, as ranks do if it is or becomes classic."""
        now, before = entry.policy, self._known.get(command.model)
        assert now is not None
        was = before.api if before is not None else CLASSIC
        wanted = Shard(ignore=before.ignore if before is not None else (), **now.changed(command.model, {}))
        reply: ShardReply = entry.reply
        return [*self._plain(command.model, was, has_optimizers=bool(reply.optimizers)), *self._shard(wanted, reply)]

    def _reshard_module(self, command: Reshard, reply: ShardReply, *, is_known: bool) -> list[str]:
        names, model = self._names, expression(command.model)
        arguments = [model]
        lines: list[str] = []
        precision = self._named(command)
        if command.wrap:
            condition = _is_one(f"{self._helper('class_name', _CLASS_NAME, 'FSDPModule')}(module)", command.wrap)
            arguments.append(f"wrap=lambda module: {condition}")
        if command.mesh:
            lines, mesh = self._mesh(command.mesh_shape)
            arguments.append(f"mesh={mesh}")
        arguments += [f"{key}={value}" for key, value in self._policy(command).items()]
        if mp_policy := self._changed_precision(precision, model, wraps=bool(command.wrap), is_known=is_known):
            arguments.append(mp_policy)
        self._casts_output |= bool(precision.get("output"))
        if len(arguments) > 1:
            arguments += [f"optimizers={self._optimizers_of(model)}"] if reply.optimizers else []
            lines += call(names.imported("reshard_module"), arguments)
        ahead = self._known[command.model].prefetch
        if command.prefetch is not None or (ahead and command.wrap):
            lines += self._prefetch(model, ahead)
        return lines

    def _named(self, command: Reshard) -> dict[str, str]:
        """Return the parts of the precision that a command changes; ``keep`` only if parameters kept their dtype."""
        named = PrecisionNames.named(command.mp) if command.mp else {}
        before = self._known.get(command.model)
        if before is None or not PrecisionNames.parse(before.mp).keep:
            named.pop("keep", None)
        return named

    def _changed_precision(self, precision: dict[str, str], model: str, *, wraps: bool, is_known: bool) -> str:
        """Return the argument that changes the precision of units; empty: none. Only the model casts its output."""
        changed = [
            f"{what}_dtype={self._dtype(dtype)}" for what, dtype in precision.items() if what not in {"output", "keep"}
        ]
        changed += ["param_dtype_override_fn=None"] if "keep" in precision else []
        if "output" in precision:
            cast = self._dtype(precision["output"])
            changed.append(
                f"output_dtype={cast} if module is {model} else None" if cast != "None" else "output_dtype=None"
            )
        elif wraps and (self._casts_output or not is_known):
            inner = f"isinstance(module, {self._names.imported('FSDPModule')})"
            changed.append(f"output_dtype=now.output_dtype if {inner} else None")
        if not changed:
            return ""
        lines = call(
            self._names.imported("replace"), ["now", *changed], before="mp_policy=lambda module, now: ", indent="    "
        )
        return "\n".join(line.removeprefix("    ") for line in lines)

    def _reshard_unit(self, command: Reshard) -> list[str]:
        unit = expression(command.model)
        arguments = [unit, *(f"{key}={value}" for key, value in self._policy(command).items())]
        if command.mp:
            precision = self._named(command)
            now = f"{self._names.imported('fully_shard')}.state({unit}).mp_policy"
            changed = [f"{what}_dtype={self._dtype(dtype)}" for what, dtype in precision.items() if what != "keep"]
            arguments.append(f"mp_policy={self._names.imported('replace')}({now}, {', '.join(changed)})")
            self._casts_output |= bool(precision.get("output"))
        return call(self._names.imported("reshard_unit"), arguments)

    def _torch_reshard(self, command: Reshard, *, is_whole: bool) -> list[str]:
        """Return lines that call the setters of torch's ``FSDPModule``, which has no others."""
        given = {name for name in ("wrap", "mesh", "api", "strategy", "mp") if getattr(command, name)}
        given |= {name for name in ("offload", "orig_params") if getattr(command, name) is not None}
        after, before = command.reshard_after_forward, self._known.get(command.model)
        if given or isinstance(after, int) or (before is not None and before.api == CLASSIC):
            raise UsageError(
                f"torch's FSDP cannot do what %fsdp {to_text(command)} did: it only changes reshard_after_forward "
                "(auto, true or false) and prefetch of a fully_shard model. Leave out --engine torch"
            )
        model, lines = expression(command.model), []
        if after:
            only = "" if is_whole else ", recurse=False"
            lines.append(f"{model}.set_reshard_after_forward({after != 'false'}{only})")
            if after == "auto" and is_whole:
                lines.append(f"{model}.set_reshard_after_forward(False, recurse=False)  # the root stays unsharded")
        return lines + ([] if command.prefetch is None else self._prefetch(model, command.prefetch))

    def _unshard(self, command: Unshard, reply: UnshardReply) -> list[str]:
        if self._is_torch:
            raise UsageError(
                f"torch's FSDP cannot make a sharded model plain again, as %fsdp {to_text(command)} did: leave out "
                "--engine torch"
            )
        before = self._known.pop(command.model, None)
        api = before.api if before is not None else ""
        return self._plain(command.model, api, has_optimizers=bool(reply.optimizers))

    def _plain(self, name: str, api: str, *, has_optimizers: bool) -> list[str]:
        model = expression(name)
        optimizers = [self._optimizers_of(model)] if has_optimizers else []
        if api == CLASSIC:
            return call(self._names.imported("unwrap"), [model, *optimizers], before=f"{model}, _ = ")
        return call(self._names.imported("unshard_module"), [model, *optimizers])

    # ---- parts

    def _mesh(self, shape: tuple[int, ...]) -> tuple[list[str], str]:
        """Return the variable of a mesh, and the lines that make it if nothing has yet."""
        if len(shape) < 2:
            return [], self._names.own("mesh")
        name = self._names.own(f"mesh_{mesh_words(*shape)}")
        if name in self._meshes:
            return [], name
        self._meshes.add(name)
        arguments = [f"{self._names.own('mesh')}.device_type", str(shape), 'mesh_dim_names=("replicate", "shard")']
        return call(self._names.imported("init_device_mesh"), arguments, before=f"{name} = "), name

    def _ignored(self, command: Shard) -> tuple[list[str], str]:
        if not command.ignore:
            return [], ""
        name, path, param = (self._names.own(each) for each in ("ignored", "path", "param"))
        matches = " or ".join(f'{self._names.imported("fnmatch")}({path}, "{glob}")' for glob in command.ignore)
        loop = f"for {path}, {param} in {expression(command.model)}.named_parameters()"
        line = f"{name} = {{{param} {loop} if {matches}}}"
        broken = [f"{name} = {{", f"    {param}", f"    {loop}", f"    if {matches}", "}"]
        return [line] if len(line) <= WIDTH else broken, name

    def _policy(self, command: Shard | Reshard) -> dict[str, str]:
        """Return the arguments of ``fully_shard`` that a command gives, without precision."""
        found = {}
        after = command.reshard_after_forward
        if after != type(command).reshard_after_forward:
            found["reshard_after_forward"] = _AFTER_FORWARD[after] if isinstance(after, str) else str(after)
        if command.offload is not type(command).offload:
            policy = "CPUOffloadPolicy" if command.offload else "OffloadPolicy"
            # torch's policy pins memory by default, and fails without an accelerator
            unpinned = "pin_memory=False" if self._is_torch and self._kind == HOST else ""
            found["offload_policy"] = f"{self._names.imported(policy)}({unpinned})"
        return found

    def _kept_params(self, model: str, precision: PrecisionNames) -> tuple[list[str], list[str]]:
        """Return the lines that choose the parameters that keep their dtype, and the argument for a policy."""
        if not precision.keep:
            return [], []
        name, path, param = (self._names.own(each) for each in ("kept", "path", "param"))
        matches = " or ".join(f'{self._names.imported("fnmatch")}({path}, "{glob}")' for glob in precision.kept)
        lines = [
            f"{name} = {{  # ids: the parameters themselves would stay in memory",
            f"    id({param})",
            f"    for {path}, {param} in {model}.named_parameters()",
            f"    if {matches}",
            "}",
        ]
        return lines, [f"param_dtype_override_fn=lambda param: param.dtype if id(param) in {name} else None"]

    def _precision(self, variable: str, precision: PrecisionNames, kept: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the lines that make a policy, and the argument that it is; nothing for none."""
        if precision == PrecisionNames():
            return [], []
        variable = self._names.own(variable)
        lines = call(
            self._names.imported("MixedPrecisionPolicy"), [*self._dtypes(precision), *kept], before=f"{variable} = "
        )
        return lines, [f"mp_policy={variable}"]

    def _dtypes(self, precision: PrecisionNames) -> list[str]:
        return [
            f"{what}_dtype={self._dtype(dtype)}" for what, dtype in vars(precision).items() if dtype and what != "keep"
        ]

    def _dtype(self, name: str) -> str:
        return f"{self._names.imported('torch')}.{DTYPES[name]}" if name else "None"

    def _prefetch(self, model: str, ahead: int) -> list[str]:
        units_of = self._helper("units_of", _UNITS_OF, "FSDPModule")
        off = "" if self._is_torch else " if ahead else None"
        return [f"{self._helper('set_prefetch', _SET_PREFETCH, units_of=units_of, off=off)}({model}, {ahead})"]

    def _optimizers_of(self, model: str) -> str:
        return f"{self._helper('optimizers_of', _OPTIMIZERS_OF, 'torch')}({model})"

    def _carry_over(self) -> str:
        if self._is_torch:
            remap = self._helper("remap_optimizer", _REMAP_OPTIMIZER, "torch", "distribute_tensor")
        else:
            remap = self._names.imported("remap_optimizer")
        return self._helper("carry_over", _CARRY_OVER, remap_optimizer=remap)

    def _helper(self, usual: str, text: str, *imports: str, **more: str) -> str:
        """Return the name of a function of the script, and have the script define it."""
        name = self._names.own(usual)
        self.helpers[usual] = text.format(name=name, **{each: self._names.imported(each) for each in imports}, **more)
        return name


def _is_one(value: str, classes: Sequence[str]) -> str:
    """Return a condition: ``value`` is one of the names of ``classes``."""
    if len(classes) == 1:
        return f'{value} == "{classes[0]}"'
    names = ", ".join(f'"{each}"' for each in classes)
    return f"{value} in ({names})"
