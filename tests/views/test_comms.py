from __future__ import annotations

import html
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.figure_checks import subtitle, title, words
from tests.helpers.trace_strategies import Setup, example_trace, simulate
from tests.replay.test_collectives import on_hosts, resharded_at
from workbench.base.text_formats import format_duration
from workbench.errors import UsageError
from workbench.events import GLOO, PER_HOST, Edge, Kind
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import BufferSum
from workbench.views import theme
from workbench.views.comms import MAX_ROWS, comms


def column(fig, heading):
    """Return a column's text in each row: a line of the labels of the axis with this heading."""
    for axis in fig.select_yaxes():
        lines = re.sub("</?b>", "", axis.ticktext[0]).split("<br>")
        for place in range(len(lines)):
            if heading in (lines[place], " ".join(lines)):
                rows = [re.sub("</?span[^>]*>", "", text).split("<br>") for text in axis.ticktext[1:]]
                return [row[place] if len(row) > 1 else row[0] for row in rows]
    raise AssertionError(f"no column {heading}")


def labels(fig):
    return [text.replace("<br>", " ") for text in fig.layout.yaxis.ticktext[1:]]


def with_policy(trace, unit, *, reshard):
    units = tuple(replace(u, reshard_after_forward=reshard) if u.index == unit else u for u in trace.header.units)
    return Trace(replace(trace.header, units=units), trace.ranks)


def lose_a_gather(trace, rank):
    """Replace one all-gather of unit 0 in the last step by another event on one rank."""
    rows = trace.rank(rank).rows.copy()
    is_it = (rows["kind"] == Kind.ALL_GATHER) & (rows["unit"] == 0) & (rows["edge"] == Edge.BEGIN)
    rows["kind"][np.flatnonzero(is_it)[-1]] = Kind.LOG
    return Trace(trace.header, tuple(RankTrace(rank, rows) if r.rank == rank else r for r in trace.ranks))


def test_the_title_reports_expected_counts():
    fig = comms(example_trace())
    assert title(fig) == "Step 2: all-gathers 7 of 7, reduce-scatters 4 of 4: as expected"
    assert theme.WRONG not in words(fig)


def test_the_table_shows_each_unit_and_kind_with_the_expected_numbers():
    fig = comms(example_trace())
    assert labels(fig)[:3] == ["(root) all-gather", "(root) reduce-scatter", "blocks.0 all-gather"]
    assert labels(fig)[-1] == "blocks.2 reduce-scatter"
    assert column(fig, "calls") == ["1", "1", "2", "1", "2", "1", "2", "1"]
    assert column(fig, "payload")[2:4] == ["385 KiB", "193 KiB"]
    assert column(fig, "expected")[2:4] == ["= 2 x 193 KiB", "= 1 x 193 KiB"]
    assert column(fig, "a ring sends")[2:4] == ["289 KiB", "144 KiB"]  # 3/4 of the payload on 4 ranks
    assert "; times: mean of 4 ranks" in subtitle(fig).replace(" · ", "; ")
    assert "Rank 0: 1.79 MiB of data; a ring would send 1.34 MiB per rank" in subtitle(fig)


def test_a_difference_is_marked_in_the_title_and_the_row():
    fig = comms(with_policy(example_trace(), 1, reshard=False))
    assert title(fig) == "Step 2: all-gathers 7 of 6, reduce-scatters 4 of 4: not as expected"
    assert column(fig, "expected")[4] == "≠ 1 x 193 KiB"
    for axis in list(fig.select_yaxes())[1:]:
        assert [theme.WRONG in text for text in axis.ticktext[1:]] == [i == 4 for i in range(8)]


@pytest.mark.parametrize(
    ("setup", "sentence"),
    [
        ({"reduces": False}, "21 = 3 x 7 all-gathers, 4 reduce-scatters (gradients accumulated)"),
        ({}, "21 = 3 x 7 all-gathers, 12 = 3 x 4 reduce-scatters"),
        (
            {"reduces": False, "copies": 2},
            "21 = 3 x 7 all-gathers, 4 reduce-scatters, 4 all-reduces (gradients accumulated)",
        ),
    ],
)
def test_several_passes_of_a_step_are_expected_and_named(setup, sentence):
    fig = comms(simulate(Setup(passes=3, steps=1, **setup)))
    assert title(fig) == f"Step 0: 3 forward/backward passes: {sentence}"
    assert theme.WRONG not in words(fig)
    assert "= 6 x " in " ".join(column(fig, "expected"))


def test_a_difference_in_several_passes_is_marked():
    fig = comms(lose_a_gather(simulate(Setup(passes=3, steps=1)), 3))
    assert "all-gathers 20 of 21" in title(fig)
    fig = comms(with_policy(simulate(Setup(passes=3, steps=1)), 1, reshard=False))
    assert title(fig).startswith("Step 0: 3 forward/backward passes: all-gathers 21 of 18, reduce-scatters 12 of 12: ")
    assert title(fig).endswith("not as expected")


def test_a_rank_that_differs_is_named():
    fig = comms(lose_a_gather(example_trace(), 3))
    assert "ranks differ: ranks 0-2: all-gathers 7 of 7" in title(fig)
    assert "rank 3: all-gathers 6 of 7" in title(fig)
    assert labels(fig)[2:4] == ["blocks.0 all-gather, ranks 0-2", "blocks.0 all-gather, rank 3"]


def test_bars_are_hidden_and_exposed_time_that_add_up():
    fig = comms(example_trace())
    total = dict.fromkeys(range(8), 0.0)
    for trace in fig.data:
        if trace.type == "bar":
            for y, x in zip(trace.y, trace.x, strict=True):
                total[y] += x
    assert [format_duration(total[y] * 1e3) for y in range(8)] == column(fig, "time")


def test_a_step_can_be_chosen_and_must_exist():
    assert title(comms(example_trace(), step=0)).startswith("Step 0: ")
    with pytest.raises(UsageError, match="no step 7; its steps are: 0-2"):
        comms(example_trace(), step=7)
    with pytest.raises(UsageError, match="none yet"):
        comms(Trace.empty(), step=0)


def test_a_step_still_running_is_not_the_one_shown():
    trace = example_trace()
    cut = Trace(trace.header, tuple(r.cut(0, r.end_seq - 10) for r in trace.ranks))
    assert title(comms(cut)).startswith("Step 1: ")
    assert "only partly recorded" in title(comms(cut, step=2))
    assert set(column(comms(cut, step=2), "expected")) == {"-"}


def test_collectives_of_no_unit_are_named_so():
    trace = example_trace()
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["unit"] = -1
        ranks.append(RankTrace(rank.rank, rows))
    fig = comms(Trace(trace.header, tuple(ranks)))
    assert "collectives of no unit, so there are no expected numbers" in title(fig)
    assert "no unit" in words(fig)
    assert "unit -1" not in words(fig)


def test_a_single_rank_has_nothing_to_communicate():
    assert "nothing to send" in words(comms(example_trace(num_ranks=1)))


@pytest.mark.parametrize(
    ("is_recorded", "words"),
    [
        (True, "≠ is expected where units are skipped or unsharded by hand; otherwise it is a bug"),
        (False, "≠: the policy of that step is not recorded, so these are the expected numbers of the newest one"),
    ],
)
def test_a_difference_is_a_bug_only_under_a_recorded_policy(is_recorded, words):
    trace = resharded_at(0) if is_recorded else with_policy(example_trace(), 0, reshard=False)
    assert words in subtitle(comms(trace, step=1))


def test_many_equal_units_share_a_row():
    fig = comms(simulate(Setup(num_units=33, steps=1)))
    assert labels(fig) == [
        "(root) all-gather",
        "(root) reduce-scatter",
        "blocks.0-31 all-gather, 32 x",
        "blocks.0-31 reduce-scatter, 32 x",
    ]


def test_many_different_units_are_bounded_and_differences_are_kept():
    trace = simulate(Setup(num_units=70, steps=1))
    units = tuple(replace(unit, name=f"layer{unit.index}" if unit.name else "") for unit in trace.header.units)
    trace = with_policy(Trace(replace(trace.header, units=units), trace.ranks), 40, reshard=False)
    fig = comms(trace)
    assert len(labels(fig)) == MAX_ROWS
    assert "layer40 all-gather" in labels(fig)
    assert "80 more rows not drawn" in subtitle(fig)


def test_copies_have_their_all_reduces_over_fewer_ranks():
    fig = comms(simulate(Setup(num_ranks=8, copies=2, num_units=2, steps=1)))
    assert title(fig) == ("Step 0: all-gathers 3 of 3, reduce-scatters 2 of 2, all-reduces 2 of 2: as expected")
    assert labels(fig)[3:] == [
        "blocks.0 all-gather over 4",
        "blocks.0 reduce-scatter over 4",
        "blocks.0 all-reduce over 2",
    ]
    assert column(fig, "payload")[4:] == ["193 KiB", "48.1 KiB"]
    assert column(fig, "a ring sends")[4:] == ["144 KiB", "48.1 KiB"]  # 3/4 of it; 2 * 1/2 of it


def test_backward_among_few_ranks_has_its_own_row():
    fig = comms(simulate(Setup(num_ranks=4, reshard_after_forward=2, num_units=2, steps=1)))
    assert title(fig).endswith("all-gathers 3 of 3, reduce-scatters 2 of 2: as expected")
    assert labels(fig)[2:4] == ["blocks.0 all-gather over 4", "blocks.0 all-gather over 2"]
    assert column(fig, "a ring sends")[2:4] == ["144 KiB", "96.3 KiB"]


def test_mixed_precision_is_expected_in_its_bytes():
    fig = comms(simulate(Setup(compute_itemsize=2, num_units=2, steps=1)))
    assert "as expected" in title(fig)
    assert column(fig, "expected")[2:4] == ["= 2 x 96.3 KiB", "= 1 x 193 KiB"]


def test_the_transport_is_named_if_known():
    trace = example_trace()
    units = tuple(replace(unit, comm="shared memory") for unit in trace.header.units)
    carried = Trace(replace(trace.header, units=units), trace.ranks)
    assert "per rank; transport: shared memory" in subtitle(comms(carried))
    assert "transport: " not in subtitle(comms(trace))


def test_an_expected_collective_that_was_not_issued_is_a_row():
    trace = example_trace()
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["kind"][(rows["kind"] == Kind.REDUCE_SCATTER) & (rows["unit"] == 0)] = Kind.LOG
        ranks.append(RankTrace(rank.rank, rows))
    fig = comms(Trace(trace.header, tuple(ranks)))
    assert column(fig, "calls")[3] == "0"
    assert column(fig, "expected")[3] == "≠ 1 x 193 KiB"


def test_a_rank_that_has_not_reached_the_step_is_left_out():
    trace = example_trace()
    late = trace.rank(3).cut(0, 200)
    fig = comms(Trace(trace.header, (*trace.ranks[:3], late)))
    assert title(fig).endswith("as expected")
    assert set(labels(fig)) == set(labels(comms(trace)))


def test_bytes_between_hosts_are_shown_with_several_hosts():
    per_host, over_gloo = (comms(on_hosts(example_trace(), "aabb", comm)) for comm in (PER_HOST, GLOO))
    assert column(per_host, "payload")[2:4] == ["385 KiB", "193 KiB"]
    assert column(per_host, "crosses")[2:4] == ["193 KiB", "96.3 KiB"]  # half of it: what the other host lacks
    assert column(over_gloo, "crosses")[2:4] == ["385 KiB", "193 KiB"]  # each of two ranks sends to two
    assert "each of 2 hosts sends 917 KiB to others" in subtitle(per_host)
    assert "each of 2 hosts sends 1.79 MiB to others" in subtitle(over_gloo)


def test_hosts_that_send_different_amounts_are_distinguished():
    fig = comms(on_hosts(example_trace(), ["a<b>", "c", "c", "c"], ""))
    assert "each of 2 hosts sends" in subtitle(fig)  # as much from one as from the other
    fig = comms(
        on_hosts(simulate(Setup(num_ranks=6, num_units=2, steps=1)), ["c", "c", "<b>", "<b>", "<b>", "d"], GLOO)
    )
    assert re.search(r"&lt;b&gt; sends .* to others, the most of 3 hosts", subtitle(fig))


def test_on_one_host_hosts_are_not_mentioned():
    fig = comms(example_trace())
    assert "host" not in subtitle(fig)
    assert not any("crosses" in axis.ticktext[0] for axis in fig.select_yaxes())


def test_with_one_replica_per_host_only_all_reduces_cross_hosts():
    fig = comms(on_hosts(simulate(Setup(num_ranks=8, copies=2, num_units=2, steps=1)), "aaaabbbb", PER_HOST))
    assert column(fig, "crosses")[3:] == ["0 B", "0 B", "193 KiB"]  # four ranks of a host, 48.1 KiB each


def test_unmanaged_parameters_are_named_with_a_remedy():
    trace = example_trace()
    assert "in no unit" not in subtitle(comms(trace))
    ranks = [replace(each, buffers=(BufferSum(name="m.mean", crc32=each.rank),)) for each in trace.header.ranks]
    header = replace(trace.header, unmanaged=("m.scale", "m.adapter.weight", "other.bias"))
    header = replace(header, hooks=("m.weight",), ranks=tuple(ranks))
    text = html.unescape(subtitle(comms(Trace(header, trace.ranks))))
    assert "in no unit, so their gradients are not averaged: scale, adapter.weight. After backward, for each: " in text
    assert "p = m.get_parameter('scale'); torch.distributed.all_reduce(p.grad); p.grad /= world_size" in text
    assert "their gradients are not averaged: bias. After backward, for each: p = other.get_parameter('bias')" in text
    assert "register_hook is never called on a sharded parameter: weight. Use register_post_accumulate" in text
    assert "buffers differ between ranks: mean. If they should not, for each: " in text
    assert "torch.distributed.broadcast(m.get_buffer('mean'), 0)" in text
