"""The recording that ``notebooks/00_replay.ipynb`` shows, made anew by ``python -m tests.helpers.replay_recording``."""

from tests.helpers.package_source import REPO
from workbench import Workbench

RECORDING = REPO / "notebooks" / "replay.trace"
NUM_RANKS = 4
NUM_STEPS = 6

MODEL = """
import torch
from workbench.zoo import GPT, GPTConfig, load_text, next_token_loss, rank_generator, sample_batch

text = load_text()
torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=len(text.characters), num_blocks=4, width=64, max_tokens=32)).to(device)
"""
STEP = """
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = rank_generator(seed=0, rank=rank)


def train_step():
    inputs, targets = sample_batch(text.train, num_sequences=8, num_tokens=32, generator=generator)
    loss = next_token_loss(model(inputs.to(device)), targets.to(device))
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()
"""


def main() -> None:
    """Train a small model for some steps on CPU ranks, and write the recording of the steps."""
    with Workbench(num_ranks=NUM_RANKS, device="cpu") as workbench:
        workbench.run_cell(MODEL)
        workbench.shard("model", wrap=["Block"])
        workbench.run_cell(STEP)
        workbench.step(NUM_STEPS)
        workbench.export(RECORDING)


if __name__ == "__main__":
    main()
