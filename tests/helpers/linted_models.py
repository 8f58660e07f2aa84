"""Models for ``lint``: clean ones, each with one fault, and its clean twin. A case leaves them in the cells' variables.

Each case takes the cells' namespace. All run one after another on the same ranks, see :func:`all_cases`.
"""

import copy
import functools
import gc
import io
import tempfile
import warnings
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from tests.helpers import huggingface_models as hf
from tests.helpers import loading_scripts, small_models
from tests.helpers.booted_ranks import execute, namespace, run
from tests.helpers.small_models import Block, Net, batch, loss_of, make_net
from workbench import engine as ours
from workbench import zoo
from workbench.base.codec import decode
from workbench.engine import classic
from workbench.errors import UsageError
from workbench.protocol.commands import Lint, Step, Verify, VerifyReply
from workbench.protocol.lint_reply import LintReply
from workbench.reports.lint_faults import lint_faults
from workbench.reports.verify_report import verify_report
from workbench.runtime import rank as rank_module
from workbench.trace import TraceBuilder
from workbench.trace.columns import Trace

WIDE = 160
"""Width of a net that is no toy: its three blocks have 1.8 MiB."""

ENGINES = {"": ours, "torch": torchs}
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def with_each_engine(function):
    for name, engine in ENGINES.items():
        CASES[f"{function.__name__}{f'[{name}]' if name else ''}"] = functools.partial(function, engine=engine)
    return function


def mesh_of(*shape, names=("replicate", "shard")):
    return init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


def blockwise(model, fully_shard, blocks=None, **options):
    for block in model.blocks if blocks is None else blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def adamw(model):
    """Return an optimizer with a group of parameters per mesh: one operation takes DTensors of one mesh alone."""
    groups = {}
    for param in model.parameters():
        if param.requires_grad:
            groups.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return small_models.adamw([{"params": params} for params in groups.values()], lr=1e-3)


def prepared(ns, model, loss=loss_of, tokens=None):
    """Define a model and its optimizer; ``loss`` and ``tokens`` are what :func:`trained` trains it with."""
    ns["model"] = model
    ns["opt"] = adamw(model)
    ns["loss"], ns["tokens"] = loss, batch(ns["rank"], 0) if tokens is None else tokens


# ---- clean models


@with_each_engine
def clean_zoo(ns, engine):
    torch.manual_seed(0)
    config = zoo.GPTConfig(vocab_size=64, width=128, num_heads=4, num_blocks=4)
    prepared(ns, blockwise(zoo.GPT(config), engine.fully_shard))


@with_each_engine
def clean_wide(ns, engine):
    prepared(ns, blockwise(make_net(dim=WIDE, num_blocks=4), engine.fully_shard))


def clean_huggingface(ns, engine, name):
    model = hf.make(name)
    for block in hf.blocks(model):
        engine.fully_shard(block)
    engine.fully_shard(model)
    prepared(ns, model, hf.loss_of, hf.batch(ns["rank"], 0))


for _name in ("Llama", "Llama, checkpointed", "GPT-2", "Mixtral", "T5"):
    for _suffix, _engine in ENGINES.items():
        CASES[f"clean_{_name}{f'[{_suffix}]' if _suffix else ''}"] = functools.partial(
            clean_huggingface, engine=_engine, name=_name
        )


@with_each_engine
def clean_lora(ns, engine):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(hf.make("Llama"), config)
    blocks = [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    prepared(ns, blockwise(model, engine.fully_shard, blocks), hf.loss_of, hf.batch(ns["rank"], 0))


@with_each_engine
def clean_hsdp(ns, engine):
    prepared(ns, blockwise(make_net(dim=WIDE), engine.fully_shard, mesh=mesh_of(2, 2)))


@with_each_engine
def clean_replicate_axis_of_one(ns, engine):
    prepared(ns, blockwise(make_net(dim=WIDE), engine.fully_shard, mesh=mesh_of(1, 4)))


@with_each_engine
def clean_tp(ns, engine):
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = make_net(dim=16, num_blocks=3)
    for block in model.blocks:
        block.mlp[0] = nn.Linear(16, 64)
        block.mlp[2] = nn.Linear(64, 16)
        torch.manual_seed(1)
        parallelize_module(block, mesh["tp"], {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    tokens = batch(ns["rank"] // 2, 0)  # the ranks that split a tensor see the same data
    prepared(ns, blockwise(model, engine.fully_shard, mesh=mesh["dp"]), tokens=tokens)


@with_each_engine
def clean_bf16(ns, engine):
    policy = engine.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    prepared(ns, blockwise(make_net(dim=WIDE), engine.fully_shard, mp_policy=policy))


@with_each_engine
def clean_offload(ns, engine):
    policy = engine.CPUOffloadPolicy(pin_memory=False)
    prepared(ns, blockwise(make_net(dim=WIDE), engine.fully_shard, offload_policy=policy))


@with_each_engine
def clean_accumulation(ns, engine):
    prepared(ns, blockwise(make_net(dim=WIDE), engine.fully_shard))
    ns["micro_batches"] = 2
    for _ in range(2):
        train_step()


@with_each_engine
def clean_checkpointing_inside_units(ns, engine):
    model = make_net(dim=WIDE)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    prepared(ns, blockwise(model, engine.fully_shard))


@with_each_engine
def clean_checkpointing_around_units(ns, engine):
    model = make_net(dim=WIDE)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(engine.fully_shard(block))
    engine.fully_shard(model)
    prepared(ns, model)


@case
def clean_classic(ns):
    model = make_net(dim=WIDE)
    prepared(ns, classic.FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy([Block])))


def torchs_wrapper(model, **options):
    cpu = torch.device("cpu")
    return torchs.FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy([Block]), device_id=cpu, **{"use_orig_params": True, **options}
    )


@case
def clean_torchs_classic(ns):
    prepared(ns, torchs_wrapper(make_net(dim=WIDE)))


@case
def clean_torchs_flat(ns):
    prepared(ns, torchs_wrapper(make_net(dim=WIDE), use_orig_params=False))


@case
def clean_ddp(ns):
    prepared(ns, DistributedDataParallel(make_net(dim=WIDE)))


@with_each_engine
def clean_after_steps(ns, engine):
    """The root stays unsharded after an evaluation."""
    prepared(ns, blockwise(make_net(dim=WIDE), engine.fully_shard))
    for step in range(2):
        loss_of(ns["model"], batch(ns["rank"], step)).backward()
        ns["opt"].step()
        ns["opt"].zero_grad()
    with torch.no_grad():
        loss_of(ns["model"], batch(ns["rank"], 9))


TRAINED = tuple(CASES)
"""The cases that can also be trained."""

TO_TRAIN = {name for name in TRAINED if not name.endswith("[torch]")}
"""Those that are; a test adds others before it asks for the first result."""

# ---- faults


@with_each_engine
def optimizer_before_shard(ns, engine):
    model = make_net(dim=16)
    prepared(ns, model)
    blockwise(model, engine.fully_shard)


@case
def optimizer_before_torchs_flat(ns):
    model = make_net(dim=16)
    ns["opt"] = torch.optim.SGD(model.parameters(), lr=0.5)
    ns["model"] = torchs_wrapper(model, use_orig_params=False)


@case
def optimizer_before_classic(ns):
    model = make_net(dim=16)
    ns["opt"] = adamw(model)
    ns["model"] = classic.FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy([Block]))


@with_each_engine
def clean_optimizer_of_another_model(ns, engine):
    """It belongs to a model that no variable holds, of other shapes."""
    prepared(ns, blockwise(make_net(dim=16), engine.fully_shard))
    ns["other"] = adamw(make_net(dim=7))


class Rotary(Net):
    """A net with a buffer that is in no state dict."""

    def __init__(self, dim=16):
        super().__init__(dim=dim)
        self.register_buffer("angles", torch.arange(1.0, dim + 1), persistent=False)

    def forward(self, tokens):
        return super().forward(tokens)


@contextmanager
def memory_of(value):
    """Let ``to_empty`` find memory that holds a value everywhere, as new pages hold zeros."""
    allocate = torch.empty_like
    with mock.patch.object(torch, "empty_like", lambda *args, **options: allocate(*args, **options).fill_(value)):
        yield


def from_meta(ns, engine, *, angles, params=True):
    with torch.device("meta"):
        model = Rotary()
    blockwise(model, engine.fully_shard)
    with memory_of(0.0):
        model.to_empty(device="cpu")
    for param in model.parameters() if params else ():
        nn.init.ones_(param)
    if angles:
        model.angles.copy_(torch.arange(1.0, 17))
    prepared(ns, model)


@with_each_engine
def never_written(ns, engine):
    from_meta(ns, engine, angles=False)


@with_each_engine
def never_written_parameters(ns, engine):
    from_meta(ns, engine, angles=True, params=False)


@with_each_engine
def clean_from_meta(ns, engine):
    from_meta(ns, engine, angles=True)


@with_each_engine
def clean_loaded(ns, engine):
    """A checkpoint restores the parameters, in place, and the code computes the buffer again."""
    from_meta(ns, engine, angles=False, params=False)
    for param in ns["model"].parameters():
        param.detach().to_local().fill_(1.0)
    ns["model"].angles = torch.arange(1.0, 17)


@with_each_engine
def still_on_meta(ns, engine):
    with torch.device("meta"):
        model = Rotary()
    blockwise(model, engine.fully_shard)
    prepared(ns, model)


@with_each_engine
def in_no_unit(ns, engine):
    model = make_net(dim=16)
    prepared(ns, blockwise(model, engine.fully_shard, ignored_params={model.scale}))
    stepped(ns)


@case
def clean_dtensor_beside_torchs_units(ns):
    model = make_net(dim=16)
    model.experts = nn.Parameter(distribute_tensor(torch.ones(4), mesh_of(4), [Split(0)]))
    prepared(ns, blockwise(model, torchs.fully_shard, ignored_params={model.experts}))


@with_each_engine
def clean_ignored_frozen(ns, engine):
    model = make_net(dim=16)
    model.scale.requires_grad_(False)
    prepared(ns, blockwise(model, engine.fully_shard, ignored_params={model.scale}))


@with_each_engine
def replicas_differ(ns, engine):
    model = make_net(dim=16, seed=ns["rank"] // 2)
    prepared(ns, blockwise(model, engine.fully_shard, mesh=mesh_of(2, 2)))


@with_each_engine
def ignored_parameters_differ(ns, engine):
    model = make_net(dim=16)
    model.scale.requires_grad_(False).fill_(float(ns["rank"] == 3))
    prepared(ns, blockwise(model, engine.fully_shard, ignored_params={model.scale}))


@case
def ddp_differs(ns):
    prepared(ns, DistributedDataParallel(make_net(dim=16)))
    with torch.no_grad():
        ns["model"].module.scale.add_(float(ns["rank"] == 1))


@case
def clean_ignored_by_ddp(ns):
    model = make_net(dim=16)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["scale"])
    prepared(ns, DistributedDataParallel(model))
    with torch.no_grad():
        model.scale.add_(ns["rank"])


@case
def added_after_ddp(ns):
    model = make_net(dim=16)
    model.scale.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model.scale.requires_grad_(True)
    model.head = copy.deepcopy(model.head)
    prepared(ns, ddp)
    with torch.no_grad():
        model.scale.add_(ns["rank"])


@case
def options_differ(ns):
    """As where each rank gives its own loss to ReduceLROnPlateau."""
    prepared(ns, DistributedDataParallel(make_net(dim=16)))
    ns["opt"].param_groups[0]["lr"] *= 1 + ns["rank"] % 2
    loss_of(ns["model"], ns["tokens"]).backward()
    ns["opt"].step()


@case
def options_differed(ns):
    """As where the schedules of all ranks have ended at the same value."""
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    rate = ns["opt"].param_groups[0]["lr"]
    for factor in (1 + ns["rank"] % 2, 1):
        ns["opt"].param_groups[0]["lr"] = rate * factor
        stepped(ns)


@case
def other_options_differ(ns):
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    ns["opt"].param_groups[0]["weight_decay"] = 0.01 * ns["rank"]
    stepped(ns)


@case
def steps_differ(ns):
    """As where only rank 0 has a file to resume its optimizer from."""
    prepared(ns, DistributedDataParallel(make_net(dim=16)))
    loss_of(ns["model"], ns["tokens"]).backward()
    ns["opt"].step()
    for state in ns["opt"].state.values():
        state["step"] += 12 * (ns["rank"] == 0)


@case
def scaler_of_own_shards(ns):
    prepared(ns, torchs_wrapper(make_net(dim=16)))
    ns["scaler"] = torch.amp.GradScaler("cpu")


@case
def clean_scaler_of_all_shards(ns):
    prepared(ns, torchs_wrapper(make_net(dim=WIDE)))
    ns["scaler"] = ShardedGradScaler("cpu")


@with_each_engine
def clean_scaler_of_dtensors(ns, engine):
    prepared(ns, blockwise(make_net(dim=WIDE), engine.fully_shard))
    ns["scaler"] = torch.amp.GradScaler("cpu")


@with_each_engine
def buffers_differ(ns, engine):
    model = Rotary()
    model.angles += ns["rank"]
    prepared(ns, blockwise(model, engine.fully_shard))


@with_each_engine
def tied_in_two_units(ns, engine):
    """What ``fully_shard`` of torch before 2.13 makes of tied weights."""
    model = make_net(dim=16)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    engine.fully_shard(model.embed)
    prepared(ns, blockwise(model, engine.fully_shard))


@case
def clean_tied_after_torchs_sharding(ns):
    model = make_net(dim=16)
    torchs.fully_shard(model.embed)
    torchs.fully_shard(model.head)
    model = blockwise(model, torchs.fully_shard)
    model.head.weight = model.embed.weight
    prepared(ns, model)
    stepped(ns)


@with_each_engine
def clean_tied(ns, engine):
    prepared(ns, blockwise(make_net(dim=16, tied=True), engine.fully_shard))


@with_each_engine
def clean_copied_layers(ns, engine):
    model = make_net(dim=16)
    for block in model.blocks:
        block.load_state_dict(model.blocks[0].state_dict())
    prepared(ns, blockwise(model, engine.fully_shard))


def rows():
    return TensorDataset(torch.arange(64.0).reshape(16, 4), torch.arange(16))


@case
def same_data(ns):
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    torch.manual_seed(0)
    ns["loader"] = DataLoader(Subset(rows(), range(12)), batch_size=2, shuffle=True)


@case
def clean_data_by_sampler(ns):
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    torch.manual_seed(0)
    ns["loader"] = DataLoader(rows(), batch_size=2, sampler=DistributedSampler(rows()))
    ns["test_loader"] = DataLoader(rows(), batch_size=2)


@case
def clean_data_by_seed(ns):
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    ns["loader"] = DataLoader(rows(), shuffle=True, generator=torch.Generator().manual_seed(ns["rank"]))


@case
def clean_data_by_rank(ns):
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    torch.manual_seed(0)
    ns["loader"] = DataLoader(TensorDataset(torch.arange(16) + 16 * ns["rank"]), shuffle=True)


class Files(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        raise AssertionError("lint reads no data")


@case
def clean_unknown_data(ns):
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    ns["loader"] = DataLoader(Files(), shuffle=True)


class Stream(IterableDataset):
    def __init__(self, first, count=6):
        self.first, self.count = first, count

    def __iter__(self):
        for place in range(self.count):
            yield torch.arange(self.first + place, self.first + place + 8) % 7


def trained_from(ns, loader, model=None, part=lambda rows: rows, *, keeps=True):
    """Train with the rows of a loader: parts of them, if ``part`` takes some; ``keeps``: the loader lives on."""
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard) if model is None else model)
    iterator = iter(loader)
    if keeps:
        ns["loader"] = loader
    del loader
    for rows in iterator:
        ns["loss"](ns["model"], part(rows)).backward()
        ns["opt"].step()
        ns["opt"].zero_grad()


@with_each_engine
def same_stream(ns, engine):
    trained_from(ns, DataLoader(Stream(0), batch_size=2), blockwise(make_net(dim=16), engine.fully_shard))


@case
def same_stream_under_ddp(ns):
    trained_from(ns, DataLoader(Stream(0), batch_size=2), DistributedDataParallel(make_net(dim=16)))


@case
def same_stream_of_a_loader_without_a_name(ns):
    trained_from(ns, DataLoader(Stream(0), batch_size=2), keeps=False)


@case
def same_order_without_shuffle(ns):
    rows = TensorDataset(torch.arange(96).reshape(12, 8) % 7)
    trained_from(ns, DataLoader(rows, batch_size=2), part=lambda rows: rows[0])


@case
def clean_stream_by_rank(ns):
    trained_from(ns, DataLoader(Stream(9 * ns["rank"]), batch_size=2))


@case
def clean_rows_by_rank(ns):
    trained_from(ns, DataLoader(Stream(0, 12), batch_size=4), part=lambda rows: rows[ns["rank"]][None])


@case
def clean_one_batch_again_and_again(ns):
    trained_from(ns, [next(iter(DataLoader(Stream(0), batch_size=2)))] * 3)


@case
def clean_evaluated_alike(ns):
    trained_from(ns, DataLoader(Stream(9 * ns["rank"]), batch_size=2))
    ns["val_loader"] = DataLoader(Stream(0), batch_size=2)
    with torch.no_grad():
        for rows in ns["val_loader"]:
            ns["model"](rows)


class Gathering(Net):
    """A model that each rank gives all rows, and that itself moves activations between ranks."""

    def forward(self, tokens):
        found = super().forward(tokens)
        parts = torch.empty(dist.get_world_size() * len(found), *found.shape[1:])
        dist.all_gather_into_tensor(parts, found.detach())
        return found


@case
def clean_activations_moved_by_itself(ns):
    model = make_net(dim=16)
    model.__class__ = Gathering
    trained_from(ns, DataLoader(Stream(0), batch_size=2), blockwise(model, ours.fully_shard))


@with_each_engine
def left_out_of_optimizer(ns, engine):
    model = blockwise(make_net(dim=16), engine.fully_shard)
    ns["model"] = model
    ns["opts"] = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.blocks, model.embed)]


@case
def left_out_of_torchs_flat(ns):
    ns["model"] = torchs_wrapper(make_net(dim=16), use_orig_params=False)
    ns["opt"] = torch.optim.SGD(ns["model"].module.blocks[0].parameters(), lr=0.1)


@with_each_engine
def clean_two_optimizers(ns, engine):
    model = ns["model"] = blockwise(make_net(dim=16), engine.fully_shard)
    params = list(model.parameters())
    ns["opts"] = {"a": torch.optim.SGD(params[:3], lr=0.1), "b": torch.optim.SGD(params[3:], lr=0.1)}


def stepped(ns, count=1, sync=None, **options):
    """Take optimizer steps of the model; ``sync``: whether gradients are reduced."""
    for _ in range(count):
        if sync is not None:
            ns["model"].set_requires_gradient_sync(sync)
        ns["loss"](ns["model"], ns["tokens"]).backward()
        ns["opt"].step()
        ns["opt"].zero_grad(**options)


@with_each_engine
def sync_left_off(ns, engine):
    prepared(ns, blockwise(make_net(dim=16), engine.fully_shard))
    stepped(ns)
    stepped(ns, 2, sync=False)


@case
def copies_left_unaveraged(ns):
    options = {"device_mesh": mesh_of(4, 1), "sharding_strategy": torchs.ShardingStrategy.HYBRID_SHARD}
    prepared(ns, torchs_wrapper(make_net(dim=16), **options))


@case
def sync_left_off_in_ddp(ns):
    prepared(ns, DistributedDataParallel(make_net(dim=16)))
    with ns["model"].no_sync():
        stepped(ns)


@with_each_engine
def all_reduce_left_off(ns, engine):
    prepared(ns, blockwise(make_net(dim=16), engine.fully_shard, mesh=mesh_of(2, 2)))
    stepped(ns)
    ns["model"].set_requires_all_reduce(False)
    stepped(ns, 2)


@with_each_engine
def clean_all_reduce_off_before_the_step(ns, engine):
    prepared(ns, blockwise(make_net(dim=16), engine.fully_shard, mesh=mesh_of(2, 2)))
    for is_last in (False, True):
        ns["model"].set_requires_all_reduce(is_last)
        loss_of(ns["model"], ns["tokens"]).backward()
    ns["opt"].step()
    ns["opt"].zero_grad()


def trained_inside(ns, count=1, average=None):
    """Take optimizer steps of the model in the wrapper, whose gradients the wrapper does not average."""
    for _ in range(count):
        loss_of(ns["model"].module, ns["tokens"]).backward()
        for param in ns["model"].parameters() if average else ():
            if param.grad is not None:
                dist.all_reduce(param.grad, op=average)
        ns["opt"].step()
        ns["opt"].zero_grad()


@case
def wrapper_bypassed(ns):
    prepared(ns, DistributedDataParallel(make_net(dim=16)))
    trained_inside(ns, 3)


@case
def wrapper_bypassed_later(ns):
    prepared(ns, DistributedDataParallel(make_net(dim=16)))
    stepped(ns, 2)
    trained_inside(ns)


@case
def clean_wrapper_averaged_by_hand(ns):
    prepared(ns, DistributedDataParallel(make_net(dim=16)))
    trained_inside(ns, 2, average=dist.ReduceOp.SUM)


@case
def clean_wrapper_bypassed_for_evaluation(ns):
    prepared(ns, DistributedDataParallel(make_net(dim=16)))
    stepped(ns)
    with torch.no_grad():
        loss_of(ns["model"].module, ns["tokens"])
    loss_of(ns["model"].module, ns["tokens"]).backward()  # the gradients are dropped
    ns["opt"].zero_grad()
    ns["model"].load_state_dict({f"module.{key}": value for key, value in ns["model"].module.state_dict().items()})
    stepped(ns)


@with_each_engine
def clean_sync_off_before_the_step(ns, engine):
    """The flag is off whenever one looks, and gradients of the run's last micro-batch are left."""
    prepared(ns, blockwise(make_net(dim=16), engine.fully_shard))
    for is_last in (False, True, False):
        ns["model"].set_requires_gradient_sync(is_last)
        loss_of(ns["model"], ns["tokens"]).backward()
        if is_last:
            ns["model"].set_requires_gradient_sync(False)
            ns["opt"].step()
            ns["opt"].zero_grad()


@case
def clean_ddp_accumulation(ns):
    prepared(ns, DistributedDataParallel(make_net(dim=16)))
    with ns["model"].no_sync():
        loss_of(ns["model"], ns["tokens"]).backward()
    loss_of(ns["model"], ns["tokens"]).backward()
    with torch.no_grad(), ns["model"].no_sync():
        loss_of(ns["model"], ns["tokens"])
    ns["opt"].step()


@with_each_engine
def kept_by_zero_grad(ns, engine):
    prepared(ns, blockwise(make_net(dim=16), engine.fully_shard))
    stepped(ns)
    ns["model"].set_requires_gradient_sync(False)
    loss_of(ns["model"], ns["tokens"]).backward()
    ns["model"].zero_grad()
    stepped(ns, sync=True)


@with_each_engine
def no_zero_grad(ns, engine):
    prepared(ns, blockwise(make_net(dim=16), engine.fully_shard))
    for _ in range(3):
        loss_of(ns["model"], ns["tokens"]).backward()
        ns["opt"].step()


def fed(ns, sampler, epochs=3, **options):
    """Train the model for some epochs, with an evaluation after each that draws the same order."""
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    ns["loader"] = DataLoader(rows(), batch_size=2, sampler=sampler, **options)
    ns["evaluated"] = DataLoader(rows(), batch_size=4, sampler=DistributedSampler(rows()))
    for epoch in range(epochs):
        yield epoch
        for _ in ns["loader"]:
            stepped(ns)
        for _ in ns["evaluated"]:
            pass


@case
def no_set_epoch(ns):
    list(fed(ns, DistributedSampler(rows())))


@case
def clean_set_epoch(ns):
    sampler = DistributedSampler(rows())
    next(iter(sampler))
    for epoch in fed(ns, sampler):
        sampler.set_epoch(epoch)


@case
def clean_unshuffled(ns):
    list(fed(ns, DistributedSampler(rows(), shuffle=False)))


@case
def sampler_seeds_differ(ns):
    list(fed(ns, DistributedSampler(rows(), seed=ns["rank"]), epochs=1))


@case
def same_rank_of_samplers(ns):
    list(fed(ns, DistributedSampler(rows(), num_replicas=4, rank=0), epochs=1))


class Dropping(Net):
    def __init__(self, dim=16):
        super().__init__(dim=dim)
        self.drop = nn.Dropout(0.1)


def seeded_by_rank(ns, states):
    torch.manual_seed(0)
    prepared(ns, blockwise(Dropping(), ours.fully_shard))
    ns["states"] = states
    torch.manual_seed(ns["rank"])
    torch.set_rng_state(states[ns["rank"]])


@case
def same_random_numbers(ns):
    seeded_by_rank(ns, [torch.Generator().manual_seed(7).get_state()] * 4)


@case
def clean_random_numbers_by_rank(ns):
    seeded_by_rank(ns, [torch.Generator().manual_seed(7 + rank).get_state() for rank in range(4)])


@case
def clean_random_numbers_equal_before(ns):
    torch.manual_seed(0)
    prepared(ns, blockwise(Dropping(), ours.fully_shard))
    torch.set_rng_state(torch.get_rng_state())


def scheduled(ns, last_epoch):
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    ns["schedule"] = torch.optim.lr_scheduler.StepLR(ns["opt"], 10)
    ns["schedule"].load_state_dict({"last_epoch": last_epoch})


@case
def optimizer_not_resumed(ns):
    scheduled(ns, 30)
    stepped(ns)


@case
def not_resumed_before_the_first_step(ns):
    scheduled(ns, 30)


@case
def not_resumed_by_step(ns):
    checkpoint = io.BytesIO()
    torch.save({"model": {}, "step": 40}, checkpoint)
    checkpoint.seek(0)
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    ns["start_step"] = torch.load(checkpoint)["step"]
    stepped(ns)


@case
def clean_resumed(ns):
    scheduled(ns, 0)
    stepped(ns)
    saved = ns["opt"].state_dict()
    ns["opt"] = adamw(ns["model"])
    ns["opt"].load_state_dict(saved)
    ns["schedule"] = torch.optim.lr_scheduler.StepLR(ns["opt"], 10)
    ns["schedule"].load_state_dict({"last_epoch": 30})
    stepped(ns)


@case
def clean_new_optimizer_of_old_parameters(ns):
    """A checkpoint of a training, from which another one begins."""
    not_resumed_by_step(ns)
    del ns["start_step"]
    ns["max_step"], ns["step"], ns["opt"] = 40, 1, adamw(ns["model"])
    stepped(ns)


@case
def clean_optimizer_without_state(ns):
    scheduled(ns, 30)
    ns["opt"] = torch.optim.SGD(ns["model"].parameters(), lr=0.1)
    ns["schedule"] = torch.optim.lr_scheduler.StepLR(ns["opt"], 10)
    ns["schedule"].load_state_dict({"last_epoch": 30})
    stepped(ns)


@with_each_engine
def tie_lost(ns, engine):
    with torch.device("meta"):
        model = make_net(dim=16, tied=True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    prepared(ns, blockwise(model, engine.fully_shard))


@case
def tie_lost_by_assign(ns):
    model = make_net(dim=16, tied=True)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    prepared(ns, blockwise(model, ours.fully_shard))


@case
def clean_tied_again(ns):
    model = make_net(dim=16, tied=True)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model.head.weight = model.embed.weight
    prepared(ns, blockwise(model, ours.fully_shard))


@with_each_engine
def tied_in_two_units_and_trained(ns, engine):
    tied_in_two_units(ns, engine)
    stepped(ns, 2)


@with_each_engine
def parameters_replaced(ns, engine):
    model = blockwise(make_net(dim=16), engine.fully_shard)
    prepared(ns, model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    stepped(ns)


@case
def head_replaced(ns):
    net = make_net(dim=16)
    ns["opt"] = adamw(net)
    torch.manual_seed(0)
    net.head = nn.Linear(16, net.head.out_features)
    ns["model"] = DistributedDataParallel(net)


@with_each_engine
def state_left_behind(ns, engine):
    model = make_net(dim=16)
    prepared(ns, model)
    ns["tokens"] = batch(0, 0)
    stepped(ns)
    blockwise(model, engine.fully_shard)
    ns["opt"].param_groups[0]["params"] = list(model.parameters())
    stepped(ns)


@case
def hook_never_called(ns):
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard))
    ns["model"].head.weight.register_hook(lambda grad: grad)


@with_each_engine
def low_precision_master(ns, engine):
    prepared(ns, blockwise(make_net(dim=16).bfloat16(), engine.fully_shard))


@case
def low_precision_in_torchs_classic(ns):
    prepared(ns, torchs_wrapper(make_net(dim=16).half()))


@case
def low_precision_in_ddp(ns):
    prepared(ns, DistributedDataParallel(make_net(dim=16).bfloat16()))


@case
def clean_frozen_in_bf16(ns):
    model = make_net(dim=16).bfloat16().requires_grad_(False)
    model.head.float().requires_grad_(True)
    prepared(ns, blockwise(model, ours.fully_shard))


@case
def clean_before_the_optimizer(ns):
    ns["model"] = blockwise(make_net(dim=16).bfloat16(), ours.fully_shard)


class KeepsMaster(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        """Do nothing."""


@case
def clean_with_an_optimizer_of_its_own(ns):
    ns["model"] = blockwise(make_net(dim=16).bfloat16(), ours.fully_shard)
    ns["opt"] = KeepsMaster(ns["model"].parameters())


class Outer(nn.Module):
    """A model whose parts have methods."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Encoder(dim=16)
        self.blocks = self.net.blocks

    def features(self, tokens):
        return self.net.encode(tokens)

    def init_weights(self):
        nn.init.normal_(self.net.embed.weight)
        for part in (self.net.head, self.net.embed):
            part.weight.data.mul_(1.0)

    def get_embeddings(self):
        return self.net.embed

    def gathered(self, tokens):
        self.unshard()
        return self.net.embed(tokens)

    def forward(self, tokens):
        return self.net(tokens)


class Encoder(Net):
    def encode(self, tokens):
        return self._hidden(tokens) * 2

    def _hidden(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def scaled(self, x):
        return x * self.scale

    def generate(self, tokens, count=2):
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens

    def num_params(self):
        return sum(p.numel() for p in self.parameters()) - self.embed.weight.numel()

    def describe(self):
        return f"{len(self.blocks)} blocks"


CALLS = """
def train_step(tokens):
    return model.{}({})
"""


def defined(ns, text):
    """Define functions as a cell does."""
    exec(compile(text, "cell", "exec"), ns)


@with_each_engine
def method_without_hooks(ns, engine):
    torch.manual_seed(0)
    prepared(ns, blockwise(Encoder(dim=16), engine.fully_shard))
    defined(ns, CALLS.format("encode", "tokens"))


@with_each_engine
def method_of_a_part(ns, engine):
    prepared(ns, blockwise(Outer(), engine.fully_shard))
    defined(ns, CALLS.format("features", "tokens"))


@case
def call_of_a_part(ns):
    prepared(ns, blockwise(Outer(), ours.fully_shard))
    defined(ns, "def train_step(self, tokens):\n    return self.model.net.embed(tokens)")


@case
def clean_methods_of_parts(ns):
    prepared(ns, blockwise(Outer(), ours.fully_shard))
    for method in ("init_weights", "get_embeddings", "gathered", "net.num_params"):
        defined(ns, CALLS.format(method, "tokens").replace("train_step", f"call_{method.replace('.', '_')}"))
    defined(ns, "def counted():\n    return sum(p.numel() for p in model.net.embed.parameters()), id(model.net.embed)")


@case
def clean_calls_while_unsharded(ns):
    call_of_a_part(ns)
    defined(ns, "def begin():\n    model.unshard()")


@case
def method_with_a_parameter(ns):
    torch.manual_seed(0)
    prepared(ns, blockwise(Encoder(dim=16), ours.fully_shard))
    defined(ns, CALLS.format("scaled", "tokens"))


@with_each_engine
def clean_registered(ns, engine):
    method_without_hooks(ns, engine)
    engine.register_fsdp_forward_method(ns["model"], "encode")


@case
def clean_methods(ns):
    torch.manual_seed(0)
    prepared(ns, blockwise(Encoder(dim=16), ours.fully_shard))
    for method in ("generate", "num_params", "describe", "train", "named_parameters", "set_requires_gradient_sync"):
        defined(ns, CALLS.format(method, "tokens").replace("train_step", f"call_{method}"))
    defined(ns, CALLS.replace("model.{}({})", "tokenizer.encode(tokens)"))


@with_each_engine
def unsplit_unit(ns, engine):
    prepared(ns, engine.fully_shard(make_net(dim=WIDE)))


@case
def unsplit_by_class(ns):
    model = nn.Sequential(nn.Embedding(1 << 17, 128), nn.Linear(128, 8), nn.Linear(8, 1 << 20))
    prepared(ns, ours.fully_shard(model))


@case
def clean_toy_in_one_unit(ns):
    prepared(ns, ours.fully_shard(make_net(dim=16)))


@with_each_engine
def nothing_sharded(ns, engine):
    prepared(ns, blockwise(make_net(dim=WIDE), engine.fully_shard, mesh=mesh_of(4, 1)))


class Experts(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.rest = nn.Linear(64, 64)

    def forward(self, x):
        return self.rest(x)


@with_each_engine
def rows_lost_to_padding(ns, engine):
    prepared(ns, engine.fully_shard(Experts(2, 1 << 18)))


@case
def much_padding(ns):
    prepared(ns, ours.fully_shard(Experts(7, 1 << 19)))


@with_each_engine
def clean_split_by_columns(ns, engine):
    prepared(ns, engine.fully_shard(Experts(2, 1 << 18), shard_placement_fn=lambda p: Shard(p.ndim - 1)))


def frozen_but_the_first(model):
    model.requires_grad_(False)
    for block in model.blocks:
        block.norm.requires_grad_(True)
    return model


@case
def frozen_in_flat_parameter(ns):
    prepared(ns, torchs_wrapper(frozen_but_the_first(make_net(dim=3 * WIDE))))


@case
def frozen_in_our_flat_parameter(ns):
    with redirect_stderr(io.StringIO()):
        wrapper = classic.FullyShardedDataParallel(
            frozen_but_the_first(make_net(dim=3 * WIDE)),
            auto_wrap_policy=ModuleWrapPolicy([Block]),
            use_orig_params=True,
        )
    prepared(ns, wrapper)


@with_each_engine
def clean_frozen_in_units(ns, engine):
    prepared(ns, blockwise(frozen_but_the_first(make_net(dim=3 * WIDE)), engine.fully_shard))


@with_each_engine
def checkpoint_around_units(ns, engine):
    model = make_net(dim=16)
    model.blocks = nn.Sequential(*model.blocks)
    for block in model.blocks:
        engine.fully_shard(block)
    model.blocks = nn.ModuleList([checkpoint_wrapper(model.blocks)])
    engine.fully_shard(model)
    prepared(ns, model)


@with_each_engine
def tiny_units(ns, engine):
    model = make_net(dim=WIDE, num_blocks=9)
    for block in model.blocks:
        engine.fully_shard(block.norm)
    engine.fully_shard(model.embed)
    prepared(ns, blockwise(model, engine.fully_shard))


@with_each_engine
def mesh_turned_round(ns, engine):
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    prepared(ns, blockwise(make_net(dim=16), engine.fully_shard, mesh=mesh))
    return {"local_world_size": 2}


@with_each_engine
def clean_mesh_of_hosts(ns, engine):
    prepared(ns, blockwise(make_net(dim=16), engine.fully_shard, mesh=mesh_of(2, 2)))
    return {"local_world_size": 2}


@case
def clean_mesh_on_one_host(ns):
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard, mesh=mesh))


@case
def clean_hosts_of_unknown_size(ns):
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    prepared(ns, blockwise(make_net(dim=16), ours.fully_shard, mesh=mesh))
    return {"local_world_size": 3}


# ---- programs that load a checkpoint


@functools.cache
def _checkpoints():
    """Return the folder of their files, which lasts as long as the process that made it."""
    made = [tempfile.TemporaryDirectory()] if dist.get_rank() == 0 else [None]
    folder = [made[0].name] if made[0] else [""]
    dist.broadcast_object_list(folder)
    loading_scripts.write_files(folder[0], lambda model: blockwise(model, torchs.fully_shard))
    return made[0], folder[0]


def loads(ns, text):
    """Run a program as a cell."""
    ns["folder"] = _checkpoints()[1]
    exec(compile(text, "a program", "exec"), ns)


for _name, (_verdict, _text) in loading_scripts.SCRIPTS.items():
    _prefix = "" if _verdict == loading_scripts.FAULT else "clean_"
    CASES[f"{_prefix}loads_{_name}"] = functools.partial(loads, text=_text)


# ---- training the clean ones

NUM_STEPS = 2
"""Too few for a verdict on a slow rank: other processes of a busy machine make one of the ranks slow."""


def train_step():
    """Take a step of the model among the variables, always with the same data."""
    ns = namespace()
    count = ns.get("micro_batches", 1)
    for micro in range(count):
        if count > 1:
            ns["model"].set_requires_gradient_sync(micro == count - 1)
        loss = ns["loss"](ns["model"], ns["tokens"])
        loss.backward()
    ns["opt"].step()
    ns["opt"].zero_grad()
    return loss.item()


def _trained(recorder):
    """Train the model, and verify a step; return what was recorded, and the reply of ``verify`` or its refusal."""
    namespace()["train_step"] = train_step
    begin = recorder.next_step
    execute(Step(count=NUM_STEPS))
    try:
        verified = execute(Verify("model"))
    except UsageError as error:
        verified = str(error)
    return begin, recorder.header, verified


# ---- running them


def _on_this_rank(to_train):
    """Run every case, and train those named in ``to_train``.

    Return by name the reply or the error of ``lint``, and what :func:`_trained` returned; and the header and all rows.
    """
    ns = namespace()
    begin = dict(ns)
    replies, trained = {}, {}
    runtime = rank_module.this_rank()
    for name, make in CASES.items():
        runtime.history.forget()
        try:
            with warnings.catch_warnings():  # of libraries, and of wrappers on what lint names too
                warnings.simplefilter("ignore")
                groups = make(ns) or {}
            rank_module._after_cell(None)
            rank_module._runtime.groups.local_world_size = groups.get("local_world_size", 4)
            replies[name] = execute(Lint())
            if name in to_train:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    trained[name] = _trained(runtime.recorder)
        except UsageError as error:
            replies[name] = str(error)
        except Exception as error:
            error.add_note(f"case: {name}")
            raise
        finally:
            runtime.groups.local_world_size = 4
            for variable in [each for each in ns if each not in begin]:
                del ns[variable]
            gc.collect()
    return replies, trained, (runtime.recorder.header, runtime.recorder.drain())


@functools.cache
def _by_rank():
    hf.load()  # new ranks inherit it, and never collect it: half of this run was imports and collections
    return run(4, _on_this_rank, frozenset(TO_TRAIN), timeout_s=800, fresh=True)


@functools.cache
def all_cases():
    """Return the replies of the four ranks to each case, by name."""
    return {name: [decode(LintReply, replies[name], "reply") for replies, *_ in _by_rank()] for name in CASES}


@functools.cache
def _trace():
    """Return the trace of all cases that were trained on the four ranks."""
    builder = TraceBuilder()
    for rank, (_, _, (header, drained)) in enumerate(_by_rank()):
        builder.update_header(header, rank=rank)
        builder.append(rank, drained.rows, lost=drained.lost, key_frame=drained.key_frame)
    return builder.snapshot()


def trace_of(name):
    """Return the trace of the steps of a case, with its units alone."""
    begin, header, _ = _by_rank()[0][1][name]
    part = _trace().slice(first=begin, last=begin + NUM_STEPS - 1)
    known = {unit.index for unit in header.units if unit.in_use}
    units = tuple(replace(unit, gone=unit.index not in known) for unit in part.header.units)
    return Trace(replace(part.header, units=units), part.ranks)


def verified(name):
    """Return the report of ``verify`` on a case, or why it refuses."""
    replies = [trained[name][-1] for _, trained, _ in _by_rank()]
    if isinstance(replies[0], str):
        return replies[0]
    return verify_report([decode(VerifyReply, reply, "reply") for reply in replies])


def faults_of(name):
    """Return the faults of a case, those of a comparison of ranks included."""
    return lint_faults(all_cases()[name])
