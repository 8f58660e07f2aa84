"""The numbers of steps in optimizers' state are read, and what one step adds to them."""

import pytest
import torch
from torch import nn

from workbench.errors import UsageError
from workbench.protocol.commands import StepCounter
from workbench.runtime.step_counters import (
    RaisedCounters,
    check_counted,
    held_params,
    reset_counters,
    step_counters,
)


def names_of(model):
    return {id(param): name for name, param in model.named_parameters()}


def trained(optimizer_class=torch.optim.AdamW, steps=2, **options):
    """Return two linear layers of which the second has no gradient in the first step, and what an optimizer holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    for number in range(steps):
        take(model, optimizer, layers=1 + (number > 0))
    return model, optimizer, held_params(names_of(model), {id(param) for param in model.parameters()}, [optimizer])


def take(model, optimizer, layers=2):
    optimizer.zero_grad()
    model[:layers](torch.ones(1, 2)).square().sum().backward()
    optimizer.step()


def counter(steps, *params):
    return StepCounter(steps=steps, params=params)


FIRST, SECOND = ("0.weight", "0.bias"), ("1.weight", "1.bias")


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_are_counted_by_their_steps(fused):
    assert step_counters(trained(fused=fused)[2]) == (counter(1, *SECOND), counter(2, *FIRST))
    assert step_counters(trained(steps=1)[2]) == (counter(None, *SECOND), counter(1, *FIRST))
    assert step_counters(trained(torch.optim.SGD)[2]) == (counter(None, *FIRST, *SECOND),)


def test_only_managed_parameters_with_rows_here_that_an_optimizer_has_are_counted():
    model = nn.Linear(2, 2)
    empty = model.empty = nn.Parameter(torch.empty(0))
    names, managed = names_of(model), {id(model.weight), id(model.bias), id(empty)}
    held = held_params(names, managed, [torch.optim.SGD([model.weight, empty])])
    assert [each.name for each in held] == ["weight"]
    assert held_params(names, {id(model.bias)}, [torch.optim.SGD([model.weight])]) == ()


def test_pieces_of_one_flat_parameter_are_one_but_all_are_looked_at():
    model, optimizer, _ = trained()
    ids = {id(param) for param in model.parameters()}
    optimizer.state[model[0].bias]["step"].zero_()
    held = held_params(dict.fromkeys(ids, "flat"), ids, [optimizer])
    assert step_counters(held) == (counter(0, "flat"), counter(1, "flat"), counter(2, "flat"))
    assert reset_counters(held) == ("flat",)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad])
def test_moments_with_a_count_of_0_are_named_and_sums_are_not(optimizer_class):
    model, optimizer, held = trained(optimizer_class)
    assert reset_counters(held) == ()
    optimizer.state[model[0].bias]["step"].zero_()
    assert reset_counters(held) == (() if optimizer_class is torch.optim.Adagrad else ("0.bias",))


def test_moments_without_a_count_are_refused_on_all_ranks():
    model, optimizer, held = trained()
    check_counted(held, int)
    with pytest.raises(UsageError, match=r"for parameters, so it cannot step"):
        check_counted(held, lambda number: number + 1)  # on another rank
    del optimizer.state[model[1].bias]["step"]
    with pytest.raises(UsageError, match=r"\('step'\) for 1.bias, so it cannot step"):
        check_counted(held, int)


class Lion(torch.optim.SGD):
    """Another one's optimizer: it has a moment, and counts nothing."""


def test_an_optimizer_of_others_may_count_elsewhere():
    model, optimizer, held = trained(Lion)
    optimizer.state[model[0].bias]["exp_avg"] = torch.ones(2)
    check_counted(held, int)


def raised(model, optimizer, held, act):
    found = RaisedCounters(held)
    with found.watching():
        act(model, optimizer)
    return found.uneven()


def test_a_step_raises_each_count_by_one():
    assert raised(*trained(), take) == ()
    assert raised(*trained(), lambda model, optimizer: take(model, optimizer, layers=1)) == ()
    assert raised(*trained(torch.optim.SGD), take) == ()
    assert raised(*trained(), lambda model, optimizer: None) == ()


def test_counts_that_parameters_share_rise_by_more():
    model, optimizer, held = trained()
    optimizer.state[model[0].bias]["step"] = optimizer.state[model[0].weight]["step"]
    assert raised(model, optimizer, held, take) == (counter(1, *SECOND), counter(2, *FIRST))


def test_several_steps_of_an_optimizer_are_not_judged():
    def act(model, optimizer):
        take(model, optimizer)
        take(model, optimizer, layers=1)

    assert raised(*trained(), act) == ()
