"""Names, dtypes and sizes of collectives as torch's tools write them."""

from __future__ import annotations

import math

from workbench.events import Kind

MAX_NUMEL = 2**50

_KINDS = {
    "reducescatter": Kind.REDUCE_SCATTER,
    "allgather": Kind.ALL_GATHER,
    "allreduce": Kind.ALL_REDUCE,
    "alltoall": Kind.ALL_TO_ALL,
    "broadcast": Kind.BROADCAST,
    "barrier": Kind.BARRIER,
    "reduce": Kind.REDUCE,
    "gather": Kind.GATHER,
    "scatter": Kind.SCATTER,
    "send": Kind.SEND,
    "recv": Kind.RECV,
}
"""Kinds by the start of an operation's name, without underscores; in this order."""

_ITEMSIZES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2, "byte": 1, "char": 1}
_ITEMSIZES |= {"bool": 1, "unsigned char": 1, "signed char": 1, "long int": 8, "c10::half": 2, "c10::bfloat16": 2}


def kind_of(name: str) -> Kind | None:
    """Return the kind of a collective by its name in torch: ``"_allgather_base_" -> ALL_GATHER``; None if unknown."""
    plain = name.replace("_", "").lower()
    return next((kind for start, kind in _KINDS.items() if plain.startswith(start)), None)


def itemsize_of(dtype: object) -> int:
    """Return the bytes of an element of a dtype as profilers write it; 0 if unknown."""
    return _ITEMSIZES.get(dtype.lower(), 0) if isinstance(dtype, str) else 0


def numel_of(sizes: object) -> int:
    """Return the number of elements of a tensor's sizes, or of all tensors in a list of sizes; 0 if they are none."""
    if not isinstance(sizes, list):
        return 0
    if all(type(size) is int and 0 <= size < MAX_NUMEL for size in sizes):
        return math.prod(sizes)
    return sum(numel_of(each) for each in sizes)
