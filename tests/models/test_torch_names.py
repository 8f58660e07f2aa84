"""The installed torch has every name that the workbench uses; what a version takes away is listed by name."""

import pytest
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.helpers.torch_names import missing, missing_in


def test_this_torch_has_every_name():
    assert missing() == []


def test_a_patched_function_that_is_gone_is_listed(monkeypatch):
    monkeypatch.delattr(FSDPParamGroup, "post_backward")
    monkeypatch.delattr(
        dist.ProcessGroup,
        "recv_anysource" if not hasattr(dist.ProcessGroup, "register_pre_hook") else "_set_group_name",
    )
    found = missing()
    assert "FSDPParamGroup has no post_backward, which is to be patched" in found
    assert len(found) >= 2


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("from torch.distributed.fsdp._gone import x", "torch has no torch.distributed.fsdp._gone.x"),
        ("from torch.distributed import _gone", "torch has no torch.distributed._gone"),
        ("import torch\ndef f(): torch._C._gone()", ":2: torch._C has no _gone"),
        ("def f(group: ParamGroup): return group._gone", ":1: FSDPParamGroup has no _gone"),
        ("def f(group: ParamGroup): return group.comm_ctx._gone", ":1: FSDPCommContext has no _gone"),
        ("def f(param: Any): param.unsharded_param = None", ":1: FSDPParam.unsharded_param can only be read"),
        ("def f(handle: Handle): return handle.flat_param._gone", ":1: FlatParameter has no _gone"),
    ],
)
def test_what_is_gone_is_named_with_its_line(source, sentence):
    name = "models/_torch_private.py"
    assert list(missing_in(source, name)) == [f"{name}{'' if sentence.startswith(':') else ': '}{sentence}"]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ndef f(): torch.distributed.barrier()",
        "def f(group: ParamGroup): return group._training_state, group.mesh_info.shard_mesh_size",
        "def f(param: Any): return hasattr(param, '_gone') and param._gone",
        "def f(param: int): return param._gone",
    ],
)
def test_what_exists_or_is_asked_for_is_not_listed(source):
    assert list(missing_in(source, "models/_torch_private.py")) == []
