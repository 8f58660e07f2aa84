"""What ranks find becomes one list: equal faults once, others with their ranks, and comparisons of ranks."""

from workbench.base.fault import Fault
from workbench.protocol.commands import ShardReply
from workbench.protocol.lint_reply import LintReply, RankComparison
from workbench.reports.lint_faults import abstained, lint_faults, num_decided
from workbench.reports.lint_report import LintReport, lint_report
from workbench.reports.sharding_reports import shard_report

RULES = ("stale", "buffers", "data", "small")
SMALL = Fault(rule="small", verdict="units are small", evidence=("9 units",), fix="%fsdp reshard model")
STALE = Fault(rule="stale", verdict="opt is stale")
BUFFERS = Fault(rule="buffers", verdict="differ: {names}", fix="broadcast({first})")
DATA = Fault(rule="data", verdict="{names} is alike")


def reply(*faults, compare=(), abstained=()):
    return LintReply(models=("model",), rules=RULES, faults=faults, comparisons=compare, abstained=abstained)


def buffers(**digests):
    return RankComparison(fault=BUFFERS, digests=digests)


def test_a_fault_of_all_ranks_is_named_once_and_the_worst_first():
    assert lint_faults([reply(SMALL, STALE), reply(SMALL, STALE)]) == (STALE, SMALL)


def test_evidence_of_some_ranks_names_them():
    other = Fault(rule="small", verdict="units are small", evidence=("8 units",), fix="")
    (fault,) = lint_faults([reply(SMALL), reply(other), reply(SMALL)])
    assert fault.evidence == ("ranks 0, 2: 9 units", "rank 1: 8 units")
    assert fault.fix == SMALL.fix


def test_what_should_be_equal_is_compared_by_name_between_the_ranks_that_have_it():
    replies = [
        reply(compare=(buffers(a=1, b=1),)),
        reply(compare=(buffers(a=1, b=2, c=7),)),
        reply(compare=(buffers(a=1, b=2),)),
        reply(),
    ]
    (fault,) = lint_faults(replies)
    assert fault == Fault(
        rule="buffers",
        verdict="differ: b",
        evidence=("b: the same on ranks 1-2; different on rank 0",),
        fix="broadcast(b)",
    )
    assert lint_faults([reply(compare=(buffers(a=1),))] * 2) == ()


def test_what_should_differ_is_a_fault_where_two_ranks_have_the_same():
    def data(digest):
        return reply(compare=(RankComparison(fault=DATA, digests={"loader": digest}, wants_equal=False),))

    assert lint_faults([data(1), data(2), data(3)]) == ()
    (fault,) = lint_faults([data(1), data(2), data(1)])
    assert (fault.verdict, fault.evidence) == (
        "loader is alike",
        ("loader: the same on ranks 0, 2; different on rank 1",),
    )


def test_what_follows_from_another_fault_of_the_same_model_is_not_named_beside_it():
    def of(model, rate):
        faults = (Fault(rule="options-differ", verdict="{names}"), Fault(rule="replicas-differ", verdict=model))
        digests = {"lr": rate}, {"weight": rate + 1}
        return [RankComparison(fault=f, digests=d, model=model) for f, d in zip(faults, digests, strict=True)]

    def of_two(rank):
        options, replicas = of("first", rank)
        alike, others = of("second", 0)[0], of("second", rank)[1]
        return LintReply(rules=("options-differ", "replicas-differ"), comparisons=(options, replicas, alike, others))

    assert [each.verdict for each in lint_faults([of_two(0), of_two(1)])] == ["lr", "second"]


def test_many_names_are_counted():
    one, two = ({f"b{i}": i * rank for i in range(1, 6)} for rank in (1, 2))
    (fault,) = lint_faults([reply(compare=(buffers(**one),)), reply(compare=(buffers(**two),))])
    assert len(fault.evidence) == 4
    assert fault.evidence[-1] == "and 2 more"


def test_a_rule_that_abstains_on_one_rank_is_not_counted():
    replies = [reply(), reply(abstained=("data: rows of a File are unknown",))]
    assert abstained(replies) == ("data: rows of a File are unknown",)
    assert (num_decided(replies), num_decided([reply()])) == (3, 4)


def test_the_report_names_the_models_if_nothing_was_found():
    report = lint_report([reply(abstained=("data: unknown",))] * 2)
    assert isinstance(report, LintReport)
    assert str(report) == "model: no faults found by 3 checks\n  not checked  data: unknown"
    assert lint_report([reply(SMALL)]).headline == report.problem + "units are small"


def test_shard_adds_one_note_on_the_worst_fault():
    def sharded(*faults):
        sizes = dict.fromkeys(("num_params", "num_elements", "bytes_unsharded", "bytes_at_rest", "optimizers"), 0)
        return shard_report([ShardReply(model="model", units=(), lint=reply(*faults), **sizes)])

    assert sharded().notes == ()
    assert sharded(SMALL).notes == ("units are small. %fsdp reshard model",)
    assert sharded(SMALL, STALE).notes == ("opt is stale. 1 further fault: %fsdp lint model",)
