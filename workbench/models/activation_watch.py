"""Activations: what autograd keeps of each module's forward for backward, exact by storage.

Nothing is put between the program and autograd, so no number, no error and no lifetime changes. When a module's forward
ends, and when a backward is about to begin, the nodes that are new in the graph are read. Each node belongs to the
module whose forward made it: its number lies after that of the forward's begin. A storage counts from then on until it
is freed, or until no node that keeps it exists; once, however many views and nodes keep it. Parameters and buffers do
not count. Of tensors that hooks of the program replaced (``save_on_cpu``), what they returned counts, if it is on the
same device.

A checkpoint keeps its inputs where no node shows them. If a module's nodes keep something that is no tensor, the
module's inputs count when its checkpoint has ended, until they are freed. What a checkpoint computes again counts as
well; a forward that it stops halfway is read from the inputs of the module that it stopped in.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from workbench.engine import probe
from workbench.engine._torch import is_fake, is_in_backward
from workbench.engine.module_names import clean
from workbench.engine.tensor_trees import differentiable_in
from workbench.events import Activation, Category, unit_words
from workbench.models._torch_private import kept_by, names_of_kept, next_node_number, node_number, own_hooks, whole_of
from workbench.models.patches import Patches, Watching
from workbench.models.torch_ddp import without_wrappers

OUTSIDE = "(no module)"
"""Path of what no module's forward made, such as a loss function's."""

RECOMPUTED = "recomputed"
"""Operation of what a checkpoint computes again in backward."""

_COMPILED = ("_orig_mod",)  # under which torch.compile's wrapper holds its module
_INPUT = "input"
_SAME_STORAGE = "unsafe_view"  # an operation that makes no storage, and whose result does not count as a view
_KEY = "workbench"
Node = torch.autograd.graph.Node
_LEAF = type(torch.zeros((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Bytes:
    """A storage that counts while this object lives; each node that keeps it has a reference."""

    handle: probe.BufferHandle | None
    end: weakref.ref[torch.UntypedStorage]  # calls back when the storage is freed


@dataclass(slots=True, eq=False)
class _Keeper:
    """Metadata of an autograd node: its module and operation, and the storages that it keeps. Ends with the node."""

    module: str
    op: str
    kept: list[_Bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Frame:
    """A module whose forward runs.

    Attributes:
        module: the module.
        first: number of the first node that it may make.
        opaque: the newest node of it that keeps what is no tensor.
        path: its path; empty while it is unknown.
    """

    module: nn.Module
    first: int
    opaque: _Keeper | None = None
    path: str = ""


@dataclass(slots=True, eq=False)
class _Input:
    """An input of a module within a checkpoint, which counts if it outlives the checkpoint."""

    storage: weakref.ref[torch.UntypedStorage]
    owner: str
    keeper: _Keeper
    hooks: object


class _Running(threading.local):
    """The modules whose forward runs in this thread, outer before inner."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.inputs: dict[int, _Input] = {}


class ActivationWatch:
    """Announces activations to the active probe, whatever engine runs the model."""

    def __init__(self) -> None:
        self._running = _Running()
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakValueDictionary[int, _Bytes] = weakref.WeakValueDictionary()  # by id of the storage
        self._until_freed: dict[int, _Bytes] = {}
        self._owned: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # storages of parameters and buffers

    def install(self, patches: Patches) -> None:
        """Watch every module's forward, and every backward, of the process."""
        call = nn.Module.__call__
        begin = patches.hook(self._begin, "the begin of a module's forward")
        end = patches.hook(self._end, "the end of a module's forward")
        stopped = patches.hook(self._read_stopped, "a module's forward that raises")

        @functools.wraps(call)
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
            if torch.compiler.is_compiling() or patches.is_off:  # a compiler sees the original alone
                return call(module, *args, **kwargs)
            begin(module)
            try:
                output = call(module, *args, **kwargs)
            except Exception:
                stopped(args, kwargs)
                raise
            else:
                end(args, kwargs, output)
                return output
            finally:
                self._running.frames.pop()

        patches.replace(nn.Module, "__call__", watched)
        patches.wrap(torch.autograd, "backward", self._backward, if_probed=True)
        patches.wrap(torch.autograd, "grad", self._backward, if_probed=True)

    def note(self, models: Iterable[nn.Module]) -> None:
        """Name modules by their paths in these models."""
        for model in models:
            self._name(model)

    def _name(self, model: nn.Module) -> None:
        self._paths.update((module, clean(path, _COMPILED)) for module, path in without_wrappers(model).items())

    # ---- when

    def _begin(self, module: nn.Module) -> None:
        running = self._running
        if running.inputs:
            self._count_inputs(running)
        running.frames.append(_Frame(module, next_node_number()))

    def _end(self, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> None:
        running = self._running
        if probe.active is not None and torch.is_grad_enabled():
            self._note_owned(running.frames[-1].module)
            if running.inputs:
                self._count_inputs(running)
            self._read_forward(running, (*args, *kwargs.values()), output)

    def _backward(self, tensors: Any, *_: Any, **__: Any) -> Watching:  # noqa: ANN401 - arguments of torch's
        self.before_backward(tensors)
        yield

    def before_backward(self, tensors: object) -> None:
        """Read what is new in the graph of tensors whose backward is about to begin."""
        if self._running.inputs:
            self._count_inputs(self._running)
        self._read(differentiable_in(tensors), self._running.frames)

    # ---- what

    def _read_forward(self, running: _Running, args: tuple[object, ...], output: object) -> None:
        frames = running.frames
        outputs = [output] if isinstance(output, torch.Tensor) else differentiable_in(output)
        opaque = self._read(outputs, frames)
        for frame in frames if opaque is not None else ():
            frame.opaque = opaque
        keeper, hooks = frames[-1].opaque, own_hooks()
        if keeper is None or hooks is None:
            return
        given = [each for each in _leaves(args) if not self._is_owned(*each)]
        self._read([tensor for tensor, _ in given], frames)
        here = _Keeper(self._path(frames[-1], frames), _INPUT)
        for tensor, storage in given:
            kept = _Input(weakref.ref(storage), _owner(tensor, here), keeper, hooks)
            running.inputs[id(storage)] = kept  # outer modules come later

    def _count_inputs(self, running: _Running) -> None:
        """Count the inputs of modules in a checkpoint that has ended, if they are still in memory."""
        hooks = own_hooks()
        for key in [key for key, each in running.inputs.items() if each.hooks != hooks]:
            each = running.inputs.pop(key)
            storage = each.storage()
            if storage is not None:
                each.keeper.kept.append(self._bytes(storage, each.owner))

    def _read_stopped(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Read the forward of a module in which a checkpoint stopped: it has computed again what it needs.

        Its inputs count, as its last operation may keep them.
        """
        frames = self._running.frames
        if probe.active is None or not is_in_backward():
            return
        given = list(_leaves((*args, *kwargs.values())))
        self._note_owned(frames[-1].module)
        self._read([tensor for tensor, _ in given], frames)
        for tensor, storage in given:
            if id(storage) not in self._known and not self._is_owned(tensor, storage):
                path = self._path(frames[-1], frames)
                kept = self._bytes(storage, _text(path, RECOMPUTED, path))
                self._until_freed[id(storage)] = kept

    def _read(self, tensors: Sequence[torch.Tensor], frames: Sequence[_Frame]) -> _Keeper | None:
        """Count what the new nodes of tensors' graphs keep; return the newest node that keeps what is no tensor."""
        todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if not todo:
            return None
        found: list[tuple[Node, _Keeper]] = []
        again = is_in_backward()
        while todo:
            node: Node = todo.pop()
            metadata: Any = node.metadata
            if _KEY not in metadata:
                kind = type(node)
                op = RECOMPUTED if again else _operation(kind)
                metadata[_KEY] = keeper = _Keeper(self._maker(frames, node_number(node)), op)
                if names_of_kept(kind):
                    found.append((node, keeper))
                for each, _ in node.next_functions:
                    if each is not None and type(each) is not _LEAF:
                        todo.append(each)
        on_cpu, opaque = tensors[0].is_cpu, None
        for node, keeper in reversed(found):
            opaque = keeper if self._keep(node, keeper, on_cpu=on_cpu) else opaque
        return opaque

    def _keep(self, node: Node, keeper: _Keeper, *, on_cpu: bool) -> bool:
        """Count what a node keeps on the device that computes; return whether some of it is no tensor."""
        is_opaque = False
        for kept in kept_by(node):
            is_opaque |= not isinstance(kept, (torch.Tensor, tuple, list))
            for tensor, storage in _leaves(kept):
                if tensor.is_cpu == on_cpu:
                    known = self._known.get(id(storage))
                    if known is None and not self._is_owned(tensor, storage):
                        known = self._bytes(storage, _owner(tensor, keeper))
                    if known is not None:
                        keeper.kept.append(known)
        return is_opaque

    def _bytes(self, storage: torch.UntypedStorage, owner: str) -> _Bytes:
        """Return what counts a storage, which begins to count if it does not yet."""
        key = id(storage)  # a storage has one object in Python for as long as it exists
        known = self._known.get(key)
        if known is None:
            handle = probe.BufferHandle(Category.ACTIVATIONS, probe.NO_UNIT, storage.nbytes(), owner)
            known = self._known[key] = _Bytes(handle, weakref.ref(storage, functools.partial(self._freed, key)))
        return known

    def _freed(self, key: int, _: object) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            known.handle = None
        self._until_freed.pop(key, None)

    # ---- parameters and buffers

    def _note_owned(self, module: nn.Module) -> None:
        for own in (module._parameters, module._buffers):
            for tensor in own.values() if own else ():
                for _, storage in _leaves(tensor):
                    if id(storage) not in self._owned:
                        forget = functools.partial(self._disowned, id(storage))
                        self._owned[id(storage)] = weakref.ref(storage, forget)

    def _disowned(self, key: int, _: object) -> None:
        self._owned.pop(key, None)

    def _is_owned(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Return whether a tensor is, or is a view of, a parameter or a buffer."""
        return id(storage) in self._owned or isinstance(whole_of(tensor), nn.Parameter)

    # ---- names

    def _maker(self, frames: Sequence[_Frame], number: int) -> str:
        """Return the path of the running module whose forward made a node."""
        for frame in reversed(frames):
            if frame.first <= number:
                return self._path(frame, frames)
        return OUTSIDE

    def _path(self, frame: _Frame, frames: Sequence[_Frame]) -> str:
        if not frame.path:
            path = self._paths.get(frame.module)
            for model in (frames[0].module, frame.module):  # the latter is not in the outermost one
                if path is None:
                    self._name(model)
                    path = self._paths.get(frame.module)
            has_params = next(frame.module.parameters(), None) is not None
            frame.path = path or (unit_words("") if has_params else type(frame.module).__name__)
        return frame.path


def _owner(tensor: torch.Tensor, keeper: _Keeper) -> str:
    """Return the owner of a tensor that a node keeps, as text."""
    node: Any = whole_of(tensor).grad_fn
    maker = keeper if node is None else node.metadata.get(_KEY, keeper)
    if maker.op == _SAME_STORAGE and node is not None and node.next_functions[0][0] is not None:
        maker = node.next_functions[0][0].metadata.get(_KEY, maker)  # such as a Linear's addmm
    return _text(maker.module, maker.op, keeper.module)


@functools.cache
def _text(module: str, op: str, kept_by: str) -> str:
    return Activation(module=module, op=op, kept_by=kept_by).text


def _leaves(kept: object) -> Sequence[tuple[torch.Tensor, torch.UntypedStorage]]:
    """Return the plain tensors in a tensor or a tuple, with their storages; of a subclass, those it consists of."""
    if type(kept) is torch.Tensor or type(kept) is nn.Parameter or (isinstance(kept, torch.Tensor) and is_fake(kept)):
        try:
            return ((kept, kept.untyped_storage()),)
        except NotImplementedError:  # a tensor within a transform of torch.func
            return ()
    if isinstance(kept, torch.Tensor):
        flatten = getattr(kept, "__tensor_flatten__", None)  # without it, its memory is unknown
        kept = () if flatten is None else tuple(getattr(kept, name) for name in flatten()[0])
    return [leaf for each in kept for leaf in _leaves(each)] if isinstance(kept, (tuple, list)) else ()


@functools.cache
def _operation(kind: type) -> str:
    """Return the operation of a kind of node: ``NativeLayerNormBackward0`` -> ``"native_layer_norm"``."""
    name = re.sub(r"Backward\d*$", "", kind.__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
