"""The right FSDP: it gathers one unit ahead, frees each unit after use, and reduces once after all micro-batches."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from workbench import watch


class ShardedUnit(nn.Module):
    """A module whose parameters are one flat tensor, ``full``, of which each rank keeps a part, ``shard``."""

    def __init__(self, units, name, module):
        super().__init__()
        self.module, self.is_root = module, name == ""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        owners = [each for each in module.modules() if not isinstance(each, ShardedUnit)]
        paths = {each: path for path, each in module.named_modules()}
        params = [(each, *named) for each in owners for named in each.named_parameters(recurse=False)]
        self.places = [(each, key, param.shape) for each, key, param in params]
        names = [".".join(filter(None, (name, paths[each], key))) for each, key, _ in params]
        self.shapes = {name: shape for name, (*_, shape) in zip(names, self.places, strict=True)}
        flat = torch.cat([param.detach().flatten() for *_, param in params])
        self.share_initial_weights(flat)
        flat = nn.functional.pad(flat, (0, self.padding(len(flat))))
        for each, key, _ in params:
            delattr(each, key)
        self.shard = nn.Parameter(flat.chunk(self.world_size)[self.rank].clone())
        self.full = flat.requires_grad_()
        self.num_bytes = self.full.untyped_storage().nbytes()
        self.full.untyped_storage().resize_(0)
        self.full.register_post_accumulate_grad_hook(self.after_backward)
        flat_param = watch.OwnParam(f"{name}.flat".lstrip("."), self.full.shape, self.shard, parts=self.shapes)
        self.unit = units.add(name, [flat_param], reshard_after_forward=not self.is_root)
        self.work = self.grad = None  # the all-gather in flight; the gradient so far
        self.next_in_forward = self.next_in_backward = None

    def share_initial_weights(self, flat):
        dist.broadcast(flat, 0)

    def padding(self, length):
        return -length % self.world_size

    # ---- gathering

    def begin_unshard(self):
        if self.work is None:
            with self.unit.unshard():
                self.full.untyped_storage().resize_(self.num_bytes)
                parts = list(self.full.data.chunk(self.world_size))
                self.work = dist.all_gather(parts, self.shard.data, async_op=True)

    def unshard(self):
        self.begin_unshard()
        with self.unit.unshard():
            self.work.wait()
        self.work = None
        self.unit.end_unshard(self.full)

    def prefetch(self, other):
        if other is not None:
            other.begin_unshard()

    def reshard(self):
        self.unit.reshard()
        self.full.untyped_storage().resize_(0)

    # ---- computing

    def forward(self, x):
        with self.unit.forward():
            self.before_forward()
            first = 0
            for module, key, shape in self.places:
                setattr(module, key, self.full[first : first + shape.numel()].view(shape))
                first += shape.numel()
            output = self.module(x)
        if output.requires_grad:
            output.register_hook(self.before_backward)
        if not self.is_root:
            self.after_forward()
        return output

    def before_forward(self):
        self.begin_unshard()
        self.prefetch(self.next_in_forward)
        self.unshard()

    def after_forward(self):
        self.reshard()

    def before_backward(self, grad):
        self.unit.begin_backward()
        if not self.is_root:
            self.begin_unshard()
        self.prefetch(self.next_in_backward)
        if not self.is_root:
            self.unshard()

    def after_backward(self, full):
        grad, full.grad = full.grad, None
        self.unit.end_backward(grad)
        self.reshard()
        self.accumulate(grad)

    def accumulate(self, grad):
        self.grad = grad if self.grad is None else self.grad.add_(grad)

    def reduce(self):
        grad, self.grad = self.grad, None
        with self.unit.reduce(grad):
            mine = torch.empty_like(self.shard)
            dist.reduce_scatter(mine, list(grad.chunk(self.world_size)))
            self.shard.grad = self.averaged(mine)

    def averaged(self, total):
        return total / self.world_size


def units_of(fsdp_model):
    """Return the units of a model, the root last."""
    return [*(each for each in fsdp_model.modules() if isinstance(each, ShardedUnit) and not each.is_root), fsdp_model]


def get_fsdp(module, unit_type=ShardedUnit, blocks=None):
    """Shard a model: each of its blocks is a unit, and the rest is the root."""
    units = watch.OwnUnits("my fsdp")
    wrapped = range(len(module.blocks) if blocks is None else blocks)
    for i in wrapped:
        module.blocks[i] = unit_type(units, f"blocks.{i}", module.blocks[i])
    root = unit_type(units, "", module)
    order = [root, *(module.blocks[i] for i in wrapped)]
    for before, after in pairwise(order):
        before.next_in_forward = after
    for later, earlier in pairwise([root, *order[:0:-1]]):
        later.next_in_backward = earlier
    return root


def fsdp_on_after_backward(fsdp_model, optimizer):
    """Average the gradients over the ranks."""
    for unit in units_of(fsdp_model):
        unit.reduce()


def fsdp_gather_full_params(fsdp_model):
    """Return the full parameters by name."""
    found = {}
    for unit in units_of(fsdp_model):
        full = torch.empty(len(unit.shard) * unit.world_size)
        dist.all_gather(list(full.chunk(unit.world_size)), unit.shard.data)
        for name, shape in unit.shapes.items():
            found[name], full = full[: shape.numel()].view(shape).clone(), full[shape.numel() :]
    return found
