import contextlib
import io
import json
import os
import pickle
import stat
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.strategies import any_traces, example_trace, traces
from workbench.errors import TraceError
from workbench.trace import Trace, load, save
from workbench.trace.schema import SCHEMA_VERSION


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@given(st.one_of(any_traces(), traces()))
def test_a_trace_loads_back_equal(folder, trace):
    save(trace, folder / "a.trace")
    assert load(folder / "a.trace") == trace


def test_numpy_opens_a_trace_too(tmp_path):
    trace = example_trace(num_ranks=2, steps=1)
    save(trace, str(tmp_path / "a.trace"))
    with np.load(tmp_path / "a.trace", allow_pickle=False) as archive:
        assert json.loads(archive["trace.json"])["header"]["world_size"] == 2
        assert np.array_equal(archive["rows_1"]["seq"], trace.rank(1).rows["seq"])


def test_the_file_is_private_and_nothing_else_is_left(tmp_path):
    save(example_trace(steps=1), tmp_path / "a.trace")
    assert os.listdir(tmp_path) == ["a.trace"]
    assert stat.S_IMODE(os.stat(tmp_path / "a.trace").st_mode) == 0o600


@pytest.mark.parametrize("broken", ["os.replace", "os.fsync", "workbench.trace.file.npy.write_array"])
def test_a_failing_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    old, path = example_trace(steps=1), tmp_path / "a.trace"
    save(old, path)

    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        with pytest.raises(OSError, match="disk full"):
            save(example_trace(steps=2), path)
    assert load(path) == old
    assert os.listdir(tmp_path) == ["a.trace"]


def test_a_missing_file_or_folder_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.trace")
    with pytest.raises(FileNotFoundError):
        save(Trace.empty(), tmp_path / "none" / "a.trace")


def bytes_of(trace: Trace, folder) -> bytes:
    save(trace, folder / "source.trace")
    return (folder / "source.trace").read_bytes()


def members_of(folder) -> dict[str, bytes]:
    """The members of the example's file."""
    with zipfile.ZipFile(io.BytesIO(bytes_of(example_trace(num_ranks=2, steps=1), folder))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def array_file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


NOT_A_TRACE = "it is not a trace, or it is damaged or cut short"


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", pickle.dumps({"rows": 1}), array_file(np.arange(3)), b"PK\x03\x04 and no more"],
    ids=["empty", "text", "pickle", "npy", "zip-start"],
)
def test_other_files_are_refused(tmp_path, data):
    (tmp_path / "a.trace").write_bytes(data)
    with pytest.raises(TraceError, match=rf"cannot read .*a\.trace: {NOT_A_TRACE}"):
        load(tmp_path / "a.trace")


@given(st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_refused(folder, share):
    whole = bytes_of(example_trace(num_ranks=2, steps=1), folder)
    (folder / "cut.trace").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TraceError, match=NOT_A_TRACE):
        load(folder / "cut.trace")


@given(st.data())
def test_a_damaged_file_is_refused_or_unharmed(folder, data):
    trace = example_trace(num_ranks=2, steps=1)
    damaged = bytearray(bytes_of(trace, folder))
    place = data.draw(st.one_of(st.integers(0, len(damaged) - 1), st.integers(len(damaged) - 400, len(damaged) - 1)))
    damaged[place] = data.draw(st.integers(0, 255))
    (folder / "damaged.trace").write_bytes(damaged)
    with contextlib.suppress(TraceError):
        assert load(folder / "damaged.trace") == trace


def edited_meta(edit) -> object:
    """An edit of the members that changes the JSON."""

    def apply(members):
        meta = json.loads(members["trace.json"])
        members["trace.json"] = json.dumps(edit(meta) or meta).encode()

    return apply


def npy_with_header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda m: m.pop("trace.json"), "it holds no trace.json, so it is not a trace"),
        (lambda m: m.pop("rows_1.npy"), NOT_A_TRACE),
        (lambda m: m.update({"trace.json": b"{"}), NOT_A_TRACE),
        (lambda m: m.update({"trace.json": b"[" * 100_000}), NOT_A_TRACE),
        (lambda m: m.update({"rows_1.npy": array_file(np.array([{}], object))}), NOT_A_TRACE),
        (lambda m: m.update({"rows_1.npy": npy_with_header(b"{'descr': (\n")}), NOT_A_TRACE),
        (lambda m: m.update({"rows_1.npy": array_file(np.arange(4.0))}), "rank 1: rows must be .*got 1-D of float64"),
        (edited_meta(lambda meta: [meta]), NOT_A_TRACE),
        (edited_meta(lambda meta: meta.pop("header") and None), NOT_A_TRACE),
        (edited_meta(lambda meta: meta["ranks"][1].pop("start") and None), NOT_A_TRACE),
        (edited_meta(lambda meta: meta["ranks"].append(meta["ranks"][0])), r"each rank once, got ranks \[0, 1, 0\]"),
        (edited_meta(lambda meta: meta["header"].pop("strings") and None), r"header lacks \['strings'\]"),
        (
            edited_meta(lambda meta: meta["header"].update(schema_version=SCHEMA_VERSION + 1)),
            "schema version 2, this workbench reads up to 1: update fsdp-workbench to read it",
        ),
    ],
)
def test_a_zip_with_wrong_content_is_refused(tmp_path, edit, sentence):
    members = members_of(tmp_path)
    edit(members)
    (tmp_path / "a.trace").write_bytes(zipped(members))
    with pytest.raises(TraceError, match=sentence):
        load(tmp_path / "a.trace")
