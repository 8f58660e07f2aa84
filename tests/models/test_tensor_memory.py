"""Bytes of all tensors of a process in a step, whoever holds them."""

import torch

from workbench.watch import tensor_bytes

SIZE = 4 * 1000  # bytes of a tensor of these tests


def make():
    return torch.zeros(1000)


def test_what_a_step_makes_and_frees_is_its_peak():
    def step():
        first, second = make(), make()
        first.untyped_storage().resize_(0)
        del second
        make()

    found = tensor_bytes(step)
    assert found["peak"] - found["before"] == 2 * SIZE
    assert found["after"] == found["before"]


def test_a_copy_that_is_hidden_counts_until_it_is_dropped():
    hidden = []
    found = tensor_bytes(lambda: hidden.append(make().clone()))
    assert found["after"] - found["before"] == SIZE
    assert found["peak"] - found["before"] == 2 * SIZE


def test_what_autograd_alone_holds_counts():
    weight = torch.ones(1000, requires_grad=True)

    def step():
        loss = (make() + 1).mul(weight).mul(weight).sum()  # both factors live in the graph only
        torch.zeros(1)
        loss.backward()

    found = tensor_bytes(step)
    assert found["peak"] - found["before"] >= 3 * SIZE
    assert found["after"] - found["before"] == SIZE, "the gradient"


def test_memory_that_is_filled_again_counts():
    """An engine resizes the storage of one tensor, whose tensor object is older than the step."""
    full = make()
    full.untyped_storage().resize_(0)

    def step():
        full.untyped_storage().resize_(SIZE)
        full.fill_(1)
        full.untyped_storage().resize_(0)

    found = tensor_bytes(step)
    assert (found["peak"] - found["before"], found["after"] - found["before"]) == (SIZE, 0)
