import contextlib
import io
import json
import os
import pickle
import stat
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import any_traces, example_trace, traces
from workbench.errors import TraceError
from workbench.trace import Trace, check, load, save
from workbench.trace.schema import SCHEMA_VERSION


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@given(traces())
def test_a_trace_loads_back_equal(folder, trace):
    save(trace, folder / "a.trace")
    assert load(folder / "a.trace") == trace


def test_numpy_opens_a_trace_too(tmp_path):
    trace = example_trace(num_ranks=2, steps=1)
    save(trace, str(tmp_path / "a.trace"))
    with np.load(tmp_path / "a.trace", allow_pickle=False) as archive:
        assert json.loads(archive["trace.json"])["header"]["world_size"] == 2
        assert np.array_equal(archive["rows_1"]["seq"], trace.rank(1).rows["seq"])


@given(any_traces())
def test_an_invalid_trace_is_written_unchanged_and_refused_on_load(folder, trace):
    save(trace, folder / "any.trace")
    broken = check(trace)
    if not broken:
        assert load(folder / "any.trace") == trace
        return
    with pytest.raises(TraceError) as refused:
        load(folder / "any.trace")
    assert str(refused.value).startswith(f"cannot read {folder / 'any.trace'}: it is not a valid trace: ")
    assert broken[0][:300] in str(refused.value)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_file_has_the_users_mode_and_nothing_else_is_left(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save(example_trace(steps=1), tmp_path / "a.trace")
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == ["a.trace"]
    assert stat.S_IMODE(os.stat(tmp_path / "a.trace").st_mode) == mode


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk full", "Ctrl-C"])
@pytest.mark.parametrize("broken", ["os.replace", "os.fsync", "workbench.trace.file.npy.write_array"])
def test_a_failing_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken, error):
    old, path = example_trace(steps=1), tmp_path / "a.trace"
    save(old, path)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        with pytest.raises(type(error)):
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
    """Return the members of the example's file."""
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


NOT_A_TRACE = "it is not a trace, or it is damaged or truncated"


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


@st.composite
def mutations(draw, size):
    """Draw a change of a file, ``(begin, end, replacement)``: another part of it, other bytes, or nothing."""
    begin = draw(st.integers(0, size))
    end = draw(st.integers(begin, min(begin + draw(st.sampled_from([4, 60, 4000])), size)))
    copied = draw(st.integers(0, size))
    junk = st.binary(max_size=8) | st.just(slice(copied, copied + draw(st.sampled_from([4, 60, 4000]))))
    return begin, end, draw(junk)


@given(st.data())
def test_any_mutation_is_a_trace_or_is_refused_and_takes_little_memory(folder, data):
    original = bytes_of(example_trace(num_ranks=2, steps=1), folder)
    mutated = original
    for begin, end, there in data.draw(st.lists(mutations(len(original)), min_size=1, max_size=4)):
        mutated = mutated[:begin] + (original[there] if isinstance(there, slice) else there) + mutated[end:]
    (folder / "mutated.trace").write_bytes(mutated)
    tracemalloc.start()
    try:
        with contextlib.suppress(TraceError):
            assert check(load(folder / "mutated.trace")) == []
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def edited_meta(edit) -> object:
    """Return an edit of the members that changes the JSON."""

    def apply(members):
        meta = json.loads(members["trace.json"])
        members["trace.json"] = json.dumps(edit(meta) or meta).encode()

    return apply


def deflated(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def claiming(data: bytes, name: str, num_bytes: int) -> bytes:
    """Return a zip file with a member whose stated size is wrong."""
    claimed = num_bytes.to_bytes(4, "little")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info, entry = archive.getinfo(name), archive.start_dir
    while data[entry + 46 :][: len(name)] != name.encode():
        entry = data.index(b"PK\x01\x02", entry + 1)
    changed = bytearray(data)
    changed[entry + 24 : entry + 28] = changed[info.header_offset + 22 : info.header_offset + 26] = claimed
    return bytes(changed)


ZEROS = bytes(64 << 20)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda m: deflated(m | {"trace.json": ZEROS}),
            "trace.json claims 67,108,864 bytes, more than the limit of",
        ),
        (lambda m: claiming(deflated(m | {"trace.json": ZEROS}), "trace.json", 1000), NOT_A_TRACE),
        (lambda m: deflated(m | {"rows_1.npy": ZEROS}, zipfile.ZIP_BZIP2), "trace.json has an unsupported compression"),
        (lambda m: claiming(deflated(m), "rows_1.npy", 2**32 - 2), "it claims 82,59.* rows, more than the limit of"),
        (lambda m: claiming(deflated(m), "rows_1.npy", 900_000), NOT_A_TRACE),
        (lambda m: claiming(deflated(m | {"rows_1.npy": ZEROS}), "rows_1.npy", 60), NOT_A_TRACE),
        (lambda m: deflated(m | {"rows_1.npy": ZEROS}), r"it claims 1,290,\d+ rows in \d+,\d+ bytes, which is"),
        (lambda m: deflated(m | {f"{place:090}": b"" for place in range(65_000)}), "table of contents is too long"),
    ],
    ids=["header", "header-lies", "other-method", "rows", "rows-lie", "rows-hide", "rows-zip", "members"],
)
def test_a_decompression_bomb_costs_little(tmp_path, make, sentence):
    (tmp_path / "bomb.trace").write_bytes(make(members_of(tmp_path)))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=sentence):
            load(tmp_path / "bomb.trace")
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.trace")
    with pytest.raises(TraceError, match="it is a pipe, a socket or a device"):
        load(tmp_path / "a.trace")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data(), value=JSON)
def test_any_value_anywhere_in_the_header_is_carried_or_refused(folder, data, value):
    members = members_of(folder)
    place = meta = json.loads(members["trace.json"])
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.integers(0, 4)) == 0:
            break
        place = place[key]
    place[key] = value
    members["trace.json"] = json.dumps(meta).encode()
    (folder / "fuzzed.trace").write_bytes(zipped(members))
    with contextlib.suppress(TraceError):
        assert check(load(folder / "fuzzed.trace")) == []


@given(st.binary(max_size=300), st.sampled_from(["trace.json", "rows_0.npy"]), st.booleans())
def test_any_bytes_in_a_member_are_refused(folder, junk, name, keep_start):
    members = members_of(folder)
    members[name] = members[name][:100] * keep_start + junk
    (folder / "fuzzed.trace").write_bytes(zipped(members))
    with pytest.raises(TraceError, match="cannot read"):
        load(folder / "fuzzed.trace")


@given(st.binary(max_size=200), st.sampled_from([b"", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06"]))
def test_any_bytes_are_refused(folder, junk, start):
    (folder / "junk.trace").write_bytes(start + junk)
    with pytest.raises(TraceError, match="cannot read"):
        load(folder / "junk.trace")


def test_an_unreadable_header_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.trace.file.MAX_META_BYTES", 100)
    with pytest.raises(TraceError, match=r"the header takes .* bytes, more than the limit of 100"):
        save(example_trace(steps=1), tmp_path / "a.trace")
    assert os.listdir(tmp_path) == []


def npy_with_header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda m: m.pop("trace.json"), "it is not a trace: it has no trace.json"),
        (lambda m: m.pop("rows_1.npy"), NOT_A_TRACE),
        (lambda m: m.update({"trace.json": b"{"}), NOT_A_TRACE),
        (lambda m: m.update({"trace.json": b"[" * 100_000}), NOT_A_TRACE),
        (lambda m: m.update({"rows_1.npy": array_file(np.array([{}], object))}), "rank 1: rows must be .*, its header"),
        (lambda m: m.update({"rows_1.npy": npy_with_header(b"{'descr': (\n")}), "rank 1: rows must be .*, its header"),
        (lambda m: m.update({"rows_1.npy": b"x"}), NOT_A_TRACE),
        (
            lambda m: m.update({"rows_1.npy": m["rows_1.npy"][:-1]}),
            r"rank 1: its header claims \d+ rows, but .* follow",
        ),
        (
            lambda m: m.update({"rows_1.npy": m["rows_1.npy"].replace(b": (", b": (9", 1)}),
            "rank 1: its header claims 9",
        ),
        (edited_meta(lambda meta: meta["ranks"][1].update(rank=-1)), "rank is -1, expected a whole number from 0 to 2"),
        (edited_meta(lambda meta: meta["ranks"][1].update(lost=10**4299)), "lost is 1000+, expected a whole number"),
        (edited_meta(lambda meta: meta["ranks"][1].update(lost="no")), "lost is 'no', expected a whole number"),
        (edited_meta(lambda meta: meta["header"].update(world_size=10**15)), "the world has 1000000000000000 ranks"),
        (edited_meta(lambda meta: meta["header"].update(world_size=10**40)), "world_size is a number of 133 bits"),
        (edited_meta(lambda meta: meta["header"].update(world_size=1)), "rank 1 is out of range for 1 ranks, and"),
        (edited_meta(lambda meta: meta["header"].update(mesh_shape=[0])), "the mesh has the shape"),
        (edited_meta(lambda meta: meta["header"]["units"][0].update(shard_size=10**9)), "copies on 1000000000 ranks"),
        (edited_meta(lambda meta: meta["header"]["units"][0].update(compute_itemsize=-1)), "has elements of -1"),
        (edited_meta(lambda meta: meta["header"]["units"][0]["params"][0].update(shape=[-4])), "has the shape"),
        (edited_meta(lambda meta: meta["ranks"][0]["start"].update(seq=2**62)), "the rows begin at 46116860184"),
        (
            edited_meta(lambda meta: meta["ranks"][0]["start"].update(unit_states={"70": 2})),
            "key frame has unit 70",
        ),
        (edited_meta(lambda meta: meta["ranks"][0]["start"].update(bytes_by_category=[-1] * 10)), "the key frame has"),
        (lambda m: m.update({"rows_1.npy": array_file(np.arange(4.0))}), "rank 1: rows must be .*, its header is .*f8"),
        (edited_meta(lambda meta: [meta]), NOT_A_TRACE),
        (edited_meta(lambda meta: meta.pop("header") and None), NOT_A_TRACE),
        (edited_meta(lambda meta: meta["ranks"][1].pop("start") and None), NOT_A_TRACE),
        (edited_meta(lambda meta: meta["ranks"].append(meta["ranks"][0])), r"ranks must be distinct, got \[0, 1, 0\]"),
        (edited_meta(lambda meta: meta["header"].pop("strings") and None), r"header lacks \['strings'\]"),
        (
            edited_meta(lambda meta: meta["header"].update(schema_version=SCHEMA_VERSION + 1)),
            f"schema version {SCHEMA_VERSION + 1}, and this workbench reads version {SCHEMA_VERSION}: update fsdp-",
        ),
        (
            edited_meta(lambda meta: meta["header"].update(schema_version=1)),
            f"schema version 1, and this workbench reads version {SCHEMA_VERSION}: record the trace again",
        ),
    ],
)
def test_a_zip_with_wrong_content_is_refused(tmp_path, edit, sentence):
    members = members_of(tmp_path)
    edit(members)
    (tmp_path / "a.trace").write_bytes(zipped(members))
    with pytest.raises(TraceError, match=sentence):
        load(tmp_path / "a.trace")
