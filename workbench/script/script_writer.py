"""A program as the text of a script: a header, the cells as they were, and the commands as code."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from workbench.base.devices import HOST
from workbench.errors import UsageError
from workbench.protocol.commands import (
    InjectFault,
    Lint,
    Reshard,
    Save,
    Shard,
    Snapshot,
    Step,
    StepReply,
    Unshard,
    Verify,
    to_text,
)
from workbench.script.cell_code import CellCode, cell_code
from workbench.script.script_names import ScriptNames
from workbench.script.sharding_code import WIDTH, ShardingCode, with_setters
from workbench.session.program import CompletedCell, CompletedCommand, Entry, Omission, Program

MARK = "by %fsdp export"
"""Text in the first line of a script; a file without it was written by somebody else."""

USED_AT_ONCE = {"os", "torch", "dist", "init_device_mesh"}
"""Imports that the head itself uses, so that a cell may import them again."""

MAX_OMISSIONS = 8
"""Omissions that a script names; it counts the others."""

_RUN_STEPS = '''\
def {run_steps}(step_function, count):
    """Call the step function `count` times; rank 0 prints the mean loss of all ranks."""
    global {num_steps}
    for _ in range(count):
        loss = step_function()
        if isinstance(loss, {torch}.Tensor):
            loss = loss.item()
        losses = [None] * {dist}.get_world_size()
        {dist}.all_gather_object(losses, loss)
        losses = [loss for loss in losses if loss is not None]
        if {dist}.get_rank() == 0 and losses:
            print(f"step {{{num_steps}}}: loss {{{fmean}(losses)}}", flush=True)
        {num_steps} += 1'''


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script.

    Attributes:
        text: its text.
        start: the command that starts it, without the path of the script.
        notes: how it differs from what the ranks did, a sentence each.
    """

    text: str
    start: str
    notes: tuple[str, ...]


def write_script(program: Program, engine: str, name: str) -> Script:
    """Return the script of a program.

    Args:
        program: the program.
        engine: whose FSDP it uses: ``workbench`` or ``torch``; empty: the one that ran the models.
        name: file name of the script.

    Raises:
        UsageError: the program has no cell, the engine has nothing for one of its commands, or both engines ran.
    """
    engine = engine or _engine_of(program)
    entries = with_setters(_without_detours(program.entries), engine)
    if not any(isinstance(entry, CompletedCell) for entry in entries):
        raise UsageError(
            "nothing to write: a script needs a %%fsdp cell that all ranks have completed since their start"
        )
    cells = {place: cell_code(entry.code) for place, entry in enumerate(entries) if isinstance(entry, CompletedCell)}
    names = ScriptNames(cells.values(), engine)
    body = _Body(names, engine, program.device, cells)
    blocks = [block for place, entry in enumerate(entries) if (block := body.block(place, entry))]
    notes = (*_notes(program, entries), *_ipython_notes(cells.values()))
    start = _start(program.ranks_per_host)
    head = _head(program, names, body, cells, [start, name], notes)
    end = f"{names.imported('dist')}.destroy_process_group()"
    return Script(text="\n\n\n".join([head, *blocks, end]) + "\n", start=f"{start} {name}", notes=notes)


def _engine_of(program: Program) -> str:
    commands = (entry.command for entry in program.entries if isinstance(entry, CompletedCommand))
    engines = {command.engine for command in commands if isinstance(command, Shard)}
    if len(engines) > 1:
        raise UsageError("both engines have run models here, and a script has one: add --engine workbench or torch")
    return engines.pop() if engines else Shard.engine


_NO_CODE = (InjectFault, Lint, Save, Snapshot, Verify)
"""Commands that leave the training as it is."""


class _Body:
    """Writer of the entries of a program, one block of lines each."""

    def __init__(self, names: ScriptNames, engine: str, kind: str, cells: dict[int, CellCode]) -> None:
        self._names, self._cells = names, cells
        self.sharding = ShardingCode(names, engine, kind)
        self.has_losses = False

    def block(self, place: int, entry: Entry) -> str:
        """Return the text of an entry; empty: it leaves no trace."""
        if isinstance(entry, CompletedCell):
            return self._cells[place].text
        if isinstance(entry, Omission) or isinstance(entry.command, _NO_CODE):
            return ""
        lines = self._command(entry)
        return "\n".join([f"# %fsdp {to_text(entry.command)}", *lines]) if lines else ""

    def _command(self, entry: CompletedCommand) -> list[str]:
        if isinstance(entry.command, (Shard, Reshard, Unshard)):
            return self.sharding.lines(entry)
        if isinstance(entry.command, Step):
            return self._steps(entry.command, entry.reply)
        raise UsageError(f"%fsdp {to_text(entry.command)} cannot be written as code of a script")

    def _steps(self, command: Step, reply: StepReply | None) -> list[str]:
        if reply is not None and reply.losses is None:
            return [f"for {self._names.own('step')} in range({command.count}):", f"    {command.fn}()"]
        self.has_losses = True
        return [f"{self._names.own('run_steps')}({command.fn}, {command.count})"]


def _without_detours(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without a ``shard`` that is undone at once before the model is sharded differently."""
    kept: list[Entry] = []
    for entry in entries:
        if isinstance(entry, CompletedCommand) and isinstance(entry.command, _NO_CODE):
            continue
        kept.append(entry)
        commands = [each.command if isinstance(each, CompletedCommand) else None for each in kept[-3:]]
        match commands:
            case [Shard(model=first), Unshard(model=second), Shard(model=third)] if first == second == third:
                del kept[-3:-1]
    return kept


def _notes(program: Program, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield how a script differs from what the ranks did."""
    if program.is_attached:
        yield "The ranks were attached: what ran on them before that is not in the script."
    counts = Counter(entry.what for entry in entries if isinstance(entry, Omission))
    named = [what if count == 1 else f"{what} ({count} times)" for what, count in counts.items()]
    if len(named) > MAX_OMISSIONS:
        named = [*named[:MAX_OMISSIONS], f"and {len(named) - MAX_OMISSIONS} more"]
    if named:
        yield f"Left out, with whatever it changed: {'; '.join(named)}."
    if program.under_way:
        yield f"Left out, as it has not ended: {program.under_way}."


def _ipython_notes(cells: Iterable[CellCode]) -> Iterator[str]:
    lines = list(dict.fromkeys(line for cell in cells for line in cell.comments))
    if lines:
        yield f"Not Python, and so comments in the script: {'; '.join(lines)}."


def _start(ranks_per_host: Sequence[int]) -> str:
    hosts, ranks = len(ranks_per_host), max(ranks_per_host, default=1)
    if hosts < 2:
        return f"torchrun --nproc-per-node {ranks}"
    return f"torchrun --nnodes {hosts} --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint HOST:29400"


def _head(
    program: Program,
    names: ScriptNames,
    body: _Body,
    cells: dict[int, CellCode],
    start: Sequence[str],
    notes: Sequence[str],
) -> str:
    """Return what precedes the first cell: docstring, imports, process group, the variables of cells, functions."""
    kind, used = program.device, {name for cell in cells.values() for name in cell.used}
    for name in ("log_metric", "display"):
        if name in used and names.is_free(name):
            names.imported(name)
    setup = list(_setup(kind, names))
    functions = list(body.sharding.helpers.values())
    if body.has_losses:
        functions.append(_run_steps(names))
    ranks = sum(program.ranks_per_host)
    doc = [f'"""A training session on {ranks} rank{"s" * (ranks > 1)}, written {MARK}.', "", "Start it with:"]
    doc += [
        "",
        f"    {' '.join(start)}",
        *(line for note in notes for line in ["", *textwrap.wrap(note, WIDTH)]),
        '"""',
    ]
    futures = sorted({name for cell in cells.values() for name in cell.futures})
    lines = [*doc]
    if names.repeated() - USED_AT_ONCE:
        lines += ["", "# ruff: noqa: F811 - cells import again what this head imports"]
    if futures:
        lines += ["", f"from __future__ import {', '.join(futures)}"]
    return "\n\n\n".join(["\n".join([*lines, "", *names.import_lines(), "", *setup]), *functions])


def _setup(kind: str, names: ScriptNames) -> Iterator[str]:
    torch, dist, os_ = (names.imported(name) for name in ("torch", "dist", "os"))
    yield from _device(kind, torch, dist, os_)
    yield f"rank, world_size = {dist}.get_rank(), {dist}.get_world_size()"
    mesh = f'{names.imported("init_device_mesh")}("{kind}", (world_size,), mesh_dim_names=("shard",))'
    yield f"mesh = {mesh}"
    for name in ("device", "mesh"):
        if not names.is_free(name):
            yield f"{names.own(name)} = {name}  # a cell binds {name} to something else"


def _device(kind: str, torch: str, dist: str, os_: str) -> Iterator[str]:
    if kind == HOST:
        yield f'device = {torch}.device("cpu")'
    else:
        yield f'device = {torch}.device("{kind}", int({os_}.environ["LOCAL_RANK"]))'
        yield f"{torch}.{kind}.set_device(device)"
    yield f'num_threads = ({os_}.cpu_count() or 1) // int({os_}.environ["LOCAL_WORLD_SIZE"])'
    yield f"{torch}.set_num_threads(max(1, num_threads))"
    yield f'{dist}.init_process_group("{"gloo" if kind == HOST else "nccl"}")'


def _run_steps(names: ScriptNames) -> str:
    num_steps = names.own("num_steps")
    imports = {name: names.imported(name) for name in ("torch", "dist", "fmean")}
    definition = _RUN_STEPS.format(run_steps=names.own("run_steps"), num_steps=num_steps, **imports)
    return f"{num_steps} = 0\n\n\n{definition}"
