"""An operation's second outcome, from the first, is what torch would have worked out."""

import pytest
import torch

from workbench.engine._torch import fakes, is_fake, storage_of
from workbench.plan.op_outcomes import OpOutcomes

aten = torch.ops.aten


def described(result, args):
    """Return the metadata of each tensor of a result, and of which argument it is, or shares the storage."""
    results = [result] if isinstance(result, torch.Tensor) else list(result or ())
    storages = [storage_of(each) for each in args if isinstance(each, torch.Tensor)]
    return type(result), [
        (
            [each is arg for arg in args],
            [storage_of(each) == storage for storage in storages],
            each.shape,
            each.stride(),
            each.storage_offset(),
            each.dtype,
            each.device,
            each.untyped_storage().nbytes(),
            is_fake(each),
        )
        for each in results
    ]


def matrices():
    return [torch.empty(4, 6), torch.empty(6, 4)]


@pytest.mark.parametrize(
    ("func", "args", "is_known"),
    [
        (aten.mm.default, matrices, True),
        (aten.t.default, lambda: [torch.empty(4, 6)], True),
        (aten.select.int, lambda: [torch.empty(4, 6), 0, 2], True),
        (aten.split.Tensor, lambda: [torch.empty(4, 6), 3, 1], True),
        (aten._unsafe_view.default, lambda: [torch.empty(4, 6), [24]], True),  # a view, though no one says so
        (aten.add_.Tensor, lambda: [torch.empty(4), 3], True),
        (aten._foreach_add_.Scalar, lambda: [[torch.empty(4), torch.empty(2)], 1.0], True),
        (aten._to_copy.default, lambda: [torch.empty(4, 6).t()], True),
        (aten.native_layer_norm.default, lambda: [torch.empty(4, 6), [6], None, None, 1e-5], True),
        (aten.expand.default, lambda: [torch.empty(4, 1), [4, 6]], True),
        (aten.resize_.default, lambda: [torch.empty(4), [4]], False),  # depends on the size of a storage
        (aten.t_.default, lambda: [torch.empty(4, 6)], False),  # changes its argument's metadata
        (aten.view_as_complex.default, lambda: [torch.empty(4, 2)], False),
        (aten.empty.memory_format, lambda: [[3]], False),
    ],
)
def test_an_outcome_from_an_earlier_one_is_torchs(func, args, is_known):
    worked_out = []
    with fakes():
        outcomes = OpOutcomes(lambda *call: worked_out.append(call) or len(worked_out))
        expected, first, second = args(), args(), args()
        wanted = described(func(*expected), expected)
        assert described(outcomes.call(func, tuple(first), {})[0], first) == wanted
        result, work = outcomes.call(func, tuple(second), {})
        assert described(result, second) == wanted
    assert work == len(worked_out) == (1 if is_known else 2)


@pytest.mark.parametrize(
    "others",
    [
        lambda: (torch.empty(4, 6), torch.empty(6, 5)),
        lambda: (torch.empty(6, 4).t(), torch.empty(6, 4)),
        lambda: (torch.empty(4, 6, dtype=torch.bfloat16), torch.empty(6, 4, dtype=torch.bfloat16)),
        lambda: (torch.empty(25)[1:].view(4, 6), torch.empty(6, 4)),
        lambda: (torch.empty(4, 6, device="meta"), torch.empty(6, 4, device="meta")),
    ],
)
def test_other_metadata_has_another_outcome(others):
    with fakes():
        outcomes = OpOutcomes(lambda *_: None)
        outcomes.call(aten.mm.default, tuple(matrices()), {})
        args = others()
        wanted = described(aten.mm.default(*args), args)
        assert described(outcomes.call(aten.mm.default, args, {})[0], args) == wanted


def test_numbers_that_are_equal_and_of_other_types_have_other_outcomes():
    with fakes():
        outcomes = OpOutcomes(lambda *_: None)
        counts = torch.empty(3, dtype=torch.int64)
        kinds = [outcomes.call(aten.add.Tensor, (counts, one), {})[0].dtype for one in (1, 1.0, True)]
        constant, _ = outcomes.call(aten.add.Tensor, (torch.tensor(1), 1), {})
        assert constant.item() == 2  # torch knows the number
    assert kinds == [torch.int64, torch.float32, torch.int64]
