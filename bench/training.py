"""A training step under each implementation, and its time; runs on the ranks."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.cases import (
    ALONE,
    CLASSIC,
    CLASSIC_TORCH,
    DDP,
    NUM_SEQUENCES,
    NUM_TOKENS,
    OURS,
    OURS_GLOO,
    TORCH,
    Case,
)
from tests.helpers.ranks_on_hosts import HOST
from workbench.zoo import GPT, next_token_loss

WARM_UP = 3
COMM = "WORKBENCH_COMM"


@dataclass(frozen=True)
class Sample:
    """One step on one rank.

    Attributes:
        wall_ns: from the moment at which all ranks were ready.
        cpu_ns: of the whole process, including communication threads.
        optimizer_ns: wall time of the optimizer's step and of ``zero_grad``, part of ``wall_ns``.
    """

    wall_ns: int
    cpu_ns: int
    optimizer_ns: int


class Training:
    """A model ready to be trained: one step is :meth:`backward`, then :meth:`update`."""

    def __init__(self, case: Case, module: nn.Module, masters: list[nn.Parameter]) -> None:
        self.module = module
        self._params = list(module.parameters())
        self._masters = masters  # fp32 parameters of a module that computes in another dtype; empty if it is fp32
        self._optimizer = torch.optim.AdamW(masters or self._params, lr=1e-4, fused=True)
        self._ids = torch.randint(case.config.vocab_size, (NUM_SEQUENCES, NUM_TOKENS + 1)).to(case.device)
        self.is_on_gpu = case.device == "cuda"

    def step(self) -> None:
        """Run one whole step."""
        self.backward()
        self.update()

    def backward(self) -> None:
        """Run forward and backward."""
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(self._params, self._masters)
        next_token_loss(self.module(self._ids[:, :-1]), self._ids[:, 1:]).backward()
        for master, param in zip(self._masters, self._params if self._masters else (), strict=True):
            master.grad, param.grad = param.grad.float(), None

    def update(self) -> None:
        """Run the optimizer's step, and drop the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()


def make_training(case: Case, implementation: str) -> Training:
    """Build the model of a case under one implementation.

    In the bf16 case, ``alone`` and ``ddp`` do by hand what ``fully_shard`` does with its policy: parameters and
    optimizer in fp32, a bf16 copy of the parameters for compute, bf16 gradients cast to fp32.
    """
    torch.manual_seed(0)
    model = GPT(case.config).to(case.device)
    masters: list[nn.Parameter] = []
    if case.is_bf16 and implementation in {ALONE, DDP}:
        masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        model = model.bfloat16()
    return Training(case, _PREPARE[implementation](model, case), masters)


def shard_per_block(model: GPT, fully_shard: Callable[..., object], **policy: Any) -> GPT:
    """Make every block a unit, and the rest another one."""
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    return model


def _ddp(model: GPT, _case: Case) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _torch(model: GPT, case: Case) -> nn.Module:
    from torch.distributed import fsdp

    return shard_per_block(model, fsdp.fully_shard, **_policy(fsdp, case))


def _ours(model: GPT, case: Case) -> nn.Module:
    os.environ.pop(COMM, None)
    return _shard_ours(model, case)


def _ours_gloo(model: GPT, case: Case) -> nn.Module:
    os.environ[COMM] = "gloo"
    return _shard_ours(model, case)


def _shard_ours(model: GPT, case: Case) -> nn.Module:
    from workbench import engine
    from workbench.engine.backends import tell_host

    tell_host(os.environ.get(HOST, ""))
    return shard_per_block(model, engine.fully_shard, **_policy(engine, case))


def _policy(api: Any, case: Case) -> dict[str, Any]:
    """Return the arguments of ``fully_shard``; both APIs have the same names."""
    policy: dict[str, Any] = {}
    if case.is_bf16:
        policy["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if case.is_copied:
        shape = (case.num_hosts, case.num_ranks // case.num_hosts)
        policy["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return policy


def _classic(model: GPT, _case: Case) -> nn.Module:
    from workbench.engine import classic

    os.environ.pop(COMM, None)
    return _wrap_per_block(model, classic.FullyShardedDataParallel, classic.ModuleWrapPolicy)


def _classic_torch(model: GPT, _case: Case) -> nn.Module:
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return _wrap_per_block(model, fsdp.FullyShardedDataParallel, ModuleWrapPolicy)


def _wrap_per_block(model: GPT, wrapper: Callable[..., nn.Module], policy: Callable[..., object]) -> nn.Module:
    wrap = policy({type(model.blocks[0])})
    return wrapper(model, auto_wrap_policy=wrap, device_id=torch.device("cpu"), forward_prefetch=True)


_PREPARE: dict[str, Callable[[GPT, Case], nn.Module]] = {
    ALONE: lambda model, _case: model,
    DDP: _ddp,
    TORCH: _torch,
    OURS_GLOO: _ours_gloo,
    OURS: _ours,
    CLASSIC: _classic,
    CLASSIC_TORCH: _classic_torch,
}


def warm(case: Case, implementation: str) -> Training:
    """Build the training and run the unmeasured steps, which make buffers and the optimizer's state."""
    training = make_training(case, implementation)
    for _ in range(WARM_UP):
        training.step()
    return training


def measure(case: Case, implementation: str, num_steps: int) -> list[Sample]:
    """Return the samples of ``num_steps`` steps on this rank."""
    training = warm(case, implementation)
    return [_timed(training) for _ in range(num_steps)]


def _timed(training: Training) -> Sample:
    dist.barrier()
    if training.is_on_gpu:
        torch.cuda.synchronize()
    cpu, begin = time.process_time_ns(), time.perf_counter_ns()
    training.backward()
    middle = time.perf_counter_ns()
    training.update()
    if training.is_on_gpu:
        torch.cuda.synchronize()
    end = time.perf_counter_ns()
    return Sample(end - begin, time.process_time_ns() - cpu, end - middle)
