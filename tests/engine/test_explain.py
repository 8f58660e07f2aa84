"""Torch's errors about sharded parameters say which parameter, of which unit, and what to do."""

import io
import sys
from contextlib import redirect_stderr

import pytest
import torch
from IPython.core.ultratb import AutoFormattedTB
from torch import nn
from torch.nn import functional

from tests.helpers.forked_ranks import run_cases
from workbench import engine
from workbench.engine.classic import FullyShardedDataParallel
from workbench.engine.explain import explain
from workbench.runtime import tracebacks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x))


class Tied(nn.Module):
    """Reads another module's parameter in its own forward, as some language models do."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Linear(4, 4, bias=False), Block()

    def forward(self, x):
        return functional.linear(self.block(self.embed(x)), self.embed.weight)


class KeepsView(nn.Module):
    """Keeps a view of its parameter, made while the parameter is unsharded."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))

    def forward(self, x):
        self.view = self.weight.t()
        return x @ self.view


class BackwardInForward(Tied):
    """Runs a backward within its own forward, which reshards it."""

    def forward(self, x):
        hidden = self.block(x)
        hidden.sum().backward()
        return functional.linear(hidden.detach(), self.embed.weight)


def message(call):
    try:
        call()
    except RuntimeError as error:
        explain(error)
        return str(error)
    return "no error"


def sharded(model, *inner):
    for module in inner:
        engine.fully_shard(module)
    return engine.fully_shard(model)


def own_forward():
    model = Tied()
    return message(lambda: sharded(model, model.embed, model.block)(torch.ones(2, 4)))


def inner_module():
    model = Tied()
    sharded(model, model.embed, model.block)
    return message(lambda: model.block.up(torch.ones(2, 4)))


def shown_in_a_cell():
    model = Tied()
    sharded(model, model.embed, model.block)
    render = tracebacks.fold(AutoFormattedTB(mode="Plain", theme_name="nocolor").structured_traceback)
    try:
        model.block.up(torch.ones(2, 4))
    except RuntimeError as error:
        text = "\n".join(render(type(error), error, error.__traceback__))
        return text[text.rindex("RuntimeError: ") :]
    return "no error"


def helper():
    model = Tied()
    weight = sharded(model).embed.weight

    def multiply(x, matrix):
        return x @ matrix

    return message(lambda: multiply(torch.ones(2, 4), weight))


def uncaught_in_a_backward():
    """What a plain script of torchrun prints."""
    model = nn.Sequential(Hides(), nn.Linear(4, 4))
    sharded(model, *model)(torch.ones(2, 4))
    printed = io.StringIO()
    try:
        model[0].kept.backward()
    except RuntimeError as error:
        with redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
    text = printed.getvalue()
    return text[text.rindex("RuntimeError: ") :]


class Hides(nn.Linear):
    """Keeps a loss on itself, so that the backward of it passes through no output of the module."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        x = super().forward(x)
        self.kept = functional.linear(x, self.weight).sum()
        return x


def within():
    model = BackwardInForward()
    return message(lambda: sharded(model, model.block)(torch.ones(2, 4)))


def wrapper():
    model = FullyShardedDataParallel(Tied())
    return message(lambda: model.module.block.up(torch.ones(2, 4)))


def kept_view(fully=True):
    model = nn.Sequential(KeepsView(), nn.Linear(8, 4))
    if fully:
        inner, _ = model
        sharded(model, inner)
    else:
        inner = model[0]
        model[0] = FullyShardedDataParallel(inner)
        model = FullyShardedDataParallel(model)
    loss = model(torch.ones(2, 4)).sum() + inner.view.square().sum()
    return message(loss.backward)


def kept_view_of_a_wrapper():
    return kept_view(fully=False)


def kept_view_of_a_closed_unit():
    model = sharded(KeepsView())
    model.unshard()
    view = model.weight.t()
    model.reshard()
    return message(lambda: (torch.ones(2, 4) @ view).sum().backward())


def kept_param(use, *, ran=False):
    model = sharded(nn.Linear(4, 8))
    if ran:
        model(torch.ones(2, 4)).sum().backward()
    model.unshard()
    weight = model.weight
    model.reshard()
    return message(lambda: use(weight).sum().backward())


def kept_param_before_any_forward():
    return kept_param(lambda weight: weight)


def kept_param_after_a_step():
    return kept_param(lambda weight: weight * torch.ones(8, 4), ran=True)


def kept_param_in_an_operation():
    return kept_param(lambda weight: torch.ones(2, 4) @ weight.t())


def invalid_for_another_reason():
    base = torch.ones(4, requires_grad=True)
    view = base.view(2, 2)
    base.data = torch.ones(())
    torch._C._autograd._unsafe_set_version_counter((base,), (7,))
    return message(view.sum().backward)


def another():
    return message(lambda: torch.ones(2) @ torch.ones(3))


def unexplained():
    leaf = torch.ones(2, requires_grad=True)
    kept = leaf * 2
    loss = kept.square().sum()
    kept.mul_(2)
    return message(loss.backward)


VIEW = (
    "the loss is computed from a view of the full parameter {!r}, such as its transpose, that was made before unit "
    "{!r} was resharded: "
)
KEPT = "the full parameter 'weight' was read before unit '(root)' was resharded and no longer has values: "
BEGINS = {
    kept_param_before_any_forward: KEPT,
    kept_param_after_a_step: KEPT,
    kept_param_in_an_operation: KEPT,
    own_forward: "parameter 'embed.weight' is sharded; call the module of unit 'embed', on which fully_shard was called"
    ", or compute between its unshard() and reshard()\n(torch: ",
    inner_module: "parameter 'block.up.weight' is sharded; call the module of unit 'block', on which fully_shard was "
    "called, not the Linear in it, or compute between its unshard() and reshard() (likewise block.up.bias)\n(torch: ",
    shown_in_a_cell: "RuntimeError: parameter 'block.up.weight' is sharded; call the module of unit 'block', ",
    uncaught_in_a_backward: "RuntimeError: backward needs the full parameter '0.weight', but unit '0' was resharded",
    helper: "parameter 'embed.weight' is sharded; call the module of unit '(root)', ",
    within: (
        "parameter 'embed.weight' was resharded within the forward of its unit '(root)', by a backward or reshard() "
        "inside it; run that after the forward\n(torch: "
    ),
    wrapper: "linear: parameter 'block.up.weight' is sharded; call the FullyShardedDataParallel around its module, or "
    "compute within summon_full_params",
    kept_view: VIEW.format("0.weight", "0"),
    kept_view_of_a_wrapper: VIEW.format("0.weight", "0"),
    kept_view_of_a_closed_unit: VIEW.format("weight", "(root)"),
    invalid_for_another_reason: "Function AsStridedBackward0 returned an invalid gradient",
    another: "inconsistent tensor size",
    unexplained: "one of the variables needed for gradient computation has been modified by an inplace operation",
}


@pytest.mark.parametrize("world_size", [2])
def test_messages_name_parameter_unit_and_cure(world_size):
    for found in run_cases(world_size, {case.__name__: case for case in BEGINS}):
        assert {case.__name__: found[case.__name__][: len(begin)] for case, begin in BEGINS.items()} == {
            case.__name__: begin for case, begin in BEGINS.items()
        }
