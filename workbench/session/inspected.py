"""What a rank says of one parameter, plain data, as a few facts in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.views.theme import format_bytes

Data = Mapping[str, Any]


def facts_of(found: Data) -> dict[str, str]:
    """Return the facts of one rank by name, in the order they are read; what it does not say is left out."""
    said = {
        "unit": _unit(found),
        "this shard": _shard(found["shard"]) if "shard" in found else "",
        "full parameter": _full(found["full"]) if "full" in found else "",
        "full gradient": _tensor(found.get("full_grad")),
        "sharded gradient": _tensor(found.get("sharded_grad")),
        **{f"optimizer {entry['name']}": _optimizer(entry) for entry in found.get("optimizers", ())},
    }
    return {name: text for name, text in said.items() if text}


def _unit(found: Data) -> str:
    if "unit" not in found:
        return ""
    shape = "x".join(map(str, found.get("global_shape", ())))
    trains = "" if found.get("trainable", True) else ", not trained"
    return f"{found['unit']} of {found.get('model', 'the model')}; {shape or 'a scalar'} in all{trains}"


def _shard(shard: Data) -> str:
    if not shard.get("num_rows"):
        return f"none of {shard.get('of_rows')} rows"
    rows = f"rows {shard['first_row']}-{shard['last_row'] - 1} of {shard['of_rows']}"
    along = f" along dim {shard['dim']}" if shard.get("dim") else ""
    return f"{rows}{along}: {_content(shard)}, on {shard.get('device', 'this rank')}"


def _full(full: Data) -> str:
    where = f"in memory, {_content(full)}" if full.get("exists") else "not in memory"
    return f"{where}; {full['why']}" if full.get("why") else where


def _tensor(tensor: Data | None) -> str:
    if tensor is None:
        return ""
    return _content(tensor) if tensor.get("present") else "none"


def _optimizer(entry: Data) -> str:
    kept = [f"{part['name']} {_tensor(part)}" for part in entry.get("state", ())]
    return f"{entry.get('type', '')}: {'; '.join(kept) or 'no state yet'}"


def _content(tensor: Data) -> str:
    """Shape, dtype, bytes and norm: ``"8x16 float32, 512 B, norm 1.83"``."""
    shape = "x".join(map(str, tensor.get("shape") or ())) or "scalar"
    norm = tensor.get("norm")
    # a norm that is no finite number comes as text
    size = "" if norm is None else f", norm {norm:.4g}" if isinstance(norm, (int, float)) else f", norm {norm}"
    kind = f"{shape} {tensor.get('dtype', '')}".strip()
    return f"{kind}, {format_bytes(tensor.get('bytes', 0))}{size}"
