"""What a step function returns."""

import asyncio

import pytest

from workbench.runtime.trainer import loss_of


async def coroutine():
    return 1.0


def generator():
    yield 1.0


async def async_generator():
    yield 1.0


@pytest.mark.parametrize("train_step", [coroutine, generator, async_generator])
def test_a_step_function_of_which_nothing_ran_is_named(train_step):
    with pytest.raises(TypeError, match=r"returned an? (async generator|coroutine|generator), so nothing of it ran"):
        loss_of(train_step())


def test_a_future_is_no_loss():
    loop = asyncio.new_event_loop()
    with pytest.raises(TypeError, match="returned a Future"):
        loss_of(loop.create_future())
    loop.close()
