"""Labels for ranks in pictures of many ranks, with their hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.base.text_formats import plural
from workbench.replay.grouping import MAX_RUNS, by_value, label, ranges, runs
from workbench.trace.schema import Header
from workbench.views import theme

MANY = 16
"""With more ranks, a label may list the excluded ones instead, and views fold ranks that did the same."""

_NAMED = 3  # hosts, and ranks with their hosts
_HOST_LETTERS = 24


def who(header: Header, ranks: Iterable[int], everyone: Iterable[int] = ()) -> str:
    """Return a label for ranks of a job that may run on several hosts; plain text.

    Example: ``"rank 37 on node04"``; ``"ranks 96-103, all of node12"``; ``"all 512 ranks but 37, 300"``.

    Args:
        header: has the host of each rank.
        ranks: the ranks to name, at least one.
        everyone: all ranks that the label may refer to; empty: never "all ranks but".
    """
    chosen = set(ranks)
    others = set(everyone) - chosen
    if len(chosen) > MANY and 0 < len(runs(others)) <= min(MAX_RUNS, len(runs(chosen))):
        return f"all {len(chosen) + len(others):,} ranks but {ranges(others)}"
    hosts = hosts_of(header)
    if len(hosts) < 2:
        return label(chosen)
    if len(chosen) <= _NAMED:
        places = {rank: theme.shorten(host, _HOST_LETTERS) for host, there in hosts.items() for rank in there}
        named = [f"{rank} on {places[rank]}" if rank in places else f"{rank}" for rank in sorted(chosen)]
        return f"rank{'s' if len(named) > 1 else ''} {', '.join(named)}"
    whole = [host for host, there in hosts.items() if chosen.issuperset(there)]
    if len(whole) > _NAMED or sum(len(hosts[host]) for host in whole) < len(chosen):
        return label(chosen)
    return f"{label(chosen)}, all of {' and '.join(theme.shorten(host, _HOST_LETTERS) for host in whole)}"


def several(header: Header, groups: Sequence[Iterable[int]], most: int = 4) -> str:
    """Return a label for some groups of ranks, with a count of the groups beyond ``most``."""
    named = "; ".join(who(header, ranks) for ranks in groups[:most])
    left = len(groups) - most
    return f"{named} and {plural(left, 'more group')} of ranks" if left > 0 else named


def hosts_of(header: Header) -> dict[str, list[int]]:
    """Return the known ranks of each host, by its name."""
    return by_value((info.rank, info.host) for info in header.ranks)
