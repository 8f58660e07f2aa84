"""A tiny Llama of transformers, sharded: rank 0 alone generates a sample between epochs."""

import torch
import torch.distributed as dist
from common import start
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

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
model = LlamaForCausalLM(config)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_epoch(epoch):
    model.train()
    for i in range(3):
        ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(97 * epoch + 7 * i + rank))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sample():
    model.eval()
    prompt = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for _ in range(4):
            logits = model(input_ids=prompt).logits  # <- here
            prompt = torch.cat([prompt, logits[:, -1:].argmax(-1)], dim=1)
    print("sample", prompt.tolist(), flush=True)


for epoch in range(2):
    train_epoch(epoch)
    if rank == 0:
        sample()
    dist.barrier()
dist.destroy_process_group()
