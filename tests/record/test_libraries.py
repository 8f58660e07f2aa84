"""Training libraries run unchanged under ``python -m workbench.record``: losses are equal, and units are recorded."""

from collections import Counter

import pytest

from tests.helpers.warm_python import torchrun
from workbench.events import COLLECTIVES, Edge, Kind
from workbench.replay.collectives import compare
from workbench.trace import check, steps
from workbench.trace.read_recording import read

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]

SAY = """
import os

def say(rank, loss):
    os.write(1, f"loss {rank} {loss.item().hex()}\\n".encode())  # in one piece, other than print
"""

LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import lightning, torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Sequential(nn.Linear(32, 16)))
        for block in self.model:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, number):
        loss = self.model(batch[0]).square().mean()
        say(self.global_rank, loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), 1e-2)

torch.manual_seed(1)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(48, 16)), batch_size=8))
"""

LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2))
"""

PEFT = f"""{LLAMA}
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
for layer in model.base_model.model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], 1e-2)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    ids = torch.randint(0, 64, (2, 8))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(dist.get_rank(), loss)
dist.destroy_process_group()
"""

TRAINER = f"""{LLAMA}
import accelerate
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer, TrainingArguments

begin = accelerate.Accelerator.__init__

def init(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    self.state.distributed_type = DistributedType.FSDP  # Accelerate would choose this path only on GPUs
    self.state.device = torch.device("cpu")
    self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )

accelerate.Accelerator.__init__ = init

class Told(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        say(self.accelerator.process_index, loss)
        return loss

ids = torch.randint(0, 64, (24, 8))
Told(
    model=model,
    args=TrainingArguments(output_dir="out", max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[],
                           save_strategy="no", disable_tqdm=True, logging_strategy="no"),
    train_dataset=[{{"input_ids": each, "labels": each}} for each in ids],
).train()
torch.distributed.destroy_process_group()  # threads of gloo may crash a process that ends with a group
"""

ACCELERATE = """
import torch
from torch import nn
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=version,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Block"],
    reshard_after_forward=True if version == 2 else "FULL_SHARD",
)
accelerator = Accelerator(cpu=True)
accelerator.state.distributed_type = DistributedType.FSDP  # Accelerate would choose this path only on GPUs
accelerator.state.device, accelerator.state.fsdp_plugin = torch.device("cpu"), plugin
torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if version == 2:
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
torch.manual_seed(accelerator.process_index)
for _ in range(3):
    loss = model(torch.randn(8, 16)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    say(accelerator.process_index, loss)
"""

PIPELINE = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
part = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=lambda found, wanted: (found - wanted).square().mean())
optimizer = torch.optim.SGD(part.parameters(), 0.1)
torch.manual_seed(7)
for _ in range(3):
    x, y, losses = torch.randn(16, 16), torch.randn(16, 16), []
    schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    if rank:
        say(rank, sum(losses))
dist.destroy_process_group()
"""


def losses(done, number):
    assert done.returncode == 0, done.stderr
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("loss"))
    assert len(found) == number
    return found


def recorded(tmp_path, script, num_losses=6, is_compared=True):
    """Run a script under the recorder; return the trace. If compared, its losses are those of a plain run."""
    (tmp_path / "train.py").write_text(SAY + script)
    done = torchrun("-m", "workbench.record", "--out", str(tmp_path / "out"), str(tmp_path / "train.py"))
    found = losses(done, num_losses)
    if is_compared:
        assert found == losses(torchrun(str(tmp_path / "train.py")), num_losses)
    found = read(tmp_path / "out")
    assert found.notes == ()
    assert check(found.trace) == []
    return found.trace


def collectives_of(trace, step):
    """Return how many collectives of each kind rank 0 began in a step."""
    rows = trace.rank(0).rows
    begun = rows["kind"][(rows["edge"] == Edge.BEGIN) & (rows["step"] == step)]
    between_ranks = {*COLLECTIVES, Kind.SEND, Kind.RECV}
    return {kind: number for kind, number in Counter(map(Kind, begun.tolist())).items() if kind in between_ranks}


def is_as_expected(trace, units):
    assert [unit.name for unit in trace.header.units] == units
    assert steps(trace) == [0, 1, 2]
    found = [row for row in compare(trace, 2) if row.unit >= 0]  # a library may clip the norm of gradients
    assert {row.unit for row in found} == set(range(len(units)))
    assert all((row.calls, row.num_bytes) == (row.expected.calls, row.expected.num_bytes) for row in found)


def test_lightning_with_its_strategy_for_fully_shard(tmp_path):
    is_as_expected(recorded(tmp_path, LIGHTNING), ["0", "1"])


def test_peft_s_adapters_with_frozen_units(tmp_path):
    layers = [f"base_model.model.model.layers.{number}" for number in (0, 1)]
    trace = recorded(tmp_path, PEFT, is_compared=False)
    is_as_expected(trace, ["", *layers])
    assert collectives_of(trace, 2) == {Kind.ALL_GATHER: 5, Kind.REDUCE_SCATTER: 2}  # none for the frozen root


def test_the_trainer_of_transformers(tmp_path):
    trace = recorded(tmp_path, TRAINER)
    is_as_expected(trace, ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"])


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_with_either_version_of_torchs_fsdp(tmp_path, version):
    is_as_expected(recorded(tmp_path, f"version = {version}\n{ACCELERATE}"), ["", "0", "1"])


def test_a_pipeline_s_sends_and_receives(tmp_path):
    trace = recorded(tmp_path, PIPELINE, num_losses=3)
    assert trace.header.units == ()
    assert collectives_of(trace, 2) == {Kind.SEND: 4, Kind.RECV: 4}  # outputs of 4 micro-batches, and their gradients
