"""Dtypes of single parameters: some keep theirs in compute, some have gradients in another dtype."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.both_engines import APIS, SAME, shard_net_with
from tests.helpers.expected_sizes import NET
from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.pairwise import quick_rows
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from workbench import engine
from workbench.engine._torch import REDUCES_IN_GRAD_DTYPE
from workbench.events import Category, Kind

BF16, F32 = torch.bfloat16, torch.float32
needs_2_15 = pytest.mark.skipif(not REDUCES_IN_GRAD_DTYPE, reason="torch's own engine has none of this")


def norms_of(model: nn.Module) -> set[nn.Parameter]:
    return {p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}


def keeping_norms(api: ModuleType, model: nn.Module, **dtypes: Any) -> dict[str, Any]:
    norms = norms_of(model)
    override = lambda param: param.dtype if param in norms else None  # noqa: E731 - as a user writes it
    return {"mp_policy": api.MixedPrecisionPolicy(BF16, **dtypes, param_dtype_override_fn=override)}


def with_grads_in(dtype: torch.dtype | None, which: Callable[[nn.Module], Any], own: torch.dtype) -> Any:
    """Return a set-up with parameters in ``own`` and gradients of some in ``dtype``."""

    def set_up(api: ModuleType, model: nn.Module) -> dict[str, Any]:
        model.to(own)
        for param in which(model):
            param.grad_dtype = dtype
        return {"mp_policy": api.MixedPrecisionPolicy(BF16)}

    return set_up


class WideGradient(torch.autograd.Function):
    """A linear map whose weight gradient is float32, as some kernels return it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.float().flatten(0, -2).T @ x.float().flatten(0, -2)


def wide_head(dtype: torch.dtype | None, **dtypes: Any) -> Any:
    def set_up(api: ModuleType, model: nn.Module) -> dict[str, Any]:
        model.to(BF16)
        model.head.weight.grad_dtype = dtype
        head = model.head
        head.forward = lambda x: WideGradient.apply(x, head.weight)
        return {"mp_policy": api.MixedPrecisionPolicy(**dtypes)}

    return set_up


SET_UPS = {
    "norms in float32": keeping_norms,
    "norms in float32, reduced in bfloat16": lambda api, model: keeping_norms(api, model, reduce_dtype=BF16),
    "gradients in float32": with_grads_in(F32, nn.Module.parameters, BF16),
    "gradients of norms in float32": with_grads_in(F32, norms_of, BF16),
    "gradients in bfloat16": with_grads_in(BF16, nn.Module.parameters, F32),
    "gradients of any dtype": wide_head(None),
    "gradients of any dtype, reduced in bfloat16": wide_head(None, reduce_dtype=BF16),
    "a float32 gradient of a bfloat16 weight": wide_head(F32),
}


def beside_torch(name: str, copies: int) -> None:
    plain = make_net(**NET)
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("copy", "shard"))
    mesh = mesh if copies > 1 else mesh["shard"]
    seen = []
    for api in APIS:
        model = copy.deepcopy(plain)
        options = SET_UPS[name](api, model)
        shard_net_with(api, model, mesh=mesh, **options)
        facts: list[Any] = []
        for step in range(6):  # micro-batches without sync and with it, twice before each update but the last
            model.set_requires_gradient_sync(step % 2 == 1)
            loss = loss_of(model, batch(dist.get_rank(), step))
            loss.backward()
            if step % 4 == 3:
                facts += [loss.detach(), [p.grad.to_local() for p in model.parameters()]]
                update(model)
        seen.append(
            ([*facts, [p.to_local().detach() for p in model.parameters()]], list(map(grad_dtype, model.parameters())))
        )
    torch.testing.assert_close(seen[0][0], seen[1][0], **SAME)
    assert seen[0][1] == seen[1][1]


def grad_dtype(param: nn.Parameter) -> torch.dtype | None:
    return param.grad_dtype


def update(model: nn.Module) -> None:
    for param in model.parameters():
        with torch.no_grad():
            param.to_local().sub_(param.grad.to_local().to(param.dtype), alpha=0.1)
        param.grad = None


@needs_2_15
@pytest.mark.parametrize("name", SET_UPS)
@pytest.mark.parametrize(("num_ranks", "copies"), quick_rows([(1, 1), (2, 1), (4, 1), (4, 2)], [(2, 1)]))
def test_all_bits_are_those_of_torch(name, num_ranks, copies):
    run_ranks(num_ranks, with_default_comm, name, copies)


def with_default_comm(name: str, copies: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_COMM", "default")  # the collectives that torch's engine uses
        beside_torch(name, copies)


# ---- which parameters compute in which dtype


class ListsDtypes(nn.Module):
    """A linear map with a norm, which notes the dtypes that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, *(p.dtype for p in self.parameters())]
        return self.norm(self.linear(x.to(self.linear.weight.dtype)))


def keeps(dtype: object) -> engine.MixedPrecisionPolicy:
    """Return a policy that keeps the dtype of norms, and ``dtype`` for any other parameter."""
    return engine.MixedPrecisionPolicy(BF16, F32, param_dtype_override_fn=lambda p: F32 if p.ndim == 1 else dtype)


def changed() -> list[Any]:
    """Run with a policy, then with others set on the live model; return dtypes and numbers of all-gathers."""
    model = engine.fully_shard(ListsDtypes(), mp_policy=keeps(None))
    optimizer = torch.optim.SGD(model.parameters())
    replicated = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "shard"))
    changes: list[dict[str, Any]] = [
        {},
        {"mesh": replicated},
        {"reshard_after_forward": True},
        {"mp_policy": keeps(F32)},
        {"mp_policy": engine.MixedPrecisionPolicy(BF16)},
    ]
    facts = []
    for change in changes:
        if change:
            engine.reshard_module(model, optimizers=[optimizer], **change)
        model.seen.clear()
        with recording() as record:
            model(torch.ones(2, 4)).sum().backward()
        facts.append(
            ([str(dtype).removeprefix("torch.") for dtype in model.seen], record.count(Kind.ALL_GATHER).total())
        )
    return facts


def test_a_policy_says_which_parameters_keep_their_dtype_also_after_reshard():
    kept = ["bfloat16", "bfloat16", "float32", "float32"]
    everything, nothing = ["bfloat16", *["float32"] * 3], ["bfloat16"] * 4
    assert run_ranks(2, changed) == [[(kept, 2), (kept, 0), (kept, 0), (everything, 0), (nothing, 0)]] * 2


@on_one_rank
def test_another_dtype_is_refused_and_nothing_is_sharded():
    model = ListsDtypes()
    with pytest.raises(ValueError, match=r"float16 for parameter 'linear.weight'; it may return None, param_dtype"):
        engine.fully_shard(model, mp_policy=keeps(torch.float16))
    assert not any(hasattr(p, "placements") for p in model.parameters())
    with pytest.raises(TypeError, match="a function of a parameter"):
        engine.MixedPrecisionPolicy(param_dtype_override_fn="*.norm*")
    engine.fully_shard(model)
    with pytest.raises(ValueError, match="reshard_unit: another param_dtype_override_fn makes other units"):
        engine.reshard_unit(model, mp_policy=keeps(None))


# ---- gradients of another dtype than the parameter's


def converted() -> list[Any]:
    model = engine.fully_shard(nn.Linear(3, 4).bfloat16())
    model.weight.grad_dtype = F32
    facts: list[Any] = []

    def look(module: nn.Module) -> None:
        weight = module.weight
        facts.append((weight.dtype, weight.grad_dtype, weight.grad.dtype, module.bias.grad.dtype))

    model(torch.ones(2, 3, dtype=BF16)).sum().backward()
    look(model)
    look(model.half())
    model.load_state_dict({k: v.detach().clone() for k, v in model.state_dict().items()}, assign=True)
    model(torch.ones(2, 3, dtype=torch.float16)).sum().backward()
    look(model)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "shard"))
    engine.reshard_module(model, mesh=mesh)
    look(model)
    engine.unshard_module(model)
    look(model)
    return facts


def test_the_dtype_of_gradients_is_kept_on_shards():
    half = torch.float16
    first, later = (BF16, F32, F32, BF16), (half, F32, F32, half)
    assert run_ranks(2, converted) == [[first, *[later] * 4]] * 2


# ---- memory of full parameters that stays


def pointers(keep: bool) -> tuple[bool, bool, bool]:
    """Return whether full memory stays allocated while resharded, at one address, and whether values are right."""
    model = engine.fully_shard(nn.Linear(300, 400))
    model.set_keep_unsharded_storage(keep)
    seen, held = [], []
    with recording() as record:
        for _ in range(3):
            model(torch.ones(1, 300)).sum().backward()
            held.append(record.alive.get(Category.UNSHARDED_PARAMS, 0) > 0)
            model.unshard()
            seen.append(model.weight.data_ptr())
            is_right = torch.equal(
                model.weight, model._get_fsdp_state().units[0].fsdp_params[0].sharded_param.full_tensor()
            )
            model.reshard()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
    return all(held), len(set(seen)) == 1, is_right


def test_memory_of_full_parameters_stays_on_request():
    assert run_ranks(2, pointers, True) == [(True, True, True)] * 2
    assert {(held, is_right) for held, _, is_right in run_ranks(2, pointers, False)} == {(False, True)}
