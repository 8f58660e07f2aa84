"""What each instrument says of a model of each engine: the cases of the contract, run on booted ranks."""

import gc
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.booted_ranks import execute, models_here, namespace, use
from tests.helpers.known_warnings import NO_SHARD, ignoring_warnings
from tests.helpers.small_models import make_net
from tests.runtime.test_policies import trace_here
from workbench import engine as ours
from workbench.engine import classic
from workbench.engine.module_names import clean, named_params
from workbench.errors import UsageError
from workbench.protocol.commands import InjectFault, Lint, Reshard, Step, Unshard, Verify
from workbench.replay.collectives import compare
from workbench.runtime import rank as rank_module
from workbench.runtime.inspection import inspect
from workbench.trace.invariants import check
from workbench.views import draw

CPU = torch.device("cpu")
_OF_MODELS = (
    (".* is frozen in one unit", UserWarning),
    ("The .grad attribute of a Tensor that is not a leaf", UserWarning),  # of torch's compiler
)


def _fully_shard(shard: Callable[..., Any]) -> Callable[[nn.Module], nn.Module]:
    def apply(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            shard(block)
        shard(model)
        return model

    return apply


def _wrapped(wrapper: Callable[..., nn.Module], policy: Callable[..., Any]) -> Callable[[nn.Module], nn.Module]:
    def apply(model: nn.Module) -> nn.Module:
        kinds = {type(block) for block in model.blocks}
        with ignoring_warnings(*NO_SHARD, *_OF_MODELS):
            return wrapper(model, auto_wrap_policy=policy(kinds), device_id=CPU, use_orig_params=True)

    return apply


ENGINES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": _fully_shard(ours.fully_shard),
    "classic wrapper": _wrapped(classic.FullyShardedDataParallel, classic.ModuleWrapPolicy),
    "torch's fully_shard": _fully_shard(fsdp.fully_shard),
    "torch's FullyShardedDataParallel": _wrapped(fsdp.FullyShardedDataParallel, ModuleWrapPolicy),
    "torch's DistributedDataParallel": DistributedDataParallel,
}


def _plain() -> nn.Module:
    return make_net(dim=16)


def _tied() -> nn.Module:
    return make_net(dim=16, tied=True)


def _checkpointed() -> nn.Module:
    model = make_net(dim=16)
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return model


def _compiled() -> nn.Module:
    model = make_net(dim=16)
    model.blocks[0].compile(backend="eager")
    return model


def _frozen() -> nn.Module:
    model = make_net(dim=16)
    model.embed.requires_grad_(False)
    return model


MODELS = {"plain": _plain, "tied": _tied, "checkpointed": _checkpointed, "compiled": _compiled, "frozen": _frozen}


def prepare(engine: str, model: str) -> None:
    """Add a sharded model, its optimizer and ``train_step`` to the cells' variables."""
    ns = namespace()
    plain = MODELS[model]()
    ns["names"] = [clean(name) for name, _ in plain.named_parameters(remove_duplicate=False)]
    use(ENGINES[engine](plain))
    rank_module._after_cell(None)


# ---- instruments


def _train() -> None:
    assert len(execute(Step(count=2))["losses"]) == 2


def _lint() -> None:
    assert execute(Lint(model="model"))["faults"] == []


def _verify() -> None:
    assert execute(Verify())["ok"]


def _inspect() -> None:
    held = [inspect(name, rank_module._this_rank().recorder) for name in namespace()["names"]]
    assert {found.fqn for found in held} == set(namespace()["names"])
    numels = [math.prod(found.shard.values.shape) for found in held]
    assert 0 < sum(numels) <= sum(math.prod(found.global_shape) for found in held)


def _units() -> None:
    (model,) = (each for each in models_here() if each.name == "model")
    known = rank_module._this_rank().recorder.header.units
    named = {param.fqn for unit in model.units for param in known[unit].params if not param.parts}
    parts = {part.fqn for unit in model.units for param in known[unit].params for part in param.parts}
    assert (named | parts) <= set(namespace()["names"])
    assert named | parts


def _views() -> None:
    trace = trace_here()
    assert not check(trace)
    newest = int(trace.ranks[0].rows["step"].max())
    assert [row for row in compare(trace, newest) if row.differs] == []
    for view in ("layout", "memory", "comms", "states", "timeline"):
        figure = draw(view, trace)
        assert figure.data or "torch 2.14 or newer announces them" in figure.to_json()  # which older ones do not


def _fault() -> None:
    execute(InjectFault(name="straggler", rank=0, ms=1))
    try:
        _train()
    finally:
        execute(InjectFault(name="off"))


def _reshard() -> None:
    execute(Reshard(model="model", mp="bf16"))


def _unshard() -> None:
    execute(Unshard(model="model"))
    assert {name for name, _ in named_params(namespace()["model"])} <= set(namespace()["names"])


INSTRUMENTS: Mapping[str, Callable[[], None]] = {
    "step": _train,
    "status": _units,
    "lint": _lint,
    "verify": _verify,
    "inspect": _inspect,
    "layout, memory, comms, states, timeline": _views,
    "fault": _fault,
    "reshard": _reshard,
    "unshard": _unshard,
}
"""What is asked of each model, in this order: a command, or several that read the same."""

_NEEDS_OURS = "this needs the workbench's engine"
LIMITS = {
    **{(name, engine): _NEEDS_OURS for name in ("reshard", "unshard") for engine in ENGINES if "torch" in engine},
    (
        "fault",
        "torch's DistributedDataParallel",
    ): "faults go into units of FSDP, and a model in DistributedDataParallel has none",
}
"""What an instrument says where it cannot work with an engine."""


def answers(engine: str, models: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return what each instrument says of each model of an engine: empty, the refusal, or what is wrong."""
    found = {}
    for model in models:
        torch._dynamo.reset()
        prepare(engine, model)
        for name, ask in INSTRUMENTS.items():
            found[model, name] = _answer(ask)
        for variable in ("model", "opt", "train_step"):
            namespace().pop(variable, None)
        gc.collect()
        rank_module._after_cell(None)
    return found


def _answer(ask: Callable[[], None]) -> str:
    try:
        with ignoring_warnings(*_OF_MODELS):
            ask()
    except UsageError as error:
        return str(error)
    except Exception:  # noqa: BLE001 - told by the test
        return traceback.format_exc()
    return ""
