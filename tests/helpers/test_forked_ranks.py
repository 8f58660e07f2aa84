"""Ranks are forked from a process that tests have used before."""

import torch

from tests.helpers.forked_ranks import run_ranks
from workbench.engine._torch import fakes


def backward():
    torch.ones((), requires_grad=True).backward()


def test_forked_ranks_can_run_a_backward_whatever_this_process_did():
    with fakes():
        pass  # makes torch count a GPU also where there is none
    backward()
    run_ranks(1, backward, fresh=True)
