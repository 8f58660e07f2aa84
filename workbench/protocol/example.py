"""A cell with everything a step needs, for ``%fsdp example`` and the panel's button."""

from __future__ import annotations

EXAMPLE = """\
%%fsdp
# A small GPT that learns to predict characters. Run this cell, then %fsdp shard model, then %fsdp step 5.
import torch
from workbench.zoo import GPT, GPTConfig, load_text, next_token_loss, rank_generator, sample_batch

text = load_text()
torch.manual_seed(0)  # the same model on every rank
model = GPT(GPTConfig(vocab_size=len(text.characters), num_blocks=4, width=128, max_tokens=64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = rank_generator(seed=0, rank=rank)  # other samples on every rank


def train_step():
    inputs, targets = sample_batch(text.train, num_sequences=8, num_tokens=64, generator=generator)
    loss = next_token_loss(model(inputs.to(device)), targets.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""

INSERTED = "below: a cell with a model, an optimizer and train_step(). Run it, then %fsdp shard model"
"""Shown above the inserted cell."""
