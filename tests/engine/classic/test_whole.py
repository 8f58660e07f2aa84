"""If one rank has a whole flat parameter, originals keep their shapes, which some optimizers need; as with torch."""

import copy
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import NO_SHARD, OLD_CALLS, SHARDED_TENSOR, ignoring_warnings
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import OURS, THEIRS, compare_with_torchs, wrap_net
from workbench.engine.classic import unwrap

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]]

CASES = [(1, "FULL_SHARD"), (1, "NO_SHARD"), (2, "NO_SHARD")]


def adafactor(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return an optimizer with row and column state for parameters of several dimensions."""
    return torch.optim.Adafactor(params, lr=1e-2)


def muon(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return an optimizer of matrices only."""
    return torch.optim.Muon([param for param in params if param.ndim == 2], lr=1e-2)


def wrapped(api: SimpleNamespace, strategy: str, **options: Any) -> nn.Module:
    return wrap_net(api, make_net(dim=8), strategy, use_orig_params=True, **options)


def shapes_of(model: nn.Module) -> Shapes:
    """Return the shapes of each parameter and its gradient."""
    return {
        name: (tuple(param.shape), None if param.grad is None else tuple(param.grad.shape))
        for name, param in model.named_parameters()
    }


def shapes_in_a_life(api: SimpleNamespace, strategy: str, **options: Any) -> Iterator[tuple[str, Any]]:
    """Yield each phase of training and the shapes in it."""
    model = wrapped(api, strategy, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    yield "made", shapes_of(model)
    loss = loss_of(model, batch(dist.get_rank(), 0))
    yield "between forward and backward", shapes_of(model)
    loss.backward()
    yield "after backward", shapes_of(model)
    optimizer.step()
    yield "optimizer", [tuple(s["momentum_buffer"].shape) for s in optimizer.state_dict()["state"].values()]
    optimizer.zero_grad()
    with torch.no_grad():
        model.eval()(batch(0, 0))
    yield "evaluated", shapes_of(model.train())
    with model.no_sync():
        loss_of(model, batch(dist.get_rank(), 1)).backward()
    yield "not reduced", shapes_of(model)
    loss_of(model, batch(dist.get_rank(), 1)).backward()
    yield "accumulated", shapes_of(model)
    with type(model).summon_full_params(model, with_grads=True):
        yield "summoned", shapes_of(model)
    yield "after that", shapes_of(model)
    model.load_state_dict(model.state_dict())
    yield "loaded", shapes_of(model)


@ignoring_warnings(*NO_SHARD)
def are_seen_alike(strategy: str) -> None:
    for precision in ({}, {"param_dtype": torch.bfloat16}):
        lives = [
            shapes_in_a_life(api, strategy, mixed_precision=api.MixedPrecision(**precision)) for api in (OURS, THEIRS)
        ]
        for (when, ours), (_, theirs) in zip(*lives, strict=True):
            assert ours == theirs, (when, precision)


@pytest.mark.parametrize(("world_size", "strategy"), CASES)
def test_shapes_are_those_that_torchs_wrapper_shows(world_size, strategy):
    run_ranks(world_size, are_seen_alike, strategy)


@ignoring_warnings(*NO_SHARD)
def train_alike(strategy: str) -> None:
    # after no_sync() torch's wrapper fails to zero gradients of parameters that the optimizer does not hold
    for make_optimizer, ways in ((adafactor, [(1, False), (2, True)]), (muon, [(1, False), (2, False)])):
        compare_with_torchs(
            lambda: make_net(dim=8),
            lambda api, net: wrap_net(api, net, strategy, use_orig_params=True),
            steps=3,
            ways=ways,
            make_optimizer=make_optimizer,
        )


@pytest.mark.parametrize(("world_size", "strategy"), CASES)
def test_updates_that_depend_on_shapes_are_torchs(world_size, strategy):
    run_ranks(world_size, train_alike, strategy)


@ignoring_warnings(*NO_SHARD, *OLD_CALLS, *SHARDED_TENSOR)
def state_is_saved_alike(strategy: str) -> None:
    """Save state that has no parameter's shape, and load torch's."""
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        models = [wrapped(api, strategy) for api in (OURS, THEIRS)]
        optimizers = [adafactor(model.parameters()) for model in models]
        saved = []
        for api, model, optimizer in zip((OURS, THEIRS), models, optimizers, strict=True):
            loss_of(model, batch(dist.get_rank(), 0)).backward()
            optimizer.step()
            model.set_state_dict_type(model, api.StateDictType[kind])
            saved.append(copy.deepcopy(model.optim_state_dict(model, optimizer)))
        ours, theirs = saved
        torch.testing.assert_close(ours["state"], theirs["state"])
        assert ours["param_groups"] == theirs["param_groups"]
        assert list(ours["state"]) == list(theirs["state"])
        assert ours["state"]["head.weight"]["row_var"].shape == (7, 1)
        model, optimizer = models[0], optimizers[0]
        fresh = adafactor(model.parameters())
        model.optim_state_dict_to_load(model, fresh, theirs, load_directly=True)
        torch.testing.assert_close(fresh.state_dict()["state"], optimizer.state_dict()["state"])
        plain, _ = unwrap(model, [optimizer])
        names = {param: name for name, param in plain.named_parameters()}
        torch.testing.assert_close({names[p]: state for p, state in optimizer.state.items()}, theirs["state"])


@pytest.mark.parametrize(("world_size", "strategy"), CASES)
def test_state_of_any_shape_is_saved_as_torchs_is(world_size, strategy):
    run_ranks(world_size, state_is_saved_alike, strategy)
