"""Reading of pickles that hold plain data only: no class is looked up, and no function is called."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable
from itertools import chain
from typing import Any

from workbench.errors import TraceError

_OPCODES = (
    *("PROTO", "FRAME", "MARK", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1"),
    *("TUPLE2", "TUPLE3", "SETITEM", "SETITEMS", "APPEND", "APPENDS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET"),
    "LONG_BINGET",
)
"""Instructions that build dicts, lists, tuples, strings, numbers, booleans and None."""

_DAMAGED = (EOFError, IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, pickle.UnpicklingError)


_MAX_VALUES, _MAX_DEPTH = 5_000_000, 16  # a value may occur many times, also in itself


# in Python: the reader in C allocates as much memory as an index in the file claims
class _PlainUnpickler(pickle._Unpickler):
    dispatch = {  # noqa: RUF012
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }


def _size(value: object, room: int, depth: int = _MAX_DEPTH) -> int:
    """Return the number of values in a value, each counted wherever it occurs.

    Raises:
        pickle.UnpicklingError: there are more than ``room``, or one contains itself.
    """
    inside: Iterable[object] = ()
    if isinstance(value, dict):
        inside = chain(value, value.values())
    elif isinstance(value, list | tuple):
        inside = value
    size = 1
    for each in inside:
        if size > room or not depth:
            raise pickle.UnpicklingError("too many values")
        size += _size(each, room - size, depth - 1)
    return size


def loads(content: bytes) -> Any:  # noqa: ANN401 - plain data
    """Return the data of a pickle: dicts, lists, tuples, strings, numbers, booleans and None.

    Raises:
        TraceError: it holds anything else, or is damaged.
    """
    try:
        found = _PlainUnpickler(io.BytesIO(content)).load()
        _size(found, _MAX_VALUES)
    except _DAMAGED as error:
        raise TraceError("its pickle holds more than plain data, or is damaged; nothing of it was executed") from error
    return found
