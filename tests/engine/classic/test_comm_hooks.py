"""Communication hooks on real ranks compute the average, bit for bit as torch's hooks do."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks as theirs

from tests.helpers.forked_ranks import outcomes, run_ranks
from workbench.engine import cancellable_waits
from workbench.engine import classic as ours
from workbench.engine._torch import default_store
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.errors import StepAborted

SIZE = 12  # elements of a gradient, divisible by 1, 2, 3 and 4 ranks
PLAIN = ["allreduce_hook", "reduce_scatter_hook"]
LOW = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


def gradient(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SIZE, generator=generator).to(dtype)


def state_of(lib, name, parameter_type):
    group = dist.group.WORLD
    return lib.LowPrecisionState(group, parameter_type) if name in LOW else lib.DefaultState(group)


def left_by(lib, name, dtype, parameter_type, sharded):
    """Return a hook's result: this rank's part, or the whole gradient."""
    grad = gradient(dist.get_rank(), dtype)
    state = state_of(lib, name, parameter_type)
    if not sharded:
        getattr(lib, name)(state, grad)
        return grad
    output = torch.empty(SIZE // dist.get_world_size(), dtype=dtype)
    getattr(lib, name)(state, grad, output)
    return output


CASES = [
    *(("allreduce_hook", dtype, torch.float32, False) for dtype in (torch.float32, torch.bfloat16)),
    *(("reduce_scatter_hook", dtype, torch.float32, True) for dtype in (torch.float32, torch.float16)),
    *(
        (name, dtype, parameter_type, sharded)
        for name, low in LOW.items()
        for dtype in (torch.float32, low)
        for parameter_type in (torch.float32, torch.float64)
        for sharded in (False, True)
    ),
]


@patch.object(torch.Tensor, "record_stream", lambda *_: None)  # torch's compressing hooks call it, and fail on the CPU
def compare_with_torch():
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in CASES:
        mine, like = left_by(ours, *case), left_by(theirs, *case)
        assert mine.dtype == like.dtype, case
        torch.testing.assert_close(mine, like, rtol=0, atol=0, msg=str(case))
        average = torch.stack([gradient(r, case[1]).double() for r in range(size)]).mean(0)
        expected = average.chunk(size)[rank] if case[3] else average
        torch.testing.assert_close(mine.double(), expected, rtol=0.03, atol=0.02, msg=str(case))
        if case[0] in LOW:
            assert mine.dtype == case[2], case


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_hooks_leave_the_average_as_torchs_do(world_size):
    run_ranks(world_size, compare_with_torch)


def compare_states():
    for name in ("DefaultState", "LowPrecisionState"):
        mine, like = (getattr(lib, name)(dist.group.WORLD) for lib in (ours, theirs))
        fields = ["process_group", "world_size", "gradient_predivide_factor", "gradient_postdivide_factor"]
        fields += ["parameter_type"] * (name == "LowPrecisionState")
        assert [getattr(mine, field) for field in fields] == [getattr(like, field) for field in fields]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_states_have_torchs_fields(world_size):
    run_ranks(world_size, compare_states)


def keep_memory():
    """The hook must write in place: the output may be a view of the engine's memory."""
    group = dist.group.WORLD
    held = torch.zeros(SIZE)
    ours.fp16_compress_hook(ours.LowPrecisionState(group), gradient(0, torch.float32), held[: SIZE // 2])
    assert held[: SIZE // 2].any()
    assert not held[SIZE // 2 :].any()
    grad = gradient(0, torch.float32)
    address = grad.data_ptr()
    ours.bf16_compress_hook(ours.LowPrecisionState(group), grad)
    assert grad.data_ptr() == address


def test_a_result_of_the_same_dtype_is_in_the_expected_memory():
    run_ranks(2, keep_memory)


def average_in_a_part_of_the_world():
    ranks = [0, 2]
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        with pytest.raises(ValueError, match=r"^DefaultState: rank 1 is not in the process group$"):
            ours.DefaultState(group)
        return None
    grad = torch.full((2,), float(dist.get_rank()))
    ours.allreduce_hook(ours.DefaultState(group), grad)
    return grad.tolist()


def test_a_hook_averages_over_its_group_only():
    assert run_ranks(3, average_in_a_part_of_the_world) == [[1, 1], None, [1, 1]]


def test_a_state_is_of_a_process_group():
    message = "^LowPrecisionState takes the process group to average over, got None; for all ranks pass "
    with pytest.raises(ValueError, match=message):
        ours.LowPrecisionState(None)


def wrong_states_and_sizes():
    group = dist.group.WORLD
    with pytest.raises(TypeError, match=r"^LowPrecisionState: parameter_type must be a torch.dtype, got 'fp16'$"):
        ours.LowPrecisionState(group, "fp16")
    with pytest.raises(ValueError, match=r"parameter_type must be a floating-point dtype, got torch\.int8$"):
        ours.LowPrecisionState(group, torch.int8)
    message = (
        "^reduce_scatter_hook: grad must have 2 times the 2 elements of output, one part for each rank, got 5; pad"
    )
    with pytest.raises(ValueError, match=message):
        ours.reduce_scatter_hook(ours.DefaultState(group), torch.zeros(5), torch.zeros(2))


def test_invalid_gradients_are_refused_before_communication():
    run_ranks(2, wrong_states_and_sizes)


def give_up_while_another_is_late():
    store, grad = default_store(), torch.ones(2)
    state = ours.DefaultState(dist.group.WORLD)
    if dist.get_rank() == 1:
        store.wait(["gave up"])
        ours.allreduce_hook(state, grad)  # completes rank 0's collective
        return
    cancellable_waits.stop_point = lambda: cancellation.cancel("enough")  # called during the wait
    with pytest.raises(StepAborted, match=r"^enough$"):
        ours.allreduce_hook(state, grad)
    cancellation.reset()
    store.set("gave up", "")


def test_a_hook_that_waits_for_another_rank_can_be_aborted():
    results = outcomes(2, give_up_while_another_is_late)
    assert [what for what, _ in results] == ["ok", "ok"], results
