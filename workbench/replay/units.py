"""Names of units and parameters in text, and the order in which units are listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.base.fault import buffers_differ, hook_never_called, in_no_unit
from workbench.events import UNWATCHED, Unit, engine_named, unit_words
from workbench.trace.schema import Header


def unit_name(header: Header, unit: int) -> str:
    """Return a unit's name for people: its module path, or ``(root)`` for the root module; plain text.

    A unit that the header does not (yet) describe is named by its number, ``"unit 7"``.
    """
    if 0 <= unit < len(header.units):
        return unit_words(header.units[unit].name)
    return f"unit {unit}"


def under_policies_of(header: Header, step: int) -> Header:
    """Return the header with each unit under its policy in a step."""
    return replace(header, units=tuple(unit.at_step(step) for unit in header.units))


def policy_steps(header: Header) -> list[int]:
    """Return the steps from which on some unit had another policy, and those that were the first of a unit."""
    known = {each.since_step for unit in header.units for each in (*unit.earlier, unit)}
    return sorted(step for step in known if step >= 0)


def engine_words(header: Header) -> str:
    """Return which engine runs the units in use, as text; empty if it is the workbench's."""
    engines = sorted({unit.engine for unit in header.units if unit.in_use} or {""})
    return "" if engines == [""] else f"run by {' and '.join(engine_named(engine).name for engine in engines)}"


def seen_words(*, sees_cpp: bool) -> str:
    """Return which collectives of programs that do not use the workbench's engine are seen, and what adds others."""
    if sees_cpp:
        return "of any program are seen, also those that C++ issues"
    return "of any program are seen if Python issues them; torch 2.14 also announces those that C++ issues"


def collectives_words(header: Header) -> str:
    """Return :func:`seen_words` of a trace; empty unless another engine than the workbench's runs a unit."""
    return seen_words(sees_cpp=all(info.sees_cpp for info in header.ranks)) if engine_words(header) else ""


def unseen_words(header: Header) -> str:
    """Return which collectives or waits of torch's engines this trace lacks, as text; empty if none."""
    if any(unit.in_use and unit.comm == UNWATCHED for unit in header.units):
        return (
            "collectives of c10d are not all in it, as watching them failed: nothing is expected of units that use them"
        )
    replicas = [unit for unit in header.units if unit.in_use and not unit.runner.splits and unit.replicate_size > 1]
    names = " and ".join(sorted({unit.runner.short_name for unit in replicas}))
    if all(unit.comm for unit in replicas):
        return f"waits of {names} for its all-reduces, in C++, are not measured" if replicas else ""
    return f"the all-reduces of {names} are missing, which C++ issues: torch 2.14 or newer announces them"


def differing(by_rank: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    """Return the buffers that differ between the ranks that have them, given their checksums on each rank."""
    sums: dict[str, set[int]] = {}
    for own in by_rank:
        for name, crc32 in own.items():
            sums.setdefault(name, set()).add(crc32)
    return tuple(name for name, found in sums.items() if len(found) > 1)


def unmanaged_notes(header: Header) -> tuple[str, ...]:
    """Return notes on what the engine does not manage in the sharded models, and what to do."""
    buffers = differing([{each.name: each.crc32 for each in info.buffers} for info in header.ranks])
    hooks = [name for names in _by_model(header.hooks).values() for name in names]
    return unmanaged_sentences(_by_model(header.unmanaged), hooks, _by_model(buffers))


def unmanaged_sentences(
    params: Mapping[str, Sequence[str]], hooks: Sequence[str], buffers: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return a sentence for the parameters of each model, one for all hooks, and one for the buffers of each model.

    Args:
        params: parameters in no unit, by the model's variable (empty: unknown); a model's list may be empty.
        hooks: sharded parameters with a hook that is never called.
        buffers: buffers that differ between ranks, by model likewise.
    """
    return (
        *(in_no_unit(model, names).sentence for model, names in params.items() if names),
        *([hook_never_called(hooks).sentence] if hooks else []),
        *(buffers_differ(model).about(names).sentence for model, names in buffers.items() if names),
    )


def _by_model(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the names within each model, by the variable that holds the model."""
    found: dict[str, list[str]] = {}
    for path in paths:
        model, _, name = path.partition(".")
        found.setdefault(model, []).append(name)
    return found


def by_number(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key for names, numbers compared as numbers: ``layers.2`` before ``layers.10``; the root first."""
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".") if part]


def model_order(header: Header) -> list[int]:
    """Return all units from the top of the model: each root, then its units by name, numbers as numbers.

    Units whose root is no unit, because it has no parameters, come first.
    """

    def key(unit: Unit) -> tuple[object, ...]:
        return unit.root, unit.index != unit.root, by_number(unit.name), unit.index

    return [unit.index for unit in sorted(header.units, key=key)]
