"""Every error for a user mistake: the value, the allowed values, the parameter or unit, and the fix."""

import copy
import os
import re
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers.forked_ranks import on_one_rank, run_ranks, simulated_rank, simulating
from tests.helpers.parity import shard_net
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.engine import FSDPModule, fully_shard, unshard_module


def fingerprint(module: nn.Module) -> dict[str, object]:
    """Return everything that a refused call must leave unchanged."""
    return {
        "classes": [type(m) for m in module.modules()],
        "params": [(name, id(p), p.data_ptr(), p.requires_grad) for name, p in module.named_parameters()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_pre_hooks)) for m in module.modules()
        ],
        "attributes": [sorted(vars(m)) for m in module.modules()],
        "of params": [sorted(vars(p)) for p in module.parameters()],
    }


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def with_scalar(model: Pair) -> Pair:
    model.b.gain = nn.Parameter(torch.tensor(1.0))
    return model


def with_transposed(model: Pair) -> Pair:
    model.b.weight = nn.Parameter(torch.randn(3, 2).T)
    return model


def with_two_dtypes(model: Pair) -> Pair:
    model.b.double()
    return model


def with_two_devices(model: Pair) -> Pair:
    model.b.to("meta")
    return model


def with_dtensor(model: Pair) -> Pair:
    mesh = init_device_mesh("cpu", (1,))
    model.b.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    return model


def as_it_is(model: Pair) -> Pair:
    return model


REFUSED = {
    "scalar": (with_scalar, {}, ValueError, "parameter 'b.gain' is a scalar.*make it 1-D: shape [1]"),
    "not contiguous": (
        with_transposed,
        {},
        ValueError,
        "parameter 'b.weight' of shape [2, 3] and stride (1, 2) is not contiguous; assign .*contiguous()",
    ),
    "dtypes": (
        with_two_dtypes,
        {},
        ValueError,
        "must share dtype and device: 'a.weight' is float32 on cpu, 'b.weight' is float64 on cpu; convert them, or "
        "shard them in separate units",
    ),
    "devices": (with_two_devices, {}, ValueError, "'a.weight' is float32 on cpu, 'b.weight' is float32 on meta"),
    "DTensor": (
        with_dtensor,
        {},
        ValueError,
        "parameter 'b.weight' is a DTensor on mesh .* cannot be combined .* sharded over: slice both from one",
    ),
    "policy": (
        as_it_is,
        {"reshard_after_forward": "yes"},
        TypeError,
        "reshard_after_forward must be True, False, an int or None, got 'yes'",
    ),
    "ignored name": (
        as_it_is,
        {"ignored_params": ["a.weight"]},
        TypeError,
        "ignored_params contains a str ('a.weight'); pass the parameters themselves, e.g. {model.embed.weight}",
    ),
    "no mesh": (as_it_is, {"mesh": 4}, TypeError, "mesh must be a torch.*DeviceMesh or None, got int"),
}


def refuses(error: type[Exception], message: str) -> AbstractContextManager:
    """Expect ``error`` whose message contains ``said``, in which only ``.*`` is special."""
    return pytest.raises(error, match=".*".join(map(re.escape, message.split(".*"))))


@pytest.mark.parametrize("case", REFUSED)
@on_one_rank
def test_a_refused_call_explains_why_and_changes_nothing(case):
    prepare, options, error, message = REFUSED[case]
    model = prepare(Pair())
    before = fingerprint(model)
    with refuses(error, message):
        fully_shard(model, **options)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ([], ValueError, "fully_shard got an empty list; pass at least one module"),
        ("model", TypeError, "takes a module or a list of modules, got str"),
        ({nn.Linear(1, 1)}, TypeError, "takes a module or a list of modules, got set"),
        ([nn.Linear(1, 1), None], TypeError, "takes a module or a list of modules, got NoneType"),
        (nn.ModuleList([nn.Linear(1, 1)]), ValueError, "cannot hook a ModuleList: .* call it on each of its children"),
        (nn.ModuleDict(), ValueError, "cannot hook a ModuleDict: it has no forward"),
    ],
)
@on_one_rank
def test_invalid_modules_to_shard(argument, error, message):
    with refuses(error, message):
        fully_shard(argument)


@on_one_rank
def test_a_list_with_a_module_twice_or_inside_of_another():
    model = Pair()
    before = fingerprint(model)
    with refuses(ValueError, "contains a Linear inside another module of the list; pass each part"):
        fully_shard([model, model.a])
    with refuses(ValueError, "contains a module twice; pass each part of the model once"):
        fully_shard([model.a, model.a])
    assert fingerprint(model) == before


@on_one_rank
def test_sharded_twice():
    model = fully_shard(Pair())
    before = fingerprint(model)
    with refuses(ValueError, "already called on this FSDPPair; undo it with unshard_module first"):
        fully_shard(model)
    with refuses(ValueError, "'weight' is sharded already, as 'a.weight' of Pair; .* inner modules"):
        fully_shard(model.a)
    assert fingerprint(model) == before


@pytest.mark.parametrize("inner", ["embed", "head"])
@on_one_rank
def test_tied_over_two_units(inner):
    model = make_net(tied=True)
    owner = type(model.get_submodule(inner)).__name__
    fully_shard(model.get_submodule(inner))
    before = fingerprint(model)
    outer = "head" if inner == "embed" else "embed"
    message = (
        f"parameter '{outer}.weight' is tied to 'weight' of {owner}, .* put both into one unit: .* a list of the two"
    )
    with refuses(ValueError, message):
        fully_shard(model)
    assert fingerprint(model) == before
    assert model.head.weight.shape == (7, 5)
    assert not isinstance(model.get_submodule(outer).weight, DTensor)


@on_one_rank
def test_a_module_shared_by_two_units():
    left, right = Pair(), Pair()
    right.b = left.b
    fully_shard(left)
    with refuses(ValueError, "'b.weight' is sharded already, as 'b.weight' of Pair; .* one unit"):
        fully_shard(right)
    assert type(right) is Pair


def test_without_a_process_group():
    model = Pair()
    with refuses(RuntimeError, "sharding needs a process group: call .*init_process_group first, or pass"):
        fully_shard(model)
    assert type(model) is Pair


def wrong_meshes() -> list[str]:
    messages = []
    model = Pair()
    before = fingerprint(model)
    square = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ValueError, match="without names") as refused:
        fully_shard(model, mesh=square)
    messages.append(str(refused.value))
    pair = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="is not in the mesh") as refused:
            fully_shard(model, mesh=pair)
        messages.append(str(refused.value))
    assert fingerprint(model) == before
    return messages


def test_a_mesh_of_two_axes_or_without_this_rank():
    messages = run_ranks(4, wrong_meshes)
    axes = "fully_shard got a 2-D mesh of shape (2, 2) without names; name its axes, e.g. mesh_dim_names="
    assert all(m[0].startswith(axes) for m in messages)
    assert [m[1] for m in messages[2:]] == [
        f"rank {r} is not in the mesh, which holds ranks [0, 1]: shard only on the ranks of the mesh" for r in (2, 3)
    ]


# ---- at the first forward


@on_one_rank
def test_parameters_still_on_meta():
    with torch.device("meta"):
        model = Pair()
    fully_shard(model.b)
    fully_shard(model)
    message = "still on the meta device: a.weight, a.bias, b.weight, b.bias; call module.to_empty(device=...) and"
    for _ in range(2):  # repeats until fixed
        with refuses(RuntimeError, message):
            model(torch.ones(1, 2))
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    assert model(torch.ones(1, 2)).tolist() == [[7, 7]]


@on_one_rank
def test_an_inner_module_that_runs_first():
    model = Pair()
    fully_shard(model.b)
    fully_shard(model)
    model.b(torch.ones(1, 2))
    message = (
        "module 'b' ran before its FSDP root FSDPPair; run the root first, or .* shard their common parent as well"
    )
    with refuses(RuntimeError, message):
        model(torch.ones(1, 2))


@on_one_rank
def test_a_module_that_was_exchanged_after_fully_shard():
    model = fully_shard(Pair())
    model.b = nn.Linear(2, 2)
    message = (
        "parameter 'b.weight' belongs to a unit of the FSDP root FSDPPair, but the Linear that held it is not below"
    )
    with refuses(RuntimeError, message):
        model(torch.ones(1, 2))


@on_one_rank
def test_a_parameter_replaced_by_a_plain_one():
    model = fully_shard(Pair())
    model.a.weight = nn.Parameter(torch.ones(2, 2))
    message = (
        "parameter 'a.weight' was replaced by a plain Parameter after fully_shard; replace it before .*copy_(dtensor)"
    )
    with refuses(TypeError, message):
        model(torch.ones(1, 2))


@on_one_rank
def test_parts_of_a_unit_converted():
    model = fully_shard(Pair())
    model(torch.ones(1, 2)).sum().backward()
    model.b.double()
    message = (
        "of one unit must share dtype and device: 'a.weight' is float32 on cpu, 'b.weight' is float64 on cpu; convert"
    )
    with refuses(ValueError, message):
        model(torch.ones(1, 2))
    model.double()
    assert model(torch.ones(1, 2).double()).dtype == torch.float64


# ---- the rest


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=["grad", "vmap"])
@on_one_rank
def test_transforms_of_functions_around_a_sharded_module(transform):
    model = fully_shard(Pair())
    message = "FSDPPair is sharded and cannot run within a transform of torch.func .* or undo it with unshard_module"
    with refuses(NotImplementedError, message):
        transform(lambda x: model(x).sum())(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()


@on_one_rank
def test_sparse_gradients():
    model = fully_shard(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)))
    message = "parameter '0.weight' got a sparse gradient, which .* make it dense (sparse=False), or .* ignored_params"
    with refuses(NotImplementedError, message):
        model(torch.tensor([1, 2])).sum().backward()


@on_one_rank
def test_reset_of_an_inner_module():
    model = shard_net(make_net(num_blocks=1))
    model(batch(0, 0))
    with refuses(RuntimeError, "on a FSDPBlock inside an FSDP root; call it on the root"):
        model.blocks[0].reset_iter_state()


@on_one_rank
def test_deep_copies_are_refused():
    model = fully_shard(Pair())
    with refuses(NotImplementedError, "cannot be deep-copied: copy the plain module before"):
        copy.deepcopy(model)
    with pytest.raises(NotImplementedError, match="cannot be deep-copied"):
        copy.deepcopy(nn.Sequential(model))


@on_one_rank
def test_unshard_module_of_what_is_not_sharded_or_only_a_part():
    with refuses(ValueError, "Pair contains no module that fully_shard was called on"):
        unshard_module(Pair())
    model = shard_net(make_net(num_blocks=1))
    model(batch(0, 0))
    before = fingerprint(model)
    with refuses(ValueError, "FSDPBlock is only a part of the FSDP root FSDPNet; call .* the root"):
        unshard_module(model.blocks[0])
    assert fingerprint(model) == before


@on_one_rank
def test_unshard_module_with_gradients_that_are_not_reduced():
    model = shard_net(make_net(num_blocks=1))
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(0, 0)).backward()
    before = fingerprint(model)
    with refuses(RuntimeError, "without sync and are not reduced yet: scale, embed.weight, .*reset_"):
        unshard_module(model)
    assert fingerprint(model) == before
    model.reset_iter_state()
    unshard_module(model)


@on_one_rank
def test_backward_through_a_forward_from_before_unshard_module():
    model = shard_net(make_net(num_blocks=1))
    loss = loss_of(model, batch(0, 0))
    unshard_module(model)
    with refuses(RuntimeError, "unit '(root)' was unsharded or resharded by .* run the forward again"):
        loss.backward()
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@simulating
def test_an_unknown_choice_of_communication():
    os.environ["WORKBENCH_COMM"] = "fastest"  # only in this process, which ends with the test
    with simulated_rank(0, 2):
        model = fully_shard(Pair())
        with refuses(ValueError, "unknown WORKBENCH_COMM='fastest'; use 'gloo' .*, 'default' .*, or unset it"):
            model.unshard()


@on_one_rank
def test_methods_on_a_module_that_was_never_sharded():
    class Mine(FSDPModule, nn.Module):
        pass

    with pytest.raises(AttributeError, match="no fully_shard state on this Mine"):
        Mine().reshard()
