"""The flags of ``shard`` and ``reshard``: how a model is to be sharded."""

from __future__ import annotations

import argparse

from workbench.commands import Reshard, Shard
from workbench.magics.parser import Parser, names
from workbench.policy import DTYPES, OFF, RESHARD_AFTER_FORWARD, as_mesh, as_reshard_after_forward


def _mesh(text: str) -> tuple[int, ...]:
    try:
        return as_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    """A whole number, 0 included."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got {text!r}")
    return int(text)


def add_policy(parser: Parser, command: type[Shard | Reshard]) -> None:
    """Add what ``shard`` and ``reshard`` share; ``reshard`` keeps what is not given."""

    def about(text: str, default: str) -> str:
        return f"{text} (default: {'as it is' if command is Reshard else default})"

    parser.flag(
        "--wrap",
        type=names,
        complete="classes",
        default=command.wrap,
        metavar="CLASS,...",
        help=about("module classes of which each instance becomes a unit", "chosen from the model"),
    )
    parser.flag(
        "--mesh",
        type=_mesh,
        default=command.mesh,
        metavar="4|2x2",
        help=about("ranks that share a copy, or copies x ranks that share one", "all ranks share one"),
    )
    parser.flag(
        "--reshard-after-forward",
        type=as_reshard_after_forward,
        complete=RESHARD_AFTER_FORWARD,
        default=command.reshard_after_forward,
        metavar="auto|true|false|K",
        help=about("free full parameters after forward; auto: all but the root's; K: K ranks share them", "auto"),
    )
    parser.flag(
        "--mp",
        complete=(*DTYPES, OFF),
        default=command.mp,
        metavar="DTYPE[,reduce=DTYPE][,output=DTYPE]",
        help=about(f"compute and reduce in {', '.join(DTYPES)}; or {OFF}", OFF),
    )
    parser.switch("offload", default=command.offload, about=about("keep what is sharded in host memory", "no"))
    parser.flag(
        "--prefetch",
        type=_count,
        default=command.prefetch,
        metavar="N",
        help=about("gather N units ahead, in the order of the modules; 0: the engine's own order", "0"),
    )
