"""A tiny Llama of transformers in the classic wrapper, with evaluation on all ranks."""

from functools import partial

import torch
import torch.distributed as dist
from common import start
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

rank, world = start()
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
)
policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
model = FSDP(LlamaForCausalLM(config), auto_wrap_policy=policy, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def ids(seed):
    return torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed))


for step in range(5):
    batch = ids(10 * step + rank)
    model(input_ids=batch, labels=batch).loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    batch = ids(999)
    value = model(input_ids=batch, labels=batch).loss
dist.all_reduce(value)
if rank == 0:
    print("eval", value.item() / world, flush=True)
dist.destroy_process_group()
