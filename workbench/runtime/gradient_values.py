"""Gradients that breakpoints compare: how many elements are NaN or infinite, and the norm of all of them.

Each rank reads its own part after every backward of a sharded model, when all reductions have ended and nothing has
clipped the result. Before the optimizer's step the ranks exchange what they read, through the store: all of them
compare the same numbers, and so stop at the same event. That exchange is no event of the trace.
"""

# ruff: noqa: ANN401 - arguments and results of torch's function are passed on

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from workbench.base.text_formats import plural
from workbench.engine.collective_order import Collective
from workbench.engine.full_param import local_tensor
from workbench.engine.process_groups import group_of
from workbench.events import Unit, unit_words
from workbench.runtime.recorder import NO_STEP, Recorder

_EXCHANGE = Collective("exchange of the gradients' values for a breakpoint", None, 0)


@dataclass(frozen=True, kw_only=True)
class GradientValues:
    """The values that breakpoints compare.

    Attributes:
        nan: elements of gradients that are NaN or infinite, over all ranks.
        grad_norm: 2-norm of all gradients before clipping; infinite if ``nan`` is not 0.
        because: rank, unit and parameter of the most telling value, as text.
    """

    nan: int
    grad_norm: float
    because: str


@dataclass(frozen=True, kw_only=True)
class _GradientsOfRank:
    """One rank's part of the gradients.

    Attributes:
        nan: its elements that are NaN or infinite.
        first: the first parameter with such elements, in words.
        num_params: parameters with such elements.
        square: sum of its squares; ranks with copies of a gradient share its part.
        largest: the largest norm of one parameter.
        of: that parameter, in words.
    """

    nan: int = 0
    first: str = ""
    num_params: int = 0
    square: float = 0.0
    largest: float = 0.0
    of: str = ""


class GradientWatch:
    """Reads the gradients of the sharded models after each backward while it is on.

    Args:
        recorder: knows the units and their tensors.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._original: Callable[..., Any] | None = None
        self._depth = 0  # checkpointing may run a backward inside one
        self._read_in = NO_STEP
        self._own = _GradientsOfRank()

    def switch(self, *, is_on: bool) -> None:
        """Begin or end to watch; equal on all ranks, so only between two requests."""
        self._read_in = NO_STEP
        if is_on and self._original is None:
            original = self._original = torch.autograd.backward

            @functools.wraps(original)
            def backward(*args: Any, **kwargs: Any) -> Any:
                return self._backward(original, *args, **kwargs)

            torch.autograd.backward = backward
        elif not is_on and self._original is not None:
            torch.autograd.backward, self._original = self._original, None

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        before = recorder.step, recorder.ordinal
        self._depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._depth -= 1
        # without an event, no model was in it that other ranks run too
        has_events = recorder.step != NO_STEP and (recorder.step, recorder.ordinal) != before
        if has_events and not self._depth and not recorder.is_aside:
            self._own, self._read_in = self._read(), recorder.step
        return result

    def exchange(self) -> GradientValues | None:
        """Return the values of the newest backward of this step, equal on all ranks; collective. None without one."""
        if self._read_in != self._recorder.step or self._depth:
            return None
        self._read_in = NO_STEP
        text = json.dumps(asdict(self._own))
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = group_of(tuple(range(dist.get_world_size())), purpose="gradient values")
            texts = group.compare(_EXCHANGE, text)
            group.end_iteration()
        else:
            texts = [text]
        return _combined([_GradientsOfRank(**json.loads(each)) for each in texts])

    @torch.no_grad()
    def _read(self) -> _GradientsOfRank:
        found = [piece for unit in self._recorder.header.units if unit.in_use for piece in self._pieces(unit)]
        if not found:
            return _GradientsOfRank()
        device = found[0][1].device
        norms = torch.stack([torch.linalg.vector_norm(grad.float()).to(device) for _, grad, _ in found]).tolist()
        measured = list(zip(found, norms, strict=True))
        suspects = [(name, grad) for (name, grad, _), norm in measured if not math.isfinite(norm)]
        counts = [(name, int((~grad.isfinite()).sum()), grad.numel()) for name, grad in suspects]
        wrong = [count for count in counts if count[1]]  # in the others only the squares overflow
        if wrong:
            name, count, numel = wrong[0]
            first = f"{count:,} of {numel:,} elements of the gradient of {name}"
            return _GradientsOfRank(nan=sum(count for _, count, _ in wrong), first=first, num_params=len(wrong))
        largest, of = max((norm, name) for (name, *_), norm in measured)
        square = math.fsum(norm * norm / copies for (*_, copies), norm in measured)
        return _GradientsOfRank(square=square, largest=largest, of=of)

    def _pieces(self, unit: Unit) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Yield each gradient of a unit on this rank: its parameter in words, its elements, and the copies of it."""
        tensors = self._recorder.tensors(unit.index)
        for param in unit.params:
            for fqn in [part.fqn for part in param.parts] or [param.fqn]:
                grad = tensors[fqn].sharded_grad if fqn in tensors else None
                if isinstance(grad, torch.Tensor) and (own := local_tensor(grad).detach()).numel():
                    yield f"{fqn} (unit {unit_words(unit.name)})", own, _copies(grad, unit)


def _copies(grad: torch.Tensor, unit: Unit) -> int:
    """Return how many ranks hold the same piece of a gradient."""
    if not isinstance(grad, DTensor):
        return unit.replicate_size
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if isinstance(placement, Replicate))


def _combined(parts: Sequence[_GradientsOfRank]) -> GradientValues:
    """Return the values of all ranks' parts, in the order of ranks."""
    nan = sum(part.nan for part in parts)
    if nan:
        rank = next(rank for rank, part in enumerate(parts) if part.nan)
        part = parts[rank]
        others = [str(other) for other, each in enumerate(parts) if each.nan and other != rank]
        likewise = [f"{plural(part.num_params - 1, 'more parameter')}"] if part.num_params > 1 else []
        likewise += [f"rank{'s' * (len(others) > 1)} {', '.join(others)}"] if others else []
        because = f"rank {rank}: {part.first} are NaN or infinite"
        because += f"; likewise {' and '.join(likewise)}" if likewise else ""
        return GradientValues(nan=nan, grad_norm=math.inf, because=because)
    norm = math.sqrt(math.fsum(part.square for part in parts))
    rank = max(range(len(parts)), key=lambda each: parts[each].largest)
    part = parts[rank]
    of_all = f"the norm of all gradients is {norm:.4g}"
    because = f"{of_all}; the largest part, {part.largest:.4g}, is on rank {rank}: {part.of}" if part.of else of_all
    return GradientValues(nan=0, grad_norm=norm, because=because)
