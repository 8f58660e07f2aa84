"""Values that the setters of an FSDP module refuse; a refusal changes nothing."""

import pytest
import torch
from torch import nn

from tests.engine.test_error_messages import Words, refused
from tests.engine.test_errors import Pair
from tests.helpers.forked_ranks import on_one_rank
from workbench.engine import fully_shard, register_fsdp_forward_method, share_comm_ctx


class NoComm:
    """Has neither ``allocate`` nor a call."""


WRONG_SETTINGS: dict[str, tuple[str, tuple[object, ...], type[Exception], Words]] = {
    "sync word": (
        "set_requires_gradient_sync",
        ("yes",),
        TypeError,
        ("set_requires_gradient_sync", "'yes'", "takes True or False, got"),
    ),
    "sync None": (
        "set_requires_gradient_sync",
        (None,),
        TypeError,
        ("set_requires_gradient_sync", "None", "takes True or False, got"),
    ),
    "all-reduce": (
        "set_requires_all_reduce",
        ("yes",),
        TypeError,
        ("set_requires_all_reduce", "'yes'", "takes True or False, got"),
    ),
    "last backward": (
        "set_is_last_backward",
        ("yes",),
        TypeError,
        ("set_is_last_backward", "'yes'", "takes True or False, got"),
    ),
    "manual end": (
        "set_manual_backward_finalization",
        (1,),
        TypeError,
        ("set_manual_backward_finalization", "1", "takes True or False, got"),
    ),
    "kept memory": (
        "set_keep_unsharded_storage",
        ("yes",),
        TypeError,
        ("set_keep_unsharded_storage", "'yes'", "takes True or False, got"),
    ),
    "reshard forward": (
        "set_reshard_after_forward",
        ("yes",),
        TypeError,
        ("set_reshard_after_forward", "'yes'", "takes True or False, got"),
    ),
    "reshard forward to a number": (
        "set_reshard_after_forward",
        (2,),
        TypeError,
        ("set_reshard_after_forward", "2", "takes True or False, got"),
    ),
    "reshard backward": (
        "set_reshard_after_backward",
        (1.5,),
        TypeError,
        ("set_reshard_after_backward", "1.5", "takes True or False, got"),
    ),
    "unshard in backward": (
        "set_unshard_in_backward",
        ("no",),
        TypeError,
        ("set_unshard_in_backward", "'no'", "takes True or False, got"),
    ),
    "own group": ("set_separate_reduce_scatter_group", ("no",), TypeError, ("'no'", "takes True or False, got")),
    "force sum": ("set_force_sum_reduction_for_comms", ("no",), TypeError, ("'no'", "takes True or False, got")),
    "allocate": (
        "set_allocate_memory_from_process_group_for_comm",
        ("no",),
        TypeError,
        ("'no'", "takes True or False, got"),
    ),
    "divide by 0": (
        "set_gradient_divide_factor",
        (0,),
        ValueError,
        ("divide_factor takes a finite number above 0, got 0",),
    ),
    "divide by -2": ("set_gradient_divide_factor", (-2.0,), ValueError, ("divide_factor", "-2.0", "above 0")),
    "divide by nan": ("set_gradient_divide_factor", (float("nan"),), ValueError, ("divide_factor", "nan", "above 0")),
    "divide by inf": ("set_gradient_divide_factor", (float("inf"),), ValueError, ("divide_factor", "inf", "finite")),
    "divide by word": (
        "set_gradient_divide_factor",
        ("4",),
        TypeError,
        ("set_gradient_divide_factor takes a number, got '4'",),
    ),
    "no buffers": ("set_reduce_scatter_max_input_buffers", (0,), ValueError, ("takes 1 or more buffers, got 0",)),
    "buffers as flag": (
        "set_reduce_scatter_max_input_buffers",
        (True,),
        TypeError,
        ("max_input_buffers takes an int, got True",),
    ),
    "buffers fraction": ("set_reduce_scatter_max_input_buffers", (1.5,), TypeError, ("max_input_buffers", "1.5")),
    "forward prefetch of a plain module": (
        "set_modules_to_forward_prefetch",
        ([nn.Linear(1, 1)],),
        TypeError,
        ("set_modules_to_forward_prefetch", "Linear", "fully_shard"),
    ),
    "backward prefetch of a plain module": (
        "set_modules_to_backward_prefetch",
        ([nn.Linear(1, 1)],),
        TypeError,
        ("set_modules_to_backward_prefetch", "Linear", "fully_shard"),
    ),
    "prefetch of a name": (
        "set_modules_to_forward_prefetch",
        (["b"],),
        TypeError,
        ("set_modules_to_forward_prefetch", "str", "fully_shard"),
    ),
    "prefetch of no list": (
        "set_modules_to_backward_prefetch",
        (None,),
        TypeError,
        ("set_modules_to_backward_prefetch", "NoneType", "list"),
    ),
    "all-gather": (
        "set_custom_all_gather",
        (NoComm(),),
        TypeError,
        ("set_custom_all_gather takes a callable with a method allocate, got", "NoComm"),
    ),
    "all-gather class": ("set_custom_all_gather", (NoComm,), TypeError, ("set_custom_all_gather", "allocate")),
    "reduce-scatter": (
        "set_custom_reduce_scatter",
        (None,),
        TypeError,
        ("set_custom_reduce_scatter", "None", "allocate"),
    ),
    "hook": (
        "set_all_reduce_hook",
        (3,),
        TypeError,
        ("set_all_reduce_hook takes a function of the reduced shard, got 3",),
    ),
    "event": (
        "set_post_optim_event",
        ("now",),
        TypeError,
        ("set_post_optim_event takes a torch.Event or None, got 'now'",),
    ),
}


@pytest.mark.parametrize("case", WRONG_SETTINGS)
@on_one_rank
def test_a_wrong_setting(case):
    setter, values, error, words = WRONG_SETTINGS[case]
    model = Pair()
    fully_shard(model.b)
    fully_shard(model)
    refused(lambda: getattr(model, setter)(*values), error, words, model)
    model(torch.ones(1, 2)).sum().backward()  # the refusal changes nothing


@pytest.mark.parametrize("setter", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
@on_one_rank
def test_a_prefetch_list_is_refused_as_a_whole(setter):
    model = Pair()
    fully_shard(model.a)
    fully_shard(model)
    refused(lambda: getattr(model, setter)([model.a, model.b]), TypeError, (setter, "Linear"), model)


@on_one_rank
def test_an_unknown_forward_method():
    model = fully_shard(Pair())
    words = ("'generate'", "Pair", "has no method")
    refused(lambda: register_fsdp_forward_method(model, "generate"), ValueError, words, model)
    register_fsdp_forward_method(Pair(), "generate")  # not sharded: a no-op, as in torch


@on_one_rank
def test_a_forward_method_that_is_no_method():
    model = fully_shard(Pair())
    refused(lambda: register_fsdp_forward_method(model, "training"), ValueError, ("'training'", "has no method"), model)


@on_one_rank
def test_sharing_a_context_with_a_plain_module():
    model = fully_shard(Pair())
    refused(lambda: share_comm_ctx([model, Pair()]), TypeError, ("share_comm_ctx", "Pair", "fully_shard"), model)
    share_comm_ctx([])  # nothing to share
