"""Errors of the wrapper; after each, nothing has changed."""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.forked_ranks import on_one_rank
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import CPU, OURS, wrap_net
from workbench.engine import fully_shard
from workbench.engine.classic import wrapper

F = OURS.FullyShardedDataParallel


def half_frozen():
    net = make_net()
    net.head.weight.requires_grad_(False)
    return net


def tied():
    net = make_net(tied=True)
    net.embed = F(net.embed, device_id=CPU)
    return F(net, device_id=CPU)


def of_both():
    net = make_net()
    fully_shard(net)
    return F(net.head, device_id=CPU)


def half_on_meta():
    net = nn.Sequential(nn.Linear(2, 2, device="meta"), make_net(num_blocks=1).to("meta"))
    return F(net, auto_wrap_policy=OURS.always_wrap_policy, device_id=CPU)


WRONG = {
    "no module": (lambda: F([nn.Linear(2, 2)]), TypeError, "FullyShardedDataParallel wraps a module, got list"),
    "a flag": (lambda: F(make_net(), use_orig_params=1), TypeError, "use_orig_params must be a bool, got 1"),
    "a strategy": (lambda: F(make_net(), sharding_strategy="full"), TypeError, "sharding_strategy must be a workbench"),
    "wrapped": (
        lambda: F(F(make_net())),
        ValueError,
        "is sharded already; wrap its children, or undo its sharding first",
    ),
    "frozen": (
        lambda: F(half_frozen()),
        ValueError,
        "is frozen, but one flat parameter is either trained or frozen: pass",
    ),
    "dtypes": (
        lambda: F(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())),
        ValueError,
        "the parameters of one unit must share dtype and device",
    ),
    "tied": (
        tied,
        ValueError,
        "parameter 'head.weight' is tied to 'weight' of Embedding, which an earlier FullyShardedDataParallel call "
        "sharded; put both into one unit: wrap a module that contains both, and no module inside it that contains "
        "only one",
    ),
    "sharded by the other": (
        of_both,
        ValueError,
        "'weight' is sharded already, as 'head.weight' of Net; call fully_sh",
    ),
    "nothing to initialise it": (
        half_on_meta,
        ValueError,
        "module '1' (Net) is on the meta device and has no reset_pa",
    ),
    "both kinds of ignored": (
        lambda: F(make_net(), ignored_modules=[], ignored_states=[]),
        ValueError,
        "FullyShardedDataParallel takes ignored_modules or ignored_states, not both",
    ),
    "one ignored": (
        lambda: F(make_net(), ignored_modules=nn.Linear(2, 2)),
        TypeError,
        "ignored_modules takes a list or a set, got a Linear: put it into [...]",
    ),
    "a name ignored": (
        lambda: F(make_net(), ignored_states=["head"]),
        TypeError,
        "ignored_states takes modules or parameters; it contains a str",
    ),
    "a parameter as a module": (
        lambda: F(make_net(), ignored_modules=[make_net().scale]),
        TypeError,
        "ignored_modules takes modules; it contains a Parameter",
    ),
    "two places": (
        lambda: F(make_net(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (1,))),
        ValueError,
        "FullyShardedDataParallel takes process_group or device_mesh, not both: leave one out",
    ),
    "no mesh": (lambda: F(make_net(), device_mesh=4), TypeError, "device_mesh must be a torch.distributed.device_mesh"),
    "a group for two": (
        lambda: F(make_net(), process_group=dist.group.WORLD, sharding_strategy=OURS.ShardingStrategy.HYBRID_SHARD),
        TypeError,
        "process_group must be a pair for HYBRID_SHARD: the shard group and the replicate group",
    ),
    "two for one": (
        lambda: F(make_net(), process_group=(dist.group.WORLD, dist.group.WORLD)),
        TypeError,
        "a pair of groups is for the hybrid strategies",
    ),
    "axes": (
        lambda: F(
            make_net(),
            device_mesh=init_device_mesh("cpu", (1,)),
            sharding_strategy=OURS.ShardingStrategy.HYBRID_SHARD,
        ),
        ValueError,
        "HYBRID_SHARD needs a mesh of two axes (replicate, shard); it got one of shape (1,)",
    ),
    "hybrid by hand": (
        lambda: F(make_net(), sharding_strategy=OURS.ShardingStrategy.HYBRID_SHARD),
        ValueError,
        "HYBRID_SHARD without auto_wrap_policy needs process_group=(shard group, replicate group)",
    ),
    "a device": (lambda: F(make_net(), device_id=1.5), TypeError, "device_id must be a torch.device, its name or an"),
    "no init": (
        lambda: F(make_net(), param_init_fn="reset"),
        TypeError,
        "param_init_fn must be a function of a module, got 'reset'",
    ),
    "left on meta": (
        lambda: F(nn.Linear(2, 2, device="meta"), param_init_fn=lambda module: None),
        ValueError,
        "on the meta device: call module.to_empty(device=..., recurse=False) in it",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@on_one_rank
def test_invalid_modules_are_refused(wrong):
    make, kind, words = WRONG[wrong]
    with pytest.raises(kind, match=re.escape(words)):
        make()


def test_a_device_index_needs_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(ValueError, match=r"device_id=0: there is no accelerator here; pass torch.device\('cpu'\)"):
        wrapper._device(0)


@on_one_rank
def test_a_refused_model_is_unchanged():
    net = half_frozen()
    before = dict(net.named_parameters())
    with pytest.raises(ValueError, match="pass use_orig_params=True, or wrap the frozen modules separately"):
        F(net)
    with pytest.raises(ValueError, match="the wrapped module itself is ignored; leave the wrapper out instead"):
        F(net, ignored_modules=[net])
    assert dict(net.named_parameters()) == before
    assert all(after is before[name] for name, after in net.named_parameters())


@on_one_rank
def test_if_one_module_cannot_be_initialised_none_is():
    net = nn.Sequential(nn.Linear(2, 2, device="meta"), make_net(num_blocks=1).to("meta"))
    with pytest.raises(ValueError, match=r"module '1' \(Net\) is on the meta device and has no reset_parameters"):
        F(net, auto_wrap_policy=OURS.ModuleWrapPolicy({nn.Linear}), device_id=CPU)
    assert type(net[0]) is nn.Linear
    assert all(param.is_meta for param in net.parameters())


@on_one_rank
def test_an_iteration_that_raised_is_dropped():
    wrapped = wrap_net(OURS, make_net())
    with pytest.raises(IndexError):
        wrapped(batch(0, 0) + 100)
    assert wrapped.state_dict()
    handle = wrapped.embed.register_full_backward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(wrapped, batch(0, 0)).backward()
    handle.remove()
    message = (
        "or has raised; call it between iterations, and after an exception call reset_iter_state() on the outermost"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        wrapped.state_dict()
    with pytest.raises(RuntimeError, match="reset_iter_state was called on a FullyShardedDataParallel inside an FS"):
        wrapped.blocks[0].reset_iter_state()
    wrapped.reset_iter_state()
    assert wrapped.state_dict()
    loss_of(wrapped, batch(0, 0)).backward()


@on_one_rank
def test_a_transform_of_a_function_around_a_wrapper():
    wrapped = F(nn.Linear(2, 2), device_id=CPU)
    with pytest.raises(NotImplementedError, match=r"or undo it with workbench\.engine\.classic\.unwrap"):
        torch.func.vmap(wrapped)(torch.ones(1, 2))


@on_one_rank
def test_whole_parameters_are_refused_where_they_cannot_be():
    wrapped = wrap_net(OURS, make_net())
    for options, kind, words in (
        ({"rank0_only": True}, ValueError, "the other ranks have no values to write back; pass writeback=False"),
        ({"with_grads": True, "offload_to_cpu": True}, ValueError, "with_grads=True needs offload_to_cpu=False"),
        ({"with_grads": True}, NotImplementedError, "with_grads=True needs use_orig_params=True"),
    ):
        with pytest.raises(kind, match=re.escape(words)), F.summon_full_params(wrapped, **options):
            pass
    loss_of(wrapped, batch(0, 0)).backward()


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_one_rank
def test_a_forward_with_whole_parameters_is_no_training(use_orig_params):
    wrapped = wrap_net(OURS, make_net(), use_orig_params=use_orig_params)
    refused = pytest.raises(
        RuntimeError, match=re.escape("run it under torch.no_grad(), or outside summon_full_params")
    )
    with F.summon_full_params(wrapped), refused:
        loss_of(wrapped, batch(0, 0))
    wrapped.requires_grad_(False)
    with F.summon_full_params(wrapped):
        loss_of(wrapped, batch(0, 0))
    wrapped.requires_grad_(True)
    loss_of(wrapped, batch(0, 0)).backward()


@on_one_rank
def test_a_sharded_parameter_has_its_form_and_no_values():
    wrapped = wrap_net(OURS, make_net())
    weight, plain = wrapped.module.head.weight, make_net().head.weight
    assert (weight.shape, weight.dtype, weight.device, weight.dim()) == (plain.shape, plain.dtype, CPU, 2)
    assert weight.numel() == plain.numel()
    assert weight.is_floating_point()
    for before in (lambda: None, lambda: loss_of(wrapped, batch(0, 0)).backward()):
        before()
        with pytest.raises(RuntimeError, match=r"is sharded; call the FullyShardedDataParallel around its module, or"):
            wrapped.module(batch(0, 0))
    with pytest.raises(RuntimeError, match=re.escape("linear: parameter 'blocks.1.mlp.0.weight' is sharded")):
        nn.functional.linear(torch.ones(1), wrapped.module.blocks[1].module.mlp[0].weight)
    assert repr(weight) == "<head.weight is sharded: [7, 5], torch.float32>"


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, pickle.dumps])
@on_one_rank
def test_a_wrapper_is_not_copied(make):
    wrapped = wrap_net(OURS, make_net())
    with pytest.raises(NotImplementedError, match=re.escape("neither copied nor pickled: save its state_dict(), or")):
        make(wrapped)


@on_one_rank
def test_only_the_outermost_wrapper_clips_and_stops_to_reduce():
    wrapped = wrap_net(OURS, make_net())
    wrapped(batch(0, 0))
    inner = wrapped.blocks[0]
    with pytest.raises(RuntimeError, match="clip_grad_norm_ was called on a wrapper inside another; call it on"):
        inner.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="no_sync was called on a wrapper inside another"), inner.no_sync():
        pass


@on_one_rank
def test_a_flat_parameter_cannot_be_removed_or_replaced():
    wrapped = wrap_net(OURS, make_net())
    flat = wrapped._state.flat
    had = wrapped.module._parameters.pop("_flat_param")
    with pytest.raises(TypeError, match="was removed from its module; to undo the wrapping call"):
        flat.registered()
    wrapped.module._parameters["_flat_param"] = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="copy values in with summon_full_params, or load a state dict"):
        flat.registered()
    wrapped.module._parameters["_flat_param"] = had
    with pytest.raises(NotImplementedError, match="cannot be resharded to fewer ranks after forward"):
        flat.post_forward_form(flat.slot, flat.mesh_info)


@on_one_rank
def test_an_original_parameter_cannot_be_removed_or_reshaped():
    wrapped = F(nn.Linear(3, 3), use_orig_params=True, device_id=CPU)
    inner, flat = wrapped.module, wrapped._state.flat
    had = inner._parameters.pop("bias")
    with pytest.raises(TypeError, match="was removed from its module after wrapping"):
        flat.adopt(flat.slot)
    inner.bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(
        ValueError, match=re.escape("it must have its full shape [3], or that of this rank's piece, [3]")
    ):
        flat.adopt(flat.slot)
    inner.bias = had
