"""All ranks gather the state, rank 0 writes it, and all wait for the file."""

import os
import tempfile

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(), fully_shard)
optimizer = torch.optim.AdamW(model.parameters())


def save(path):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, path)
        print("saved", len(state), flush=True)
    dist.barrier()


with tempfile.TemporaryDirectory() as folder:
    for step in range(8):
        loss = lm_loss(model, tokens(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.reduce(mean, dst=0)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.3f}", flush=True)
        if step % 4 == 3:
            save(os.path.join(folder, "model.pt"))
dist.destroy_process_group()
