"""Reading of a JSON file piece by piece: an array in it is decoded element by element, in bounded memory."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from workbench.errors import TraceError

MAX_BYTES = 8 << 30
"""Maximum bytes of a file, unpacked. A gigabyte takes about half a minute."""

MAX_VALUE_BYTES = 4 << 20
"""Maximum length of one element, or of a value beside the array."""

DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""Exceptions of a compressed file that is cut or damaged."""

_PIECE_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_AFTER_A_VALUE = tuple(" \t\r\n,:]}")
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


Takers = Mapping[str, Callable[[Any], None]]
"""Receivers of the elements of arrays, by the arrays' keys."""


def read_object(path: Path, takers: Takers) -> tuple[dict[str, Any], str]:
    """Read the object in a file, compressed or not; pass each element of some of its arrays to a function.

    Args:
        path: path of the file.
        takers: receive the elements, in order; the arrays themselves are empty in the result.

    Returns:
        The other entries of the object, and how the file is damaged, as the end of a sentence; empty if it is whole.

    Raises:
        TraceError: the file holds no JSON object, or is too long.
        OSError: the file cannot be read.
    """
    with path.open("rb") as raw:
        text = _JsonText(unpacked(raw))
        entries: dict[str, Any] = {}
        try:
            if text.next_character() != "{":
                raise TraceError("it is not JSON of a trace: it does not begin with {")
            _read_entries(text, takers, entries)
        except _DamageError as error:
            return entries, str(error)
    return entries, ""


def unpacked(raw: BufferedReader) -> BufferedReader | gzip.GzipFile:
    """Return a file that reads the content of ``raw``, compressed or not."""
    is_packed = raw.read(len(_GZIP)) == _GZIP
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if is_packed else raw


class _DamageError(Exception):
    """The rest of a file cannot be decoded; the message follows its name."""


def _read_entries(text: _JsonText, takers: Takers, entries: dict[str, Any]) -> None:
    text.skip("{")
    while text.next_character() != "}":
        key = str(text.value())
        text.skip(":")
        if key in takers and text.next_character() == "[":
            entries[key] = []
            _read_elements(text, takers[key])
        else:
            entries[key] = text.value()
        if text.next_character() != "}":
            text.skip(",")


def _read_elements(text: _JsonText, take: Callable[[Any], None]) -> None:
    text.skip("[")
    while text.next_character() != "]":
        take(text.value())
        if text.next_character() != "]":
            text.skip(",")
    text.skip("]")


class _JsonText:
    """The characters of a file that are decoded at the moment."""

    def __init__(self, file: BufferedReader | gzip.GzipFile) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._buffer = ""
        self._at = 0
        self._num_bytes = 0
        self._is_over = False

    def next_character(self) -> str:
        """Return the next character that is no space.

        Raises:
            _DamageError: the file ends.
        """
        while True:
            found = _SPACE.match(self._buffer, self._at)
            self._at = self._at if found is None else found.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._extend():
                raise _DamageError("ends before its end")

    def skip(self, character: str) -> None:
        """Move past a character.

        Raises:
            _DamageError: another one comes next.
        """
        if self.next_character() != character:
            raise _DamageError(f"is damaged at character {self._place():,}")
        self._at += 1

    def value(self) -> Any:  # noqa: ANN401 - any JSON
        """Return the next value and move past it.

        Raises:
            _DamageError: there is none.
        """
        self.next_character()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except (ValueError, RecursionError) as error:
                value, end = error, len(self._buffer)
            # a number may go on in the next piece: 12 | 34, or 12. | 34
            if self._buffer[end : end + 1] in _AFTER_A_VALUE or self._is_over:
                break
            if len(self._buffer) - self._at > MAX_VALUE_BYTES or not self._extend():
                break
        if isinstance(value, Exception):
            cut = self._is_over and len(self._buffer) - self._at < MAX_VALUE_BYTES
            raise _DamageError("ends before its end" if cut else f"is damaged at character {self._place():,}")
        self._at = end
        return value

    def _place(self) -> int:
        return self._num_bytes - len(self._buffer) + self._at

    def _extend(self) -> bool:
        """Append the next piece; return False at the end of the file."""
        if self._is_over:
            return False
        try:
            # twice as much as is there: a long value is then decoded again only a few times
            # read1, because read drops what precedes the end of a truncated file
            piece = self._file.read1(max(_PIECE_BYTES, len(self._buffer) - self._at))
        except DAMAGED:
            piece = b""
        self._num_bytes += len(piece)
        self._is_over = not piece
        if self._num_bytes > MAX_BYTES:
            raise TraceError(
                f"it has more than {MAX_BYTES >> 30} GB, unpacked: profile fewer steps, for example with "
                "torch.profiler.schedule(wait=1, warmup=1, active=3)"
            )
        self._buffer, self._at = self._buffer[self._at :] + self._decode(piece), 0
        return bool(piece)
