"""Third-party models: the engine next to torch's fully_shard and the unsharded model."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers.forked_ranks import run_cases, run_ranks
from tests.helpers.huggingface_models import batch, blocks, loss_of, make, shard, transformers
from tests.helpers.parity import assert_same_shards, average_grads
from tests.helpers.small_models import adamw
from workbench.engine import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from workbench.runtime.checkpoint_reads import CheckpointReads

pytestmark = pytest.mark.exhaustive

# 1e-4: a few gradients (a key's bias) are zero except for rounding, which Adam must not turn into a step
ADAMW = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
VIEWS = "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"  # torch's engine warns about a T5 block
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    transformers()  # ranks are forked, so they inherit the import


def assert_same_as_torchs(ours: nn.Module, theirs: nn.Module) -> None:
    """Check that the shards of the gradients are equal."""
    for (name, a), (their_name, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == their_name
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert_same_shard(a.grad, b.grad)


def assert_same_shard(a: DTensor, b: DTensor) -> None:
    assert (a.placements, a.shape, a.stride(), a.dtype) == (b.placements, b.shape, b.stride(), b.dtype)
    torch.testing.assert_close(a.to_local(), b.to_local(), **TOLERANCE)


def assert_same_state(plain: nn.Module, ours: nn.Module, theirs: nn.Module) -> None:
    states = [model.state_dict() for model in (plain, ours, theirs)]
    assert list(states[0]) == list(states[1]) == list(states[2])
    for name, value in states[0].items():
        assert_same_shard(states[1][name], states[2][name])
        torch.testing.assert_close(states[1][name].full_tensor(), value, **TOLERANCE)


def five_steps(name: str, reshard: bool | None) -> list[float]:
    plain = make(name)
    ours, theirs = (
        shard(copy.deepcopy(plain), wrap, reshard_after_forward=reshard) for wrap in (fully_shard, torch_fully_shard)
    )
    models = (plain, ours, theirs)
    optimizers = [adamw(model.parameters(), **ADAMW) for model in models]
    losses = []
    for step in range(5):
        values = [loss_of(model, batch(dist.get_rank(), step)) for model in models]
        for value in values:
            torch.testing.assert_close(value, values[0], **TOLERANCE)
            value.backward()
        average_grads(plain)
        assert_same_shards(ours, plain, **TOLERANCE)
        assert_same_as_torchs(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(values[1].item())
    assert_same_state(*models)
    assert tied(ours) == tied(plain)
    return losses


def tied(model: nn.Module) -> set[tuple[str, ...]]:
    """Return the groups of names that share a parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {tuple(same) for same in names.values() if len(same) > 1}


@pytest.mark.filterwarnings(VIEWS)
@pytest.mark.parametrize("name", ["Llama", "Llama, checkpointed", "GPT-2", "Mixtral", "T5"])
def test_five_steps_match_torch_and_the_unsharded_model(name):
    first, second = run_cases(2, {reshard: partial(five_steps, name, reshard) for reshard in (None, False)})
    for reshard, losses in first.items():
        assert all(math.isfinite(loss) for loss in losses)
        assert losses != second[reshard]  # each rank has its own data


def with_precision(name: str) -> list[float]:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ours = shard(make(name), fully_shard, mp_policy=MixedPrecisionPolicy(**dtypes))
    theirs = shard(make(name), torch_fully_shard, mp_policy=TorchMixedPrecisionPolicy(**dtypes))
    optimizers = [adamw(model.parameters(), **ADAMW) for model in (ours, theirs)]
    losses = []
    for step in range(5):
        values = [loss_of(model, batch(dist.get_rank(), step)) for model in (ours, theirs)]
        torch.testing.assert_close(*values, **TOLERANCE)
        for value in values:
            value.backward()
        assert_same_as_torchs(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(values[0].item())
    return losses


def generates(name: str) -> None:
    plain = make(name).eval()
    sharded = shard(copy.deepcopy(plain), fully_shard)
    if plain.config.is_encoder_decoder:
        register_fsdp_forward_method(sharded, "generate")  # it runs the encoder outside the model's forward
    prompt = batch(dist.get_rank(), 0, size=1, length=5)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}  # all ranks must run as many forwards
    expected, written = (model.generate(prompt, **options) for model in (plain, sharded))
    assert torch.equal(written, expected)
    loss_of(sharded.train(), batch(dist.get_rank(), 1)).backward()  # trains afterwards


@pytest.mark.filterwarnings(VIEWS)
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_five_steps_in_bfloat16_match_torch_and_the_unsharded_generation(name):
    cases = {"in bfloat16": partial(with_precision, name), "generates": partial(generates, name)}
    found, *_ = run_cases(2, cases)
    assert all(math.isfinite(loss) for loss in found["in bfloat16"])


def few_tokens(step: int) -> torch.Tensor:
    """Return two tokens [1, 2]: they do not reach every expert."""
    return batch(dist.get_rank(), step, size=1, length=2)


def average_with_zeros(model: nn.Module) -> list[bool]:
    """Average every gradient over ranks, an absent one as zero; return which gradients this rank had."""
    had = [parameter.grad is not None for parameter in model.parameters()]
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average_grads(model)
    return had


def experts_in_one_parameter() -> None:
    plain = make("Mixtral")
    sharded = shard(copy.deepcopy(plain), fully_shard)
    unused = 0
    for step in range(3):
        for model in (plain, sharded):
            model.set_experts_implementation("eager")  # loops over the experts in use
            loss_of(model, few_tokens(step)).backward()
        unused += sum((layer.mlp.experts.down_proj.grad == 0).all((1, 2)).sum().item() for layer in blocks(plain))
        average_grads(plain)
        assert_same_shards(sharded, plain, **TOLERANCE)
        plain.zero_grad()
        sharded.zero_grad()
    assert unused


def test_stacked_experts_that_no_token_of_a_rank_reaches():
    run_ranks(2, experts_in_one_parameter)


def experts_of_their_own() -> list[list[bool]]:
    """Return, step by step, which parameters had a gradient on this rank."""
    plain = make("Switch")
    ours, theirs = (shard(copy.deepcopy(plain), wrap) for wrap in (fully_shard, torch_fully_shard))
    for sharded in (ours, theirs):
        sharded.set_reduce_scatter_unused_params(True)
    optimizers = [adamw(model.parameters(), **ADAMW) for model in (plain, ours, theirs)]
    used = []
    for step in range(3):
        for model in (plain, ours, theirs):
            loss_of(model, few_tokens(step)).backward()
        used.append(average_with_zeros(plain))
        assert_same_shards(ours, plain, **TOLERANCE)
        assert_same_as_torchs(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(plain, ours, theirs)
    return used


@pytest.mark.filterwarnings(VIEWS)
def test_experts_used_on_some_ranks_count_as_zero_on_the_others():
    used = run_ranks(2, experts_of_their_own)
    assert used[0] != used[1]
    assert not all(map(all, used[0]))


READ = {  # the model, how it is read, and whether most of it is in memory of this process alone
    "of its own dtype": ("Llama", {}, False),
    "cast": ("Llama", {"dtype": torch.bfloat16}, True),
    "not mapped": ("Llama", {"disable_mmap": True}, True),
    "tied": ("GPT-2", {}, False),
    "tied, cast": ("GPT-2", {"dtype": torch.bfloat16}, True),
    "cast, of an encoder and a decoder": ("T5", {"dtype": torch.bfloat16}, True),
    "experts that are stacked as they are read": ("Mixtral", {}, True),
}


@pytest.mark.parametrize(("name", "how", "is_copied"), READ.values(), ids=READ)
def test_what_from_pretrained_copies_is_noted(name, how, is_copied, tmp_path):
    transformers().utils.logging.disable_progress_bar()  # tqdm's would leave a thread
    model = make(name)
    model.save_pretrained(tmp_path)
    reads, parts = CheckpointReads().install(), []
    reads.on_read = parts.append
    try:
        read = type(model).from_pretrained(tmp_path, **how)
        taken = reads.taken.get(read)
        assert (taken is not None and taken.num_elements > 0.5 * sum(map(torch.numel, read.parameters()))) == is_copied
        assert parts[-1] == f"loading {type(model).__name__}"
        assert not is_copied or how == {"disable_mmap": True} or taken.words.endswith("B of model.safetensors")
        later = read.double()
        assert reads.taken[later].num_elements == sum(map(torch.numel, later.parameters()))
        assert len(reads.taken) == 1
    finally:
        reads.remove()
