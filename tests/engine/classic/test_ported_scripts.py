"""Scripts of torch's wrapper, ported by changing only their imports, give the same bits on every rank."""

import functools
import shutil
import tempfile
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.helpers import huggingface_models
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import FROZEN_BESIDE_TRAINED, NO_SHARD, OLD_CALLS, SHARDED_TENSOR, ignoring_warnings
from tests.helpers.wrapped_models import CPU, assert_same_tree, kept

PACKAGES = ("workbench.engine.classic", "torch.distributed.fsdp")


# ---- digits


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12)
        self.fc1, self.fc2 = nn.Linear(12 * 4 * 4, 20), nn.Linear(20, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


def trains_digits(package):
    fsdp, wrap = import_module(package), import_module(f"{package}.wrap")
    torch.manual_seed(0)
    model = fsdp.FullyShardedDataParallel(
        Digits(),
        auto_wrap_policy=functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=500),
        device_id=CPU,
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0, foreach=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    data = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(2):
        model.train()
        for _ in range(3):
            images, digits = torch.randn(6, 1, 12, 12, generator=data), torch.randint(10, (6,), generator=data)
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), digits)
            loss.backward()
            optimizer.step()
            seen.append(kept(loss))
        schedule.step()
        model.eval()
        with torch.no_grad():
            total = F.nll_loss(model(torch.ones(4, 1, 12, 12)), torch.arange(4), reduction="sum")
        dist.all_reduce(total)
        seen.append(total)
    config = fsdp.FullStateDictConfig(rank0_only=True)  # on a CPU torch's wrapper frees what it offloads
    with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, config):
        return seen, [type(each).__name__ for each in model.modules()], kept(dict(model.state_dict()))


# ---- language


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    def __init__(self, vocabulary=31, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trains_language(package, kind, use_orig_params):
    fsdp, wrap = import_module(package), import_module(f"{package}.wrap")
    api = fsdp.FullyShardedDataParallel
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made(seed):
        torch.manual_seed(seed)
        model = api(
            Language(),
            auto_wrap_policy=functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Layer}),
            mixed_precision=fsdp.MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
            sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD,
            backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
            limit_all_gathers=True,
            use_orig_params=use_orig_params,
            device_id=CPU,
            device_mesh=mesh,
        )
        options = getattr(fsdp, f"{kind}OptimStateDictConfig")(
            offload_to_cpu=False
        )  # torch's next gather overwrites it
        api.set_state_dict_type(model, fsdp.StateDictType[f"{kind.upper()}_STATE_DICT"], None, options)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    data = torch.Generator().manual_seed(dist.get_rank())

    def trained(model, optimizer):
        for _ in range(3):
            tokens = torch.randint(31, (2, 7), generator=data)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            seen.append(kept(loss))
            # torch's wrapper sums squares in the order of a set, so the last bits of other norms depend on chance
            seen.append(kept(model.clip_grad_norm_(0.01, norm_type=float("inf"))))
            optimizer.step()
            optimizer.zero_grad()

    seen = []
    model, optimizer = made(0)
    trained(model, optimizer)
    saved, saved_optimizer = model.state_dict(), api.optim_state_dict(model, optimizer)
    kinds = [type(each).__name__ for each in saved.values()]
    first = kept(dict(saved)), kept(saved_optimizer)
    model, optimizer = made(1)
    model.load_state_dict(saved)
    optimizer.load_state_dict(api.optim_state_dict_to_load(model, optimizer, saved_optimizer))
    trained(model, optimizer)
    return seen, kinds, first, kept(dict(model.state_dict())), kept(api.optim_state_dict(model, optimizer))


# ---- adapters


class Adapted(nn.Module):
    def __init__(self, dim, rank=2):
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def trains_adapters(package, strategy):
    fsdp, wrap = import_module(package), import_module(f"{package}.wrap")
    torch.manual_seed(0)
    model = fsdp.FullyShardedDataParallel(
        nn.Sequential(*(Adapted(6) for _ in range(3)), nn.Linear(6, 1)),
        auto_wrap_policy=functools.partial(
            wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Adapted)
        ),
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        use_orig_params=True,
        device_id=CPU,
    )
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, foreach=True)
    data = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(3):
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():
                loss = model(torch.randn(4, 6, generator=data)).square().mean()
                (loss / 3).backward()
            seen.append(kept(loss))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    return seen, trainable, kept(dict(model.state_dict()))


# ---- summaries


def trains_summaries(package):
    """A GPT-2 wrapped by layer class, with ``optim_input``, attributes, and a full checkpoint loaded by a new model."""
    fsdp, wrap = import_module(package), import_module(f"{package}.wrap")
    api = fsdp.FullyShardedDataParallel

    def made(seed):
        torch.manual_seed(seed)
        plain = huggingface_models.make("GPT-2")
        model = api(
            plain,
            auto_wrap_policy=functools.partial(
                wrap.transformer_auto_wrap_policy, transformer_layer_cls={type(plain.transformer.h[0])}
            ),
            sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP,
            mixed_precision=None,
            limit_all_gathers=True,
            device_id=CPU,
        )
        options = fsdp.FullOptimStateDictConfig(offload_to_cpu=False)  # on a CPU torch's next gather overwrites it
        api.set_state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, None, options)
        return model, torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=True)

    def trained(model, optimizer, steps):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.85)
        for step in steps:
            model.train()
            loss = huggingface_models.loss_of(model, huggingface_models.batch(model.rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            model.eval()
            with torch.no_grad():
                total = huggingface_models.loss_of(model, huggingface_models.batch(model.rank, 9)).detach()
            dist.all_reduce(total, group=model.process_group)
            seen.append([kept(loss), total / model.world_size])

    seen = []
    model, optimizer = made(0)
    trained(model, optimizer, range(2))
    wrappers = api.fsdp_modules(model)
    read = [[w.sharding_strategy.name, w.training_state.name, w.cpu_offload.offload_params] for w in wrappers]
    read += [[w.mixed_precision.param_dtype, w.backward_prefetch.name, w.limit_all_gathers] for w in wrappers]
    states = kept(dict(model.state_dict()))
    optim_states = kept(api.optim_state_dict(model, optimizer))
    whole = api.full_optim_state_dict(model, optimizer, optim_input=model.parameters())
    read.append([list(whole.get("state", {})), len(whole.get("param_groups", []))])
    model, optimizer = made(1)
    model.load_state_dict(states)
    given = list(model.parameters())
    optimizer.load_state_dict(api.shard_full_optim_state_dict(optim_states, model, optim_input=given))
    trained(model, optimizer, range(2, 4))
    return seen, read, states, optim_states, kept(dict(model.state_dict()))


# ---- a small GPT


def trains_a_gpt(package):
    """Activation checkpointing of layers, original parameters, and a checkpoint with a file per rank."""
    fsdp, wrap = import_module(package), import_module(f"{package}.wrap")
    api = fsdp.FullyShardedDataParallel
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)

    def made(seed):
        torch.manual_seed(seed)
        model = api(
            Language(),
            auto_wrap_policy=wrap.ModuleWrapPolicy({Layer}),
            backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_POST,
            forward_prefetch=True,
            use_orig_params=True,
            device_id=CPU,
            device_mesh=mesh,
        )
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
        options = fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False)
        api.set_state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT, None, options)
        decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
        others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=True)

    def trained(model, optimizer):
        for _ in range(2):
            tokens = torch.randint(31, (2, 7), generator=data)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(kept(loss))
        model.backward_prefetch, model.forward_prefetch = fsdp.BackwardPrefetch.BACKWARD_PRE, False

    data, seen = torch.Generator().manual_seed(dist.get_rank()), []
    model, optimizer = made(0)
    trained(model, optimizer)
    saved = {"model": model.state_dict(), "optim": api.optim_state_dict(model, optimizer)}
    checkpoint.save(saved, checkpoint_id=folder[0])
    model, optimizer = made(1)
    trained(model, optimizer)  # creates state to load into
    loaded = {"model": model.state_dict(), "optim": api.optim_state_dict(model, optimizer)}
    checkpoint.load(loaded, checkpoint_id=folder[0])
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(api.optim_state_dict_to_load(model, optimizer, loaded["optim"]))
    trained(model, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return seen, kept(saved), kept(dict(model.state_dict()))


# ---- all


def is_the_same(script, *args):
    with ignoring_warnings(*OLD_CALLS, *SHARDED_TENSOR, *NO_SHARD, *FROZEN_BESIDE_TRAINED):
        ours, theirs = (script(package, *args) for package in PACKAGES)
    assert_same_tree(kept(ours), kept(theirs))


def digits_are():
    is_the_same(trains_digits)


def languages_are():
    for kind in ("Full", "Sharded"):
        for use_orig_params in (False, True):
            is_the_same(trains_language, kind, use_orig_params)


def adapters_are():
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        is_the_same(trains_adapters, strategy)


def summaries_are():
    is_the_same(trains_summaries)


def gpts_are():
    is_the_same(trains_a_gpt)


def test_a_gpt_2_with_deprecated_arguments_trains_and_resumes_as_with_torch():
    huggingface_models.transformers()
    run_ranks(2, summaries_are)


def test_a_transformer_with_checkpointing_trains_and_resumes_as_with_torch():
    run_ranks(2, gpts_are)


def test_a_network_of_convolutions_with_batch_norms_trains_and_is_saved_as_with_torchs():
    run_ranks(2, digits_are)


@pytest.mark.thorough
def test_a_transformer_is_clipped_saved_loaded_and_trained_on_as_with_torchs():
    run_ranks(2, languages_are)


def test_adapters_of_a_frozen_model_train_as_with_torchs():
    run_ranks(2, adapters_are)
