"""Collectives: what was sent for which unit, how long it took, and how long compute waited for it.

*payload* is the logical size of a collective (all-gather: its whole output; reduce-scatter: its whole input;
all-reduce: one rank's input); :func:`ring_bytes` is what one rank sends for it on a ring, and :func:`crossing_bytes`
what leaves each host. *exposed* time is compute blocked on it. Neither time includes holds at a breakpoint or a pause.
Arrays: ``N`` collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

import numpy as np

from workbench.events import C10D, COLLECTIVES, GLOO, PER_HOST, UNWATCHED, Edge, Kind, Param, Unit
from workbench.replay.grouping import activity_key
from workbench.replay.spans import Ints, Work, closed, durations_ns, rows_of, spans
from workbench.replay.units import under_policies_of
from workbench.trace.begin_end import partners
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header, KeyFrame


@dataclass(frozen=True, kw_only=True, eq=False)
class Collectives(Work):
    """The collectives one rank issued, in the order of issue; arrays are ``[N]``.

    Attributes:
        seq: the row that issued it.
        issue_ns: when it was issued.
        time_ns: from issue to end (if it has not ended: to the last row of its step), holds excluded.
        wait_begin_ns: when compute first waited for it; -1 if never.
        wait_end_ns: when compute resumed; -1 if it never waited or still waits.
        wait_ns: exposed time: all its waits (a wait not ended: to the last row of its step), holds excluded.
    """

    seq: Ints
    issue_ns: Ints
    time_ns: Ints
    wait_begin_ns: Ints
    wait_end_ns: Ints
    wait_ns: Ints


def table(rank_trace: RankTrace) -> Collectives:
    """Return the collectives issued in a rank's trace; those issued before its first row are left out."""
    rows = rank_trace.rows
    issued = spans(rows, COLLECTIVES)
    waits = spans(rows, (Kind.WAIT,))
    place = matches(issued, waits)
    waits_ns = durations_ns(rows, waits.begin_ns, closed(waits, rows).end_ns)
    exposed = np.zeros(len(issued), np.int64)
    np.add.at(exposed, place[place >= 0], waits_ns[place >= 0])
    return Collectives(
        kind=issued.kind,
        unit=issued.unit,
        step=issued.step,
        num_bytes=issued.num_bytes,
        comm_group=issued.comm_group,
        comm_seq=issued.comm_seq,
        seq=issued.begin_seq,
        issue_ns=issued.begin_ns,
        end_ns=issued.end_ns,
        time_ns=durations_ns(rows, issued.begin_ns, closed(issued, rows).end_ns),
        wait_begin_ns=first_of(place, waits.begin_ns, len(issued)),
        wait_end_ns=first_of(place, waits.end_ns, len(issued)),
        wait_ns=exposed,
    )


def _times(alike: Sequence[RankTrace]) -> tuple[Collectives, Ints, Ints]:
    """Return the collectives of the first of some ranks, and ``time_ns`` and ``wait_ns`` of each rank, ``[R, N]``.

    Args:
        alike: ranks with the same collectives and waits (:func:`~workbench.replay.grouping.activity_key`): rows are
            matched in the first one only.
    """
    kinds = (*COLLECTIVES, Kind.WAIT)
    rows = rows_of(alike[0], kinds)
    is_wait, begins, end = rows["kind"] == Kind.WAIT, rows["edge"] == Edge.BEGIN, partners(rows)
    held = any((rank.kinds == Kind.GATE).any() for rank in alike)
    if len(alike) == 1 or held or (end[begins] < 0).any():
        tables = [table(rank) for rank in alike]
        return tables[0], np.stack([found.time_ns for found in tables]), np.stack([found.wait_ns for found in tables])
    t_ns = np.stack([rows_of(rank, kinds)["t_ns"] for rank in alike])
    issued, waits = np.flatnonzero(begins & ~is_wait), np.flatnonzero(begins & is_wait)
    place = matches(spans(rows, COLLECTIVES), spans(rows, (Kind.WAIT,)))
    exposed = np.zeros((len(issued), len(alike)), np.int64)
    np.add.at(exposed, place[place >= 0], (t_ns[:, end[waits]] - t_ns[:, waits]).T[place >= 0])
    return table(alike[0]), t_ns[:, end[issued]] - t_ns[:, issued], exposed.T


def matches(issued: Work, waits: Work) -> Ints:
    """Return for each wait the position of its collective, -1 if that was issued before the trace."""
    if not len(issued):
        return np.full(len(waits), -1)
    order = np.argsort(_identity(issued), kind="stable")
    keys, wanted = _identity(issued)[order], _identity(waits)
    found = order[np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)]
    return np.where((_identity(issued)[found] == wanted) & (waits.comm_seq >= 0), found, -1)


def _identity(found: Work) -> Ints:
    """One number per collective, shared by the collective and its waits."""
    return (found.comm_group << 32) + found.comm_seq


def first_of(place: Ints, values: Ints, count: int) -> Ints:
    """Return for each of ``count`` collectives the value of its first wait, -1 without one.

    Args:
        place: of each wait, the position of its collective (:func:`matches`).
        values: of each wait.
        count: number of collectives.
    """
    first = np.full(count, -1, np.int64)
    matched = np.flatnonzero(place >= 0)[::-1]  # the first one is written last
    first[place[matched]] = values[matched]
    return first


def ring_bytes(kind: Kind, payload: int, num_ranks: int) -> float:
    """Return the bytes one rank sends on a ring of ``num_ranks`` for a collective of ``payload`` bytes.

    All-gather and reduce-scatter: ``(F - 1) / F * payload``. An all-reduce is one after the other, so twice that. In a
    broadcast, every rank except the last passes the whole payload on: the same share on average.
    """
    share = (num_ranks - 1) / num_ranks * payload
    return 2 * share if kind == Kind.ALL_REDUCE else share


def crossing_bytes(kind: Kind, payload: int, hosts: Sequence[str], carrier: str = "") -> dict[str, float]:
    """Return the bytes that each host sends to others for a collective of ``payload`` bytes.

    With F ranks, L of them on a host, H hosts, and a payload of P bytes:

    - memory within hosts, gloo between them: each host sends its ``P / H`` to every other one, ``(H - 1) / H * P``;
    - gloo: each rank sends ``P / F`` to every other one, of which ``L * (F - L) / F * P`` leave a host;
    - a ring, for any other carrier and every all-reduce: :func:`ring_bytes` leave a host as many times as one of its
      ranks is followed by a rank of another host. On gloo, c10d's own reduce-scatter is an all-reduce.

    Args:
        kind: of the collective.
        payload: of the collective, in bytes.
        hosts: the host of each participating rank, in group order.
        carrier: the transport, one of the values of :attr:`~workbench.events.Unit.comm`.

    Example: all-gather, 600 bytes, ``a a b b c c`` -> 400 from each host by its memory, 800 over gloo, 500 on a ring.
    """
    size, count = len(hosts), Counter(hosts)
    if kind != Kind.ALL_REDUCE and carrier == PER_HOST:
        return dict.fromkeys(count, (len(count) - 1) / len(count) * payload)
    if kind != Kind.ALL_REDUCE and carrier == GLOO:
        return {host: num * (size - num) / size * payload for host, num in count.items()}
    as_all_reduce = kind == Kind.REDUCE_SCATTER and carrier == C10D
    sent = ring_bytes(Kind.ALL_REDUCE if as_all_reduce else kind, payload, size)
    followed = Counter(host for place, host in enumerate(hosts) if host != hosts[(place + 1) % size])
    return {host: followed[host] * sent for host in count}


Key = tuple[int, Kind, int]
"""Unit, kind, and number of participating ranks."""


@dataclass(frozen=True, kw_only=True)
class _Tally:
    """The collectives of one key, of ranks with equal counts and payloads.

    Attributes:
        ranks: global ranks.
        calls: how many each issued.
        num_bytes: sum of the payloads of one rank.
        time_ns: sum of the times over all ranks.
        exposed_ns: sum over all ranks of the time compute waited for them.
    """

    ranks: tuple[int, ...]
    calls: int = 0
    num_bytes: int = 0
    time_ns: int = 0
    exposed_ns: int = 0


def _tallies(header: Header, alike: Sequence[RankTrace], step: int) -> dict[Key, _Tally]:
    """Return what some identical ranks issued in ``step``."""
    found, time_ns, exposed_ns = _times(alike)
    exposed_ns = np.minimum(exposed_ns, time_ns)  # compute wakes up after the last byte: not communication
    here = np.flatnonzero(found.step == step)
    keys = np.stack([found.unit[here], found.kind[here], _num_ranks(header, found)[here]])
    keys, which = np.unique(keys, axis=1, return_inverse=True)
    columns = (np.ones(len(found), np.int64), found.num_bytes, time_ns.sum(axis=0), exposed_ns.sum(axis=0))
    sums = np.zeros((len(columns), keys.shape[1]), np.int64)
    for total, column in zip(sums, columns, strict=True):
        np.add.at(total, which.reshape(-1), column[here])
    ranks = tuple(rank.rank for rank in alike)
    return {
        (unit, Kind(kind), num_ranks): _Tally(
            ranks=ranks, calls=calls, num_bytes=num_bytes, time_ns=took_ns, exposed_ns=waited_ns
        )
        for (unit, kind, num_ranks), (calls, num_bytes, took_ns, waited_ns) in zip(
            keys.T.tolist(), sums.T.tolist(), strict=True
        )
    }


def _num_ranks(header: Header, found: Collectives) -> Ints:
    """Ranks that took part in each collective: those of its group or, if unknown, those its unit is spread over."""
    sizes = np.array([*(len(group.ranks) for group in header.comm_groups), 0])  # the last entry is for index -1
    known = sizes[np.where(found.comm_group < len(sizes) - 1, found.comm_group, -1)]
    copies = found.kind == Kind.ALL_REDUCE
    spread = np.array([[unit.shard_size, unit.replicate_size] for unit in header.units] + [[header.world_size] * 2])
    row = np.where(found.unit < len(header.units), found.unit, -1)
    num_ranks: Ints = np.where(known > 0, known, spread[row, copies.astype(np.int64)])
    return num_ranks


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass of a model, and the backward pass that follows it.

    Attributes:
        has_backward: False for an evaluation.
        reshards: whether units free their full parameters in backward.
        reduces: whether gradients are reduced; False while they accumulate.
        all_reduces: whether they are also averaged over copies.
    """

    has_backward: bool = True
    reshards: bool = True
    reduces: bool = True
    all_reduces: bool = True


Passes = tuple[Pass, ...]
ONE_PASS: Passes = (Pass(),)


def passes(header: Header, rank: RankTrace, step: int) -> dict[int, Passes]:
    """Return the passes of each model in a rank's ``step``, by the index of its root unit.

    A pass begins with a forward of the root. Models whose root has no forward in this step are left out.
    """
    rows = rank.rows[(rank.rows["step"] == step) & _TELLS_PASSES[rank.kinds]]
    kind, begins = rows["kind"], rows["edge"] != Edge.END
    roots = np.array([*(unit.root for unit in header.units), -1])  # the last entry is for index -1
    root = roots[np.where(rows["unit"] < len(header.units), rows["unit"], -1)]
    found: dict[int, Passes] = {}
    for index in np.unique(root[root >= 0]).tolist():
        mine = begins & (root == index)
        starts = np.flatnonzero(mine & (kind == Kind.FORWARD) & (rows["unit"] == index))
        ends = [*starts[1:].tolist(), len(rows)]
        if len(starts):
            found[index] = tuple(
                _pass(kind[a:b][mine[a:b]].tolist()) for a, b in zip(starts.tolist(), ends, strict=True)
            )
    return found


_TELLS_PASSES = np.isin(
    np.arange(256), (Kind.FORWARD, Kind.BACKWARD, Kind.RESHARD, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
)  # indexed by the ``kind`` column


def _pass(kinds: list[int]) -> Pass:
    if Kind.BACKWARD not in kinds:
        return Pass(has_backward=False, reshards=False, reduces=False, all_reduces=False)
    backward = kinds[kinds.index(Kind.BACKWARD) :]
    return Pass(
        reshards=Kind.RESHARD in backward,
        reduces=Kind.REDUCE_SCATTER in backward,
        all_reduces=Kind.ALL_REDUCE in backward,
    )


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The collectives of one rank for one unit in one step.

    Attributes:
        unit: unit index, -1 none.
        kind: one of COLLECTIVES.
        num_ranks: ranks that take part in each.
        calls: how many.
        num_bytes: sum of their payloads.
    """

    unit: int
    kind: Kind
    num_ranks: int
    calls: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Expected(Calls):
    """The collectives that one training step needs for one unit: see :func:`closed_form`.

    Attributes:
        num_passes: forward and backward passes of the unit's model in the step.
        num_parts: collectives that each pass has instead of one.
    """

    num_passes: tuple[int, int] = (1, 1)
    num_parts: int = 1


def closed_form(
    header: Header, full: Collection[int] = (), passes: Mapping[int, Passes] | None = None
) -> tuple[Expected, ...]:
    """Return the collectives of one training step on each rank.

    ``full`` are the units whose parameters are full, or being gathered, when the step begins: an earlier evaluation
    may leave the root so. Forward does not gather them. ``passes`` are those of the step, by model, as returned by
    :func:`passes`; a model without an entry has one plain pass: one forward, one backward, gradients reduced.

    With ``p^ = padded_rows * F * elements of a row``, F the unit's shard size, R its copies, b_c and b_r the bytes per
    element of its all-gathers and reductions:

    - in each pass a unit gathers ``sum of p^ * b_c``, or what its parameters' own code exchanges, over F ranks in
      forward and, if it is resharded after forward, once more in backward: over F ranks, or with
      ``reshard_after_forward=K`` over K ranks, with K instead of F in p^ too, except in torch's engine;
    - it reduce-scatters ``sum of p^ * b_r`` of its trainable parameters over F ranks once in each pass that reduces:
      with accumulated gradients only in the last pass, and in at least one;
    - with R > 1 copies each rank's part of that, ``sum of p^ / F * b_r``, is then all-reduced over R ranks: at once, or
      by DistributedDataParallel bucket by bucket, from the second backward on. While the buckets are unknown, nothing
      is expected.

    A single rank communicates nothing. Retired units are left out, and units whose parameters are unknown or whose
    collectives were not watched.

    Example: G units, only the root kept unsharded after forward, gradients accumulated over P passes -> P (2 G - 1)
    all-gathers and G reduce-scatters.
    """
    live = (unit for unit in header.units if unit.in_use and unit.params and unit.comm != UNWATCHED)
    known = passes or {}
    return tuple(
        expected
        for unit in live
        for expected in _closed_form(unit, known.get(unit.root, ONE_PASS), is_full=unit.index in full)
    )


def _closed_form(unit: Unit, passes: Passes, *, is_full: bool) -> Iterator[Expected]:
    size, copies = unit.shard_size, unit.replicate_size
    trainable = [param for param in unit.params if param.trainable]
    num_passes = len(passes), sum(each.has_backward for each in passes)

    def expected(kind: Kind, num_ranks: int, calls: int, payload: int, parts: int = 1) -> Expected:
        calls = calls if num_ranks > 1 else 0
        return Expected(
            unit=unit.index,
            kind=kind,
            num_ranks=num_ranks,
            calls=calls * parts,
            num_bytes=calls * payload,
            num_passes=num_passes,
            num_parts=parts,
        )

    is_apart = unit.runner.gathers_params
    gathers = _gathers(unit, passes, is_full=is_full)
    for num_ranks, calls in gathers.items():
        padded_for = size if unit.runner.pads_for_copy else num_ranks
        sizes = ((_padded_elements(param, padded_for), unit.gathered_itemsize(param)) for param in unit.params)
        payload = unit.gather_nbytes or sum(elements * itemsize for elements, itemsize in sizes)
        yield expected(Kind.ALL_GATHER, num_ranks, calls, payload, len(unit.params) if is_apart else 1)
    payload = unit.reduce_itemsize * sum(_padded_elements(param, size) for param in trainable)
    reduces, all_reduces = sum(each.reduces for each in passes), sum(each.all_reduces for each in passes)
    least = bool(trainable) and num_passes[1] > 0
    calls = max(reduces, 1) if least else 0
    yield expected(Kind.REDUCE_SCATTER, size, calls, payload, len(trainable) if is_apart else 1)
    if copies > 1 and unit.num_reductions:
        calls = max(all_reduces, 1) if least else 0
        yield expected(Kind.ALL_REDUCE, copies, calls, payload // size, unit.num_reductions)


def _gathers(unit: Unit, passes: Passes, *, is_full: bool) -> Counter[int]:
    """Return how many all-gathers a unit needs for some passes, by the number of ranks in each."""
    policy, size = unit.reshard_after_forward, unit.shard_size
    after_forward = 1 if policy is False else size if policy is True else policy
    over = 1 if is_full else size  # ranks that the parameters are split over
    found = Counter({size: 0})
    for each in passes:
        found[over] += 1
        over = after_forward
        if each.has_backward:
            found[over] += 1
            over = size if each.reshards else 1
    if size > 1:
        del found[1]  # full already
    return found


def _padded_elements(param: Param, num_ranks: int) -> int:
    others = prod(size for dim, size in enumerate(param.shape) if dim != param.shard_dim)
    return -(-param.shape[param.shard_dim] // num_ranks) * num_ranks * others


@dataclass(frozen=True, kw_only=True)
class Comparison(Calls):
    """Measured and expected values for one unit, kind and number of ranks, of ranks with equal counts and payloads.

    Attributes:
        ranks: the ranks this is about, ascending.
        time_ns: sum of the times, mean over the ranks.
        exposed_ns: sum of the exposed times, mean over the ranks.
        expected: the closed form; None where it has no value: no unit, another kind, or a step whose beginning or end
            is not in the trace.
        crossing: bytes that each host sends to others for them, by host name (:func:`crossing_bytes`). A group whose
            ranks are in several rows counts in the first one. None: there is one host, or some hosts are unknown.
    """

    ranks: tuple[int, ...]
    time_ns: float
    exposed_ns: float
    expected: Expected | None
    crossing: Mapping[str, float] | None = None

    @property
    def differs(self) -> bool:
        """Whether it differs from the expected. Units that are skipped, or unsharded by hand, differ legitimately."""
        found = (self.calls, self.num_bytes)
        return self.expected is not None and found != (self.expected.calls, self.expected.num_bytes)


def _issuing(trace: Trace, step: int) -> set[int]:
    """Return the units of which some rank issued a collective in a step; memory of others may still be freed in it."""
    found: set[int] = set()
    for rank in trace.ranks:
        begin, end = rank.places_of(step, step)
        found.update(rank.rows["unit"][begin:end][np.isin(rank.kinds[begin:end], COLLECTIVES)].tolist())
    return found


def compare(trace: Trace, step: int) -> tuple[Comparison, ...]:
    """Return measured and expected values for every unit that a rank used in ``step``.

    Ordered by unit, kind and number of ranks. Where ranks differ there are several entries, the most common first.
    Expected is what each unit's policy in ``step`` needs, also if the unit is no longer in use.
    """
    header, used = under_policies_of(trace.header, step), _issuing(trace, step)
    units = (replace(unit, retired=False, gone=False) if unit.index in used else unit for unit in header.units)
    trace = Trace(replace(header, units=tuple(units)), trace.ranks)
    groups: dict[Hashable, list[RankTrace]] = {}
    for rank in trace.ranks:
        begin, end = rank.places_of(step, step)
        part = rank.part(begin, end, KeyFrame(unit_states=rank.unit_states_before(begin)))
        groups.setdefault(_program(trace.header, part, step), []).append(part)
    forms: dict[Hashable, dict[Key, Expected]] = {}
    found: dict[tuple[Key, int, int, Expected | None], list[_Tally]] = {}
    for alike in groups.values():
        full, ran = frozenset(alike[0].start.unit_states), passes(trace.header, alike[0], step)
        known = full, tuple(ran.items())
        if known not in forms:
            forms[known] = {(e.unit, e.kind, e.num_ranks): e for e in closed_form(trace.header, full, ran)}
        for key, tally, expected in _with_expected(_tallies(trace.header, alike, step), alike, step, forms[known]):
            found.setdefault((key, tally.calls, tally.num_bytes, expected), []).append(tally)
    rows = [_comparison(key[0], alike, key[-1]) for key, alike in found.items()]
    rows.sort(key=lambda c: (c.unit, c.kind, -c.num_ranks, -len(c.ranks), c.ranks))
    return tuple(_with_crossing(trace, step, rows))


def _with_crossing(trace: Trace, step: int, rows: Sequence[Comparison]) -> Iterator[Comparison]:
    """Add the bytes that cross between hosts to the comparisons of ``step``, if there are several hosts."""
    header = trace.header
    host_of = {rank: info.host for rank, info in header.info_of.items()}
    if len(set(host_of.values())) == 1 or not set(range(header.world_size)) <= host_of.keys():
        yield from rows
        return
    hosts = [tuple(host_of[rank] for rank in group.ranks) for group in header.comm_groups]
    payloads: dict[int, Counter[tuple[int, Kind, int]]] = {}  # of what one rank issued
    counted: set[tuple[Key, int]] = set()
    first_of, of_a_byte = cache(partial(_first_of_groups, header)), cache(partial(crossing_bytes, payload=1))
    for row in rows:
        firsts = {group: rank for group, rank in first_of(row.ranks).items() if len(hosts[group]) == row.num_ranks}
        key, total = (row.unit, row.kind, row.num_ranks), Counter[str]()
        for group, rank in firsts.items():
            if len(set(hosts[group])) == 1 or (key, group) in counted:
                continue
            if rank not in payloads:
                payloads[rank] = _payloads(trace.rank(rank), step)
            payload = payloads[rank][row.unit, row.kind, group]
            counted |= {(key, group)} if payload else set()
            shares = of_a_byte(row.kind, hosts=hosts[group], carrier=_carrier(header, row))
            total.update({host: share * payload for host, share in shares.items()})
        yield replace(row, crossing=total if firsts or not row.calls else None)


def _first_of_groups(header: Header, ranks: tuple[int, ...]) -> dict[int, int]:
    """Return the first of some ranks in each group that has any of them, by group index."""
    chosen = frozenset(ranks)
    members = ([rank for rank in group.ranks if rank in chosen] for group in header.comm_groups)
    return {index: some[0] for index, some in enumerate(members) if some}


def _payloads(rank: RankTrace, step: int) -> Counter[tuple[int, Kind, int]]:
    """Return the payloads that a rank issued in ``step``, summed by unit, kind and group."""
    found = table(rank.part(*rank.places_of(step, step), rank.start))
    total = Counter[tuple[int, Kind, int]]()
    for place in np.flatnonzero(found.step == step).tolist():
        key = int(found.unit[place]), Kind(found.kind[place]), int(found.comm_group[place])
        total[key] += int(found.num_bytes[place])
    return total


def _carrier(header: Header, row: Comparison) -> str:
    """Return the transport of a row's collectives; empty for a ring."""
    unit = header.units[row.unit] if 0 <= row.unit < len(header.units) else None
    if unit is None or (unit.comm == C10D and header.is_enqueued):  # NCCL's
        return ""
    is_among_fewer = row.kind == Kind.ALL_GATHER and row.num_ranks != unit.shard_size  # reshard_after_forward=K
    return GLOO if is_among_fewer and unit.comm == PER_HOST else unit.comm


def _program(header: Header, rank: RankTrace, step: int) -> Hashable:
    """Everything in a comparison of a rank except its times."""
    rows = rank.rows
    active = np.bincount(rows["unit"][rows["step"] == step] + 1) > 0
    did_so = activity_key(header, rows_of(rank, (*COLLECTIVES, Kind.WAIT)), ("step", "num_bytes"))
    ran = tuple(passes(header, rank, step).items())
    return frozenset(rank.start.unit_states), ran, _is_whole(rank, step), active.tobytes(), did_so


def _with_expected(
    measured: dict[Key, _Tally], alike: Sequence[RankTrace], step: int, forms: dict[Key, Expected]
) -> Iterator[tuple[Key, _Tally, Expected | None]]:
    """Yield what ranks issued in ``step`` with what was expected, including what was expected but never issued."""
    rows = alike[0].rows[alike[0].rows["step"] == step]
    active = set(np.unique(rows["unit"]).tolist()) if _is_whole(alike[0], step) else set()
    expected = {key: form for key, form in forms.items() if key[0] in active}
    nothing = _Tally(ranks=tuple(rank.rank for rank in alike))
    for key in measured | {key: form for key, form in expected.items() if form.calls}:
        tally, form = measured.get(key, nothing), expected.get(key)
        if form is not None and tally.calls * form.num_parts == form.calls:  # all parts at once: a first backward
            form = replace(form, calls=tally.calls)
        yield key, tally, form


def _is_whole(rank: RankTrace, step: int) -> bool:
    """Whether a rank's rows of a step include its beginning and its end."""
    rows = rank.rows[rank.kinds == Kind.STEP]
    edges = rows["edge"][rows["step"] == step]
    return Edge.BEGIN in edges and Edge.END in edges


def _comparison(key: Key, tallies: Sequence[_Tally], expected: Expected | None) -> Comparison:
    unit, kind, num_ranks = key
    ranks = tallies[0].ranks
    if len(tallies) > 1:
        ranks = tuple(sorted(rank for tally in tallies for rank in tally.ranks))
    return Comparison(
        unit=unit,
        kind=kind,
        num_ranks=num_ranks,
        ranks=ranks,
        calls=tallies[0].calls,
        num_bytes=tallies[0].num_bytes,
        time_ns=sum(tally.time_ns for tally in tallies) / len(ranks),
        exposed_ns=sum(tally.exposed_ns for tally in tallies) / len(ranks),
        expected=expected,
    )
