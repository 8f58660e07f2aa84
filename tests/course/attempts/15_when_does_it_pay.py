# %% pay-tokens: right
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return flops * (2 * gathered + reduced) * (ranks - 1) / (6 * ranks * rate)


# %% pay-tokens: right
from fractions import Fraction


def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return float(Fraction(ranks - 1, ranks) * (gathered + gathered + reduced) * int(flops) / int(rate) / 6)


# %% pay-tokens: right
tokens_to_hide = lambda f, r, k, g, d: (1 - 1 / k) * (g / r + g / r + d / r) * f / (2 + 4)


# %% pay-tokens: right
import math


def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return math.ceil((ranks - 1) / ranks * (2 * gathered + reduced) / rate * flops / 6)


# %% pay-tokens: is not right: look at the three lines above
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return (ranks - 1) / ranks * (2 * gathered + reduced) / rate * flops / 2


# %% pay-tokens: is not right: look at the three lines above
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return rate / flops * (2 * gathered + reduced) / 6


# %% pay-tokens: is not right
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return (ranks - 1) / ranks * (gathered + reduced) / rate * flops / 6


# %% pay-tokens: use all arguments
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return (2 * gathered + reduced) / rate * flops / 6


# %% pay-tokens: use all arguments
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return (ranks - 1) / ranks * 8 / rate * flops / 6


# %% pay-tokens: is not right
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return (ranks - 1) * (2 * gathered + reduced) / rate * flops / 6


# %% pay-tokens: use all arguments
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return hides_at


# %% pay-tokens: there is no answer yet
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    (ranks - 1) / ranks * (2 * gathered + reduced) / rate * flops / 6


# %% pay-tokens: is not right
def tokens_to_hide(flops, rate, ranks, gathered, reduced):
    return planned.step_ns


# %% pay-budget: right
# %%fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing


def policy(net):
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=False)
    return fully_shard(net)


# %% pay-budget: right
# %%fsdp
from torch.utils.checkpoint import checkpoint


class Again(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def policy(net):
    net.blocks = nn.ModuleList(Again(block) for block in net.blocks)
    net = default_policy(net)
    net.set_reshard_after_forward(False)
    return net


# %% pay-budget: right
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def policy(net):
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for first in (0, 2):
        fully_shard([net.blocks[first], net.blocks[first + 1]], reshard_after_forward=False)
    return fully_shard(net)


# %% pay-budget: right
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def policy(net):
    short = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, reshard_after_forward=False, mp_policy=short)
    return fully_shard(net, mp_policy=short)


# %% pay-budget: (2 of 5 findings, 0 of 4 points)
# %%fsdp
def policy(net):
    return default_policy(net)


# %% pay-budget: (1 of 5 findings, 2 of 4 points)
# %%fsdp
def policy(net):
    net = default_policy(net)
    net.set_reshard_after_forward(False)
    return net


# %% pay-budget: (1 of 5 findings, 2 of 4 points)
# %%fsdp
from functools import partial

from torch.utils.checkpoint import checkpoint


def policy(net):
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return default_policy(net)


# %% pay-budget: the losses are not those of the reference
# %%fsdp
def policy(net):
    short = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for block in net.blocks:
        fully_shard(block, mp_policy=short)
    return fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32))


# %% pay-budget: the dtypes of the shards are not those of the reference
# %%fsdp
def policy(net):
    return default_policy(net.bfloat16())


# %% pay-budget: the norms of the gradients are not those of the reference
# %%fsdp
def policy(net):
    for block in net.blocks[:2]:
        block.requires_grad_(False)
    return default_policy(net)


# %% pay-budget: the losses are not those of the reference
# %%fsdp
def policy(net):
    net.blocks = net.blocks[:2]
    return default_policy(net)


# %% pay-budget: points
# %%fsdp
def policy(net):
    return fully_shard(net)


# %% pay-budget: an older step does not count
# %%fsdp
def policy(net):
    default_policy(net)


# %% pay-budget: an older step does not count
# %%fsdp
def my_policy(net):
    return default_policy(net)


# %% pay-budget: nothing is sharded yet
# %%fsdp
def policy(net):
    return net
