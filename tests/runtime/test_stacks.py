"""Whose code a frame is."""

import pytest

from workbench.runtime.stacks import is_of_a_library


class FakeFrame:
    def __init__(self, module):
        self.f_globals = {"__name__": module}


@pytest.mark.parametrize("module", ["workbench.models.c10d", "workbench.engine.param", "torch.nn", "asyncio"])
def test_a_frame_of_the_workbench_or_of_torch_is_of_a_library(module):
    assert is_of_a_library(FakeFrame(module))


@pytest.mark.parametrize("module", ["transformers.models.llama", "workbench.zoo.gpt", "my_model"])
def test_a_frame_of_a_model_is_the_users(module):
    assert not is_of_a_library(FakeFrame(module))
