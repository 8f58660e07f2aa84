"""What ``models/`` uses of torch's private API exists in this version, and means what it is taken for."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import NO_SHARD, ignoring_warnings
from tests.helpers.watched import make_blocks, shard_by_torch
from tests.models.test_torch_wrapper import wrapped
from workbench.models import _torch_private as _torch


def test_groups_their_ranks_and_models():
    run_ranks(2, groups)


def groups():
    pair = dist.new_group([0, 1])
    assert pair in _torch.groups_so_far()
    assert dist.group.WORLD in _torch.groups_so_far()
    assert _torch.ranks_of(pair) == (0, 1)
    plain = make_blocks(2)
    assert list(_torch.groups_below(plain)) == []
    model = shard_by_torch(plain)
    found = dict(_torch.groups_below(model))
    assert list(found) == ["", "0", "1"]
    root, block = found[""], found["0"]
    assert _torch.root_of(block) is model[0]  # no forward has made a root known
    model(torch.randn(1, 16)).sum().backward()
    assert _torch.root_of(block) is _torch.root_of(root) is model
    assert _torch.will_unshard(block)
    model[0].unshard(async_op=True)
    assert _torch.is_gathering(block)
    assert not _torch.will_unshard(block)
    model[0].unshard()
    model[0].reshard()
    param = block.fsdp_params[0]
    assert _torch.shape_of(param) == (32, 16)
    assert _torch.module_of(param) == (model[0][0], "weight")
    assert _torch.full_of(param) is None
    assert _torch.freed_of(param).untyped_storage().size() == 0
    assert _torch.full_grads_of(param) == ()
    assert _torch.local_of(param.sharded_param) is _torch.local_of(param.sharded_param)
    assert _torch.local_of(param.sharded_param).shape == (16, 16)
    model[0].unshard()
    assert _torch.full_of(param).shape == (32, 16)
    assert _torch.freed_of(param) is None
    model[0].reshard()
    assert not _torch.is_in_forward(block)
    assert not _torch.is_in_backward(block)


def test_a_group_of_several_modules_is_found_once():
    run_ranks(2, several_modules)


def several_modules():
    model = make_blocks(2)
    fully_shard([model[0], model[1]])
    fully_shard(model)
    assert [path for path, _ in _torch.groups_below(model)] == ["", "0"]
    policies = [(modules, len(groups)) for modules, policy, groups in _torch.policies_below(model)]
    assert policies == [((model,), 1), ((model[0], model[1]), 1)]


def test_modules_are_plain_for_a_while():
    run_ranks(2, plain_for_a_while)


def plain_for_a_while():
    def ours(*_):
        return None

    model = make_blocks(2)
    classes = [type(module) for module in model.modules()]
    model[0].register_forward_pre_hook(ours)
    fully_shard([model[0], model[1]])
    fully_shard(model)
    register_fsdp_forward_method(model, "append")
    hooks = [(list(m._forward_pre_hooks.items()), list(m._forward_hooks.items())) for m in model.modules()]
    with _torch.plain_modules(model):
        assert [type(module) for module in model.modules()] == classes
        found = [hook for m in model.modules() for h in (m._forward_pre_hooks, m._forward_hooks) for hook in h.values()]
        assert found == [ours]
        assert "append" not in vars(model)
    assert isinstance(model, FSDPModule)
    assert "append" in vars(model)
    assert hooks == [(list(m._forward_pre_hooks.items()), list(m._forward_hooks.items())) for m in model.modules()]


def test_a_parameter_has_the_form_that_tensor_parallelism_gave_it():
    run_ranks(2, split_before)


def split_before():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = make_blocks(1)
    parallelize_module(model[0], mesh["tp"], {"0": ColwiseParallel()})
    before = dict(model.named_parameters())
    fully_shard(model, mesh=mesh["dp"])
    ((_, group),) = _torch.groups_below(model)
    for param, was in zip(group.fsdp_params, before.values(), strict=True):
        form = _torch.form_of(param)
        assert _torch.mesh_of(param) == mesh["dp"]
        assert not _torch.is_on_one_mesh(param)
        assert isinstance(form, DTensor) == isinstance(was, DTensor)
        if isinstance(was, DTensor):
            assert (form.shape, form.placements, form.device_mesh) == (was.shape, was.placements, was.device_mesh)


def test_gradients_that_were_not_reduced_are_dropped():
    run_ranks(2, unreduced)


def unreduced():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(make_blocks(1), mesh=mesh)
    ((_, group),) = _torch.groups_below(model)
    x = torch.randn(4, 16)
    model.set_requires_all_reduce(False)
    model(x).sum().backward()
    assert _torch.has_partial_sum(group)
    _torch.drop_full_grads(group)
    assert not _torch.has_partial_sum(group)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    assert any(map(_torch.full_grads_of, group.fsdp_params))
    _torch.drop_full_grads(group)
    assert not any(map(_torch.full_grads_of, group.fsdp_params))


def test_a_group_is_renewed_after_an_iteration_that_was_given_up():
    run_ranks(2, renewed)


def renewed():
    model = shard_by_torch(make_blocks(2))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    model(x).sum().backward()
    expected = [param.grad.full_tensor() for param in model.parameters()]
    model.zero_grad()
    loss = model(x).sum()
    model[1].unshard(async_op=True).wait()
    del loss
    for _, group in _torch.groups_below(model):
        _torch.renew(group)
        assert group.is_sharded
    model(x).sum().backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad.full_tensor(), grad)


def test_handles_of_wrappers():
    run_ranks(2, handles)


def handles():
    model = wrapped("FULL_SHARD")
    assert {_torch.flat_full_of(handle) for _, handle in _torch.handles_below(model)} == {None}  # before a forward
    model(torch.randn(1, 16)).sum().backward()
    found = dict(_torch.handles_below(model))
    assert list(found) == ["", "0", "1", "2", "3"]
    handle = found["0"]
    facts = _torch.facts_of(handle)
    numel = 16 * 32 + 32 + 32 * 16 + 16
    assert (facts.numel, facts.shard_numel, facts.shard_size, facts.copies) == (numel, numel // 2, 2, 1)
    assert facts.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert facts.shapes == ((32, 16), (32,), (16, 32), (16,))
    assert facts.firsts == (0, 512, 544, 1056)
    assert (facts.reshards, facts.trainable) == (True, True)
    assert {facts.dtype, facts.compute_dtype, facts.reduce_dtype} == {torch.float32}
    assert _torch.will_gather(handle)
    assert _torch.flat_full_of(handle) is None
    assert _torch.ranks_of_handle(handle) == ((0, 1), (dist.get_rank(),))
    assert _torch.module_of_handle(handle) is model.module[0].module
    assert _torch.flat_freed_of(handle).untyped_storage().size() == 0
    assert _torch.flat_places_of(handle)[2] == (model.module[0].module[2], "weight")
    assert _torch.flat_grad_of(handle) is None
    assert _torch.flat_sharded_grad_of(handle).shape == _torch.flat_shard_of(handle).shape == (numel // 2,)
    assert _torch.shard_rank_of(handle) == dist.get_rank()
    assert not _torch.is_recomputing(handle)
    assert not _torch.has_begun_backward(handle)
    old, new = handle.process_group, dist.new_group([0, 1])
    _torch.renew_handle(handle, {id(old): new})
    assert handle.process_group is new
    wrapper = next(each for each in model.modules() if getattr(each, "_handle", None) is handle)
    assert wrapper.process_group is new


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_a_copy_of_a_wrapped_model_needs(use_orig_params):
    run_ranks(2, parts_of_wrappers, use_orig_params)


def parts_of_wrappers(use_orig_params):
    plain = dict(make_blocks().named_parameters())
    model = wrapped("FULL_SHARD", use_orig_params=use_orig_params)
    found = dict(_torch.handles_below(model))
    handle, block = found["0"], model.module[0].module
    assert [(is_root, own is handle) for _, is_root, own in _torch.wrappers_below(model)][:2] == [
        (True, False),
        (False, True),
    ]
    held = _torch.held_of(handle)
    assert len(held) == (4 if use_orig_params else 1)
    assert {id(param) for param in held} <= {id(param) for param in model.parameters()}
    assert [each for _, *each in _torch.all_places_of(handle)] == [list(each) for each in _torch.flat_places_of(handle)]
    assert _torch.averaging_groups_of(handle) == (handle.process_group,)
    whole = _torch.gathered_flat(handle, _torch.flat_shard_of(handle).detach())
    assert torch.equal(whole[:512].view(32, 16), plain["0.0.weight"])
    assert _torch.objects_of_shards(handle, dist.get_rank()) == [0, 1]
    _torch.reshard_handle(handle)  # nothing has run yet
    with torch.no_grad():
        model(torch.randn(1, 16))
    root = found[""]
    assert _torch.flat_full_of(root) is not None  # stays gathered without a backward
    _torch.reshard_handle(root)
    assert _torch.flat_full_of(root) is None
    with model.no_sync():
        model(torch.randn(1, 16)).sum().backward()
    assert _torch.flat_grad_of(handle) is not None
    before = [sorted(vars(each)) for each, *_ in _torch.wrappers_below(model)]
    for each in found.values():
        _torch.forget_iteration(each)
    assert before == [sorted(vars(each)) for each, *_ in _torch.wrappers_below(model)]
    assert _torch.flat_grad_of(handle) is None
    model(torch.randn(1, 16)).sum().backward()
    _torch.plain_module(block)
    assert "_flat_param" not in block._parameters


def test_ranks_and_checkpoints_of_groups():
    run_ranks(4, ranks_of_groups)


@ignoring_warnings(*NO_SHARD)
def ranks_of_groups():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, rank = make_blocks(2), dist.get_rank()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[1])
    found = [_torch.ranks_of_group(group) for _, group in _torch.groups_below(model)]
    assert found == [(((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]), ((0, 1, 2, 3), (rank,))]
    block, model[1] = model[1], checkpoint_wrapper(model[1])
    assert list(_torch.checkpoint_wrappers_below(model)) == [("1", block)]
    hybrid = wrapped("HYBRID_SHARD", shape=(2, 2))
    ((_, handle), *_) = _torch.handles_below(hybrid)
    assert _torch.ranks_of_handle(handle) == found[0]
    ((_, handle), *_) = _torch.handles_below(wrapped("NO_SHARD"))
    assert _torch.ranks_of_handle(handle) == ((rank,), (0, 1, 2, 3))


def replicas():
    model = DistributedDataParallel(make_blocks(2), bucket_cap_mb=0.004)
    assert _torch.num_buckets(model) == 0
    ended = []
    for _ in range(3):
        output = model(torch.ones(2, 16))
        output.register_hook(lambda _: _torch.at_end_of_backward(lambda: ended.append(model.module[-1].bias.grad)))
        output.sum().backward()
    assert len(ended) == 3
    assert all(grad is not None for grad in ended)
    assert (_torch.num_buckets(model) > 1) == _torch.HAS_HOOKS
    weights = list(model.parameters())
    _torch.renew_replicas(model, {id(model.process_group): dist.group.WORLD})
    assert list(map(id, model.parameters())) == list(map(id, weights))
    model.zero_grad()
    model(torch.full((2, 16), float(dist.get_rank()))).sum().backward()
    return model.module[-1].weight.grad


def test_replicas_their_buckets_and_the_end_of_their_backward():
    one, other = run_ranks(2, replicas)
    assert torch.equal(one, other)


def buckets_within():
    entered = []

    @contextmanager
    def at_work():
        entered.append(None)
        yield

    before = DistributedDataParallel.__init__
    with _torch.around_reducers(at_work):
        model = DistributedDataParallel(nn.Linear(2, 2), [0], output_device=0)  # of which no rank here has one
        model(torch.ones(1, 2))
    assert DistributedDataParallel.__init__ is before
    model(torch.ones(1, 2))
    return len(entered)


def test_buckets_are_made_and_rebuilt_within_a_context():
    assert run_ranks(2, buckets_within) == [2, 2]


def test_the_tensors_of_an_output_are_found():
    a, b = torch.ones(1), torch.ones(2)
    assert list(map(id, _torch.tensors_in({"a": a, "more": [b, 3]}))) == [id(a), id(b)]


def test_what_a_node_keeps_is_read_without_its_hooks():
    x = torch.ones(2, requires_grad=True)
    before = _torch.next_node_number()
    base = x * 2
    y = base[:1] * base[1:]
    assert before == _torch.node_number(base.grad_fn) < _torch.node_number(y.grad_fn) < _torch.next_node_number()
    assert [tensor.untyped_storage() for tensor in _torch.kept_by(y.grad_fn)] == [base.untyped_storage()] * 2
    assert _torch.whole_of(base[:1]) is base
    assert _torch.whole_of(x) is x
    y.backward()
    assert list(_torch.kept_by(y.grad_fn)) == []  # freed
    assert _torch.own_hooks() is None
    kept = object()
    with torch.autograd.graph.saved_tensors_hooks(lambda _: kept, pytest.fail):
        assert _torch.own_hooks() is not None
        y = x * x
    assert list(_torch.kept_by(y.grad_fn)) == [kept, kept]
    assert _torch.names_of_kept(type(y.grad_fn)) == ("_raw_saved_other", "_raw_saved_self")
