"""Scripts of torch's wrapper run on ours with their imports alone changed: the same bits on every rank."""

import functools
import warnings
from contextlib import nullcontext
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.engine.classic.wrapped import CPU, assert_same_tree, kept
from tests.engine.ranks import run_ranks

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
            # the order in which torch's wrapper adds up squares is a set's: of other norms the last bits are chance
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


# ---- both


def is_the_same(script, *args):
    with warnings.catch_warnings():  # of what torch's wrapper is deprecated for, and of frozen parameters
        warnings.simplefilter("ignore")
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


def test_a_network_of_convolutions_with_batch_norms_trains_and_is_saved_as_with_torchs():
    run_ranks(2, digits_are)


def test_a_transformer_is_clipped_saved_loaded_and_trained_on_as_with_torchs():
    run_ranks(2, languages_are)


def test_adapters_of_a_frozen_model_train_as_with_torchs():
    run_ranks(2, adapters_are)
