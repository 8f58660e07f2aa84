"""``verify --repeat``: run a sharded step twice from the same state, and find the first bits that differ."""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine.full_param import local_tensor
from workbench.models.sharded_model import Largest, ShardedModel, checksum, join, local_tensors
from workbench.protocol.commands import Difference, Repetition, VerifyReply
from workbench.runtime.program_state import ProgramState
from workbench.runtime.step_observation import (
    GradObserver,
    OutputObserver,
    is_equal,
    modules_of,
    pieces_of,
    relative,
)
from workbench.runtime.trainer import loss_of

_HAS_NONE = re.compile(r"(\S+) does not have a deterministic implementation")


class _Run:
    """The result of one run of the step.

    Attributes:
        calls: modules in the order in which they are called.
        random: the random numbers' states at these calls.
        gathered: checksums of full parameters at their first use, by name.
        params: this rank's values of parameters and buffers at the end, on the host.
        loss: the loss; None: the step function returns none.
    """

    def __init__(self, sharded: ShardedModel, program: ProgramState, expected: _Run | None) -> None:
        self._program, self._averaged = program, sharded.groups()
        self._modules = modules_of(sharded.model)
        self.calls: list[str] = []
        self.random: list[int] = []
        self.gathered: dict[str, int] = {}
        self.params: list[torch.Tensor] = []
        self.loss: float | None = None
        self.outputs: OutputObserver = OutputObserver(self._modules, None if expected is None else expected.outputs)
        pieces = pieces_of(sharded.units, sharded.tensors, sharded.paths, dict.fromkeys(sharded.names.values()))
        self.pieces = {piece.name: piece for piece in pieces}
        self.grads = GradObserver(pieces, lambda: _flat_grads(sharded, pieces), keeps=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the body, one step."""
        with ExitStack() as stack:
            for path, module in self._modules.items():
                hook = module.register_forward_pre_hook(self._before(path))
                stack.callback(hook.remove)
            stack.enter_context(self.outputs.watching())
            stack.enter_context(self.grads.watching())
            yield

    def _before(self, path: str) -> Callable[..., None]:
        def before(module: nn.Module, _: object) -> None:
            self.calls.append(path)
            self.random.append(zlib.crc32(repr(self._program.random.get()).encode()))
            for name, param in module.named_parameters(recurse=False):
                if join(path, name) in self._averaged and not isinstance(param, DTensor):
                    self.gathered.setdefault(join(path, name), checksum(param))

        return before


def _flat_grads(sharded: ShardedModel, pieces: list[Any]) -> dict[str, torch.Tensor]:
    """Return this rank's rows of gradients, flat, by name."""
    found, tensors = {}, {index: sharded.tensors(index) for index in {piece.unit.index for piece in pieces}}
    for piece in pieces:
        grad = tensors[piece.unit.index][piece.key].sharded_grad
        if isinstance(grad, torch.Tensor):
            found[piece.name] = local_tensor(grad).detach().reshape(-1)
    return found


def repeated(
    sharded: ShardedModel,
    step: Callable[[], Any],
    program: ProgramState,
    largest: Largest,
    restored: Callable[[ShardedModel], AbstractContextManager[None]],
) -> VerifyReply:
    """Run the step twice and compare all bits; if they differ, twice more with deterministic operations; collective.

    Args:
        sharded: the model.
        step: the step function.
        program: the state that all runs start from.
        largest: returns the largest of a number that each rank passes.
        restored: restores a model after its body.
    """

    def run(expected: _Run | None = None) -> _Run:
        found = _Run(sharded, program, expected)
        with restored(sharded), program.restored():
            with found.watching():
                found.loss = loss_of(step())
            sharded.reshard()
            found.params = [tensor.detach().to("cpu", copy=True) for tensor in local_tensors(sharded.model)]
        return found

    first = run()
    second = run(first)
    differs, operations, is_deterministic = _differs(first, second), set[str](), None
    if largest(int(differs)):
        with _deterministic(operations):
            third = run()
            is_deterministic = not largest(int(_differs(third, run(third))))
    equal = [is_equal(a, b) for a, b in zip(first.params, second.params, strict=True)]
    sizes = [relative(b, a) for a, b in zip(first.params, second.params, strict=True)]
    return VerifyReply(
        num_params=len(equal),
        max_abs_diff=max(
            (float((a.double() - b.double()).abs().max()) for a, b in _floats(first, second)), default=0.0
        ),
        max_rel_diff=max(sizes, default=0.0),
        worst_param="",
        equal_bits=sum(equal),
        ok=not differs,
        tolerance="none: all bits are compared",
        loss_sharded=second.loss,
        loss_reference=first.loss,
        repetition=_located(first, second, tuple(sorted(operations)), is_deterministic),
    )


def _floats(first: _Run, second: _Run) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for a, b in zip(first.params, second.params, strict=True):
        if a.numel() and a.shape == b.shape:
            yield a, b


def _differs(first: _Run, second: _Run) -> bool:
    found = _located(first, second, (), None)
    places = (found.output, found.grad, found.param, found.order, found.random, found.changed)
    return found.differs_in_input or any(each is not None for each in places)


def _located(first: _Run, second: _Run, operations: tuple[str, ...], is_deterministic: bool | None) -> Repetition:
    calls = list(zip(first.calls, second.calls, strict=False))
    order = next((a for a, b in calls if a != b), None)
    if order is None and len(first.calls) != len(second.calls):
        order = max(first.calls, second.calls, key=len)[len(calls)]
    random = next((c for c, a, b in zip(first.calls, first.random, second.random, strict=False) if a != b), None)
    changed = next((name for name, crc in first.gathered.items() if second.gathered.get(name, crc) != crc), None)
    names = list(reversed(first.pieces))
    grad = param = None
    for position, name in enumerate(names):
        a, b = first.grads.values.get(name), second.grads.values.get(name)
        if (a is None) != (b is None) or (a is not None and b is not None and not is_equal(a, b)):
            size = relative(b, a) if a is not None and b is not None else float("inf")
            rows = first.pieces[name].rows
            grad = Difference(name=name, position=position, total=len(names), relative=size, rows=rows)
            break
    for position, (a, b) in enumerate(zip(first.params, second.params, strict=True)):
        if not is_equal(a, b):
            param = Difference(
                name=f"tensor {position}", position=position, total=len(first.params), relative=relative(b, a)
            )
            break
    return Repetition(
        output=second.outputs.first_difference(0.0),
        grad=grad,
        param=param,
        differs_in_input=second.outputs.differs_in_input,
        order=order,
        random=random,
        changed=changed,
        gathered=first.gathered,
        operations=operations,
        is_deterministic=is_deterministic,
    )


@contextmanager
def _deterministic(operations: set[str]) -> Iterator[None]:
    """Use deterministic operations in the body; add to ``operations`` the names of those that have none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        texts = (_HAS_NONE.match(str(each.message)) for each in caught)
        operations.update(found.group(1) for found in texts if found is not None)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
