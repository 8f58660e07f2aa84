"""Faults that a rank finds in its models without running them: the reply of ``lint``, and part of ``shard``'s."""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.base.fault import Fault


@dataclass(frozen=True, kw_only=True)
class RankComparison:
    """Something to compare between ranks: only the notebook has the values of all of them.

    Attributes:
        fault: the fault if the comparison fails, with ``{names}`` and ``{first}`` in its texts (:meth:`Fault.about`);
            the notebook adds the ranks to its evidence.
        digests: a checksum by name. Ranks that have the same name are compared.
        wants_equal: whether equal digests are right, such as those of a buffer, or different ones, such as of data.
        model: the variable of the model that it is about, if a comparison of the same model may be its cause.
        before: earlier digests: ranks whose earlier ones were equal too are no fault where different ones are right.
    """

    fault: Fault
    digests: dict[str, int] = field(default_factory=dict)
    wants_equal: bool = True
    model: str = ""
    before: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LintReply:
    """The findings of one rank.

    Attributes:
        models: variables of the models that were checked.
        rules: names of all rules that ran, in the order of the damage of what they find.
        faults: faults that this rank sees alone, in the same order.
        comparisons: what to compare between ranks.
        abstained: why rules could not decide, a sentence each that begins with the rule's name.
    """

    models: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    comparisons: tuple[RankComparison, ...] = ()
    abstained: tuple[str, ...] = ()
