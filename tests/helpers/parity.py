"""Sharded models are trained beside an unsharded copy that sees every rank's data."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.helpers.small_models import adamw, batch, loss_of
from workbench.engine import fully_shard

Pair = tuple[torch.Tensor, torch.Tensor]


def shard_net(model: nn.Module, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def average_grads(model: nn.Module) -> None:
    """Average every gradient over the ranks, as the reduction should, in one collective per dtype."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        alike = [grad for grad in grads if grad.dtype == dtype]
        mean = torch.cat([grad.flatten() for grad in alike])
        dist.all_reduce(mean)
        mean.div_(dist.get_world_size())
        for grad, part in zip(alike, mean.split([grad.numel() for grad in alike]), strict=True):
            grad.copy_(part.view_as(grad))


def part_of(whole: torch.Tensor, sharded: DTensor) -> torch.Tensor:
    """Return this rank's part of ``whole``, split as ``sharded`` is, in DTensor's way: that of torch.chunk."""
    mesh = sharded.device_mesh
    for size, index, placement in zip(mesh.shape, mesh.get_coordinate(), sharded.placements, strict=True):
        if isinstance(placement, Shard):
            chunks = whole.chunk(size, placement.dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def beside(sharded: DTensor, plain: torch.Tensor) -> Pair:
    """Return the pair to compare, per rank, to check that all of a sharded tensor equals ``plain``.

    Ranks compare their shards, unless the layout is not one of consecutive parts: then they compare the full tensor,
    which DTensor takes much longer to assemble.
    """
    if all(type(placement) in (Shard, Replicate) for placement in sharded.placements):
        return sharded.to_local(), part_of(plain, sharded)
    return sharded.full_tensor(), plain


def assert_equals(sharded: DTensor, plain: torch.Tensor, **tolerance: float) -> None:
    """Check that all of a sharded tensor equals ``plain``; see :func:`beside`."""
    torch.testing.assert_close(*beside(sharded, plain), **tolerance)


def assert_all_close(pairs: Mapping[str, Pair], **tolerance: float) -> None:
    """Check that both tensors of every pair have the same shape and dtype, and are close.

    All pairs are compared at once, as one comparison takes as long as a small tensor's computation. With several dtypes
    the tolerance is that of the finest; if the check fails, the pairs are compared one by one.
    """
    for name, (ours, theirs) in pairs.items():
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
    if not pairs:
        return
    try:
        torch.testing.assert_close(
            *(torch.cat([tensor.detach().flatten() for tensor in side]) for side in zip(*pairs.values(), strict=True)),
            **tolerance,
        )
    except AssertionError:
        for name, (ours, theirs) in pairs.items():
            torch.testing.assert_close(ours, theirs, **tolerance, msg=functools.partial("{}: {}".format, name))


def assert_same_shards(sharded: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Check that names, order, values and gradients of all parameters equal the plain copy's."""
    pairs = {}
    for (name, s), (plain_name, p) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        assert name == plain_name
        assert isinstance(s, DTensor), name
        assert s.shape == p.shape
        assert s.stride() == p.stride()
        pairs[name] = beside(s, p)
        assert (s.grad is None) == (p.grad is None), name
        if p.grad is not None:
            assert s.grad.shape == p.grad.shape, name
            pairs[f"gradient of {name}"] = beside(s.grad, p.grad)
    assert_all_close(pairs, **tolerance)


def one_batch(model: nn.Module, step: int) -> torch.Tensor:
    """A step's forward and backward on this rank's data; returns the loss."""
    loss = loss_of(model, batch(dist.get_rank(), step))
    loss.backward()
    return loss.detach()


def train_beside(
    plain: nn.Module,
    models: Sequence[nn.Module],
    steps: int = 3,
    run: Callable[[nn.Module, int], torch.Tensor | None] = one_batch,
    *,
    before_update: Callable[[Sequence[nn.Module]], object] = lambda models: None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    assert_same: Callable[[nn.Module, nn.Module], object] = assert_same_shards,
) -> list[torch.Tensor]:
    """Train a plain copy and other models alike; compare losses, and after each backward and in the end the models.

    Args:
        plain: its gradients are averaged over ranks after each backward.
        models: sharded in any way.
        steps: number of optimizer steps.
        run: does the forwards and backwards of one step; may return the loss.
        before_update: called with the plain model and the others when all have their gradients.
        make_optimizer: of parameters.
        assert_same: compares one of ``models`` with the plain one.

    Returns:
        The losses of the last of ``models``, one for each step, if ``run`` returns them.
    """
    everyone = (plain, *models)
    optimizers = [make_optimizer(model.parameters()) for model in everyone]
    losses = []
    for step in range(steps):
        values = [run(model, step) for model in everyone]
        torch.testing.assert_close(values[1:], values[:1] * len(models))
        average_grads(plain)
        before_update(everyone)
        for model in models:
            assert_same(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses += [value for value in values[-1:] if value is not None]
    for model in models:
        assert_same(model, plain)
    return losses


def clip_dtensors(model: nn.Module, clip: float) -> torch.Tensor:
    """Clip as a script with DTensor parameters does, and return the norm."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor()


def check_parity(
    make: Callable[[], nn.Module],
    shard: Callable[[nn.Module], nn.Module],
    steps: int = 10,
    clip: float | None = None,
    *,
    clip_sharded: Callable[[nn.Module, float], torch.Tensor] = clip_dtensors,
    assert_same: Callable[[nn.Module, nn.Module], None] = assert_same_shards,
) -> list[float]:
    """Train both with AdamW for ``steps``, gradients clipped to the norm ``clip``; returns this rank's losses."""
    plain = make()
    sharded = shard(copy.deepcopy(plain))

    def clip_both(_models: Sequence[nn.Module]) -> None:
        if clip is not None:
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            torch.testing.assert_close(clip_sharded(sharded, clip), expected)

    losses = train_beside(plain, [sharded], steps, before_update=clip_both, assert_same=assert_same)
    return [loss.item() for loss in losses]
