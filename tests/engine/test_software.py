"""Third-party trainers and adapters on our engine and on torch's: Accelerate's FSDP2 path, and PEFT."""

import importlib
import os
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers import huggingface_models
from tests.helpers.forked_ranks import run_ranks
from workbench import engine
from workbench.base.ports import LOOPBACK

NAMES = ("FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "fully_shard")
pytestmark = [
    # CommDebugMode's, from its module hooks
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),  # torch's own
    # PEFT reads this attribute of transformers
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
TORCHS = {name: getattr(fsdp, name) for name in NAMES}


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    huggingface_models.transformers()
    for name in ("accelerate", "peft"):
        importlib.import_module(name)


def swap(api: ModuleType) -> None:
    """Make later imports of torch's engine in this process, which ends with the test, return ``api``'s."""
    for name in NAMES:
        setattr(fsdp, name, TORCHS[name] if api is fsdp else getattr(api, name))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, backward) -> list[object]:
    """Train three steps; return losses, the last step's number of collectives and gradients, and full parameters."""
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        with CommDebugMode() as mode:
            loss = huggingface_models.loss_of(model, huggingface_models.batch(dist.get_rank(), step))
            backward(loss)
        losses.append(loss.item())
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    params = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    return [losses, sum(mode.get_comm_counts().values()), grads, params]


def assert_same(ours: list[object], theirs: list[object]) -> None:
    assert ours[2]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def accelerated(checkpointing: bool) -> None:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState

    place = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    met = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "1",
    }  # required but unused: the process group exists
    os.environ.update({name: str(value) for name, value in (place | met).items()})
    found = []
    for api in (engine, fsdp):
        swap(api)
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            **huggingface_models.PLUGIN,
            activation_checkpointing=checkpointing,
        )
        accelerator = Accelerator(cpu=True)
        accelerator.state.distributed_type = DistributedType.FSDP  # Accelerate would choose this path only on GPUs
        accelerator.state.fsdp_plugin = plugin
        model = huggingface_models.make("Llama")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        assert isinstance(model, api.FSDPModule)
        found.append(trained(model, optimizer, accelerator.backward))
    assert PartialState().num_processes == 2
    assert_same(*found)


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", [False, True])
def test_accelerate_trains_as_with_torchs_engine(checkpointing):
    run_ranks(2, accelerated, checkpointing)


def adapted() -> None:
    from peft import LoraConfig, get_peft_model

    found = []
    for api in (engine, fsdp):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(huggingface_models.make("Llama"), config)
        for layer in huggingface_models.blocks(model.get_base_model()):
            api.fully_shard(layer)
        api.fully_shard(model)
        trained_only = [p for p in model.parameters() if p.requires_grad]
        assert 0 < len(trained_only) < len(list(model.parameters()))
        found.append(trained(model, torch.optim.AdamW(trained_only, lr=1e-2), torch.Tensor.backward))
        assert all("lora_" in name for name in found[-1][2])
    assert_same(*found)


def test_adapters_of_peft_train_as_with_torchs_engine():
    run_ranks(2, adapted)
