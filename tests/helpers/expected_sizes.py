"""Sizes of a small net by formula, independent of the engine."""

import torch

FP32 = 4
DIM, BLOCKS, VOCAB = 5, 2, 7
WIDE = 3 * DIM + 1
BLOCK_SHAPES = ((DIM,), (DIM,), (WIDE, DIM), (WIDE,), (DIM, WIDE), (DIM,))  # norm, first linear, second linear
ROOT_SHAPES = ((VOCAB, DIM), (1,), (VOCAB, DIM))  # embedding, scale, head
UNITS = ("root", "blocks.0", "blocks.1")
NET = {"dim": DIM, "num_blocks": BLOCKS, "vocab": VOCAB}


def numel(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return the number of elements of the parameters, without padding."""
    return sum(torch.Size(shape).numel() for shape in shapes)


def slots(world_size: int, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return the elements that one rank stores: padded rows (d0 / F, rounded up) times the elements of a row."""
    return sum(-(-shape[0] // world_size) * torch.Size(shape[1:]).numel() for shape in shapes)
