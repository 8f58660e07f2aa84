"""Terms of a plan: a buffer is that of one quantity, and blocks in the middle are alike."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from workbench.cli.size_terms import ENDS, PARAMS, Count, SizeTerms, TermsError, bytes_at, quantities, read_off
from workbench.events import Category, Unit
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame
from workbench.zoo.llama import SIZES, Llama, LlamaSizes

SMALL = LlamaSizes(blocks=8, width=96, heads=6, kv_heads=2, hidden=202, vocab=307, sequences=3, tokens=17)
SHARDS = 5
KNOWN = quantities(asdict(SMALL), SHARDS)
PARAMETERS, ACTIVATIONS = Category.UNSHARDED_PARAMS, Category.ACTIVATIONS
TOKEN = 4 * SMALL.sequences * SMALL.tokens * SMALL.width


def test_quantities_are_those_of_the_model():
    with torch.device("meta"):
        model = Llama(SMALL)
    shapes = [param.shape for param in model.blocks[3].parameters()]
    rest = [param.shape for name, param in model.named_parameters() if "blocks" not in name]
    for part, found in (("block", shapes), ("outside", rest)):
        assert len(found) == len(PARAMS[part])
        assert KNOWN[f"{part}.full"] == sum(map(math.prod, found))
        assert KNOWN[f"{part}.shard"] == sum(math.prod([-(-rows // SHARDS), *rest]) for rows, *rest in found)
        assert KNOWN[f"{part}.padded"] == SHARDS * KNOWN[f"{part}.shard"]
        assert KNOWN[f"{part}.vectors"] == sum(rows for rows, *rest in found if not rest)
    assert KNOWN["batch*kv"] == 3 * 17 * 32
    assert quantities(asdict(SIZES["70b"]), 8)["block.full"] == 855_654_400


def trace(*rows):
    """Return a trace of one step: each row has a class, a unit or a module, and bytes, negative if they are freed."""
    found = np.zeros(len(rows), ROW_DTYPE)
    strings = list(dict.fromkeys(owner for _, owner, _ in rows if isinstance(owner, str)))
    for place, (category, owner, num_bytes) in enumerate(rows):
        is_unit = not isinstance(owner, str)
        found[place]["category"], found[place]["num_bytes"], found[place]["step"] = category, num_bytes, 1
        found[place]["unit"] = owner if is_unit else -1
        found[place]["module"] = -1 if is_unit else strings.index(owner)
    about = {"params": (), "reshard_after_forward": True, "compute_dtype": "bfloat16", "reduce_dtype": "float32"}
    sizes = {"shard_size": SHARDS, "compute_itemsize": 2, "reduce_itemsize": 4}
    names = [*(f"blocks.{block}" for block in range(SMALL.blocks)), ""]
    units = tuple(Unit(index=place, name=name, root=SMALL.blocks, **about, **sizes) for place, name in enumerate(names))
    header = Header(world_size=SHARDS, units=units, strings=tuple(strings))
    return Trace(header, (RankTrace(0, found, KeyFrame()),))


def terms(*rows, is_offloaded=False):
    return read_off(trace(*rows), asdict(SMALL), SHARDS, is_offloaded=is_offloaded)


FORWARD = [(ACTIVATIONS, f"blocks.{block}.norm1\tmul\tx", TOKEN) for block in range(SMALL.blocks)]


def test_what_each_block_keeps_is_there_as_often_as_there_are_blocks():
    found = terms(*FORWARD)
    assert list(found.moments) == [{(ACTIVATIONS, "batch*width"): Count(4 * 2 * ENDS, 4)}]
    larger = asdict(SMALL) | {"blocks": 80, "tokens": 100, "width": 960}
    assert found.peak(larger, 64) == {ACTIVATIONS: 80 * 4 * 3 * 100 * 960}


def test_a_moment_in_which_one_of_the_blocks_in_the_middle_is_at_work_does_not_count():
    gathered = [(PARAMETERS, 4, 2 * KNOWN["block.padded"]), (PARAMETERS, 4, -2 * KNOWN["block.padded"])]
    found = terms(*FORWARD[:5], *gathered, *FORWARD[5:], (PARAMETERS, 8, 4 * KNOWN["outside.full"]))
    assert list(found.moments) == [
        {(ACTIVATIONS, "batch*width"): Count(24, 4), (PARAMETERS, "outside.full"): Count(4, 0)},
    ]


def test_gradients_of_which_some_are_in_another_dtype_are_two_terms():
    size = 2 * KNOWN["block.full"] + 2 * KNOWN["block.vectors"]
    (moment,) = terms((Category.UNSHARDED_GRADS, 0, size)).moments
    assert moment == {
        (Category.UNSHARDED_GRADS, "block.full"): Count(2, 0),
        (Category.UNSHARDED_GRADS, "block.vectors"): Count(2, 0),
    }


def test_what_is_offloaded_is_the_host_s():
    state = sum(
        number * (8 * KNOWN[f"{part}.shard"] + 4 * len(PARAMS[part]))
        for part, number in (("block", SMALL.blocks), ("outside", 1))
    )
    found = terms((Category.OPTIMIZER_STATE, 8, state), *FORWARD, is_offloaded=True)
    assert {category for moment in found.moments for category, _ in moment} == {ACTIVATIONS}
    assert bytes_at(found.host, asdict(SMALL), SHARDS) == {Category.OPTIMIZER_STATE: state}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ((ACTIVATIONS, "blocks.3\tmul\tx", TOKEN + 1), r"activations of 19585 bytes \(blocks.3.* of no quantity"),
        ((PARAMETERS, 3, 3 * KNOWN["block.full"]), "unsharded params of .* of no quantity"),
        ((Category.OPTIMIZER_STATE, 3, 12), "the optimizer's state has 12 bytes, and not"),
    ],
)
def test_bytes_of_no_quantity_are_refused(row, sentence):
    with pytest.raises(TermsError, match=sentence):
        terms(row)


def test_bytes_of_several_quantities_are_refused():
    even = asdict(SMALL) | {"vocab": 96}  # as many logits as elements of a width
    with pytest.raises(TermsError, match=r"are those of \{'batch\*width': 4\} and of \{'batch\*vocab': 4\}"):
        read_off(trace(FORWARD[0]), even, SHARDS, is_offloaded=False)


def test_the_peak_is_at_the_moment_with_most_for_these_sizes():
    moments = [{(PARAMETERS, "outside.full"): Count(4)}, {(ACTIVATIONS, "batch*width"): Count(0, 4)}]
    found = SizeTerms(moments=moments, host={})
    assert found.peak(asdict(SMALL), SHARDS) == {PARAMETERS: 4 * KNOWN["outside.full"]}
    assert found.peak(asdict(SMALL) | {"tokens": 100_000}, SHARDS).keys() == {ACTIVATIONS}
