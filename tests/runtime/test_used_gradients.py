"""Gradients that nothing clears between two steps of an optimizer, in training steps of all kinds."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.booted_ranks import execute, models_here, namespace, run
from tests.runtime.test_gate import sharded
from workbench import engine as ours
from workbench.engine import classic
from workbench.protocol.commands import Step, StepReply
from workbench.reports.step_reports import step_report

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def loss_of(model, factor=1.0):
    return factor * model(torch.randn(2, 4)).square().mean()


@case
def cleared_first(model, opt):
    opt.zero_grad()
    loss_of(model).backward()
    opt.step()


@case
def cleared_between_forward_and_backward(model, opt):
    loss = loss_of(model)
    opt.zero_grad()
    loss.backward()
    opt.step()


@case
def cleared_last_by_the_model(model, opt):
    loss_of(model).backward()
    opt.step()
    model.zero_grad()


@case
def zeroed_in_place(model, opt):
    loss_of(model).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)


@case
def zeroed_by_hand(model, opt):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.detach().zero_()
    loss_of(model).backward()
    opt.step()


@case
def set_to_none_by_hand(model, opt):
    loss_of(model).backward()
    opt.step()
    for param in model.parameters():
        param.grad = None


@case
def accumulated(model, opt):
    for _ in range(3):
        loss_of(model, 1 / 3).backward()
    opt.step()
    opt.zero_grad()


@case
def accumulated_over_calls(model, opt):
    calls = vars(model)["calls"] = vars(model).get("calls", 0) + 1
    loss_of(model).backward()
    if calls % 2 == 0:
        opt.step()
        opt.zero_grad()


@case
def clipped(model, opt):
    loss_of(model).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    opt.zero_grad()


@case
def stepped_twice_with_the_same_gradients(model, opt):
    opt.zero_grad()
    loss_of(model).backward()
    opt.step()
    opt.step()


@case
def evaluated_with_gradients_in_between(model, opt):
    opt.zero_grad()
    loss_of(model).backward()
    opt.step()
    loss_of(model).backward()  # such as for a plot; cleared before the next step


@case
def with_a_closure(model, opt):
    def closure():
        opt.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    opt.step(closure)


@case
def decayed_by_hand(model, opt):
    loss_of(model).backward()
    opt.step()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.mul_(0.5)  # a momentum of one's own


@case
def forgotten(model, opt):
    loss_of(model).backward()
    opt.step()


@case
def forgotten_and_clipped(model, opt):
    loss_of(model).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()


@case
def forgotten_with_micro_batches(model, opt):
    for _ in range(2):
        loss_of(model, 0.5).backward()
    opt.step()


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def split(api):
    def make():
        model = net()
        for module in (*model, model):
            api(module)
        return model

    return make


MODELS = {
    "plain": net,
    "ours": split(ours.fully_shard),
    "classic": lambda: classic.FullyShardedDataParallel(net(), use_orig_params=True),
    "torch": split(torch.distributed.fsdp.fully_shard),
    "DDP": lambda: DistributedDataParallel(net()),
    "DDP, views": lambda: DistributedDataParallel(net(), gradient_as_bucket_view=True),
}
OPTIMIZERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
KINDS = [(model, "Adam") for model in MODELS] + [("plain", "SGD"), ("ours", "SGD"), ("ours", "fused")]


def verdicts():
    """Return the reply of each case with each model and optimizer, on one rank."""
    ns, replies = namespace(), {}
    for model, optimizer in KINDS:
        for name, train_step in CASES.items():
            ns["model"] = MODELS[model]()
            ns["opt"] = OPTIMIZERS[optimizer](ns["model"].parameters())
            ns["train_step"] = lambda train_step=train_step: train_step(ns["model"], ns["opt"])
            replies[model, optimizer, name] = execute(Step(count=5))["never_cleared"]
    return replies


def test_only_gradients_that_nothing_clears_are_named():
    for replies in run(2, verdicts):
        for (model, optimizer, name), found in replies.items():
            expected = ["opt"] if name.startswith("forgotten") else []
            assert found == expected, (model, optimizer, name)


def other_loops():
    """Return the replies of steps with several optimizers, or with one per parameter; and of a corrected step."""
    ns, replies = namespace(), {}
    d, g = net(), nn.Linear(4, 4)
    ns["opt_d"], ns["opt_g"] = (torch.optim.Adam(model.parameters(), lr=0.01) for model in (d, g))

    def adversarial():
        ns["opt_d"].zero_grad()
        loss_of(nn.Sequential(g, d)).backward()  # also into the generator
        ns["opt_d"].step()
        ns["opt_g"].zero_grad()
        loss_of(nn.Sequential(g, d), -1).backward()  # adds to the discriminator's gradients, which are cleared above
        ns["opt_g"].step()

    ns["train_step"] = adversarial
    replies["adversarial"] = execute(Step(count=5))["never_cleared"]

    model = net()
    each = {param: torch.optim.SGD([param], lr=0.01) for param in model.parameters()}

    def in_backward(param):
        each[param].step()
        param.grad = None

    handles = [param.register_post_accumulate_grad_hook(in_backward) for param in model.parameters()]
    ns["train_step"] = lambda: loss_of(model).backward()
    replies["in backward"] = execute(Step(count=5))["never_cleared"]
    for handle in handles:
        handle.remove()

    ns["opt"] = torch.optim.SGD(model.parameters(), lr=0.01)
    ns["train_step"] = lambda: forgotten(model, ns["opt"])
    replies["forgotten"] = execute(Step(count=5))["never_cleared"]
    ns["model"], ns["other"] = model, net()
    named = {each.name: each.never_cleared for each in models_here()}
    assert (named["model"], named["other"]) == (("opt",), ())  # which explain reads
    ns["train_step"] = lambda: cleared_first(model, ns["opt"])
    replies["corrected"] = execute(Step(count=5))["never_cleared"]
    ns["train_step"] = lambda: forgotten(model, ns["opt"])
    replies["forgotten again"] = execute(Step(count=5))["never_cleared"]
    return replies


def test_other_loops():
    (replies,) = run(1, other_loops)
    assert {name for name, found in replies.items() if found} == {"forgotten", "forgotten again"}


def left_off():
    ns = sharded()
    replies = []
    for is_on in (False, True):
        ns["model"].set_requires_gradient_sync(is_on)
        replies += [execute(Step(count=2))["never_reduced"]]
    return replies


def test_an_optimizer_that_steps_without_reduced_gradients():
    assert run(2, left_off) == [[["opt"], []]] * 2


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_the_sentences_name_the_optimizer_once(ranks):
    quiet = {"steps_done": 1, "losses": None, "seconds": (0.2,), "optimizer_steps": 1, "first_step": 0}
    names = [("opt",) if rank in ranks else () for rank in range(2)]
    replies = [StepReply(**quiet, never_cleared=each, never_reduced=each) for each in names]
    assert step_report(replies).notes == (
        "nothing clears the gradients that opt has used, and the next backward adds to them: opt.zero_grad()",
        "gradients were not reduced over the ranks before the step of opt; %fsdp lint says what to change",
    )
