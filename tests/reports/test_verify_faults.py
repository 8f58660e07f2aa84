"""Causes of a difference are decided by what the ranks measured, and left open where it does not decide."""

from dataclasses import replace

import pytest

from workbench.protocol.commands import (
    Difference,
    GradRatio,
    ReplicaSum,
    StepCounter,
    StepDifferences,
    VerifyReply,
)
from workbench.reports.verify_faults import DRIFT, faults_of, first_differences

SAME = StepDifferences(
    output=None,
    grad=None,
    param=None,
    differs_in_input=False,
    num_inputs=8,
    ratios=(GradRatio(ratio=1.0, num_params=4, first="a"),),
    norm=3.0,
    norm_reference=5.0,
    optimizer_steps=1,
)
REPLY = VerifyReply(
    num_params=4,
    max_abs_diff=1.0,
    max_rel_diff=1.0,
    worst_param="a",
    equal_bits=0,
    ok=False,
    tolerance="rtol",
    loss_sharded=None,
    loss_reference=None,
)

NOT_FINITE = Difference(name="1", position=3, total=9, relative=float("inf"))


def ratio(value, num_params=4, first="a"):
    return GradRatio(ratio=value, num_params=num_params, first=first)


def with_ratio(*ratios, **fields):
    return replace(
        SAME, ratios=tuple(ratio(value) if not isinstance(value, GradRatio) else value for value in ratios), **fields
    )


def rules(*differences):
    return [fault.rule for fault in faults_of([replace(REPLY, differences=each) for each in differences])]


@pytest.mark.parametrize("states", [(1, 1), (1, 2)])
def test_copies_of_tensor_parallelism_moved_apart(states):
    replies = [replace(REPLY, uneven_copies=("down.bias",), random_crc32=each) for each in states]
    (fault,) = [each for each in faults_of(replies) if each.rule == "uneven-copies"]
    assert fault.fix.startswith("ranks 0-1 draw other random numbers") == (states == (1, 2))
    assert "sum their gradients over the ranks of tensor parallelism" in fault.fix


def test_equal_steps_have_no_fault():
    assert rules(SAME, SAME) == []
    assert faults_of([replace(REPLY, ok=True)] * 2) == ()
    assert first_differences([SAME, SAME]) == ()


@pytest.mark.parametrize(
    ("differences", "rule"),
    [
        # the same ratio on all ranks
        ([with_ratio(2.0)] * 2, "wrong-scale"),
        ([with_ratio(0.25)] * 4, "wrong-scale"),
        ([with_ratio(1.7)] * 2, "wrong-scale"),
        ([with_ratio(ratio(2.0, 1, "b"), 1.0)] * 2, "wrong-scale"),
        # one ratio per rank: all are clipped, or one is not
        ([with_ratio(1.25, norm=5.0), with_ratio(5 / 3, norm=5.0)], "partial-norm"),
        ([with_ratio(1.5, norm=5.0), with_ratio(2.0, norm=4.0)], "partial-norm"),
        # factors after the average
        ([replace(SAME, num_inputs=24, norm_reference=7.5), replace(SAME, norm_reference=2.5)], "uneven-batches"),
        ([replace(SAME, norm_reference=7.5), replace(SAME, norm_reference=2.5)], "scaled-per-rank"),
        # what comes first is the cause of the rest
        ([replace(with_ratio(2.0), optimizer_steps=2), with_ratio(2.0)], "rank-stepped-twice"),
        ([replace(with_ratio(2.0), optimizer_steps=0), with_ratio(2.0)], "rank-not-stepped"),
        ([replace(with_ratio(2.0), differs_in_input=True)] * 2, "different-data"),
        ([replace(SAME, missing=("a",), unreduced=("0",))] * 2, "no-sync-left-on"),
        ([replace(SAME, rounded_to="bfloat16")] * 2, "precision"),
        ([replace(with_ratio(2.0), output=NOT_FINITE), with_ratio(2.0)], "not-finite"),
    ],
)
def test_a_cause_is_decided(differences, rule):
    assert rules(*differences) == [rule]


@pytest.mark.parametrize(
    "differences",
    [
        [with_ratio(1.25, norm=5.0), with_ratio(5 / 3, norm=5.0)],
        [replace(SAME, norm_reference=7.5), replace(SAME, norm_reference=2.5)],
    ],
)
def test_numbers_of_each_rank_are_those_of_the_ranks_there_are(differences):
    (fault,) = faults_of([replace(REPLY, differences=each) for each in differences])
    assert fault.evidence[0].startswith("gradients of ranks 0-1 are ")


@pytest.mark.parametrize(
    "differences",
    [
        [with_ratio(None)] * 2,  # elements differ
        [with_ratio(2.0, None)] * 2,
        [with_ratio(ratio(2.0, 1), ratio(3.0, 1))] * 2,
        [with_ratio(2.0), with_ratio(3.0)],
        [with_ratio(2.0)],  # one rank
        [with_ratio(1.25, norm=5.0), with_ratio(0.5, norm=2.0)],  # a smaller gradient than of the copy
        [with_ratio(1.25, norm=5.0), with_ratio(1.1, norm=4.0)],  # not clipped, and not the largest ratio
        [replace(SAME, missing=("a",))] * 2,  # no gradient, and none that waits
        [with_ratio(2.0, missing=("a",))] * 2,
        [replace(SAME, rounded_to="bfloat16"), SAME],
        [replace(SAME, rounded_to="bfloat16", output=Difference(name="0", position=0, total=1, relative=1.0))] * 2,
        [replace(SAME, norm_reference=0.0), SAME],
    ],
)
def test_a_cause_that_is_not_decided_is_not_named(differences):
    assert rules(*differences) == []


def counted(*steps, **fields):
    """Return the reply of a rank whose steps are equal, with the number of steps of the parameters a, b, ..."""
    counters = tuple(StepCounter(steps=number, params=(name,)) for name, number in zip("abcd", steps, strict=False))
    return replace(REPLY, ok=True, counters=counters, **fields)


UNEVEN = (StepCounter(steps=1, params=("a",)), StepCounter(steps=2, params=("b", "c")))


@pytest.mark.parametrize(
    ("replies", "evidence"),
    [
        ([counted(3, 3), counted(3, 0)], ("rank 0: 3 steps for 1 parameter (b, ...)", "rank 1: 0 steps")),
        ([counted(3), counted(None), counted(3)], ("ranks 0, 2: 3 steps", "rank 1: no state for 1 parameter (a, ...)")),
        ([counted(0, 3, reset=("a",)), counted(0, 3)], ("rank 0: 0 steps for 1 parameter (a, ...)",)),
        (
            [counted(3, 3, 3, uneven=UNEVEN)] * 2,
            ("ranks 0-1: 1 step for 1 parameter (a, ...), 2 steps for 2 parameters (b, ...)",),
        ),
    ],
)
def test_wrong_numbers_of_steps_are_named_although_the_steps_are_equal(replies, evidence):
    (fault,) = faults_of(replies)
    assert fault.rule == "optimizer-counters"
    assert len(fault.evidence) == len(evidence)
    assert all(text.startswith(part) for text, part in zip(fault.evidence, evidence, strict=True)), fault.evidence
    assert "torch.distributed.checkpoint.state_dict" in fault.fix


@pytest.mark.parametrize(
    "replies",
    [
        [counted(3, 1), counted(3, 1)],  # b had no gradient in some steps
        [counted(3, None), counted(3, None)],  # nor in any
        [counted(3, 3), counted(3)],  # a rank without rows of b
        [counted(), counted()],
    ],
)
def test_numbers_of_steps_that_may_be_right_are_not_named(replies):
    assert faults_of(replies) == ()


def test_other_numbers_of_steps_come_before_what_follows_from_them():
    def both(differences):
        return [replace(counted(n), ok=False, differences=differences) for n in (3, 0)]

    assert [fault.rule for fault in faults_of(both(with_ratio(2.0)))] == ["optimizer-counters"]
    other_data = replace(SAME, differs_in_input=True)
    assert [fault.rule for fault in faults_of(both(other_data))] == ["different-data"]


def test_an_output_that_is_not_finite_names_module_and_ranks():
    (fault,) = faults_of([replace(REPLY, differences=each) for each in (SAME, replace(SAME, output=NOT_FINITE))])
    assert fault.verdict == "the output of 1 is NaN or infinite on rank 1, and not in the unsharded copy"
    assert fault.evidence == ("1, module 4 of 9 in the order of execution: not finite, on rank 1",)


def test_replicas_are_compared_by_shard():
    def reply(first_rank, crc32):
        return replace(REPLY, ok=True, replicas=(ReplicaSum(unit="0", first_rank=first_rank, crc32=crc32),))

    assert faults_of([reply(0, 1), reply(1, 2), reply(0, 1), reply(1, 2)]) == ()
    (fault,) = faults_of([reply(0, 1), reply(1, 2), reply(0, 1), reply(1, 3)])
    assert fault.rule == DRIFT
    assert fault.evidence == ("0: the values of rank 1 differ from those of rank 3",)


def test_a_unit_left_out_is_said_after_the_cause():
    replies = [replace(REPLY, differences=with_ratio(2.0), left_out=("unit 1",))] * 2
    assert [fault.rule for fault in faults_of(replies)] == ["wrong-scale", "stale-optimizer"]


def test_the_first_difference_is_that_of_the_earliest_rank():
    grad = Difference(name="b", position=3, total=9, relative=0.5, rows="rows 0-3")
    early = replace(grad, name="c", position=2, relative=float("inf"), rows="row 4")
    (found,) = first_differences([replace(SAME, grad=grad), replace(SAME, grad=early), SAME])
    assert (found.what, found.name, found.position, found.ranks) == ("gradient", "c", 2, (1,))
    assert found.words == "c, parameter 3 of 9 in the order of backward: not finite, on rank 1 (row 4)"
    (root,) = first_differences([replace(SAME, output=replace(grad, name="", rows=""))] * 2)
    assert root.words == "(root), module 4 of 9 in the order of execution: 50% of its size, on ranks 0-1"
