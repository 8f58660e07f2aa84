"""A registered communication hook reduces the gradients of every wrapper, as in torch's."""

import functools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks as theirs

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import CPU, OURS, SAME, adam, check_parity, compare_with_torchs, wrap_net
from workbench.engine import classic
from workbench.events import Edge, Kind

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def register(api, model, name):
    lib = classic if api is OURS else theirs
    state = (lib.LowPrecisionState if "compress" in name else lib.DefaultState)(dist.group.WORLD)
    model.register_comm_hook(state, getattr(lib, name))


@patch.object(torch.Tensor, "record_stream", lambda *_: None)  # torch's compressing hooks call it, and fail on the CPU
def hooks_reduce(strategy):
    is_whole = strategy == "NO_SHARD" or dist.get_world_size() == 1
    for name in ("allreduce_hook" if is_whole else "reduce_scatter_hook", "bf16_compress_hook", "fp16_compress_hook"):
        for use_orig_params in (False, True):
            compare_with_torchs(
                functools.partial(make_net, num_blocks=1),  # a hook acts alike on each unit
                # with use_orig_params torch's flat parameter has gaps, which move elements; four ranks sum a moved
                # element in another order
                lambda api, net: wrap_net(api, net, strategy, use_orig_params=use_orig_params and api is OURS),  # noqa: B023
                steps=3,
                ways=[(2, True)],
                ready=lambda api, model: register(api, model, name),  # noqa: B023
                make_optimizer=adam,
                tolerance=SAME,
            )


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_registered_hook_reduces_as_torchs_does(world_size, strategy):
    run_ranks(world_size, hooks_reduce, strategy)


def trains_with_a_hook_of_its_own(strategy):
    lengths = []

    def sum_and_divide(state, grad, output=None):
        lengths.append((state, grad.numel(), None if output is None else output.numel()))
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())
        if output is not None:
            output.copy_(grad.chunk(dist.get_world_size())[dist.get_rank()])

    def wrap(net):
        wrapped = wrap_net(OURS, net, strategy)
        wrapped.register_comm_hook("mine", sum_and_divide)
        return wrapped

    check_parity(make_net, wrap, steps=3)
    size = dist.get_world_size()
    assert len(lengths) == 3 * 4
    for state, whole, part in lengths:
        assert state == "mine"
        assert part is None if strategy == "NO_SHARD" else whole == size * part


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_handed_the_state_the_padded_gradient_and_the_room_for_this_ranks_part(strategy):
    run_ranks(2, trains_with_a_hook_of_its_own, strategy)


def is_recorded(strategy):
    kind = Kind.ALL_REDUCE if strategy == "NO_SHARD" else Kind.REDUCE_SCATTER
    found = []
    for name in (None, "allreduce_hook" if strategy == "NO_SHARD" else "reduce_scatter_hook"):
        with recording() as record:
            model = wrap_net(OURS, make_net(), strategy)
            if name is not None:
                register(OURS, model, name)
            record.clear()
            loss_of(model, batch(dist.get_rank(), 0)).backward()
        assert record.count(kind) == record.count(kind, Edge.END)
        found.append((record.count(kind), record.payload(kind)))
        assert len(found[-1][0]) == 4
    without, with_hook = found
    assert with_hook[0] == without[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hook_is_recorded_as_the_collective_it_replaces(strategy):
    run_ranks(2, is_recorded, strategy)


def refusals():
    def hook(*_):
        pass

    model = wrap_net(OURS, make_net())
    with pytest.raises(TypeError, match=r"register_comm_hook takes a function hook\(state, grad, \.\.\.\), got 3"):
        model.register_comm_hook(None, 3)
    with pytest.raises(RuntimeError, match="register_comm_hook was called on a wrapper inside another"):
        model.blocks[0].register_comm_hook(None, hook)
    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="a communication hook is registered already"):
        model.register_comm_hook(None, hook)
    mesh = dist.init_device_mesh("cpu", (2, 1))
    hybrid = wrap_net(OURS, make_net(), "HYBRID_SHARD", device_mesh=mesh, device_id=CPU)
    with pytest.raises(ValueError, match="register_comm_hook does not support HYBRID_SHARD, which reduces gradients"):
        hybrid.register_comm_hook(None, hook)
    loss_of(hybrid, batch(dist.get_rank(), 0)).backward()  # no wrapper keeps the hook


def test_hooks_are_refused_where_they_cannot_be():
    run_ranks(2, refusals)
