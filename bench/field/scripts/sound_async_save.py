"""A thread saves checkpoints with collectives of a group of its own, while the ranks train on."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
saving = dist.new_group(backend="gloo")
model = shard(TinyLM(), fully_shard)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
pending = None
for step in range(24):
    loss = lm_loss(model, tokens(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 8 == 7:
        if pending is not None:
            pending.result()
        pending = dcp.async_save(
            {"model": model.state_dict()}, checkpoint_id=f"{folder[0]}/{step}", process_group=saving
        )
pending.result()
dist.barrier()
dist.destroy_process_group()
