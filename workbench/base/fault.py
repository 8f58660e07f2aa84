"""A fault of a model or a run: the verdict, what shows it, and what to type against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.events import unit_words

LATE = "late-rank"
"""Rule of the fault that the others wait for a rank that is busy elsewhere."""

_MAX_LISTED = 12  # names in a sentence
_MAX_LETTERS = 80  # characters of one name


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. All texts are plain, without a full stop at the end.

    Attributes:
        rule: name of the check that found it, such as ``optimizer-before-shard``; scripts rely on it.
        verdict: what is wrong, in one sentence.
        evidence: what shows it, a phrase each: rank, unit, parameter, bytes, milliseconds.
        fix: what to type: a line of code or an ``%fsdp`` line; empty if nothing that is typed helps.
    """

    rule: str
    verdict: str
    evidence: tuple[str, ...] = ()
    fix: str = ""

    def facts(self) -> list[tuple[str, str]]:
        """Return the evidence and the fix as (name, text), in display order."""
        return [*(("evidence", text) for text in self.evidence), *([("fix", self.fix)] if self.fix else [])]

    @property
    def may_pass(self) -> bool:
        """Whether ranks that wait may still continue: the rank that they wait for is only late."""
        return self.rule == LATE

    @property
    def sentence(self) -> str:
        """Verdict and fix, for a note in another report."""
        return ". ".join(filter(None, (self.verdict, self.fix)))

    def about(self, names: Sequence[str]) -> Fault:
        """Return the fault with ``{names}`` in its texts replaced by a list of these, and ``{first}`` by the first."""

        def filled(text: str) -> str:
            return text.replace("{names}", listed(names)).replace("{first}", names[0])

        return replace(self, verdict=filled(self.verdict), fix=filled(self.fix))


def listed(paths: Sequence[str]) -> str:
    """Return the names of units or parameters as a list in text; shortens long lists and long names in the middle."""
    names = [unit_words(path) for path in paths]
    if len(names) > _MAX_LISTED:
        names = [*names[: _MAX_LISTED - 2], f"... {len(names) - _MAX_LISTED + 1} more ...", names[-1]]
    half = _MAX_LETTERS // 2
    return ", ".join(n if len(n) <= _MAX_LETTERS else f"{n[:half]}...{n[3 - half :]}" for n in names)


# ---- state of a sharded model that no engine manages


def in_no_unit(model: str, params: Sequence[str]) -> Fault:
    """Return the fault that trained ``params`` of ``model`` (its variable; empty: unknown) are in no unit."""
    return Fault(
        rule="in-no-unit",
        verdict="in no unit, so their gradients are not averaged: {names}",
        fix=f"After backward, for each: p = {model or 'model'}.get_parameter('{{first}}'); "
        "torch.distributed.all_reduce(p.grad); p.grad /= world_size. Or freeze them, or unshard and shard again "
        "without --ignore",
    ).about(params)


def added_late(params: Sequence[str]) -> Fault:
    """Return the fault that ``params`` became trained parameters after the wrapper that averages gradients was made."""
    return Fault(
        rule="in-no-unit",
        verdict="added or unfrozen after DistributedDataParallel was made, which does not average their gradients: "
        "{names}",
        fix="make DistributedDataParallel again after such a change, and a new optimizer; then load one checkpoint on "
        "every rank",
    ).about(params)


def hook_never_called(params: Sequence[str]) -> Fault:
    """Return the fault that sharded ``params`` have a ``register_hook``, which is never called."""
    return Fault(
        rule="hook-never-called",
        verdict="register_hook is never called on a sharded parameter: {names}",
        fix="Use register_post_accumulate_grad_hook",
    ).about(params)


def buffers_differ(model: str) -> Fault:
    """Return the fault that buffers of ``model`` differ between ranks; :meth:`Fault.about` names them."""
    return Fault(
        rule="buffers-differ",
        verdict="buffers differ between ranks: {names}",
        fix=f"If they should not, for each: torch.distributed.broadcast({model or 'model'}.get_buffer('{{first}}'), "
        "0); after to_empty they are uninitialised until set",
    )


def facts_of(faults: Sequence[Fault]) -> list[tuple[str, str]]:
    """Return evidence and fix of each fault as (name, text), in display order; the first verdict is the headline's."""
    found: list[tuple[str, str]] = []
    for place, fault in enumerate(faults):
        found += [*([("also", fault.verdict)] if place else []), *fault.facts()]
    return found
