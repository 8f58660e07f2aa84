"""Small models and data for demos and tests; nothing is downloaded."""

from workbench.zoo.gpt import GPT, Attention, Block, GPTConfig, next_token_loss
from workbench.zoo.text import Text, heldout_loss, load_text, rank_generator, sample_batch, split_text, unigram_loss

__all__ = [
    "GPT",
    "Attention",
    "Block",
    "GPTConfig",
    "Text",
    "heldout_loss",
    "load_text",
    "next_token_loss",
    "rank_generator",
    "sample_batch",
    "split_text",
    "unigram_loss",
]
