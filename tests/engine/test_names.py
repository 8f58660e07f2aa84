"""Public names and arguments equal torch's; the engine's concepts have the field's names."""

import ast
import enum
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import workbench.engine
from tests.helpers.forked_ranks import on_one_rank, run_ranks
from workbench import engine
from workbench.engine._torch import REDUCES_IN_GRAD_DTYPE

# ---- public names that torch also has

SHARED_WITH_TORCH = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
OURS_ALONE = ["ShardPlacementResult", "probe", "reshard_module", "unshard_module"]

SETTERS = [
    "reset_iter_state",
    "reshard",
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_max_input_buffers",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_separate_reduce_scatter_group",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_unshard_in_backward",
    "unshard",
]


@pytest.mark.parametrize("name", [*SHARED_WITH_TORCH, "GradientReductionHandle", *OURS_ALONE])
def test_a_public_name_is_there(name):
    assert hasattr(engine, name)
    assert name in engine.__all__ or isinstance(getattr(engine, name), ModuleType)


def arguments(function: object) -> dict[str, object]:
    """Return argument names in order with their defaults, without ``self``; classes by their repr."""
    parameters = inspect.signature(function).parameters.values()
    known = [
        p for p in parameters if p.name != "self" and (p.name != "param_dtype_override_fn" or REDUCES_IN_GRAD_DTYPE)
    ]
    return {p.name: p.default if p.default is p.empty else as_installed(p.default) for p in known}


def as_installed(default: object) -> str:
    """Return a default's repr, without the field of policies that torch has from 2.15 on."""
    return repr(default) if REDUCES_IN_GRAD_DTYPE else repr(default).replace(", param_dtype_override_fn=None", "")


def by_position(function: object) -> list[str]:
    """Return the arguments that may be positional."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


needs_2_15 = pytest.mark.skipif(torch.__version__ < "2.15", reason="this torch has no such name")
NEWER = ["finalize_backward", "set_keep_unsharded_storage", "set_manual_backward_finalization"]


@pytest.mark.parametrize("name", [*SETTERS, *(pytest.param(name, marks=needs_2_15) for name in NEWER)])
def test_a_setter_takes_torchs_arguments(name):
    ours, theirs = (getattr(module, name) for module in (engine.FSDPModule, torch_fsdp.FSDPModule))
    assert list(arguments(ours)) == list(arguments(theirs))
    assert arguments(ours) == arguments(theirs)
    # our arguments may be positional where torch's may; ENGINE.md allows both for `recurse`
    assert set(by_position(theirs)) <= set(by_position(ours))


@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"])
def test_a_function_takes_torchs_arguments(name):
    ours, theirs = (getattr(module, name) for module in (engine, torch_fsdp))
    assert arguments(ours) == arguments(theirs)
    assert by_position(ours) == by_position(theirs)


@needs_2_15
def test_replicate_takes_torchs_arguments():
    theirs = importlib.import_module("torch.distributed._composable.replicate_with_fsdp").replicate
    assert arguments(engine.replicate) == arguments(theirs)
    assert by_position(engine.replicate) == by_position(theirs)


@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"])
def test_a_policy_takes_torchs_fields(name):
    ours, theirs = (getattr(module, name) for module in (engine, torch_fsdp))
    assert arguments(ours) == arguments(theirs)
    assert by_position(ours) == by_position(theirs)
    assert as_installed(ours()) == repr(theirs())
    assert ours() == ours()


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"])
def test_a_precision_policy_cannot_be_changed(field):
    with pytest.raises(AttributeError):  # it is a default argument of every call
        setattr(engine.MixedPrecisionPolicy(), field, None)


def test_offload_policies_are_of_one_family():
    assert issubclass(engine.CPUOffloadPolicy, engine.OffloadPolicy)


def test_an_unshard_handle_waits():
    assert arguments(engine.UnshardHandle.wait) == arguments(torch_fsdp.UnshardHandle.wait) == {}


# ---- concepts, found wherever their class is defined


def modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(workbench.engine.__path__)]
    return [importlib.import_module(f"workbench.engine.{name}") for name in names]


def concept(name: str) -> object:
    """Return the engine's only object of that name, wherever it is defined."""
    found = {id(vars(m)[name]): vars(m)[name] for m in [workbench.engine, *modules()] if name in vars(m)}
    assert len(found) == 1, f"{name}: {len(found)} in workbench.engine"
    return next(iter(found.values()))


CONCEPTS = {
    "FSDPParam": [],
    "FSDPParamGroup": [
        "is_unsharded",
        "lazy_init",
        "post_backward",
        "post_forward",
        "pre_backward",
        "pre_forward",
        "reshard",
        "unshard",
        "wait_for_unshard",
    ],
    "FSDPCommContext": [],
    "AllGatherState": [],
    "ReduceScatterState": [],
    "AllReduceState": [],
    "FSDPState": ["_lazy_init"],
    "ShardedState": [],
    "TrainingState": ["FORWARD", "PRE_BACKWARD", "POST_BACKWARD", "IDLE"],
    "RegisterPostBackwardFunction": ["forward", "backward", "apply"],
    "FSDPMeshInfo": [],
    "DDPMeshInfo": [],
    "HSDPMeshInfo": [],
    "ShardPlacementResult": [],
    "AllGather": ["allocate", "__call__"],
    "ReduceScatter": ["allocate", "__call__"],
    "DefaultAllGather": ["allocate", "__call__"],
    "DefaultReduceScatter": ["allocate", "__call__"],
}
HELPERS = [
    "ParamModuleInfo",
    "_get_gradient_divide_factors",
    "_get_managed_modules",
    "_get_managed_states",
    "_get_param_module_infos",
    "_get_post_forward_mesh_info",
    "_init_default_fully_shard_mesh",
    "foreach_all_gather",
    "foreach_all_gather_copy_out",
    "foreach_reduce",
]


@pytest.mark.parametrize("name", CONCEPTS)
def test_a_concept_is_a_class_with_its_methods(name):
    found = concept(name)
    assert inspect.isclass(found)
    assert [attribute for attribute in CONCEPTS[name] if not hasattr(found, attribute)] == []
    assert found.__module__.startswith("workbench.engine.")
    assert inspect.getdoc(found)


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_keeps_its_name(name):
    found = concept(name)
    assert callable(found)
    assert found.__module__.startswith("workbench.engine.")


def test_states_are_enums_of_these_members_only():
    assert issubclass(concept("ShardedState"), enum.Enum)
    training = concept("TrainingState")
    assert issubclass(training, enum.Enum)
    assert {member.name for member in training} == {"FORWARD", "PRE_BACKWARD", "POST_BACKWARD", "IDLE"}


def test_mesh_infos_are_a_family():
    fsdp, ddp, hsdp = (concept(name) for name in ("FSDPMeshInfo", "DDPMeshInfo", "HSDPMeshInfo"))
    assert issubclass(hsdp, fsdp)
    assert issubclass(hsdp, ddp)
    assert not issubclass(fsdp, ddp)


def test_post_backward_is_an_autograd_function():
    assert issubclass(concept("RegisterPostBackwardFunction"), torch.autograd.Function)


@pytest.mark.parametrize(
    ("protocol", "default"), [("AllGather", "DefaultAllGather"), ("ReduceScatter", "DefaultReduceScatter")]
)
def test_the_default_comms_take_the_protocols_arguments(protocol, default):
    required, given = concept(protocol), concept(default)
    for method in ("allocate", "__call__"):
        assert list(arguments(getattr(given, method))) == list(arguments(getattr(required, method)))


def test_the_protocols_are_torchs():
    from torch.distributed.fsdp._fully_shard import _fsdp_api as theirs

    for name in ("AllGather", "ReduceScatter"):
        for method in ("allocate", "__call__"):
            torchs = arguments(getattr(getattr(theirs, name), method))
            assert arguments(getattr(concept(name), method)) == torchs, f"{name}.{method}"


# ---- reached from a module


@on_one_rank
def test_names_reachable_from_a_sharded_module():
    model = engine.fully_shard(nn.Sequential(engine.fully_shard(nn.Linear(2, 2)), nn.Linear(2, 1)))
    state = model._get_fsdp_state()
    assert engine.fully_shard.state(model) is state
    assert engine.fully_shard.state(model[1]) is None  # as with torch's
    assert isinstance(state, concept("FSDPState"))
    inner = engine.fully_shard.state(model[0])
    assert inner is not state
    model(torch.ones(1, 2)).sum().backward()
    assert (state._is_root, inner._is_root) == (True, False)
    assert isinstance(state._comm_ctx, concept("FSDPCommContext"))
    assert inner._comm_ctx is state._comm_ctx
    group = state._fsdp_param_group
    assert isinstance(group, concept("FSDPParamGroup"))
    assert [isinstance(p, concept("FSDPParam")) for p in group.fsdp_params] == [True] * 2
    assert isinstance(group.mesh_info, concept("FSDPMeshInfo"))
    assert group.post_forward_mesh_info is None or isinstance(group.post_forward_mesh_info, concept("FSDPMeshInfo"))


@on_one_rank
def test_a_list_has_one_state():
    first, second = engine.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert engine.fully_shard.state(first) is engine.fully_shard.state(second)


@on_one_rank
def test_the_class_is_a_subclass_with_fsdp_module_mixed_in():
    linear = nn.Linear(2, 2)
    assert engine.fully_shard(linear) is linear
    assert isinstance(linear, engine.FSDPModule)
    assert isinstance(linear, nn.Linear)
    assert type(linear).__name__ == "FSDPLinear"
    assert type(linear) is type(engine.fully_shard(nn.Linear(3, 3)))


@on_one_rank
def test_setters_exist_on_a_sharded_module():
    linear = engine.fully_shard(nn.Linear(2, 2))
    assert [name for name in SETTERS if not callable(getattr(linear, name, None))] == []


# ---- a script ported by changing its import

SCRIPT = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle, fully_shard,
    register_fsdp_forward_method, share_comm_ctx,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)

    def features(self, x):
        return self.blocks[0](x) + self.head.weight.sum()


def train(offload):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    register_fsdp_forward_method(model, "features")
    share_comm_ctx([model])
    assert isinstance(model, FSDPModule)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        for micro in range(2):
            model.set_is_last_backward(micro == 1)
            model.set_requires_gradient_sync(micro == 1)
            model.set_reshard_after_backward(micro == 1)
            generator = torch.Generator().manual_seed(10 * step + micro + 100 * torch.distributed.get_rank())
            x = torch.randn(4, 6, generator=generator)
            loss = model(x).square().mean()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), norm.full_tensor().item()))
    handle = model.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    model.reshard()
    with torch.no_grad():
        losses.append((model.features(torch.ones(1, 6)).sum().item(), 0.0))
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return losses, state


result = train(OffloadPolicy()), train(CPUOffloadPolicy(pin_memory=False))
"""
ONE_LINE = ("from torch.distributed.fsdp import (", "from workbench.engine import (")


def run_script(text: str) -> object:
    names: dict[str, object] = {"__name__": "script"}
    exec(compile(text, "script.py", "exec"), names)
    return names["result"]


def both_scripts() -> None:
    for ours, theirs in zip(run_script(SCRIPT.replace(*ONE_LINE)), run_script(SCRIPT), strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
        assert list(ours[1]) == list(theirs[1])
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)


def test_the_script_differs_in_its_import_only():
    changed = SCRIPT.replace(*ONE_LINE)
    assert [a for a, b in zip(changed.splitlines(), SCRIPT.splitlines(), strict=True) if a != b] == [ONE_LINE[1]]
    (statement,) = [
        node for node in ast.walk(ast.parse(SCRIPT)) if isinstance(node, ast.ImportFrom) and "fsdp" in str(node.module)
    ]
    assert {alias.name for alias in statement.names} == set(SHARED_WITH_TORCH)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_script_moves_over_by_changing_one_import(world_size):
    run_ranks(world_size, both_scripts)
