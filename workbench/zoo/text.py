"""Real text that ships with Python, as characters: the help topics of ``pydoc``, about 0.5 MB of English prose.

The last tenth is held out. Token numbers are 1-D int64 tensors; B sequences, T tokens per sequence, V vocabulary.
Losses are in nats per character.
"""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data import topics  # type: ignore[import-not-found, unused-ignore]
from typing import Final

import torch
from torch import Tensor, nn

from workbench.zoo.gpt import next_token_loss

HELD_OUT: Final = 0.1
"""Fraction of the text, at its end, that training never sees."""

_EVAL_SEQUENCES = 64  # per forward; fits easily into a laptop's memory


@dataclass(frozen=True)
class Text:
    """A text as numbers, split in two.

    Attributes:
        train: token numbers for training, ``(N,)``.
        heldout: token numbers that follow them, ``(M,)``.
        characters: the vocabulary, sorted; token number n is ``characters[n]``.
    """

    train: Tensor
    heldout: Tensor
    characters: str

    def decode(self, ids: Tensor) -> str:
        """Return the text for the token numbers ``ids``."""
        return "".join(self.characters[i] for i in ids.tolist())


def load_text() -> Text:
    """Return the help topics of this Python, in the order of their names."""
    return split_text("\n".join(body for _, body in sorted(topics.topics.items())))


def split_text(text: str) -> Text:
    """Return ``text`` as token numbers, with the last tenth held out.

    Example: the 10 characters ``"abbaabbaca"`` -> train ``[0, 1, 1, 0, 0, 1, 1, 0, 2]``, held out ``[0]``.
    """
    characters = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(characters)}
    ids = torch.tensor([number[character] for character in text], dtype=torch.int64)
    num_train = len(ids) - round(len(ids) * HELD_OUT)
    return Text(ids[:num_train], ids[num_train:], characters)


def rank_generator(seed: int, rank: int) -> torch.Generator:
    """Return a CPU generator with a reproducible stream that differs between ranks."""
    return torch.Generator().manual_seed(seed * 1_000_003 + rank)


def sample_batch(
    ids: Tensor, *, num_sequences: int, num_tokens: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return random pieces of ``ids``: inputs ``(B, T)``, and targets shifted by one character.

    Args:
        ids: token numbers, ``(N,)``.
        num_sequences: B.
        num_tokens: T.
        generator: source of randomness, see :func:`rank_generator`.

    Raises:
        ValueError: ``ids`` is too short for one sequence and its last target.
    """
    if len(ids) <= num_tokens:
        raise ValueError(f"{num_tokens} tokens and the one after them need a text of {num_tokens + 1}, not {len(ids)}")
    start_B1 = torch.randint(len(ids) - num_tokens, (num_sequences, 1), generator=generator)
    piece = ids[start_B1 + torch.arange(num_tokens + 1)]  # (B, T + 1)
    return piece[:, :-1], piece[:, 1:]


def unigram_loss(text: Text) -> float:
    """Return the held-out loss of a model that knows only character frequencies in the training part.

    It is ``-sum_c q(c) log p(c)``: q the held-out frequencies, p from the training counts plus one for each character,
    so that none has probability 0. A language model below this loss has learned something about order.
    """
    num_characters = len(text.characters)
    counts_V = torch.bincount(text.train, minlength=num_characters).double() + 1
    log_p_V = (counts_V / counts_V.sum()).log()
    return -log_p_V[text.heldout].mean().item()


@torch.no_grad()
def heldout_loss(model: nn.Module, text: Text, *, num_tokens: int, device: torch.device | str = "cpu") -> float:
    """Return the mean loss over the held-out part, cut into whole sequences.

    Every rank runs the same forwards, as a sharded model requires, and returns the same number.

    Args:
        model: maps token numbers ``(B, T)`` to scores ``(B, T, V)``; in eval mode during the call.
        text: its held-out part is evaluated.
        num_tokens: T.
        device: device of the model.

    Raises:
        ValueError: the held-out part is shorter than one sequence and its last target.
    """
    num_sequences = (len(text.heldout) - 1) // num_tokens
    if num_sequences < 1:
        raise ValueError(f"{num_tokens} tokens and the one after them need more than {len(text.heldout)} held out")
    used = text.heldout[: num_sequences * num_tokens + 1].to(device)
    inputs_BT, targets_BT = used[:-1].view(-1, num_tokens), used[1:].view(-1, num_tokens)
    was_training = model.training
    model.eval()
    try:
        losses = [
            next_token_loss(model(inputs), targets) * len(inputs)
            for inputs, targets in zip(inputs_BT.split(_EVAL_SEQUENCES), targets_BT.split(_EVAL_SEQUENCES), strict=True)
        ]
    finally:
        model.train(was_training)
    return (torch.stack(losses).sum() / num_sequences).item()
