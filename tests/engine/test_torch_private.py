"""The torch internals that the engine uses: a test here fails if one no longer does what the engine needs."""

import ast
import copy
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._composable import replicate
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _common_utils, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TheirState
from torch.distributed.pipelining import schedules, stage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.known_warnings import SHARDED_TENSOR, ignoring_warnings
from workbench import engine
from workbench.engine import _torch
from workbench.engine._torch import (
    NO_VALUE,
    BatchNorm,
    Checkpointed,
    GradScalerWithFlags,
    _traversal,
    _Wrappers,
    abort_process_groups,
    allow_reading,
    base_of,
    call_post_accumulate_hooks,
    chunk_cat,
    default_store,
    drop_own_parameter,
    drop_post_accumulate_hooks,
    dtensor_of,
    fake_device,
    fakes,
    flattened_mesh,
    forbid_reading,
    gather_old_shards,
    group_allocator,
    has_constant,
    has_grad_hooks,
    has_own_grad_dtype,
    has_own_setattr,
    has_post_accumulate_hooks,
    is_fake,
    is_in_backward,
    is_of_old_shards,
    is_replicated,
    is_transforming,
    joined_mesh,
    lacking_kernel,
    local_of,
    make_fake,
    make_spec,
    name_groups_from,
    named_groups,
    new_group,
    parameter_of,
    premultiplied_sum,
    put_parameter,
    queue_backward_final_callback,
    reset_group_names,
    root_mesh,
    set_composed,
    set_local,
    set_own_parameter,
    set_parameter,
    set_versions,
    shards_along,
    share_grad_dtype,
    share_post_accumulate_hooks,
    spec_of,
    splits,
    strided_shard,
    tell_checkpoints,
    tell_pipelining,
    traversal_of_checkpoints,
    untried,
    waited,
    with_dtype,
    without_fakes,
)
from workbench.engine.fsdp_state import FSDPState


def test_the_installed_torch_is_one_that_was_tried():
    assert untried() == ""


@pytest.mark.parametrize("version", ["2.13.0", "2.15.1+cpu"])
def test_a_tested_torch_gives_no_warning(version):
    assert untried(version) == ""


@pytest.mark.parametrize("version", ["2.12.2", "2.16.0.dev20270101+cu130", "3.0"])
def test_a_torch_that_was_not_tried_is_named_in_a_sentence(version):
    tried = "the workbench is tested with torch 2.13 to 2.15"
    assert untried(version) == f"{tried}, not with {version}; some features may fail"


def test_every_batch_norm_is_one():
    kinds = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d]
    assert [kind.__name__ for kind in [*kinds, nn.LayerNorm] if not issubclass(kind, BatchNorm)] == ["LayerNorm"]


class Scaler(GradScalerWithFlags):
    """Records the flags it gets, then raises all of them."""

    def share_flags(self, flags, device):
        self.were = [(flag.item(), flag.dtype, flag.shape) for flag in flags]
        for flag in flags:
            flag.fill_(1)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("grad", [None, 1.0, torch.inf])
def test_a_scaler_reports_infinities_and_obeys_settings(grad, fused):
    param = nn.Parameter(torch.ones(2, dtype=torch.float32 if fused else torch.float16))
    param.grad = None if grad is None else torch.full_like(param, grad)
    scaler = Scaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD([param], lr=1.0, fused=fused))
    scaler.update()
    assert scaler.were == [(float(grad == torch.inf), torch.float32, ())]
    assert param.tolist() == [1, 1]
    assert scaler.get_scale() == 4


def test_the_engine_warns_of_an_untried_torch_and_works_on():
    code = """
import warnings, torch
torch.__version__ = "9.9.0a0+later"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from workbench.engine import fully_shard
print([str(w.message) for w in caught if "workbench" in str(w.message)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == [untried("9.9.0a0+later")]


def test_every_private_piece_has_a_test_here():
    wrapped = {node.name for node in ast.parse(Path(_torch.__file__).read_text()).body if hasattr(node, "name")}
    here = Path(__file__).read_text()
    assert {name for name in wrapped if here.count(name) < 2} == set()


def sharded(rows: int = 3) -> DTensor:
    """Return a DTensor [rows, 2] over all ranks, uneven on two."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    full = torch.arange(rows * 2.0).view(rows, 2)
    local = list(full.chunk(mesh.size()))[mesh.get_local_rank()].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def test_the_dtype_of_gradients_is_set_or_follows_the_parameter():
    unset, wide, free, new = (nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in range(4))
    wide.grad_dtype, free.grad_dtype = torch.float32, None
    assert [has_own_grad_dtype(param) for param in (unset, wide, free)] == [False, True, True]
    share_grad_dtype(unset, new)
    assert not has_own_grad_dtype(new)
    for old in (wide, free):
        share_grad_dtype(old, new)
        assert new.grad_dtype is old.grad_dtype


@on_one_rank
def test_the_final_callback_runs_once_all_gradients_are_there():
    x = torch.ones(2, requires_grad=True)
    seen = []

    def hook(grad):
        queue_backward_final_callback(lambda: seen.append(x.grad.tolist()))
        assert not seen
        return grad

    y = x * 2
    y.register_hook(hook)
    (y.sum() + (x * 3).sum()).backward()
    assert seen == [[5, 5]]
    x.grad = None
    (x * 2).sum().backward()
    assert seen == [[5, 5]]  # the callback was for that backward only


@on_one_rank
def test_no_final_callback_outside_of_backward():
    with pytest.raises(RuntimeError):
        queue_backward_final_callback(lambda: None)


def checks_of_dtensors() -> None:
    reference = nn.Parameter(sharded())
    local = torch.full_like(local_of(reference), 7)
    made = dtensor_of(local, spec_of(reference))
    assert isinstance(made, DTensor)
    assert local_of(made) is local
    assert not made.requires_grad
    assert (made.shape, made.stride(), made.dtype) == (reference.shape, reference.stride(), reference.dtype)
    assert (made.placements, made.device_mesh) == (reference.placements, reference.device_mesh)
    assert torch.equal(made.full_tensor(), torch.full((3, 2), 7.0))
    reference.grad = made  # as the engine sets every gradient
    torch.optim.SGD([reference], lr=1).step()
    assert torch.equal(reference.full_tensor(), torch.arange(6.0).view(3, 2) - 7)

    storage = torch.zeros(6)
    view = storage[: local.numel()].view(local.shape)
    view.copy_(local_of(reference))
    set_local(reference, view)
    assert local_of(reference) is view
    assert spec_of(reference) is spec_of(nn.Parameter(reference))  # the same object if the dtype is the same
    with torch.no_grad():
        reference.mul_(2)
    assert torch.equal(storage[: local.numel()].view(local.shape), reference.to_local())
    assert torch.equal(reference.full_tensor(), (torch.arange(6.0).view(3, 2) - 7) * 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_tensor_inside_of_a_dtensor(world_size):
    run_ranks(world_size, checks_of_dtensors)


def specs() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.empty(3, 2, dtype=torch.bfloat16)
    spec = make_spec(mesh, [Shard(0)], whole)
    rows = whole.chunk(mesh.size())[mesh.get_local_rank()].shape[0]
    made = dtensor_of(torch.ones(rows, 2, dtype=torch.bfloat16), spec)
    assert (made.shape, made.stride(), made.dtype) == (whole.shape, whole.stride(), whole.dtype)
    assert (made.device_mesh, made.placements) == (mesh, (Shard(0),))
    assert torch.equal(made.full_tensor(), torch.ones(3, 2, dtype=torch.bfloat16))
    assert with_dtype(spec, torch.bfloat16) is spec
    other = with_dtype(spec, torch.float32)
    assert (other.tensor_meta.dtype, other.shape, other.stride) == (torch.float32, spec.shape, spec.stride)
    assert (other.mesh, other.placements, spec.tensor_meta.dtype) == (mesh, spec.placements, torch.bfloat16)
    param = nn.Parameter(made)
    set_local(param, local_of(param).float())
    assert spec_of(param) == other  # the result a conversion must have
    assert param.to_local().dtype is torch.float32
    assert param.full_tensor().dtype is torch.float32


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_description_of_a_dtensor_and_its_dtype(world_size):
    run_ranks(world_size, specs)


def strided() -> list[object]:
    """Split rows over "tp" first, then over "dp", as fully_shard does with a column-parallel weight."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = world["dp"], world["tp"]
    full = torch.arange(10.0).view(10, 1)
    inner = distribute_tensor(full, tp, [Shard(0)], src_data_rank=None)
    assert shards_along(spec_of(inner), 0) == 2
    assert shards_along(make_spec(tp, [Replicate()], full), 0) == 1
    mine = local_of(inner).chunk(2)[dp.get_local_rank()].contiguous()
    joined = joined_mesh(dp, tp)
    assert (joined.mesh_dim_names, tuple(joined.shape)) == (("dp", "tp"), (2, 2))
    assert torch.equal(joined.mesh, world.mesh)
    assert root_mesh(dp) == root_mesh(world) == world
    outer = strided_shard(0, shards_along(spec_of(inner), 0))
    assert outer.is_shard(0) or outer != Shard(0)
    made = dtensor_of(mine, make_spec(joined, (outer, Shard(0)), full))
    assert torch.equal(made.full_tensor(), full)
    split = distribute_tensor(full, joined, made.placements, src_data_rank=None)
    assert torch.equal(local_of(split), mine)  # optimizer state is split again like this
    assert strided_shard(1, 1) == Shard(1)
    assert outer != Shard(0)
    return [mine.flatten().tolist()]


def test_rows_that_two_axes_split_one_after_the_other():
    order = [[0, 1, 2], [5, 6, 7], [3, 4], [8, 9]]  # by rank: (dp, tp) = (0, 0), (0, 1), (1, 0), (1, 1)
    assert run_ranks(4, strided) == [[list(map(float, rows))] for rows in order]


def unrelated_meshes() -> None:
    named = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(RuntimeError):
        joined_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["b"], named["dp"])
    with pytest.raises((RuntimeError, TypeError)):
        joined_mesh(init_device_mesh("cpu", (2,)), named["tp"])


def test_meshes_that_do_not_come_from_one_cannot_be_joined():
    run_ranks(2, unrelated_meshes)


def partial_sums() -> None:
    mesh = init_device_mesh("cpu", (2,))
    summed = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False).redistribute(
        placements=[Replicate()]
    )
    plain = waited(local_of(summed))
    assert type(plain) is torch.Tensor
    assert plain.tolist() == [2, 2]
    same = torch.ones(1)
    assert waited(same) is same


def test_the_collective_behind_a_redistributed_gradient_is_waited_for():
    run_ranks(2, partial_sums)


def conversions() -> None:
    module = nn.Linear(2, 3, bias=False)
    set_parameter(module, "weight", nn.Parameter(sharded()))
    param, local = module.weight, local_of(module.weight)
    module.double()
    assert module.weight is param  # torch swaps the contents, so the engine compares both
    assert local_of(param) is not local
    assert local_of(param).dtype == torch.float64


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_conversion_keeps_the_parameter_and_replaces_its_tensor(world_size):
    run_ranks(world_size, conversions)


@pytest.mark.parametrize("exchange", [set_parameter, put_parameter])
def test_a_parameter_is_replaced_in_its_modules(exchange):
    module = nn.Linear(2, 2)
    plain = nn.Parameter(torch.ones(2, 2))
    assert parameter_of(module, "weight") is module.weight
    exchange(module, "weight", plain)
    assert module.weight is parameter_of(module, "weight") is plain
    assert parameter_of(module, "no such") is None
    assert dict(module.named_parameters())["weight"] is plain
    assert list(module.state_dict()) == ["weight", "bias"]  # in the old order
    assert copy.deepcopy(module)(torch.ones(1, 2)).shape == (1, 2)


def test_torchs_composable_functions_and_we_know_of_each_other():
    module, before = nn.Linear(1, 1), set(vars(nn.Linear(1, 1)))
    assert not is_replicated(module)
    set_composed(module, sharded=True)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(module)
    vars(module).clear()
    vars(module).update(vars(nn.Linear(1, 1)))
    set_composed(module, sharded=True)
    set_composed(module, sharded=False)
    assert set(vars(module)) == before
    replicate(module)
    assert is_replicated(module)
    set_composed(module, sharded=True)
    set_composed(module, sharded=False)
    assert is_replicated(module)


def test_transforms_are_noticed_only_within_them():
    seen = []
    torch.func.grad(lambda x: (seen.append(is_transforming()), x * x)[1])(torch.tensor(1.0))
    torch.func.functional_call(nn.Linear(1, 1), {}, torch.ones(1, 1)).register_hook(
        lambda g: seen.append(is_transforming())
    )
    assert seen == [True]
    assert not is_transforming()


@on_one_rank
def test_a_backward_is_noticed_only_within_it_and_in_those_that_it_runs():
    seen = []

    def nested(grad: torch.Tensor) -> torch.Tensor:
        seen.append(is_in_backward())
        with torch.enable_grad():
            inner = torch.ones(1, requires_grad=True) * 2
        inner.register_hook(lambda g: seen.append(is_in_backward()))
        inner.backward()
        seen.append(is_in_backward())
        return grad

    out = torch.ones(1, requires_grad=True) * 2
    out.register_hook(nested)
    assert not is_in_backward()
    out.backward()
    assert seen == [True] * 3
    assert not is_in_backward()


def test_a_module_with_its_own_setattr_gets_the_replacement():
    seen = []

    class RecordsAssignments(nn.Linear):
        def __setattr__(self, name: str, value: object) -> None:
            seen.append(name)
            super().__setattr__(name, value)

    module = RecordsAssignments(2, 2)
    assert has_own_setattr(module)
    assert not has_own_setattr(nn.Linear(2, 2))
    seen.clear()
    set_parameter(module, "weight", nn.Parameter(torch.ones(2, 2)))
    assert seen == ["weight"]
    assert list(module.state_dict()) == ["weight", "bias"]


@on_one_rank
def test_writing_to_a_view_drops_its_hooks_and_keeps_those_of_its_base():
    weight = torch.ones(2, 2, requires_grad=True)
    fired = []
    whole = weight * 2
    view = whole.view(4)
    assert base_of(view) is whole
    assert base_of(whole) is base_of(weight) is base_of(weight.view(4)) is None  # a parameter would keep hooks for good
    for name, tensor in (("view", view), ("whole", base_of(view))):
        tensor.register_hook(lambda grad, name=name: fired.append(name))
    view += 1
    view.sum().backward()
    assert fired == ["whole"]
    assert weight.grad.tolist() == [[2, 2], [2, 2]]


@on_one_rank
def test_a_parameter_can_be_emptied_and_filled_again_under_autograds_saved_tensors():
    full = torch.ones(4)
    view = full.view(2, 2)
    param = nn.Parameter(view.data)
    y = (param * param).sum() + nn.functional.linear(torch.ones(1, 2), param).sum()
    version = param._version
    param.data = full.new_empty(0)
    full.untyped_storage().resize_(0)
    assert full.untyped_storage().nbytes() == 0
    assert param.tolist() == []
    full.untyped_storage().resize_(4 * 4)
    full.fill_(3)
    param.data = view
    assert param._version == version  # to autograd, the saved tensor looks unchanged
    y.backward()
    assert torch.equal(param.grad, torch.full((2, 2), 2 * 3 + 1.0))


@on_one_rank
def test_the_memory_of_a_tensor_is_the_same_after_it_was_freed():
    full = torch.ones(4)
    other, before = torch.ones(4), _torch.storage_of(full[1:])
    full.untyped_storage().resize_(0)
    assert _torch.storage_of(full.view(2, 2)) == before != _torch.storage_of(other)


def test_autograd_notices_a_changed_version_but_not_a_restored_one():
    """This is why refilled memory passes as the saved tensor, and why a backward without an unshard fails."""
    param = nn.Parameter(torch.ones(2))
    version = param._version
    y = (param * param).sum()
    set_versions((param,), (version + 1,))
    assert param._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(retain_graph=True)
    with torch.no_grad():
        param.fill_(3)
    set_versions((param, torch.ones(1)), (version, 0))
    y.backward()
    assert param.grad.tolist() == [6, 6]


def hooked() -> tuple[nn.Parameter, list[nn.Parameter]]:
    seen: list[nn.Parameter] = []
    param = nn.Parameter(torch.ones(2))
    param.register_post_accumulate_grad_hook(seen.append)
    return param, seen


def test_hooks_of_gradients_are_found():
    param = nn.Parameter(torch.ones(2))
    assert not has_grad_hooks(param)
    handle = param.register_hook(lambda grad: grad)
    assert has_grad_hooks(param)
    handle.remove()
    assert not has_grad_hooks(param)


def test_post_accumulate_grad_hooks_can_be_called_by_hand():
    param, seen = hooked()
    handle = param.register_post_accumulate_grad_hook(lambda p: handle.remove())
    assert has_post_accumulate_hooks(param)
    call_post_accumulate_hooks(param)
    call_post_accumulate_hooks(param)
    assert [p is param for p in seen] == [True, True]
    assert handle.id not in param._post_accumulate_grad_hooks
    assert not has_post_accumulate_hooks(nn.Parameter(torch.ones(1)))
    call_post_accumulate_hooks(nn.Parameter(torch.ones(1)))  # without hooks
    param.register_post_accumulate_grad_hook(lambda p: None)
    drop_post_accumulate_hooks(param)
    drop_post_accumulate_hooks(nn.Parameter(torch.ones(1)))  # without hooks
    assert not has_post_accumulate_hooks(param)


@on_one_rank
def test_post_accumulate_grad_hooks_can_be_shared_and_are_still_called_by_autograd():
    old, seen = hooked()
    new, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    share_post_accumulate_hooks(old, new)
    share_post_accumulate_hooks(other, new)  # without hooks
    handle = old.register_post_accumulate_grad_hook(lambda p: seen.append(None))
    (new * 2).sum().backward()
    assert [p is new for p in seen] == [True, False]
    handle.remove()  # the user's handle still works
    (new * 2).sum().backward()
    assert [p is new for p in seen] == [True, False, True]


def allocators() -> None:
    group = new_group([0], "one")
    assert group_allocator(group, torch.device("cpu")) is None  # gloo has no allocator
    assert group_allocator(None, torch.device("cpu")) is None


def test_gloo_allocates_no_memory_for_collectives():
    run_ranks(1, allocators)


class Backend:
    """The interface that the engine needs of a backend with an allocator."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, torch.dtype]] = []

    def _get_backend(self, device: torch.device) -> "Backend":
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.requests.append((numel, dtype))
        return torch.empty(numel, dtype=dtype, device=device)


def test_a_backend_with_an_allocator_is_used():
    backend, cpu = Backend(), torch.device("cpu")
    allocate = group_allocator(backend, cpu)
    assert allocate(3, dtype=torch.float16, device=cpu).shape == (3,)
    assert backend.requests == [(3, torch.float16)]
    for name in ("supports_tensor_alloc", "allocate_tensor"):
        assert callable(getattr(torch._C._distributed_c10d.Backend, name)), name  # c10d's backend has them


@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "_make_nccl_premul_sum"), reason="torch without NCCL")
def test_a_premultiplied_sum_is_its_own_operation():
    op = premultiplied_sum(0.25)
    assert op == dist.ReduceOp.PREMUL_SUM
    assert op != dist.ReduceOp.SUM


def stores_and_groups() -> list[object]:
    """Make named groups on ranks that have made different numbers of groups; then make a new default store."""
    rank, store = dist.get_rank(), default_store()
    dist.PrefixStore("x", store).set(str(rank), "here")
    store.wait([f"x/{r}" for r in range(3)])
    if rank != 2:
        new_group([0, 1], "first")
    sums = []
    for ranks in ([0, 2], [1, 2]):
        if rank in ranks:
            group = new_group(ranks, f"of {ranks}")
            total = torch.full((1,), float(rank))
            dist.all_reduce(total, group=group)
            assert dist.get_process_group_ranks(group) == ranks
            sums.append(total.item())
    assert default_store() is store
    with pytest.raises(ValueError, match="already been created"):
        new_group([0, 1] if rank != 2 else [1, 2], "first" if rank != 2 else "of [1, 2]")
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=3)
    assert default_store() is not store
    return sums


def names() -> None:
    """Check that the default group is first by name, and that later groups skip reserved numbers."""
    mine, theirs = new_group([0], "mine"), dist.new_group([0])
    (default, world), *rest = named_groups().items()
    assert world is dist.group.WORLD
    number = name_groups_from(0)
    assert rest == [("mine", mine), (str(number - 1), theirs)]
    assert name_groups_from(number + 5) == name_groups_from(0) == number + 5
    later = dist.new_group([0])
    assert list(named_groups().items())[-1] == (str(number + 5), later)
    assert distributed_c10d._resolve_process_group("mine") is mine  # as a mesh looks it up
    dist.destroy_process_group(theirs)
    assert str(number - 1) not in named_groups()
    assert default in named_groups()
    reset_group_names()
    assert name_groups_from(0) == 0


def test_groups_are_found_by_name():
    run_ranks(1, names, fresh=True)


def backends() -> list[str]:
    """With a default group for several kinds of device, a new group has only its own device's backend."""
    default = distributed_c10d._get_default_group()
    store = distributed_c10d._world.pg_map[default][1]
    distributed_c10d._world.pg_map[default] = ("cpu:gloo,cuda:nccl", store)
    mixed = dist.get_backend(new_group([0], "of a mixed one"))
    distributed_c10d._world.pg_map[default] = ("gloo", store)
    return [mixed, dist.get_backend(new_group([0], "cpu")), dist.get_backend(new_group([0], "cuda", "cuda"))]


def test_a_group_has_the_backend_of_its_device():
    assert run_ranks(1, backends) == [["gloo", "gloo", "gloo"]]


def aborted() -> bool:
    new_group([0], "one")
    abort_process_groups()
    return dist.is_initialized()


def test_all_groups_can_be_aborted():
    assert run_ranks(1, aborted) == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_many_tensors_are_copied_at_once(dtype):
    tensors = [torch.arange(10.0).view(5, 2), torch.arange(3.0), torch.ones(1, 2)]
    out = torch.full((2, 10), torch.nan, dtype=dtype)
    chunk_cat(tensors, 2, out)
    assert out.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 1, 1], [6, 7, 8, 9, 0, 0, 2, 0, 0, 0]]


def test_groups_have_the_names_they_are_given_and_the_store_is_the_default_groups():
    assert run_ranks(3, stores_and_groups) == [[2], [3], [2, 3]]


def test_reading_can_be_forbidden_where_torch_can_and_is_allowed_again():
    tensor = torch.ones(4)
    alias = tensor.view(2, 2).detach()
    forbid_reading(tensor, "too late")
    if hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"):  # only in CUDA builds
        for read in (alias.clone, alias.sum, alias.numpy, lambda: repr(alias)):
            with pytest.raises(RuntimeError, match="too late"):
                read()
    allow_reading(tensor)
    allow_reading(tensor)
    assert alias.sum() == 4


def test_pipelining_treats_registered_module_types_as_sharded():
    class Ours:
        pass

    with (
        patch.multiple(stage, create=True, FSDPModule=FSDPModule, fully_shard=fully_shard),  # the latter before 2.15
        patch.object(schedules, "FSDPModule", FSDPModule),
    ):
        module = nn.Linear(1, 1)
        for _ in range(2):  # a second call is allowed
            tell_pipelining(Ours, {module: "state"}.get)
            for place in (stage, schedules):
                assert isinstance(Ours(), place.FSDPModule)
                assert issubclass(FSDPModule, place.FSDPModule)
                assert not isinstance(module, place.FSDPModule)
            assert stage.FSDPModule == (FSDPModule, Ours)
        assert stage.fully_shard.state(module) == "state"
        assert stage.fully_shard.state(nn.Linear(1, 1)) is None


def test_pipelining_uses_only_names_that_the_engine_has():
    used = {
        node.attr
        for path in (stage.__file__, schedules.__file__)
        for node in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(node, ast.Attribute)
    }
    of_modules = used.intersection(dir(FSDPModule)).difference(dir(nn.Module))
    of_states = {name for name in used.intersection(dir(TheirState())) if name[:1] == "_" != name[1]}
    assert "unshard" in of_modules < set(dir(engine.FSDPModule))
    assert of_states
    assert of_states - {"_modules"} < set(dir(FSDPState))


def joined_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    flat = flattened_mesh(mesh["a", "b"], "a_b")
    assert (flat.mesh_dim_names, flat.mesh.tolist()) == (("a_b",), [0, 1])
    assert flattened_mesh(mesh["a", "b"], "a_b") == flat
    assert joined_mesh(flat, mesh["c"]).mesh_dim_names == ("a_b", "c")


def test_axes_of_a_mesh_become_one():
    run_ranks(2, joined_axes)


def test_a_placement_splits_one_dim():
    assert [splits(p, 1) for p in (Shard(1), strided_shard(1, 2), Shard(0), Replicate(), Partial())] == [
        True,
        True,
        False,
        False,
        False,
    ]


class RecordsNameRequests(nn.Module):
    """Records whether checkpoints ask for names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.for_names: list[str] = []
        self.for_frozen: list[bool] = []

    def named_parameters(self, *args, **kwargs):
        self.for_names = [*self.for_names, traversal_of_checkpoints()]
        return super().named_parameters(*args, **kwargs)

    def named_modules(self, *args, **kwargs):
        self.for_frozen.append(traversal_of_checkpoints() == "named_parameters")
        yield from super().named_modules(*args, **kwargs)


def test_calls_from_checkpoints_are_recognised():
    module = RecordsNameRequests()
    list(module.parameters())
    assert module.for_names == [""]
    get_model_state_dict(module)
    assert set(module.for_names[1:]) == {"named_parameters"}
    assert not any(module.for_frozen)
    for outer in (module, nn.Sequential(module), nn.Sequential(nn.Sequential(module))):
        list(outer.named_parameters())
        list(outer.named_modules())
        assert not any(module.for_frozen)
        get_model_state_dict(outer, options=StateDictOptions(ignore_frozen_params=True))
        assert module.for_frozen.pop()


class RecordsThroughOverrides(RecordsNameRequests):
    """A user's subclass of a wrapper, with overrides that only pass on."""

    def named_parameters(self, *args, **kwargs):
        return super().named_parameters(*args, **kwargs)

    def named_modules(self, *args, **kwargs):
        yield from super().named_modules(*args, **kwargs)


class OuterModule(nn.Module):
    """A module around a wrapper that has no names of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def named_parameters(self, *args, **kwargs):
        yield from self.inner.named_parameters(*args, **kwargs)

    def named_modules(self, *args, **kwargs):
        yield from self.inner.named_modules(*args, **kwargs)


@pytest.mark.parametrize(
    "through",
    [lambda m: m, OuterModule, lambda m: torch.compile(m, backend="eager"), nn.Sequential],
    ids=["itself", "module", "compiled", "sequential"],
)
def test_calls_from_checkpoints_are_recognised_through_wrappers(through):
    module = RecordsThroughOverrides()
    outer = through(module)
    list(outer.named_parameters())
    list(outer.named_modules())
    assert not any(module.for_names + module.for_frozen)
    get_model_state_dict(outer, options=StateDictOptions(ignore_frozen_params=True))
    assert module.for_frozen.pop()
    assert "named_parameters" in module.for_names
    del module.for_names[:]
    list(outer.named_parameters())
    assert not any(module.for_names)


@pytest.mark.parametrize("kind", [RecordsNameRequests, RecordsThroughOverrides])
def test_a_compiled_function_may_ask_for_names(kind):
    module = kind()
    torch.compile(lambda: list(module.named_parameters(recurse=False)), backend="eager")()  # Dynamo warns of nothing
    assert set(module.for_names) == {""}
    assert _traversal() == ""


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # the checkpoints' own gc.isenabled
@pytest.mark.parametrize("kind", [RecordsNameRequests, RecordsThroughOverrides])
def test_calls_from_checkpoints_are_recognised_in_a_compiled_function(kind):
    module = kind()
    torch.compile(lambda: get_model_state_dict(module), backend="eager")()
    assert set(module.for_names) == {"named_parameters"}
    assert not any(module.for_frozen)


class Wrapper(nn.Module):
    """A module that checkpoints must treat as a wrapper."""

    sharding_strategy = process_group = None

    def __init__(self) -> None:
        super().__init__()
        self._fsdp_wrapped_module = nn.Linear(1, 1, bias=False)

    def _fqn_modifiers(self):
        tell_checkpoints(Wrapper, Answers)
        return {"": "_fsdp_wrapped_module"}


class Answers(Checkpointed):
    """Answers for :class:`Wrapper`; records the calls."""

    requests: ClassVar[list[object]] = []

    @staticmethod
    def fsdp_modules(module):
        return [m for m in module.modules() if isinstance(m, Wrapper)]

    @staticmethod
    @contextmanager
    def state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config):
        Answers.requests.append((state_dict_type.name, vars(state_dict_config), vars(optim_state_dict_config)))
        yield

    @staticmethod
    def optim_state_dict(model, optim, optim_state_dict, group=None):
        Answers.requests.append(("made", list(optim_state_dict["state"]), group))
        return {"state": {"weight": optim_state_dict["state"][0]}, "param_groups": [{"params": ["weight"], "lr": 3.0}]}

    @staticmethod
    def optim_state_dict_to_load(model, optim, optim_state_dict, group=None):
        Answers.requests.append(("to load", list(optim_state_dict["state"]), group))
        return {"state": {}, "param_groups": [{**optim_state_dict["param_groups"][0], "params": [0]}]}


def test_checkpoints_query_wrappers_with_their_settings(monkeypatch):
    checkpoints = sys.modules["torch.distributed.checkpoint.state_dict"]
    is_sharded = "_get_module_fsdp_state_if_fully_sharded_module"
    monkeypatch.setattr(checkpoints, "FSDP", FullyShardedDataParallel)
    monkeypatch.setattr(checkpoints, is_sharded, getattr(_common_utils, is_sharded))
    monkeypatch.setattr(Answers, "requests", [])
    model = nn.Sequential(Wrapper())[0]
    optimizer = torch.optim.Adam(model.parameters())
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    assert list(state["state"]) == ["weight"]
    assert isinstance(checkpoints.FSDP, _Wrappers)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(cpu_offload=True))
    assert optimizer.param_groups[0]["lr"] == 3.0
    how = ("SHARDED_STATE_DICT", *2 * ({"offload_to_cpu": True, "_use_dtensor": False},))
    assert Answers.requests == [how, ("made", [0], None), how, ("to load", ["weight"], None)]
    plain = nn.Linear(1, 1)
    assert get_optimizer_state_dict(plain, torch.optim.Adam(plain.parameters()))["state"].keys() == {"weight", "bias"}
    assert len(Answers.requests) == 4
    monkeypatch.delattr(checkpoints, "FSDP")
    with pytest.raises(NotImplementedError, match=r"of torch .* differs from that of 2\.13 to 2\.15"):
        get_optimizer_state_dict(model, optimizer)


def test_a_foreign_parameter_is_in_no_checkpoint():
    module = nn.Linear(1, 1, bias=False)
    module.register_buffer("table", torch.ones(1), persistent=False)
    own = nn.Parameter(torch.ones(1))
    set_own_parameter(module, "own", own)
    assert module.own is own
    assert dict(module.named_parameters()).keys() == {"weight", "own"}
    given = {"weight": torch.ones(1, 1)}
    options = StateDictOptions(full_state_dict=True, strict=False)  # non-strict: a missing value is kept
    assert set_model_state_dict(module, dict(given), options=options) == (["own"], [])
    drop_own_parameter(module, "own")
    drop_own_parameter(module, "own")
    assert set_model_state_dict(module, dict(given), options=options) == ([], [])
    assert list(module.state_dict()) == ["weight"]


def test_old_shards_are_gathered():
    run_ranks(2, gathers_old_shards)


@ignoring_warnings(*SHARDED_TENSOR)
def gathers_old_shards():
    rank, cpu = dist.get_rank(), torch.device("cpu")
    for whole in (torch.tensor([[-0.0, 1.5], [2.0, -3.0], [4.0, 5.0]]), torch.tensor([[True], [False], [True]])):
        part = whole[:2] if rank == 0 else whole[2:]
        shard = sharded_tensor.Shard.from_tensor_and_offsets(part.clone(), [2 * rank, 0], rank)
        made = sharded_tensor.init_from_local_shards([shard], *whole.shape)
        assert is_of_old_shards(made)
        assert not is_of_old_shards(whole)
        gathered = gather_old_shards(made, cpu)
        assert torch.equal(gathered, whole)
        assert torch.equal(gathered.signbit(), whole.signbit())


def fake_world():
    """Make, move and read tensors without data, and a mesh by ``_make_mesh``; return which tensors are fake."""
    ranks = torch.arange(2)
    with fakes() as without_data:
        tensor, given = torch.empty(4), without_data([ranks])[0]
        model = nn.Linear(4, 4).to(torch.bfloat16)  # torch swaps its parameters
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("shard",))  # _make_mesh makes it of the CPU
        user_mesh = dist.DeviceMesh("cpu", [0, 1])
        with pytest.raises(NO_VALUE):
            tensor.sum().item()
        with without_fakes():
            real = torch.empty(4)
        one = _torch._with_data(lambda: torch.ones(1).item())()  # _with_data: computed
    assert model.weight.dtype == torch.bfloat16
    assert [mesh.mesh.tolist(), user_mesh.mesh.tolist(), mesh.device_type] == [[0, 1], [0, 1], "cpu"]
    assert one == 1.0
    return [is_fake(each) for each in (tensor, given, model.weight, real, torch.empty(1))]


def test_an_operation_without_a_fake_kernel_is_named():
    with torch.library._scoped_library("workbench_test", "FRAGMENT") as library:
        library.define("thrice(Tensor x) -> Tensor")
        library.impl("thrice", lambda x: 3 * x, "CPU")
        with fakes(), pytest.raises(RuntimeError) as raised:
            torch.ops.workbench_test.thrice(torch.empty(2))
    assert lacking_kernel(raised.value) == "workbench_test::thrice"
    of_python = "There was no fake impl registered for <CustomOpDef(mine::scale)>. This is necessary"
    assert [lacking_kernel(RuntimeError(text)) for text in (of_python, "out of memory")] == ["mine::scale", ""]


def test_a_tensor_without_data_is_made_by_its_form():
    with fakes():
        base, meta, number = torch.empty(12), torch.empty(2, device="meta"), torch.tensor(3)
        new = make_fake(((2, 3), (1, 2), 0, torch.bfloat16), base, None)
        view = make_fake(((2, 3), (3, 1), 6, torch.float32), base, base)
    assert [new.shape, new.stride(), new.dtype] == [(2, 3), (1, 2), torch.bfloat16]
    assert [_torch.storage_of(each) == _torch.storage_of(base) for each in (new, view)] == [False, True]
    assert [is_fake(each) for each in (new, view)] == [True, True]
    assert [fake_device(each).type for each in (new, view, meta)] == ["cpu", "cpu", "meta"]
    assert [has_constant(each) for each in (new, view, number)] == [False, False, True]


def test_tensors_without_data_are_made_moved_and_told_from_others():
    assert run_ranks(2, fake_world) == [[True, True, True, False, False]] * 2
