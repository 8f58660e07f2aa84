"""What models got while a DataLoader was iterated, in this process; whether ranks got the same: test_lint_rules."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torchs
from torch.utils.data import DataLoader

from workbench.runtime import training_inputs
from workbench.runtime.training_inputs import TrainingInputs


@pytest.fixture
def inputs():
    found = TrainingInputs(lambda: False)
    yield found
    found.remove()
    assert not torchs._global_forward_hooks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 2), nn.Linear(2, 2)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def train(inputs, model, rows):
    loader = DataLoader(torch.arange(9)[:, None], batch_size=3)
    iterator = iter(loader)
    inputs.iterated(loader, iterator)
    for row in rows:
        model(torch.tensor([row]))
    return loader, iterator


def test_the_first_forwards_are_noted_of_the_outermost_module_and_then_none(inputs):
    model = Model()
    kept = train(inputs, model, range(6))
    found = inputs.of(model)
    assert (len(found.digests), len(set(found.digests)), found.iterated.loader()) == (4, 4, kept[0])
    assert inputs.of(model.embed) is None or inputs.of(model.embed) is found
    assert not torchs._global_forward_hooks


def test_a_loader_may_be_gone_while_its_iterator_goes_on(inputs):
    model = Model()
    loader, iterator = train(inputs, model, range(1))
    del loader
    model(torch.tensor([7]))
    found = inputs.of(model)
    assert (len(found.digests), found.iterated.loader(), found.iterated.dataset) == (2, None, "Tensor")
    del iterator


def test_of_a_model_that_is_called_with_keywords_its_first_modules_tell(inputs):
    model = Model()
    kept = train(inputs, model, [])
    for row in range(3):
        model(tokens=torch.tensor([row]))
    assert len(set(inputs.of(model).digests)) == 3
    assert not torchs._global_forward_hooks_with_kwargs, "torch would never remove its mark"
    del kept


def evaluating(model):
    model.eval()


def without_grad(_):
    torch.set_grad_enabled(False)


@pytest.mark.parametrize("change", [evaluating, without_grad])
def test_an_evaluation_is_no_training(inputs, change):
    model = Model()
    try:
        change(model)
        kept = train(inputs, model, range(4))
    finally:
        torch.set_grad_enabled(True)
    assert inputs.of(model) is None
    del kept


def test_with_two_loaders_under_way_nothing_is_known(inputs):
    model, other = Model(), train(inputs, Model(), [])
    kept = train(inputs, model, range(4))
    assert inputs.of(model) is None
    del kept, other
    kept = train(inputs, model, range(2))
    assert len(inputs.of(model).digests) == 2
    del kept


def test_the_same_batch_again_tells_nothing_and_the_newest_forwards_count(inputs):
    model = Model()
    kept = train(inputs, model, [1] * 4)
    assert inputs.of(model) is None
    inputs.watch_again()
    model(torch.tensor([1]))
    model(torch.tensor([2]))
    assert len(inputs.of(model).digests) == 2
    del kept


def test_a_fault_of_its_own_ends_the_notes_and_not_the_program(inputs, monkeypatch):
    def fails(_):
        raise KeyError

    monkeypatch.setattr(training_inputs, "checksum", fails)
    model = Model()
    kept = train(inputs, model, range(3))
    assert (inputs.of(model), len(torchs._global_forward_hooks)) == (None, 0)
    del kept
