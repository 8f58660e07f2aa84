"""What autograd keeps of each module's forward: the values below were written down by hand, before there was any code.

Shapes are small: B = 8 rows, D = 16 features, float32, so one [B, D] tensor is 512 B.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from tests.helpers.recording_probe import recording
from workbench.events import Activation, Category
from workbench.models.activation_watch import OUTSIDE, ActivationWatch
from workbench.models.patches import Patches

B, D = 8, 16
ROW = B * D * 4  # 512


@pytest.fixture
def watch():
    """Activations are watched, and whatever fails in that fails the test."""

    def fail(sentence):
        raise AssertionError(sentence)

    watch, patches = ActivationWatch(), Patches("activations are", fail)
    patches.install(watch.install)
    yield watch
    patches.undo()


class Attention(nn.Module):
    """A pre-norm transformer block of 2 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.act, self.down = nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = (part.view(2, 4, 2, 8).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(2, 4, D))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Tied(nn.Module):
    """An embedding whose weight is that of the output too."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(10, D), nn.Linear(D, 10, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, ids):
        return self.out(self.emb(ids))


class Halves(nn.Module):
    """A product of two views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x):
        a, b = self.fc(x).chunk(2, -1)
        return a * b


class Twice(nn.Module):
    """Two modules, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(D, D), nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(self.act(self.fc(x))))


class Block(nn.Sequential):
    """16 -> 64 -> 16."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D))


def chain():
    return nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, 4))


def blocks(impl=None):
    model = nn.Sequential(*(Block() for _ in range(3)))
    if impl is not None:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=impl),
            check_fn=lambda module: isinstance(module, Block),
        )
    return model


def rows(*shape, requires_grad=False):
    return torch.randn(*(shape or (B, D)), requires_grad=requires_grad)


def with_loss(model):
    """Cross-entropy of 4 classes, outside any module."""
    return lambda x: F.cross_entropy(model(x), torch.zeros(B, dtype=torch.int64))


def in_bfloat16(model):
    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    return run


CASES = {
    # the input, which the first Linear needs for its weight, and relu's result, which the second needs too
    "chain": (chain, rows, {"0": ROW, "1": 2 * ROW}),
    # norm1: x, its result, mean and rstd of 8 rows; qkv: one storage for q, k and v; the block itself: attention's
    # result, logsumexp of 2 x 2 heads x 4, and the first sum; norm2: its result and statistics
    "attention": (
        Attention,
        lambda: rows(2, 4, D),
        {
            "norm1": 2 * ROW + 64,
            "qkv": 3 * ROW,
            "(root)": 2 * ROW + 64,
            "norm2": ROW + 64,
            "up": 4 * ROW,
            "act": 4 * ROW,
        },
    ),
    # 1: the mask, in the dtype of the rows, and the result
    "dropout": (lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(), nn.Linear(D, 4)), rows, {"0": ROW, "1": 2 * ROW}),
    # 8 indices of 8 bytes; the shared weight is a parameter wherever it is used
    "tied": (Tied, lambda: torch.zeros(B, dtype=torch.int64), {"emb": 64 + ROW}),
    "views": (Halves, rows, {"fc": 2 * ROW}),
    "twice": (Twice, rows, {"fc": ROW, "act": 2 * ROW}),
    # x in half the bytes; the second weight, [4, 32], cast for the gradient of its input (the first needs none)
    "bfloat16": (lambda: in_bfloat16(chain()), rows, {"0": ROW // 2, "1": ROW, "2": 4 * 2 * D * 2}),
    # log-softmax of [8, 4], 8 labels of 8 bytes, and the sum of their weights, which is a scalar
    "loss": (lambda: with_loss(chain()), rows, {"0": ROW, "1": 2 * ROW, OUTSIDE: B * 4 * 4 + B * 8 + 4}),
    "blocks": (blocks, rows, {"0.0": ROW, "0.1": 4 * ROW, "0.2": ROW, "1.1": 4 * ROW, "1.2": ROW, "2.1": 4 * ROW}),
    # the input of each block; as one operation, a block makes its output itself
    "checkpointed": (lambda: blocks(CheckpointImpl.NO_REENTRANT), rows, {"0": ROW, "0.2": ROW, "1.2": ROW}),
    "reentrant": (
        lambda: blocks(CheckpointImpl.REENTRANT),
        lambda: rows(requires_grad=True),
        {"0": 2 * ROW, "1": ROW},
    ),
}


def kept_by_module(events) -> Counter:
    """Live bytes of activations by the module that made them."""
    found = Counter()
    for text, delta in events.owners:
        found[Activation.from_text(text).module] += delta
    return +found


def loss_of(output):
    return output if output.ndim == 0 else output.sum()


AGAIN = {"checkpointed": 4 * ROW, "reentrant": 4 * ROW}
"""What backward computes again, of one block at a time."""


@pytest.mark.parametrize("name", CASES)
def test_what_forward_keeps_belongs_to_its_modules(watch, name):
    make, inputs, expected = CASES[name]
    model, x = make(), inputs()
    with recording() as events:
        loss = loss_of(model(x))
        watch.before_backward(loss)
        assert kept_by_module(events) == expected
        assert events.live[Category.ACTIVATIONS] == sum(expected.values())
        loss.backward()
        assert events.peak[Category.ACTIVATIONS] == sum(expected.values()) + AGAIN.get(name, 0)
        del loss
        assert events.live[Category.ACTIVATIONS] == 0


def test_activations_are_split_by_the_operation_that_made_them(watch):
    model, x = Attention(), rows(2, 4, D)
    with recording() as events:
        watch.before_backward(model(x).sum())
    found = Counter()
    for text, delta in events.owners:
        found[Activation.from_text(text).op] += max(delta, 0)
    assert found == {
        "native_layer_norm": ROW + 2 * (ROW + 64),  # of them the input, which has no gradient
        "addmm": 3 * ROW + 4 * ROW,
        "scaled_dot_product_flash_attention_for_cpu": ROW + 64,
        "add": ROW,
        "gelu": 4 * ROW,
    }


class Function(torch.autograd.Function):
    """A function of the program's own, whose backward reads what it put on the parameter."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight.factor, (grad * x).sum(0)


def changed_in_place(weight):
    y = rows(requires_grad=True) * 2
    z = y * y
    y.add_(1)
    return z


def within_a_transform(weight):
    x = rows(requires_grad=True)
    return x * torch.func.grad(lambda a: (a.sin() * weight).sum())(x)


def by_a_function(weight):
    weight.factor = 2
    return Function.apply(rows(requires_grad=True), weight)


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (changed_in_place, "modified by an inplace operation"),
        (within_a_transform, ""),
        (by_a_function, ""),
    ],
)
def test_a_program_does_not_notice(watch, run, error):
    weight = nn.Parameter(torch.ones(D))
    with recording() as events:
        loss = run(weight).sum()
        if error:
            with pytest.raises(RuntimeError, match=error):
                loss.backward()
        else:
            loss.backward()
        assert events.peak[Category.ACTIVATIONS] > 0
        del loss
        assert events.live[Category.ACTIVATIONS] == 0


def test_what_the_program_holds_on_to_counts_until_its_graph_is_gone(watch):
    model, x = chain(), rows()
    with recording() as events:
        hidden = model[1](model[0](x))
        loss = model[2](hidden).sum()
        loss.backward(retain_graph=True)
        assert events.live[Category.ACTIVATIONS] == 3 * ROW
        loss.backward()
        assert events.live[Category.ACTIVATIONS] == 3 * ROW  # the program has x and hidden, and the graph exists
        del loss, hidden
        assert events.live[Category.ACTIVATIONS] == 0


def test_a_compiler_sees_the_original_call_alone(watch, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with recording() as events:
        chain()(rows())
    assert not events.owners


@pytest.mark.parametrize("name", ["attention", "dropout", "blocks", "loss"])
def test_activations_are_what_forward_left_allocated(watch, name):
    make, inputs, _ = CASES[name]
    model, x = make(), inputs()
    with recording() as events, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = loss_of(model(x))
        watch.before_backward(loss)
    allocated = sum(event.self_cpu_memory_usage for event in profiled.events())
    assert events.peak[Category.ACTIVATIONS] == allocated + x.nbytes - loss.nbytes
