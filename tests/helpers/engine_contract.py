"""What each instrument says of a model of each engine: the cases of the contract, run on booted ranks."""

import gc
import itertools
import math
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.helpers.booted_ranks import execute, models_here, namespace, use
from tests.helpers.known_warnings import NO_SHARD, ignoring_warnings
from tests.helpers.small_models import make_net
from tests.helpers.stopped_step import beside
from tests.runtime.test_policies import trace_here
from workbench.base.codec import decode
from workbench.engine.module_names import clean, named_params
from workbench.errors import UsageError
from workbench.models.c10d import sees_all_collectives
from workbench.protocol.commands import Command, InjectFault, Lint, Reshard, Step, Unshard, Verify
from workbench.replay.collectives import compare
from workbench.runtime import rank as rank_module
from workbench.runtime.inspection import inspect
from workbench.script.script_writer import write_script
from workbench.session.program import CompletedCell, CompletedCommand, Program
from workbench.trace import load, save, to_perfetto
from workbench.trace.invariants import check
from workbench.views import draw

_OF_MODELS = (
    (".* is frozen in one unit", UserWarning),
    ("The .grad attribute of a Tensor that is not a leaf", UserWarning),  # of torch's compiler
)


def _fully_shard(package: str) -> str:
    return f"""\
        from {package} import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    """


def _wrapped(package: str, of_policy: str) -> str:
    return f"""\
        import torch
        from {package} import FullyShardedDataParallel, ShardingStrategy
        from {of_policy} import ModuleWrapPolicy

        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({{type(block) for block in model.blocks}}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD if mesh.ndim > 1 else ShardingStrategy.FULL_SHARD,
        )
    """


ENGINES: Mapping[str, str] = {
    "fully_shard": _fully_shard("workbench.engine"),
    "classic wrapper": _wrapped("workbench.engine.classic", "workbench.engine.classic"),
    "torch's fully_shard": _fully_shard("torch.distributed.fsdp"),
    "torch's FullyShardedDataParallel": _wrapped("torch.distributed.fsdp", "torch.distributed.fsdp.wrap"),
    "torch's DistributedDataParallel": """\
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model)
    """,
}
"""The cell that shards a ``model`` with each engine, over a ``mesh``."""


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
"""Models on two ranks."""


def _copied() -> nn.Module:
    namespace()["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return _plain()


def _split() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    namespace()["mesh"], namespace()["batch"] = mesh["dp"], mesh["dp"].get_local_rank()
    model = make_net(dim=15)  # blocks of 46: an even number of columns
    for block in model.blocks:
        parallelize_module(block.mlp, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


MESHES = {"on copies": _copied, "split by tensor parallelism": _split}
"""Models on a mesh of 2 x 2 ranks."""

ON_MESHES = {"on copies": tuple(ENGINES)[:4], "split by tensor parallelism": tuple(ENGINES)[:4]}
"""The engines of each."""

MAKE = {**MODELS, **MESHES}


def prepare(engine: str, model: str) -> None:
    """Add a sharded model, its optimizer and ``train_step`` to the cells' variables."""
    ns = namespace()
    ns["model"], ns["program"] = MAKE[model](), []
    ns["names"] = [clean(name) for name, _ in ns["model"].named_parameters(remove_duplicate=False)]
    params, in_blocks = (list(module.parameters()) for module in (ns["model"], ns["model"].blocks))
    ns["sizes"] = len(params), *(sum(param.numel() for param in each) for each in (params, in_blocks))
    code = dedent(ENGINES[engine])
    with ignoring_warnings(*NO_SHARD, *_OF_MODELS):
        exec(code, ns)
    ns["program"].append(CompletedCell(code=code))
    use(ns["model"])
    ns["generator"].manual_seed(ns.get("batch", ns["rank"]))
    rank_module._after_cell(None)


# ---- instruments


def _do(command: Command) -> object:
    """Execute a command, which becomes part of the program; return its reply."""
    reply = decode(type(command).reply, execute(command), "reply")
    (policy,) = (each.policy for each in models_here() if each.name == "model")
    namespace()["program"].append(CompletedCommand(command=command, reply=reply, policy=policy))
    return reply


def _train() -> None:
    assert len(_do(Step(count=2)).losses) == 2


def _stop() -> None:
    """Stop before a collective, or where none is seen before a backward; find the rank there, and go on."""
    header = rank_module.this_rank().recorder.header
    (model,) = (each for each in models_here() if each.name == "model")
    gathers = any(header.units[unit].shard_size > 1 for unit in model.units)
    event = "all_gather" if gathers else "all_reduce" if sees_all_collectives() else "backward"

    def find(channel):
        channel.until_held()
        return channel.where().held

    done, held = beside(find, Step(until=event))
    assert len(done["losses"]) == 1
    assert held.kind.key == event
    assert held.unit in model.units


def _lint() -> None:
    assert execute(Lint(model="model"))["faults"] == []


def _verify() -> None:
    assert execute(Verify())["ok"]


def _inspect() -> None:
    held = [inspect(name, rank_module.this_rank().recorder) for name in namespace()["names"]]
    assert {found.fqn for found in held} == set(namespace()["names"])
    numels = [math.prod(found.shard.values.shape) for found in held]
    assert 0 < sum(numels) <= sum(math.prod(found.global_shape) for found in held)


def _units() -> None:
    (model,) = (each for each in models_here() if each.name == "model")
    in_blocks = next(each.num_elements for each in model.classes if each.name == "Block")
    if "batch" not in namespace():  # torch's wrapper knows no whole shapes of what tensor parallelism splits
        assert (model.num_params, model.num_elements, in_blocks) == namespace()["sizes"]
    known = rank_module.this_rank().recorder.header.units
    named = {param.fqn for unit in model.units for param in known[unit].params if not param.parts}
    parts = {part.fqn for unit in model.units for param in known[unit].params for part in param.parts}
    assert (named | parts) <= set(namespace()["names"])
    assert named | parts


def _views() -> None:
    trace = trace_here()
    assert not check(trace)
    newest = int(trace.ranks[0].rows["step"].max())
    assert [row for row in compare(trace, newest) if row.differs] == []
    for view in () if namespace()["rank"] else ("layout", "memory", "comms", "states", "timeline"):
        figure = draw(view, trace)
        assert figure.data or "torch 2.14 or newer announces them" in figure.to_json()  # which older ones do not


def _fault() -> None:
    execute(InjectFault(name="straggler", rank=0, ms=1))
    try:
        _train()
    finally:
        execute(InjectFault(name="off"))


def _reshard() -> None:
    _do(Reshard(model="model", mp="bf16"))


def _unshard() -> None:
    _do(Unshard(model="model"))
    assert {name for name, _ in named_params(namespace()["model"])} <= set(namespace()["names"])


def _export() -> None:
    trace, program = trace_here(), tuple(namespace()["program"])
    with tempfile.TemporaryDirectory() as folder:
        save(trace, path := Path(folder) / "run.trace")
        again = load(path)
    assert again.header == trace.header
    assert again.ranks[0].rows.tobytes() == trace.ranks[0].rows.tobytes()
    assert to_perfetto(trace)["traceEvents"]
    script = write_script(Program(ranks_per_host=(namespace()["world_size"],), entries=program), "", "train.py").text
    compile(script, "train.py", "exec")
    assert program[0].code.strip() in script
    assert all(f"# %fsdp {entry.command.word}" in script for entry in program[1:])


INSTRUMENTS: Mapping[str, Callable[[], None]] = {
    "step": _train,
    "break, where": _stop,
    "status": _units,
    "lint": _lint,
    "verify": _verify,
    "inspect": _inspect,
    "layout, memory, comms, states, timeline": _views,
    "fault": _fault,
    "reshard": _reshard,
    "unshard": _unshard,
    "export": _export,
}
"""What is asked of each model, in this order: a command, or several that read the same."""

_NEEDS_OURS = "this needs the workbench's engine"
LIMITS = {
    **{(name, engine): _NEEDS_OURS for name in ("reshard", "unshard") for engine in ENGINES if "torch" in engine},
    (
        "fault",
        "torch's DistributedDataParallel",
    ): "faults go into units of FSDP, and a model in DistributedDataParallel has none",
    (
        "verify",
        "torch's FullyShardedDataParallel",
        "split by tensor parallelism",
    ): "tensor parallelism splits 'model' in torch's FullyShardedDataParallel, which verify does not know",
}
"""What an instrument says where it cannot work with an engine, or with one of its models."""


def answers(engines: Sequence[str], models: Sequence[str]) -> dict[tuple[str, str, str], str]:
    """Return what each instrument says of each model of each engine: empty, the refusal, or what is wrong."""
    found = {}
    for engine, model in itertools.product(engines, models):
        if model == "compiled":
            torch._dynamo.reset()
        before = set(namespace())
        prepare(engine, model)
        for name, ask in INSTRUMENTS.items():
            found[engine, model, name] = _answer(ask)
        for variable in set(namespace()) - before:
            del namespace()[variable]
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
