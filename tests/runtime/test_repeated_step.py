"""``verify --repeat`` finds the first bits that a step does not give twice, and what explains them."""

import pytest

from tests.helpers.booted_ranks import execute, namespace, run
from tests.runtime.test_verify_recipes import RECIPES, SETUP
from workbench.base.codec import decode
from workbench.protocol.commands import Step, Verify, VerifyReply
from workbench.reports.verify_report import verify_report
from workbench.runtime import rank as rank_module

HIDDEN = """
hidden = (itertools.count(1),)  # verify cannot give again what an iterator in a tuple gives
x, y = torch.randn(4, 8), torch.arange(4)
def train_step():
    return train((x, y), model, opt)
class Noise(nn.Module):
    def forward(self, x):
        {body}
model.insert(1, Noise())
"""
REPLICAS = """
model = nn.parallel.DistributedDataParallel(nn.Sequential(Block(), nn.Linear(8, 4)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = torch.randn(4, 8), torch.arange(4)
def train_step():
    return train((x, y), model, opt)
"""
CAUSES = {
    "not-repeatable": ("return x + next(hidden[0])", "1, module 4 of 6"),
    "nondeterministic-operation": (
        "return x if torch.are_deterministic_algorithms_enabled() else x + next(hidden[0])",
        "use_deterministic_algorithms",
    ),
    "other-random-numbers": ("return x + torch.rand(next(hidden[0])).mean()", "drawn before module 2"),
    "other-order": ("return model[0](x) if next(hidden[0]) % 2 else x", "same order twice"),
    "other-gather": (
        "return x\nmodel[0].up.register_forward_pre_hook(lambda m, _: [m.weight.data.add_(rank)] and None)",
        "0.up.weight is not the same on all ranks",
    ),
}


def replies_of(*sources):
    """Return this rank's replies to the steps of sources, and the losses of a step with and without a verify before."""
    found = []
    for source in sources:
        losses = []
        for verifies in (True, False):
            exec(SETUP + source, namespace())
            rank_module._after_cell(None)
            execute(Step(count=1))
            if verifies:
                reply = execute(Verify(repeat=True))
            losses.append(execute(Step(count=1))["losses"])
        found.append((reply, *losses))
    return found


def reports_of(*sources):
    for each in zip(*run(2, replies_of, *sources, timeout_s=600), strict=True):
        yield (
            verify_report([decode(VerifyReply, reply, "reply") for reply, *_ in each]),
            [losses for _, *losses in each],
        )


def test_a_sound_step_gives_the_same_bits_twice_and_nothing_changes():
    for report, losses in reports_of(*(RECIPES[name] for name in ("iterator", "micro-batches", "stream")), REPLICAS):
        assert report.ok, str(report)
        assert report.problem == ""
        assert report.could_compare
        assert "gives the same bits twice" in report.headline
        assert all(with_it == without for with_it, without in losses)


@pytest.fixture(scope="module")
def reports():
    sources = (HIDDEN.format(body=body) for body, _ in CAUSES.values())
    return dict(zip(CAUSES, (report for report, _ in reports_of(*sources)), strict=True))


@pytest.mark.parametrize("rule", CAUSES)
def test_the_cause_is_named(reports, rule):
    report = reports[rule]
    assert [fault.rule for fault in report.faults] == [rule], str(report)
    assert CAUSES[rule][1] in str(report)
    assert report.could_compare
    assert report.problem
