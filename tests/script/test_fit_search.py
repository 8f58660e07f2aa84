"""A search finds what planning every policy would find, and plans no policy that cannot fit."""

from dataclasses import replace
from itertools import product

import pytest

from workbench.errors import UsageError
from workbench.events import TORCH_DDP, Category, Param, Unit
from workbench.protocol.commands import Plan
from workbench.reports.plan_report import PlanReport
from workbench.script.fit_search import HALF_PRECISION, FitSearch, read_size, report_exceeds, slack_bytes

MB = 10**6
OWN = Plan("model", ranks=16, hosts=2)
UNIT = Unit(
    index=0,
    name="",
    root=0,
    params=(),
    reshard_after_forward=True,
    shard_size=16,
    compute_dtype="float32",
    reduce_dtype="float32",
    compute_itemsize=4,
    reduce_itemsize=4,
)
VALUES = [
    {"reshard_after_forward": ["true", "false"]},
    {"checkpoint": [("Block",), ()]},
    {"mesh": [(), "hosts"]},
    {"wrap": [("Block",), ()]},
    {"mp": ["", HALF_PRECISION]},
]


def planned(plan):
    """Return a plan by simple sums: shards, full parameters, activations."""
    half = 0.5 if plan.mp == HALF_PRECISION else 1
    state = 0 if plan.offload else 1600 / (plan.ranks / 2 if plan.mesh == "hosts" else plan.ranks)
    keeps = plan.reshard_after_forward == "false" or not plan.wrap
    size = {
        Category.OPTIMIZER_STATE: state,
        Category.UNSHARDED_PARAMS: half * (80 if keeps else 20),
        Category.ACTIVATIONS: half * (20 if plan.checkpoint else 90),
    }
    slow = 1 + 0.3 * bool(plan.checkpoint) + 0.1 * (not keeps) + 0.2 * (plan.mesh != "hosts") + 2 * bool(plan.offload)
    return PlanReport(
        device=plan.device,
        num_ranks=plan.ranks,
        num_hosts=plan.hosts or 1,
        step=1,
        peak_bytes=round(sum(size.values()) * MB),
        peak_bytes_by_category={category: round(each * MB) for category, each in size.items()},
        peak_unit=None,
        memory_bytes=300 * MB,
        host_bytes=0,
        step_ns=round(slow * half * 1e6),
        collectives=(),
        trace="",
        units=(UNIT,),
        blocks=("Block",),
    )


def search(limit, own=OWN):
    calls = []
    found = FitSearch(lambda plan: calls.append(plan) or planned(plan), str, lambda _: None).limit(limit).run(own)
    return found, calls


def every(offload=None):
    names = [name for option in VALUES for name in option]
    for values in product(*(option[name] for option in VALUES for name in option)):
        yield planned(Plan("model", ranks=16, hosts=2, offload=offload, **dict(zip(names, values, strict=True))))


@pytest.mark.parametrize("limit", [70, 90, 110, 135, 150, 180, 200, 240, 300, 400])
def test_it_finds_what_planning_every_policy_finds(limit):
    found, calls = search(f"{limit}MB")
    fitting = [each for each in every() if each.peak_bytes <= limit * MB]
    fitting = fitting or [each for each in every(offload=True) if each.peak_bytes <= limit * MB]
    pairs = {(each.peak_bytes, each.step_ns) for each in fitting}
    best = {
        (size, time)
        for size, time in pairs
        if not any(a <= size and b <= time and (a, b) != (size, time) for a, b in pairs)
    }
    assert {(policy.peak_bytes, policy.step_ns) for policy in found.best} == best
    assert len(calls) == len(set(calls))


def test_what_needs_no_less_than_what_does_not_fit_is_not_planned():
    found, calls = search("170MB")
    assert found.skipped
    on_these = [call for call in calls if call.ranks == 16 and not call.mp]
    assert len(on_these) < 2**4
    assert not {policy.options for policy in found.policies[1:]} & set(found.skipped)


@pytest.mark.parametrize(("limit", "own", "leanest"), [("250MB", 32, 8), ("190MB", 128, 16), ("271MB", 16, 8)])
def test_the_fewest_ranks_are_found_by_halves_and_doubles(limit, own, leanest):
    found, _ = search(limit)
    fewest = {policy.options: policy.num_ranks for policy in found.least}
    assert fewest.pop("") == own
    assert list(fewest.values()) == [leanest]


def test_a_policy_that_more_ranks_do_not_help_is_named_with_its_largest_class():
    found, _ = search("160MB")
    (never,) = found.never
    assert never.options == ""
    assert dict(found.facts())["fits on no number"].startswith("as it is: the largest class is activations, 85.8 MiB")


def test_more_ranks_come_before_offload():
    found, _ = search("120MB", Plan("model", ranks=16, hosts=2, mp="off"))
    assert all("--offload" in policy.options for policy in found.best)
    (fewest,) = found.least
    assert (fewest.num_ranks, fewest.options) == (32, "--wrap Block --reshard-after-forward true --checkpoint Block")


def test_without_any_that_fits_the_sentence_says_so():
    found, _ = search("10MB")
    assert "no policy fits: " in found.headline
    assert not found.best


def test_of_a_model_on_every_rank_only_checkpoints_are_searched():
    whole = replace(UNIT, engine=TORCH_DDP)
    calls = []

    def plan(each):
        calls.append(each)
        return replace(planned(each), units=(whole,))

    FitSearch(plan, str, lambda _: None).limit("10MB").run(OWN)
    assert {replace(call, checkpoint=(), ranks=OWN.ranks, hosts=OWN.hosts) for call in calls} == {OWN}
    assert {bool(call.checkpoint) for call in calls} == {True, False}


def test_what_is_given_is_not_searched():
    own = Plan("model", ranks=16, hosts=2, mesh=(2, 8), reshard_after_forward="true", checkpoint="Block", mp="bf16")
    found, calls = search("300MB", own)
    assert {call.mesh for call in calls} == {(2, 8)}
    assert {call.ranks for call in calls} == {16}  # other numbers do not have this mesh
    assert {policy.options for policy in found.policies} == {"", "--wrap Block"}


@pytest.mark.parametrize("text", ["80", "GB", "0GB", "-1GB", "80 quarts"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="fit takes a size such as 80GB"):
        search(text)


def test_sizes_are_read():
    assert [read_size(text) for text in ("80GB", "1.5 gib", "device")] == [80 * 10**9, 3 * 2**29, 0]


def padded(rows):
    param = Param(
        fqn="w",
        shape=(rows, 4),
        global_shape=(rows, 4),
        dtype="float32",
        itemsize=4,
        shard_dim=0,
        rows_per_rank=(1,) * rows,
        padded_rows=-(-rows // 16),
    )
    return replace(UNIT, params=(param,))


@pytest.mark.parametrize(
    ("rows", "gathered", "slack"), [(16, 0, 0), (16, 7, 7), (12, 0, 25), (12, 5, 30), (17, 0, 47), (0, 3, 3)]
)
def test_what_gathering_and_padding_add_to_a_leaner_policy_is_no_reason_to_leave_others_out(rows, gathered, slack):
    sizes = {Category.SHARDED_PARAMS: 60, Category.OPTIMIZER_STATE: 40, Category.ACTIVATIONS: 1000}
    sizes[Category.ALL_GATHER_BUFFERS] = gathered
    report = replace(
        planned(OWN), units=(UNIT, padded(rows)), peak_bytes=sum(sizes.values()), peak_bytes_by_category=sizes
    )
    assert slack_bytes(report) == slack
    assert report_exceeds(report, report.peak_bytes - slack - 1)
    assert not report_exceeds(report, report.peak_bytes - slack)
