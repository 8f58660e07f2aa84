"""Records of which steps trained which model."""

import pytest
from torch import nn

from tests.helpers.booted_ranks import execute, models_here, prepare, run
from tests.runtime.test_verify import joined, recorded
from workbench.protocol.commands import Reshard, Shard, Step, Unshard
from workbench.replay import training
from workbench.runtime import rank as rank_module
from workbench.trace.invariants import check
from workbench.views import draw


def two_models():
    prepare()
    execute(Shard(model="model", wrap=("Block",)))
    execute(Step(count=2))
    execute(Reshard(model="model", wrap=("Linear",)))
    execute(Step(count=1))
    execute(Reshard(model="model", reshard_after_forward="false"))
    execute(Step(count=1))
    execute(Unshard(model="model"))
    execute(Shard(model="model", wrap=("Block",)))
    execute(Step(count=1))
    first = recorded()
    prepare()
    execute(Shard(model="model", wrap=("Block",)))
    losses = execute(Step(count=2))["losses"]
    return first, recorded(), losses


def deleted():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",)))
    execute(Step(count=1))
    for name in ("model", "opt", "train_step"):
        del ns[name]
    rank_module._after_cell(None)
    return any(unit.in_use for unit in rank_module.this_rank().recorder.header.units)


def test_a_model_that_a_cell_deletes_is_gone_after_it():
    assert run(2, deleted) == [False, False]


def sizes_within_a_step(api):
    model = prepare()["model"]
    sizes = [models_here()[0].num_bytes]
    execute(Shard(model="model", wrap=("Block",), api=api))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: sizes.append(models_here()[0].num_bytes))
    execute(Step(count=1))
    return [*sizes, models_here()[0].num_bytes]


@pytest.mark.parametrize("api", ["fully_shard", "classic"])
def test_a_model_is_as_large_within_a_step_as_before_it(api):
    for sizes in run(2, sizes_within_a_step, api):
        assert len(sizes) > 4
        assert set(sizes) == {sizes[0]}


def test_only_a_model_made_again_cuts_the_curve():
    results = run(2, two_models)
    first, both = (joined([result[place] for result in results]) for place in (0, 1))
    assert training.summary(first).cuts == ()
    assert len(training.summary(first).losses) == 5
    found = training.summary(both)
    assert found.cuts == (5,)
    assert found.losses.tolist() == [sum(pair) / 2 for pair in zip(*(losses for *_, losses in results), strict=True)]
    assert "in 2 steps" in draw("training", both).layout.title.text
    assert check(both) == []
