from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.trace_strategies import Setup, simulate
from workbench.events import TORCH_DDP, Category
from workbench.replay import memory
from workbench.replay.peak_savings import Knob, parts_of, savings
from workbench.replay.unit_history import histories
from workbench.trace.columns import RankTrace


def step_of(setup, step=1):
    """Return the header of a job, and the rows of rank 0 in a step."""
    trace = simulate(setup)
    whole = trace.rank(0)
    begin, end = whole.places_of(step, step)
    return trace.header, whole, whole.cut(begin, end)


def known(setup, *, on_device=False, header=None):
    """Return the peak of a step, and what would lower it, by knob."""
    made, whole, part = step_of(setup)
    found = memory.peak(part)
    held = histories(whole, tuple({*found.unsharded_units, *found.in_flight}), found.seq)
    saved = savings(header or made, part, found, held, on_device=on_device)
    return found.num_bytes, {saving.knob: saving for saving in saved}


@settings(deadline=None, max_examples=60)
@given(
    num_ranks=st.sampled_from([2, 4]),
    num_units=st.integers(2, 5),
    width=st.integers(4, 24),
    activations=st.booleans(),
    passes=st.integers(1, 2),
)
def test_the_peak_without_kept_units_is_that_of_a_job_that_frees_them(num_ranks, num_units, width, activations, passes):
    setup = Setup(
        num_ranks=num_ranks,
        num_units=num_units,
        width=width,
        activations=activations,
        passes=passes,
        steps=2,
        reshard_after_forward=False,
    )
    peak, saved = known(setup)
    freed, _ = known(replace(setup, reshard_after_forward=True))
    if Knob.RESHARD not in saved:
        assert freed >= peak
        return
    saving = saved[Knob.RESHARD]
    assert saving.peak_bytes == pytest.approx(freed, rel=0.01)
    assert saving.saved_bytes == peak - saving.peak_bytes
    assert saving.units == tuple(range(num_units - 1))
    assert saving.more_calls == passes * (num_units - 1)
    assert not saving.is_bound


def test_a_job_that_frees_its_units_has_nothing_to_free():
    _, saved = known(Setup(num_ranks=2, steps=2))
    assert Knob.RESHARD not in saved


def test_half_the_bytes_of_an_element_save_half_of_what_is_gathered():
    setup = Setup(num_ranks=2, steps=2, num_units=3)
    peak, saved = known(setup)
    precise, _ = known(replace(setup, compute_itemsize=2, reduce_itemsize=2))
    assert saved[Knob.PRECISION].peak_bytes <= precise < peak
    assert saved[Knob.PRECISION].is_bound
    assert Knob.PRECISION not in known(replace(setup, compute_itemsize=2, reduce_itemsize=2))[1]


def test_half_the_bytes_of_an_element_save_at_most_half_of_the_activations():
    peak, saved = known(Setup(num_ranks=2, steps=2, num_units=3, activations=True))
    less, without = known(Setup(num_ranks=2, steps=2, num_units=3))
    more = saved[Knob.PRECISION].saved_bytes - without[Knob.PRECISION].saved_bytes
    assert more == pytest.approx((peak - less) / 2, rel=0.1)


def test_offloading_saves_what_a_device_keeps_at_rest():
    setup = Setup(num_ranks=2, steps=2)
    assert Knob.OFFLOAD not in known(setup)[1]
    _, saved = known(setup, on_device=True)
    _, _, part = step_of(setup)
    kept = memory.peak(part).bytes_by_category
    at_rest = (Category.SHARDED_PARAMS, Category.SHARDED_GRADS, Category.OPTIMIZER_STATE)
    assert saved[Knob.OFFLOAD].saved_bytes == sum(kept[category] for category in at_rest)


@pytest.mark.parametrize(
    ("setup", "units", "modules", "calls"),
    [
        (Setup(num_units=2, vocab=1), (0,), "", 2),
        (Setup(num_units=2, vocab=1, reshard_after_forward=False), (0,), "", 1),
        (Setup(num_units=2, vocab=1, passes=3), (0,), "", 6),
        (Setup(num_units=4, vocab=1), (0, 1, 2), "mlp", 6),
    ],
)
def test_a_submodule_of_its_own_is_gathered_as_often_as_its_unit(setup, units, modules, calls):
    _, saved = known(replace(setup, num_ranks=2, steps=2))
    found = saved[Knob.SMALLER_UNITS]
    assert (found.units, found.modules, found.more_calls, found.is_bound) == (units, modules, calls, False)
    assert set(parts_of(step_of(setup)[0].units[0])) == {"norm1", "attn", "norm2", "mlp"}


def test_a_replicated_model_has_no_knobs():
    setup = Setup(num_ranks=2, steps=2)
    header, _, _ = step_of(setup)
    replicated = replace(header, units=tuple(replace(unit, engine=TORCH_DDP) for unit in header.units))
    assert known(setup, header=replicated)[1] == {}


def test_nothing_recorded_has_no_knobs():
    header, whole, _ = step_of(Setup(num_ranks=2, steps=2))
    empty = RankTrace(0, whole.rows[:0])
    assert savings(header, empty, memory.peak(empty), {}, on_device=True) == ()
