"""A BERT of transformers with DDP: one rank asserts that its loss is finite."""

import torch
import torch.distributed as dist
from common import start
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import BertConfig, BertForMaskedLM

rank, world = start()
config = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)
model = DDP(BertForMaskedLM(config), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    ids = torch.randint(0, 50, (2, 8))
    loss = model(input_ids=ids, labels=ids).loss
    if rank == 1 and step == 3:
        loss = loss / 0.0 * 0.0
    assert torch.isfinite(loss), f"loss is {loss.item()} at step {step}"  # <- here
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
