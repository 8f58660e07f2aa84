"""Learning rates of a schedule that has ended; a verify with one is in test_verify_recipes."""

import pytest
import torch

from workbench.protocol.commands import VerifyReply
from workbench.reports.verify_report import verify_report
from workbench.runtime.ended_schedules import has_ended, initial_rates


def scheduled(factors, rates=(0.1, 0.2)):
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _, factor=factor: factor for factor in factors])
    optimizer.step()
    scheduler.step()
    return optimizer


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("rates", [(0.1, 0.2), (torch.tensor(0.1), torch.tensor(0.2))])
def test_a_schedule_that_has_ended_begins_again_for_a_while(rates):
    optimizer = scheduled((0.0, 0.0), rates)
    assert has_ended(optimizer)
    with initial_rates([optimizer]) as rate:
        assert (rate, rates_of(optimizer)) == (pytest.approx(0.1), pytest.approx([0.1, 0.2]))
    assert rates_of(optimizer) == [0.0, 0.0]


def test_one_that_still_trains_or_never_did_has_not_ended():
    assert not has_ended(scheduled((0.0, 1.0)))
    assert not has_ended(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0))


def test_the_report_says_with_which_rate_both_steps_were_taken():
    numbers = {"num_params": 1, "max_abs_diff": 0.0, "max_rel_diff": 0.0, "worst_param": "", "equal_bits": 1}
    reply = VerifyReply(**numbers, ok=True, tolerance="", loss_sharded=None, loss_reference=None, initial_rate=0.003)
    assert verify_report([reply]).notes == (
        "a schedule has ended at learning rate 0: both steps take its first one, 0.003",
    )
