"""Sharding policies in user notation: meshes, precisions, reshard_after_forward.

Both ends validate them here: the notebook before it sends a request, and every rank before it changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

from workbench.events import Unit

RESHARD_AFTER_FORWARD = ("auto", "true", "false")

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""User notation of a dtype: torch's name."""

OFF = "off"

HOSTS = "hosts"
"""The mesh with one copy on every host, sharded over the host's ranks; the session resolves its sizes."""

Api = Literal["fully_shard", "classic"]
"""API that a model is sharded with: one DTensor per parameter, or a wrapper with one flat parameter."""

FULLY_SHARD: Api = "fully_shard"
CLASSIC: Api = "classic"

APIS: tuple[Api, ...] = get_args(Api)

Engine = Literal["workbench", "torch"]
"""Whose FSDP runs a model, or a script uses: the workbench's own, or torch's."""

WORKBENCH: Engine = "workbench"
TORCH: Engine = "torch"

ENGINES: tuple[Engine, ...] = get_args(Engine)

Strategy = Literal["full", "grad", "none", "hybrid", "hybrid2"]
"""User notation of the classic wrapper's sharding strategies."""

_NAMES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

STRATEGIES: Mapping[str, str] = dict(zip(get_args(Strategy), _NAMES, strict=True))
"""User notation of a strategy: the wrapper's name."""

HYBRID: tuple[Strategy, ...] = ("hybrid", "hybrid2")
"""Strategies that take a mesh of copies; the others use all ranks."""


def strategy_like(mesh: Sequence[int], reshard_after_forward: str | int) -> Strategy | Literal[""]:
    """Return the strategy equivalent to a ``fully_shard`` policy; empty: there is none."""
    if reshard_after_forward not in {"auto", "true", "false"}:
        return ""
    copies, size = (1, *mesh)[-2:]
    if size == 1 and copies > 1:
        return "none"
    keeps = reshard_after_forward == "false"
    return ("hybrid2" if keeps else "hybrid") if copies > 1 else ("grad" if keeps else "full")


@dataclass(frozen=True, kw_only=True)
class PrecisionNames:
    """Dtypes of a unit, each a key of :data:`DTYPES` or ``""`` for none, and which parameters keep their own.

    Attributes:
        param: dtype of the all-gather and of forward and backward.
        reduce: dtype in which gradients are reduced; none: as the installed torch does.
        output: dtype to which the model's result is cast; none: no cast.
        keep: globs, separated by ``|``, of the names of parameters that compute in their own dtype, not in ``param``.
    """

    param: str = ""
    reduce: str = ""
    output: str = ""
    keep: str = ""

    @property
    def kept(self) -> list[str]:
        """The globs of :attr:`keep`."""
        return self.keep.split("|") if self.keep else []

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``text``.

        Example: ``"bf16,reduce=fp32"`` -> ``MixedPrecision(param="bf16", reduce="fp32")``; ``"off"`` -> all none.

        Raises:
            ValueError: as :meth:`named`.
        """
        return cls().changed(text)

    def changed(self, text: str) -> Self:
        """Return this with the dtypes that ``text`` names replaced. Raises as :meth:`named`."""
        return replace(self, **self.named(text))

    @staticmethod
    def named(text: str) -> dict[str, str]:
        """Return the attributes that ``text`` names: ``off`` alone names all.

        Example: ``"bf16,output=off"`` -> ``{"param": "bf16", "output": ""}``.

        Raises:
            ValueError: ``text`` has another form.
        """
        if text == OFF:
            return {"param": "", "reduce": "", "output": "", "keep": ""}
        found: dict[str, str] = {}
        for place, part in enumerate(text.split(",") if isinstance(text, str) else [""]):
            name, has_name, dtype = part.strip().rpartition("=")
            name = name.strip() if has_name else ("param" if place == 0 else "")
            is_valid = bool(dtype.strip()) if name == "keep" else dtype.strip() in {*DTYPES, OFF}
            if name not in ("param", "reduce", "output", "keep") or name in found or not is_valid:
                raise ValueError(
                    f"mp is a dtype, with reduce= and output= if they differ, such as bf16 or "
                    f"bf16,reduce=fp32,output=fp32; {OFF} means none, also for one of them: reduce={OFF}; the dtypes "
                    f"are {', '.join(DTYPES)}; keep=*.norm* leaves the parameters of these names in their own dtype; "
                    f"got {text!r}"
                )
            found[name] = dtype.strip().replace(OFF, "")
        return found

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads as this."""
        parts = (("reduce", self.reduce), ("output", self.output), ("keep", self.keep))
        named = (f"{name}={value}" for name, value in parts if value)
        return ",".join(filter(None, (self.param, *named))) or OFF


def as_mesh(value: object) -> tuple[int, ...]:
    """Return a mesh from user notation, unvalidated; :func:`check_mesh` validates it.

    Example: ``"2x4"`` and ``[2, 4]`` -> ``(2, 4)``, ``4`` and ``"4"`` -> ``(4,)``.

    Raises:
        ValueError: ``value`` has another form.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, str) and all(part.isdecimal() for part in value.split("x")):
        return tuple(map(int, value.split("x")))
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(value)
    raise ValueError(_wrong_mesh(value))


def read_mesh(value: object) -> tuple[int, ...] | str:
    """Return a mesh, or :data:`HOSTS`, from user notation.

    Raises:
        ValueError: ``value`` has another form.
    """
    return HOSTS if value == HOSTS else as_mesh(value)


def mesh_words(copies: int, shard_size: int) -> str:
    """Return the user notation of a mesh: ``(1, 4)`` -> ``"4"``, ``(2, 2)`` -> ``"2x2"``."""
    return str(shard_size) if copies == 1 else f"{copies}x{shard_size}"


def as_reshard_after_forward(text: str) -> str | int:
    """Return ``text`` as a number if it is one, else unchanged: ``"4"`` -> ``4``, ``"auto"`` -> ``"auto"``."""
    return int(text) if text.isdecimal() else text


def check_mesh(mesh: Sequence[object]) -> None:
    """Raise unless ``mesh`` is ``(F,)`` or ``(R, F)``.

    Raises:
        ValueError: it is not.
    """
    if len(mesh) not in (1, 2) or not all(type(size) is int and size > 0 for size in mesh):
        raise ValueError(_wrong_mesh("x".join(map(str, mesh))))


def check_mesh_fits(mesh: Sequence[int], world_size: int) -> None:
    """Raise unless ``mesh`` holds all ranks or is empty.

    Raises:
        ValueError: it does not; the message lists the meshes that fit.
    """
    if mesh and math.prod(mesh) != world_size:
        product = f" = {math.prod(mesh)}" if len(mesh) > 1 else ""
        raise ValueError(
            f"mesh {'x'.join(map(str, mesh))}{product} does not match the number of ranks, {world_size}; these fit: "
            f"{', '.join(meshes_that_fit(world_size))}"
        )


def meshes_that_fit(world_size: int) -> list[str]:
    """Return the meshes over all ranks in user notation: ``4`` -> ``["4", "2x2", "4x1"]``."""
    copies = [n for n in range(2, world_size + 1) if world_size % n == 0]
    return [mesh_words(n, world_size // n) for n in (1, *copies)]


def check_reshard_after_forward(value: object) -> None:
    """Raise unless ``value`` is one of :data:`RESHARD_AFTER_FORWARD` or a number of at least 2.

    Raises:
        ValueError: it is not.
    """
    is_number = type(value) is int and value > 1
    if value not in RESHARD_AFTER_FORWARD and not is_number:
        raise ValueError(
            f"reshard_after_forward is one of {', '.join(RESHARD_AFTER_FORWARD)}, or a number of ranks of at least 2, "
            f"not {value!r}"
        )


def check_reshard_fits(value: object, shard_size: int) -> None:
    """Raise if ``value`` is a number of ranks that is not a proper divisor of the F ranks that share one copy.

    Raises:
        ValueError: it is not; the message lists the values that fit.
    """
    if not isinstance(value, int) or (value < shard_size and shard_size % value == 0):
        return
    fitting = [str(n) for n in range(2, shard_size) if shard_size % n == 0]
    numbers = f"{', '.join(fitting)}; or " if fitting else "no number; "
    raise ValueError(
        f"reshard_after_forward {value} does not split the {shard_size} shard ranks into equal, smaller groups; "
        f"these fit: {numbers}{', '.join(RESHARD_AFTER_FORWARD)}"
    )


AUTO_PREFETCH = "auto"
"""Units are gathered ahead in the engine's own order; the same as 0."""


def as_prefetch(text: str) -> int:
    """Return a number of units that are gathered ahead, 0 for ``auto``.

    Raises:
        ValueError: it is neither.
    """
    if text != AUTO_PREFETCH and not text.isdecimal():
        raise ValueError(f"expected {AUTO_PREFETCH} or a whole number, got {text!r}")
    return 0 if text == AUTO_PREFETCH else int(text)


def check_prefetch(value: object) -> None:
    """Raise unless ``value`` is a number of units ahead, 0 included.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or value < 0:
        raise ValueError(
            f"prefetch is the number of units gathered ahead: 1, 2, ..., or {AUTO_PREFETCH} for the engine's own "
            f"order, not {value!r}"
        )


def check_engine(engine: object) -> None:
    """Raise unless ``engine`` is one of :data:`ENGINES`.

    Raises:
        ValueError: it is not.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is one of {', '.join(ENGINES)}, not {engine!r}")


def check_given(api: str, given: Mapping[str, Any]) -> None:
    """Raise unless the options that a command gives are valid, and are options of an API.

    Args:
        api: the API; empty: unknown, and the options of either are taken.
        given: options that are not at their default; api, strategy and mesh are not checked against other options.

    Raises:
        ValueError: one is not; the message names the alternative.
    """
    if given.get("api", APIS[0]) not in APIS:
        raise ValueError(f"api is one of {', '.join(APIS)}, not {api!r}")
    if given.get("strategy", "") not in {"", *STRATEGIES}:
        raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}, not {given['strategy']!r}")
    if "reshard_after_forward" in given:
        check_reshard_after_forward(given["reshard_after_forward"])
    if "mp" in given:
        PrecisionNames.parse(given["mp"])
    for name in ("offload", "orig_params"):
        if type(given.get(name, False)) is not bool:
            raise ValueError(f"{name} is true or false, not {given[name]!r}")
    if "prefetch" in given:
        check_prefetch(given["prefetch"])
    if api == CLASSIC:
        _check_classic(given)
    elif api:
        check_not_classic(given)


def check_not_classic(given: Mapping[str, Any]) -> None:
    """Raise if an option is given that ``fully_shard`` does not take.

    Raises:
        ValueError: one is given; the message names the alternative.
    """
    if given.get("strategy"):
        raise ValueError(
            "strategy is for --api classic; with fully_shard give --reshard-after-forward true for full and false for "
            "grad, --mesh 4x1 for none, --mesh 2x2 for hybrid"
        )
    if given.get("orig_params"):
        raise ValueError(
            "orig_params is for --api classic; with fully_shard, optimizers always have the model's own parameters"
        )


def _check_classic(given: Mapping[str, Any]) -> None:
    if given.get("reshard_after_forward", "auto") != "auto":
        raise ValueError(
            "reshard_after_forward is for --api fully_shard; with classic give --strategy full, which frees full "
            "parameters after forward, or grad, which keeps them"
        )
    mp, prefetch = given.get("mp", OFF), given.get("prefetch", 0)
    if PrecisionNames.parse(mp).output:
        raise ValueError(
            f"mp {mp!r}: --api classic does not cast outputs: leave out output=, or cast in the model; output={OFF} "
            f"removes an earlier setting"
        )
    if PrecisionNames.parse(mp).keep:
        raise ValueError(f"mp {mp!r}: one flat parameter has one dtype; keep= needs --api fully_shard")
    if prefetch > 1:
        raise ValueError(
            f"prefetch {prefetch}: --api classic gathers at most one unit ahead; give 1, for forward and backward, "
            f"or 0, for backward only"
        )


def check_strategy_fits(api: str, strategy: str, mesh: Sequence[int]) -> None:
    """Raise unless a mesh has the number of axes that a strategy needs.

    Args:
        api: the API; strategies are the classic one's.
        strategy: one of :data:`STRATEGIES`; empty: ``full``.
        mesh: ``()`` or ``(F,)``, or ``(R, F)``.

    Raises:
        ValueError: it does not.
    """
    if api != CLASSIC:
        return
    if strategy in HYBRID and len(mesh) < 2:
        raise ValueError(f"strategy {strategy} needs a mesh of replicas x shard ranks: --mesh 2x2")
    if strategy not in HYBRID and len(mesh) > 1:
        raise ValueError(
            f"strategy {strategy or 'full'} takes no mesh of replicas, such as {'x'.join(map(str, mesh))}: give "
            "--strategy hybrid, or hybrid2, which keeps full parameters from forward to backward"
        )


@dataclass(frozen=True, kw_only=True)
class ModelPolicy:
    """How a model is sharded, in the words that ``reshard`` takes; for what only the other API has, what is like it.

    Attributes:
        api: what it is sharded with.
        strategy: of the classic API; empty: its units differ, or it has nothing like what there is.
        orig_params: whether optimizers have pieces of the parameters; else, with the classic API, flat ones.
        wrap: classes whose modules are units, the model itself left out.
        mesh: such as ``4``, or ``2x2`` for two copies; empty: its units differ.
        reshard_after_forward: of ``fully_shard``: ``auto``, ``true``, ``false`` or a number; empty: its units differ.
        mp: such as ``bf16,reduce=fp32``, or ``off``; empty: its units differ, or there are no words for it.
        offload: whether shards stay in host memory; None: only those of some units.
        prefetch: units gathered ahead, as a command asked; 0: the engine's own order.
    """

    api: Api
    strategy: Strategy | Literal[""]
    orig_params: bool
    wrap: tuple[str, ...]
    mesh: str
    reshard_after_forward: str | int
    mp: str
    offload: bool | None
    prefetch: int

    def changed(self, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the ``shard`` that gives a plain model this policy with what a ``reshard`` gives.

        Args:
            model: the variable of the model.
            given: as :attr:`workbench.protocol.commands.Reshard.given`.

        Raises:
            ValueError: units differ in a field that is not given, or the other API has no equivalent.
        """
        found = {"model": model, **vars(self), **given}
        if "mp" in given:
            found["mp"] = str(PrecisionNames.parse(self.mp or OFF).changed(given["mp"]))
        if found["api"] == CLASSIC:
            if "mesh" in given and "strategy" not in given:
                found["strategy"] = strategy_like(as_mesh(given["mesh"]), self.reshard_after_forward)
            found["reshard_after_forward"] = given.get("reshard_after_forward", "auto")
            if found["strategy"] not in {"", *HYBRID}:
                found["mesh"] = given.get("mesh", ())
        else:
            found |= {"strategy": given.get("strategy", ""), "orig_params": given.get("orig_params", False)}
        needed = ("strategy", *_OF_ALL) if found["api"] == CLASSIC else _OF_ALL
        if missing := [f"--{name.replace('_', '-')}" for name in needed if found[name] in {"", None}]:
            raise ValueError(
                f"units of {model} differ, or {found['api']} has no equivalent; choose one value for all units: add "
                f"{' and '.join(missing)}"
            )
        return found


_OF_ALL = ("mesh", "reshard_after_forward", "mp", "offload")
"""Fields of a policy in which units may differ."""


def _wrong_mesh(value: object) -> str:
    return (
        f"mesh is {HOSTS} (one replica per host), a number of shard ranks, or replicas x shard ranks, such as 4 or "
        f"2x2, not {str(value)!r:.60}"
    )


def policy_words(infos: Sequence[Unit], prefetch: int = 0, output: str = "") -> list[str]:
    """Return a phrase for each non-default property of how units are sharded and computed.

    Args:
        infos: the units.
        prefetch: units gathered ahead.
        output: dtype to which the model's outputs are cast; empty: none.

    Example: two copies, computed in bfloat16 -> ``["HSDP 2x2: 2 replicas, each sharded over 2 ranks", "compute in
    bfloat16"]``.
    """
    copies, size = max((info.replicate_size, info.shard_size) for info in infos)
    own = {param.dtype for info in infos for param in info.params}
    compute, reduce = ({getattr(info, f"{what}_dtype") for info in infos} for what in ("compute", "reduce"))
    flat = [param for info in infos for param in info.params if param.parts]
    engines = {info.engine for info in infos} - {""}
    parts = [
        f"run by {_listed(engines)}" if engines else "",
        "classic: one flat parameter per unit" if flat else "",
        "optimizers have a shard of each parameter" if any(param.use_orig_params for param in flat) else "",
        _replicas(copies, size) if copies > 1 else "",
        _after_forward(infos),
        f"compute in {_listed(compute)}" if compute != own else "",
        f"reduce in {_listed(reduce)}" if reduce != compute else "",
        f"outputs in {output}" if output and compute != {output} else "",
        "shards kept in host memory (offload)" if any(info.offload for info in infos) else "",
        f"gathers {prefetch} {'units' if prefetch > 1 else 'unit'} ahead" if prefetch else "",
    ]
    return [phrase for phrase in parts if phrase]


def _replicas(copies: int, size: int) -> str:
    if size == 1:
        return f"{copies} replicas, none of them sharded"
    return f"HSDP {copies}x{size}: {copies} replicas, each sharded over {size} ranks"


def _after_forward(infos: Iterable[Unit]) -> str:
    policies = {info.reshard_after_forward for info in infos}
    numbers = {policy for policy in policies if not isinstance(policy, bool)}
    if numbers:
        return f"on {_listed(map(str, numbers))} ranks after forward"
    return "unsharded from forward to backward" if policies == {False} else ""


def _listed(words: Iterable[str]) -> str:
    return " and ".join(sorted(words))
