"""Reading of JSON piece by piece."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import TraceError
from workbench.importers import json_stream
from workbench.importers.json_stream import read_object

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def read(path):
    found = []
    entries, damage = read_object(path, {"events": found.append})
    return entries, found, damage


@given(before=st.dictionaries(st.text(), JSON, max_size=3), events=st.lists(JSON), piece=st.integers(1, 64))
def test_a_file_is_read_as_json_reads_it(before, events, piece, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "a.json"
    before.pop("events", None)
    text = json.dumps({**before, "events": events, "last": 12345}, ensure_ascii=False)
    path.write_bytes(gzip.compress(text.encode()) if piece % 2 else text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_PIECE_BYTES", piece)
        entries, found, damage = read(path)
    assert (found, damage) == (events, "")
    assert entries == {**before, "events": [], "last": 12345}


@given(cut=st.integers(1, 60), piece=st.integers(1, 64))
def test_what_precedes_the_cut_is_read(cut, piece, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "a.json"
    text = json.dumps({"a": 1, "events": [{"n": i} for i in range(8)]})
    path.write_text(text[: len(text) - cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_PIECE_BYTES", piece)
        _, found, damage = read(path)
    assert found == [{"n": i} for i in range(len(found))]
    assert damage == "ends before its end"


def test_damage_in_the_middle_is_placed(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"events": [{"n": 0}, {"n" 1}, {"n": 2}]}' + " " * 5_000_000)
    _, found, damage = read(path)
    assert found == [{"n": 0}]
    assert damage == "is damaged at character 22"


@pytest.mark.parametrize("element", [b'{"n":"%s"},' % (b"x" * 8000), b" " * 8000])
def test_memory_stays_bounded_however_long_the_file_is(tmp_path, element):
    path = tmp_path / "a.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"events": [')
        for _ in range(4000):
            file.write(element)
        file.write(b'{"n":1}]}')
    count = []
    tracemalloc.start()
    try:
        read_object(path, {"events": lambda _: count.append(None) if not count else None})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count
    assert peak < 16 << 20


def test_a_file_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "MAX_BYTES", 5 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b"{" + b" " * (8 << 20)))
    with pytest.raises(TraceError, match="profile fewer steps"):
        read(path)


def test_a_value_longer_than_the_limit_is_damage(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"events": ["' + "x" * (12 << 20) + '"]}')
    assert "damaged" in read(path)[2]


def test_endless_nesting_is_damage(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"events": ' + "[" * 100_000)
    assert read(path)[1] == []
    assert read(path)[2]
