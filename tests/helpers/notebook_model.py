"""Cells that the tests run on real ranks: a small model, its optimizer, a training step."""

CELL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
generator = torch.Generator().manual_seed(rank)

def train_step():
    loss = model(torch.randn(8, 16, generator=generator)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.item()
"""

UNHURRIED = """
import time

as_fast_as_it_can = train_step

def train_step():
    time.sleep(0.2)  # else the ranks take the processors from the page that is tested
    return as_fast_as_it_can()
"""
"""A cell to run after CELL: makes the step as long as a large model's, without more computation."""


def fresh_cell(*, optimizer: str, synced: str, clip: str) -> str:
    """Return a cell that makes the same model and optimizer again, and a step of two micro-batches.

    The step that follows an aborted one uses the same data.

    Args:
        optimizer: options of AdamW.
        synced: context manager for the micro-batch ``micro``; it enables gradient reduction for the last one only.
        clip: statement that limits the norm of the gradients.
    """
    return f"""
import contextlib
torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters(), {optimizer})
generator = torch.Generator()
count = 0

def train_step():
    global count
    for micro in range(2):
        generator.manual_seed(1000 * count + 10 * micro + rank)
        with {synced}:
            loss = model(torch.randn(8, 16, generator=generator)).square().mean()
            loss.backward()
    {clip}
    opt.step()
    opt.zero_grad()
    count += 1
    return loss.item()
"""
