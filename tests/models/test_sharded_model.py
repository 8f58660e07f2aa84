"""What a plain copy of a sharded model offers in place of its engine's calls, and which buffers are compared."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from workbench.models import sharded_model


class Wrapped(nn.Linear):
    """A model with a method that wrappers have too."""

    def no_sync(self):
        return "own"


def test_a_plain_copy_has_the_calls_of_a_wrapper_and_keeps_its_own():
    plain = Wrapped(2, 1)
    sharded_model.take_calls_of_a_wrapper(plain)
    assert plain.module is plain
    assert plain.no_sync() == "own"
    assert plain.clip_grad_norm_(1.0) == 0  # without gradients


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_plain_copy_clips_as_torch_does(max_norm, norm_type):
    plain, expected = nn.Linear(2, 1), nn.Linear(2, 1)
    for model in (plain, expected):
        model.weight.grad, model.bias.grad = torch.tensor([[3.0, -4.0]]), torch.tensor([12.0])
    sharded_model.take_calls_of_a_wrapper(plain)
    assert plain.clip_grad_norm_(max_norm, norm_type) == clip_grad_norm_(expected.parameters(), max_norm, norm_type)
    assert all(map(torch.equal, (p.grad for p in plain.parameters()), (p.grad for p in expected.parameters())))


class Sharded(nn.Linear):
    """A module as an engine makes it, whose own methods must not run on a plain copy."""

    def set_sync(self, is_on):
        raise NotImplementedError

    def unshard(self, async_op=False):
        raise NotImplementedError


def test_setters_of_a_plain_copy_do_nothing():
    model, plain = nn.Sequential(Sharded(1, 1)), nn.Linear(1, 1)
    sharded_model.take_setters(model, {id(model[0]): plain}, Sharded)
    assert plain.set_sync(False) is plain.unshard() is plain.unshard(async_op=True).wait() is None


def test_buffers_that_a_rank_has_whole_are_compared():
    buffers = torch.ones(2), torch.ones(2, device="meta"), torch.ones(2).to_sparse()
    assert list(map(sharded_model._is_plain, buffers)) == [True, False, False]
