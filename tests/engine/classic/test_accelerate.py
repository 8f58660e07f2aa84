"""Accelerate with ``fsdp_version=1`` gives the same bits on our wrapper as on torch's."""

import importlib
import os
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_sharded_data_parallel as their_module
from torch.distributed.fsdp import wrap as their_policies

from tests.helpers import huggingface_models
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import (
    FROZEN_BESIDE_TRAINED,
    NO_SHARD,
    OLD_CALLS,
    SHARDED_TENSOR,
    UPCAST,
    ignoring_warnings,
)
from tests.helpers.pairwise import quick
from tests.helpers.wrapped_models import CPU, assert_same_tree, kept
from workbench.base.ports import LOOPBACK
from workbench.engine import classic
from workbench.engine.classic import wrap as policies

PLACES = ((fsdp, classic), (their_module, classic), (their_policies, policies))
NAMES = {*classic.__all__, *their_policies.__all__}
TORCHS = {
    (module, name): getattr(module, name)
    for module, ours in PLACES
    for name in NAMES
    if hasattr(module, name) and hasattr(ours, name)
}


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    huggingface_models.transformers()
    importlib.import_module("accelerate")


def swap(*, ours: bool) -> None:
    """Make later imports of torch's wrapper in this process, which ends with the test, return ours."""
    instead = {id(module): package for module, package in PLACES}
    for (module, name), torchs in TORCHS.items():
        setattr(module, name, getattr(instead[id(module)], name) if ours else torchs)


def trains(ours: bool, kind: str, use_orig_params: bool, is_low: bool) -> list[object]:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import fsdp_utils

    swap(ours=ours)
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        **huggingface_models.PLUGIN,
        use_orig_params=use_orig_params,
        state_dict_type=kind,
        backward_prefetch="BACKWARD_PRE",
        activation_checkpointing=not is_low,
    )
    plugin.optim_state_dict_config.offload_to_cpu = False  # on a CPU torch's next gather overwrites offloaded values
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.state.distributed_type = DistributedType.FSDP  # Accelerate would choose this path only on GPUs
    accelerator.state.device, accelerator.state.fsdp_plugin = CPU, plugin
    if is_low:
        accelerator.state._mixed_precision = "bf16"
        plugin.set_mixed_precision("bf16")
    torch.manual_seed(0)
    plain = huggingface_models.make("Llama")
    model = accelerator.prepare(plain.to(torch.bfloat16) if is_low else plain)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True))
    found: list[object] = []

    def train() -> None:
        for step in range(4):
            with accelerator.accumulate(model):
                loss = huggingface_models.loss_of(model, huggingface_models.batch(dist.get_rank(), step))
                accelerator.backward(loss)
                found.append(kept(loss))
                if accelerator.sync_gradients:  # for other norms the last bits of torch's depend on chance
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"))
                    found.append(kept(norm))
                optimizer.step()
                optimizer.zero_grad()

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    train()
    if not ours and kind == "FULL_STATE_DICT":
        return found  # on a CPU torch's next gather frees the offloaded values, so saving them fails
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder[0])
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder[0])
    train()
    fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder[0])
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder[0])
    again = len(found)
    train()
    assert_same_tree(found[again:], found[again // 2 : again])
    found.append({name: str(param.dtype) for name, param in model.named_parameters()})
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    assert isinstance(model, classic.FullyShardedDataParallel if ours else TORCHS[fsdp, "FullyShardedDataParallel"])
    return found


def trains_alike(*how: object) -> None:
    place = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    met = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}  # unused: the process group exists
    os.environ.update({name: str(value) for name, value in (place | met).items()})
    with ignoring_warnings(*OLD_CALLS, *SHARDED_TENSOR, *NO_SHARD, *FROZEN_BESIDE_TRAINED, *UPCAST):
        ours, theirs = (trains(is_ours, *how) for is_ours in (True, False))
    assert_same_tree(ours[: len(theirs)], theirs)


@pytest.mark.parametrize("is_low", quick([False, True], [False]))
@pytest.mark.parametrize("use_orig_params", quick([False, True], [True]))
@pytest.mark.parametrize("kind", quick(["FULL_STATE_DICT", "SHARDED_STATE_DICT"], ["FULL_STATE_DICT"]))
def test_accelerate_trains_and_resumes_as_with_torchs_wrapper(kind, use_orig_params, is_low):
    run_ranks(2, trains_alike, kind, use_orig_params, is_low)
