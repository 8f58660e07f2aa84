from dataclasses import replace

from tests.helpers.trace_strategies import example_trace
from workbench.events import TORCH_FULLY_SHARD
from workbench.replay.units import (
    by_number,
    collectives_words,
    differing,
    listed,
    model_order,
    seen_words,
    unit_name,
    unmanaged_notes,
    unmanaged_sentences,
    unmanaged_words,
)
from workbench.trace.schema import BufferSum, Header, RankInfo


def test_a_unit_is_called_by_its_path_and_the_root_is_called_root():
    header = example_trace(num_units=3).header
    assert [unit_name(header, unit) for unit in range(3)] == ["blocks.0", "blocks.1", "(root)"]


def test_a_unit_the_header_does_not_know_is_called_by_its_number():
    header = example_trace(num_units=3).header
    assert [unit_name(header, unit) for unit in (3, -1)] == ["unit 3", "unit -1"]


def test_which_collectives_are_seen_is_said_where_another_engine_runs_units():
    header = example_trace(num_ranks=2, num_units=2).header
    assert collectives_words(header) == ""
    header = replace(header, units=tuple(replace(unit, engine=TORCH_FULLY_SHARD) for unit in header.units))
    assert collectives_words(header) == seen_words(sees_cpp=True)
    python = replace(header.ranks[1], sees_cpp=False)
    found = collectives_words(replace(header, ranks=(header.ranks[0], python)))
    assert found == seen_words(sees_cpp=False)
    assert "torch 2.14" in found


def test_units_are_ordered_by_name_below_their_root():
    header = example_trace(num_units=3).header
    assert model_order(header) == [2, 0, 1]
    names = ["blocks.10", "blocks.2", "an.encoder"]
    rootless = tuple(replace(unit, name=name, root=-1) for unit, name in zip(header.units, names, strict=True))
    assert model_order(replace(header, units=rootless)) == [2, 1, 0]


def test_a_long_list_and_a_long_name_are_cut_in_the_middle():
    assert listed(["a", ""]) == "a, (root)"
    assert listed([f"p{i}" for i in range(12)]).count(", ") == 11
    assert listed([f"p{i}" for i in range(20)]).endswith("p9, ... 9 more ..., p19")
    assert [len(listed(["x" * number])) for number in (80, 81, 500)] == [80, 80, 80]
    assert listed(["a" * 60 + "b" * 60]) == "a" * 40 + "..." + "b" * 37
    assert "p9, ... 9 more ..., p19. After backward" in unmanaged_words("model", [f"p{i}" for i in range(20)])


def test_buffers_differ_where_ranks_that_have_them_hold_other_bytes():
    assert differing([{"a": 1, "b": 1}, {"a": 1, "b": 2, "c": 3}, {}]) == ("b",)


GRADIENTS = (
    "in no unit, so their gradients are not averaged: {}. After backward, for each: p = {}; "
    "torch.distributed.all_reduce(p.grad); p.grad /= world_size. Or freeze them, or unshard and shard again without "
    "--ignore"
)
HOOKS = "register_hook is never called on a sharded parameter: {}. Use register_post_accumulate_grad_hook"
BUFFERS = (
    "buffers differ between ranks: {}. If they should not, for each: torch.distributed.broadcast({}, 0); after "
    "to_empty they are uninitialised until set"
)


def test_each_note_on_what_is_not_managed_says_what_to_do():
    header = Header(
        unmanaged=("net.scale", "net.a.bias", "other.scale"),
        hooks=("net.w", "other.v"),
        ranks=tuple(
            RankInfo(rank=rank, host="here", device="cpu", pid=rank, buffers=(BufferSum(name="net.mean", crc32=rank),))
            for rank in range(2)
        ),
    )
    assert unmanaged_notes(header) == (
        GRADIENTS.format("scale, a.bias", "net.get_parameter('scale')"),
        GRADIENTS.format("scale", "other.get_parameter('scale')"),
        HOOKS.format("w, v"),
        BUFFERS.format("mean", "net.get_buffer('mean')"),
    )
    assert unmanaged_sentences({"": ["w"], "net": []}, [], {"": ["b"], "net": []}) == (
        GRADIENTS.format("w", "model.get_parameter('w')"),
        BUFFERS.format("b", "model.get_buffer('b')"),
    )
    assert unmanaged_notes(Header()) == ()


def test_numbers_in_names_are_ordered_as_numbers_and_before_words():
    names = ["layers.10", "layers.2", "", "layers.2.norm", "3", "layers", "20"]
    assert sorted(names, key=by_number) == ["", "3", "20", "layers", "layers.2", "layers.2.norm", "layers.10"]
