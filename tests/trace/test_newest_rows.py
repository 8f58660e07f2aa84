"""The file of a rank's newest rows."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.events import Edge, Kind
from workbench.trace import newest_rows
from workbench.trace.newest_rows import NEWEST_FILE, NUM_ROWS, NewestRows, read_newest
from workbench.trace.schema import ROW_DTYPE, GroupInfo, Header

HEADER = Header(strings=("a",), comm_groups=(GroupInfo(name="all"),))


def rows(first, count, **columns):
    found = np.zeros(count, ROW_DTYPE)
    found["seq"] = np.arange(first, first + count)
    found["kind"], found["edge"] = Kind.ALL_REDUCE, Edge.BEGIN
    for name in ("module", "unit", "comm_group"):
        found[name] = -1
    for name, value in columns.items():
        found[name] = value
    return found


def write(file, first, count, **columns):
    file.write(first, rows(first, count, **columns).tobytes())


@given(st.lists(st.integers(1, NUM_ROWS), max_size=6), st.data())
def test_what_follows_a_row_is_read_if_all_of_it_is_there(tmp_path_factory, counts, data):
    folder = tmp_path_factory.mktemp("newest")
    file = NewestRows(folder, 3)
    for count in counts:
        write(file, file.seq, count)
    end = sum(counts)
    assert file.seq == end
    seq = data.draw(st.integers(0, end + 5))
    found = read_newest(folder / NEWEST_FILE.format(rank=3), seq, HEADER)
    assert found["seq"].tolist() == (list(range(seq, end)) if end - NUM_ROWS <= seq else [])
    file.delete()


@pytest.mark.parametrize("column", ["module", "unit", "comm_group"])
def test_rows_are_read_up_to_one_that_refers_to_what_is_unknown(tmp_path, column):
    file = NewestRows(tmp_path, 0)
    write(file, 0, 2)
    write(file, 2, 1, **{column: 1})
    write(file, 3, 1)
    assert len(read_newest(tmp_path / NEWEST_FILE.format(rank=0), 0, HEADER)) == 2
    file.delete()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"", b"x" * 52, b"\0" * 100_000, b"\xff" * 200_000])
def test_a_file_that_is_none_has_no_rows(tmp_path, content):
    path = tmp_path / NEWEST_FILE.format(rank=0)
    if content is not None:
        path.write_bytes(content)
    assert len(read_newest(path, 7, HEADER)) == 0


def test_a_file_that_cannot_be_written_is_none(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, os.strerror(28))

    assert not NewestRows(tmp_path / "no such folder", 0).is_open
    file = NewestRows(tmp_path, 0)
    monkeypatch.setattr(os, "pwrite", fails)
    write(file, 0, 1)
    assert (file.is_open, list(tmp_path.iterdir())) == (False, [])


def test_training_does_not_wait_for_a_slow_disk_again(tmp_path, monkeypatch):
    monkeypatch.setattr(newest_rows, "_SLOW_S", -1.0)
    file = NewestRows(tmp_path, 0)
    write(file, 0, 1)
    assert (file.is_open, list(tmp_path.iterdir())) == (False, [])
