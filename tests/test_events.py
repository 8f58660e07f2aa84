import ast
import subprocess

import numpy as np
import pytest

from tests.helpers import documents
from tests.helpers.package_source import REPO, sources
from tests.helpers.warm_python import WARM
from workbench.events import (
    BESIDE,
    COLLECTIVES,
    MAX_EARLIER,
    RANK_TRACKS,
    ROOT,
    STOPS,
    Category,
    Colour,
    Edge,
    FlatPart,
    Kind,
    Phase,
    Track,
    Unit,
    UnitState,
    on_track,
    unit_words,
    within,
)
from workbench.trace.keyframe import advance
from workbench.trace.schema import NO_CATEGORY, ROW_DTYPE, KeyFrame
from workbench.views import theme

# the numbers in files: an existing number never changes its meaning
NUMBERS = {
    Kind: "STEP FORWARD BACKWARD OPTIMIZER UNSHARD RESHARD ALL_GATHER REDUCE_SCATTER ALL_REDUCE BROADCAST COPY_IN "
    "COPY_OUT WAIT ALLOC FREE OFFLOAD GATE METRIC LOG RESET RESIDENT",
    Edge: "BEGIN END INSTANT",
    Phase: "IDLE FORWARD PRE_BACKWARD BACKWARD POST_BACKWARD OPTIMIZER",
    Category: "SHARDED_PARAMS UNSHARDED_PARAMS ALL_GATHER_BUFFERS UNSHARDED_GRADS REDUCE_SCATTER_BUFFERS SHARDED_GRADS "
    "OPTIMIZER_STATE ACTIVATIONS SNAPSHOTS RESERVED",  # 8 was OTHER, which nothing ever recorded
    UnitState: "SHARDED ALL_GATHER_IN_FLIGHT UNSHARDED REDUCING",
}


@pytest.mark.parametrize("words", NUMBERS, ids=lambda words: words.__name__)
def test_numbers_of_old_files_stay(words):
    known = NUMBERS[words].split()
    assert [member.name for member in words][: len(known)] == known
    assert [int(member) for member in words] == list(range(len(words))), "indexed by them"


@pytest.mark.parametrize("words", NUMBERS, ids=lambda words: words.__name__)
def test_display_names_are_plain_words(words):
    written = [member.words for member in words]
    assert len(set(written)) == len(written)
    assert all(word == word.lower() and "_" not in word and word.strip() for word in written)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_the_properties_of_a_kind_are_consistent(kind):
    info = kind.info
    assert kind < NO_CATEGORY, "a byte holds it"
    assert info.is_span or info.track is None, "a track holds spans"
    assert info.is_event or not info.is_stop, "ranks stop at what they count"
    assert info.is_span or not (info.is_collective or info.is_work)
    assert info.is_collective or not info.is_reduction
    assert not info.is_collective or info.track in {Track.ALL_GATHER, Track.REDUCE_SCATTER, Track.OTHER}
    assert info.memory_sign in {-1, 0, 1}
    assert all((edge is Edge.INSTANT) != info.is_span for edge, _ in info.states)
    assert all(state is not UnitState.REDUCING for _, state in info.states), "that is counted"


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_tables_cover_every_kind(kind):
    info = kind.info
    assert (kind in COLLECTIVES, kind in BESIDE) == (info.is_collective, not info.is_event)
    assert (STOPS.get(kind.name.lower()) is kind) == info.is_stop
    assert [track for track in RANK_TRACKS if kind in on_track(track)] == ([info.track] if info.track else [])
    assert theme.KIND_COLOURS[kind] == theme.COLOURS[info.colour]
    for edge in Edge:
        row = np.zeros(1, ROW_DTYPE)
        row["kind"], row["edge"], row["num_bytes"], row["category"] = kind, edge, 8, Category.SNAPSHOTS
        after = advance(KeyFrame(), row)
        state = dict(info.states).get(edge, UnitState.SHARDED)
        assert after.unit_states == ({0: state} if state is not UnitState.SHARDED else {})
        assert after.bytes_by_category[Category.SNAPSHOTS] == (8 if info.memory_sign else 0)
        assert bool(after.reducing) == info.is_reduction


@pytest.mark.parametrize(
    ("begin", "end", "inside"),
    [(8, 16, (8, 10)), (0, 8, (4, 8)), (5, 7, (5, 7)), (0, 99, (4, 10)), (0, 4, (4, 4)), (12, 16, (10, 10))],
)
def test_the_elements_of_a_part_lie_within_both_bounds(begin, end, inside):
    part = FlatPart(fqn="w", shape=(2, 3), global_shape=(4, 3), first=4)
    assert part.within(begin, end) == within(4, 10, begin, end) == inside


def test_side_information_is_not_counted_as_progress():
    assert {kind.name for kind in BESIDE} == {"ALLOC", "FREE", "GATE", "METRIC", "LOG", "RESIDENT", "DEVICE", "READERS"}


def test_every_colour_is_used_and_there():
    used = {member.info.colour for words in (Kind, Category, UnitState) for member in words}
    assert used == set(Colour) == set(theme.COLOURS)


def test_the_engine_announces_its_own_classes():
    """The runtime announces the others, or nothing of ours does."""
    of_engine = {
        node.attr
        for source in sources()
        if source.part == "engine"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Category"
    }
    assert of_engine == {category.name for category in Category if category.info.is_engines}


def test_the_documents_name_every_event_that_can_be_stopped_at():
    line = next(line for line in documents.text().split("\n\n") if "An event is `" in line)
    named = documents.code(line[line.index("An event is `") : line.index("with `.end`")])
    assert sorted(named) == sorted(STOPS)


def test_a_root_unit_is_named_in_one_place():
    assert (unit_words(""), unit_words("blocks.0")) == (ROOT, "blocks.0")
    named = {
        (str(source.path), node.value)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and node.value in {ROOT, ROOT.strip("()")}
    }
    assert named == {("events.py", ROOT)}


def test_a_kind_is_one_row():
    """With two rows added to the text of ``events.py``, and nothing else, every part treats two more kinds."""
    done = subprocess.run(
        [WARM.executable(), "-m", "tests.helpers.added_kinds"], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([(0, True)], [(0, True), (0, True)]),
        ([(0, True), (8, False)], [(0, True), (8, False)]),
        ([(0, True), (8, True)], [(0, True), (0, True)]),
        ([(8, True), (8, False)], [(-1, False), (8, False)]),  # within a step, or before its first forward
        ([(step, bool(step % 2)) for step in range(40)], [(-1, True), (-1, True)]),  # of many, the newest are kept
    ],
)
def test_a_unit_has_the_policy_of_a_step(changes, found):
    sizes = {"compute_dtype": "float32", "reduce_dtype": "float32", "compute_itemsize": 4, "reduce_itemsize": 4}
    unit = None
    for step, reshard in changes:
        unit = Unit(
            index=0, name="", root=0, params=(), reshard_after_forward=reshard, shard_size=2, **sizes
        ).following(unit, step)
    there = [unit.at_step(step) for step in (7, 8)]
    assert [(each.since_step, each.reshard_after_forward) for each in there] == found
    assert len(unit.earlier) <= MAX_EARLIER
