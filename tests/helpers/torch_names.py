"""List the names of torch that the workbench uses and the installed version lacks.

By hand: ``python -m tests.helpers.torch_names``.
Read from the sources: what is imported from torch, dotted names that begin with an import, and attributes of variables
that are annotated with a class of torch, or listed in :data:`VARIABLES`. What the code itself asks for with ``hasattr``
or ``getattr`` is left out.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllGatherResult, FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
from torch.nn.parallel import DistributedDataParallel

import workbench
from workbench.models import _torch_private
from workbench.models.engines import Watch
from workbench.models.patches import Patches

FILES = (
    "engine/_torch.py",
    *(f"models/{name}.py" for name in ("_torch_private", "torch_fully_shard", "torch_wrapper", "torch_ddp", "c10d")),
)

VARIABLES: Mapping[str, Mapping[str, type]] = {
    "models/_torch_private.py": {
        "param": FSDPParam,
        "state": FSDPState,
        "flat": FlatParameter,
        "wrapper": FullyShardedDataParallel,
    },
    "models/torch_fully_shard.py": {"param": FSDPParam, "gathered": AllGatherResult},
}
"""Classes of variables without an annotation, by file and name."""

ATTRIBUTES: Mapping[tuple[type, str], type] = {
    (FSDPParamGroup, "mesh_info"): HSDPMeshInfo,
    (FSDPParamGroup, "post_forward_mesh_info"): HSDPMeshInfo,
    (FSDPParamGroup, "comm_ctx"): FSDPCommContext,
    (FSDPState, "_state_ctx"): FSDPStateContext,
    (FSDPParam, "_module_info"): ParamModuleInfo,
    (FSDPParam, "mp_policy"): MixedPrecisionPolicy,
    (FlatParamHandle, "flat_param"): FlatParameter,
}
"""Classes of attributes."""

ANNOTATIONS: Mapping[str, type] = {
    "ParamGroup": FSDPParamGroup,
    "State": FSDPState,
    "Handle": FlatParamHandle,
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "DTensor": torch.distributed.tensor.DTensor,
    "DeviceMesh": dist.device_mesh.DeviceMesh,
    "dist.ProcessGroup": dist.ProcessGroup,
}


OPTIONAL = {"_set_storage_data_ptr_access_error_msg", "register_post_hook", "unregister_post_hook"}
"""Names that come with another one, for which the code asks: CUDA builds, or torch 2.14, have both."""


def missing() -> list[str]:
    """Return a sentence for each name that the installed torch does not have, and for each kind of call that is new."""
    folder = Path(workbench.__file__).parent
    found = [text for name in FILES for text in missing_in((folder / name).read_text(), name)]
    return [*found, *_patches(), *_kinds_of_calls()]


def missing_in(source: str, name: str) -> Iterator[str]:
    """Yield a sentence for each name that the source of a file uses and the installed torch does not have."""
    tree, imported = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or "torch": (alias.asname and alias.name) or "torch" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    known = {alias: _resolved(path) for alias, path in imported.items() if path.partition(".")[0] == "torch"}
    yield from (f"{name}: torch has no {imported[alias]}" for alias, value in known.items() if value is None)
    asked = OPTIONAL | {ast.literal_eval(call.args[1]) for call in ast.walk(tree) if _is_question(call)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            annotated = {each.arg: ast.unparse(each.annotation) for each in every if each.annotation is not None}
            classes = {arg: ANNOTATIONS[text] for arg, text in annotated.items() if text in ANNOTATIONS}
            others = {arg: None for arg, text in annotated.items() if text not in {*ANNOTATIONS, "Any"}}
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr not in asked:
                    yield from _missing_at(node, known, {**VARIABLES.get(name, {}), **others, **classes}, name)


def _is_question(node: ast.AST) -> bool:
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"hasattr", "getattr"}
    return named and isinstance(node.args[1], ast.Constant)  # type: ignore[attr-defined]


def _missing_at(
    node: ast.Attribute, known: Mapping[str, object], classes: Mapping[str, type | None], name: str
) -> Iterator[str]:
    owner = _owner(node.value, known, classes)
    if owner is None:
        return
    where = f"{name}:{node.lineno}"
    if isinstance(owner, ModuleType) or not isinstance(owner, type):
        if not hasattr(owner, node.attr) and not isinstance(owner, ModuleType):
            return  # a value, whose attributes are not known
        if not hasattr(owner, node.attr):
            yield f"{where}: {owner.__name__} has no {node.attr}"
    elif node.attr not in _names_of(owner):
        yield f"{where}: {owner.__name__} has no {node.attr}"
    elif isinstance(node.ctx, ast.Store):
        held = inspect.getattr_static(owner, node.attr, None)
        if isinstance(held, property) and held.fset is None:
            yield f"{where}: {owner.__name__}.{node.attr} can only be read"


def _owner(node: ast.expr, known: Mapping[str, object], classes: Mapping[str, type | None]) -> object:
    """Return the module, or the class of the value, of an expression; None: unknown."""
    if isinstance(node, ast.Name):
        return classes[node.id] if node.id in classes else known.get(node.id)
    if isinstance(node, ast.Attribute):
        above = _owner(node.value, known, classes)
        if isinstance(above, ModuleType):
            return getattr(above, node.attr, None)
        return ATTRIBUTES.get((above, node.attr)) if isinstance(above, type) else None
    return None


def _resolved(path: str) -> object:
    """Return what a dotted path names; None: torch has no such name."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        try:
            return getattr(importlib.import_module(module), name, None)
        except ImportError:
            return None


@cache
def _names_of(owner: type) -> frozenset[str]:
    """Return the attributes of a class and of its instances: those that its methods set, too."""
    found = {*dir(owner), "grad", "data"} if owner is FlatParameter else set(dir(owner))
    for each in owner.__mro__:
        if not each.__module__.startswith("torch"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError):  # of C++
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    if owner is FlatParameter:  # its handle sets the rest, and the functions of a backward
        for module in (FlatParamHandle.__module__, "torch.distributed.fsdp._runtime_utils"):
            tree = ast.parse(inspect.getsource(sys.modules[module]))
            found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return frozenset(found)


def _patches() -> list[str]:
    """Return a sentence for each function that is to be patched and does not exist."""
    found: list[str] = []
    wrap = Patches.wrap

    def asked(patches: Patches, owner: type | ModuleType, name: str, *args: object, **options: bool) -> None:
        if hasattr(owner, name):
            wrap(patches, owner, name, *args, **options)  # type: ignore[arg-type]
        else:
            found.append(f"{owner.__name__} has no {name}, which is to be patched")

    Patches.wrap = asked  # type: ignore[method-assign]
    try:
        Watch(found.append).begin().end()
    finally:
        Patches.wrap = wrap  # type: ignore[method-assign]
    return found


def _kinds_of_calls() -> Iterator[str]:
    """Yield a sentence for each kind of call that hooks of process groups announce and ``models/`` does not know."""
    names = getattr(torch._C._distributed_c10d, "HookOpName", None)
    for name in () if names is None else names.__members__:
        if name not in _torch_private._BY_HOOK:
            yield f"process groups announce {name}, which is new"


if __name__ == "__main__":
    every = missing()
    sys.stdout.write("\n".join([f"torch {torch.__version__}: {len(every) or 'no'} names to look at", *every, ""]))
    sys.exit(bool(every))
