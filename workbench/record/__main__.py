"""``python -m workbench.record --out DIR train.py ARGS``: run a training script unchanged, and record it.

Start it as the script is started: by torchrun (``torchrun --nproc-per-node 8 -m workbench.record --out DIR train.py``),
srun, mpirun or accelerate, or alone. Every rank writes its own files into DIR; nothing is asked of the network.
``%fsdp open DIR`` shows them, also while the run continues; so do ``workbench view DIR`` and ``workbench where DIR``.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import TYPE_CHECKING, NoReturn

from workbench.record.launch import Place, place
from workbench.record.reasons import reason_of

if TYPE_CHECKING:
    from workbench.record.rank_recording import RankRecording


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script and record it; ends as the script ends."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.record",
        description="Run a training script unchanged, and record what its ranks do. Start it as you start the script: "
        "torchrun --nproc-per-node 8 -m workbench.record --out DIR train.py ARGS",
        epilog="Open DIR with %fsdp open DIR in a notebook, or with: workbench view DIR, workbench where DIR.",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the recording; new or empty")
    parser.add_argument(
        "--keep", type=_whole, default=0, metavar="STEPS", help="keep at least the newest STEPS steps (default: all)"
    )
    parser.add_argument(
        "--max-mb", type=_whole, default=200, metavar="MB", help="limit of a rank's files; the oldest are deleted (200)"
    )
    parser.add_argument(
        "--every", type=_whole, default=1, metavar="N", help="record only every N-th step of the loop (default: all)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args(argv)
    for flag in ("max_mb", "every"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} must be at least 1")
    if not args.module and not Path(args.script).is_file():
        parser.error(f"there is no script {args.script}")
    try:
        here = place(os.environ)
    except ValueError as error:
        parser.error(str(error))
    folder = args.out / f"restart{here.restart}" if here.restart else args.out
    _run(args, folder, here)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def _run(args: argparse.Namespace, folder: Path, here: Place) -> None:
    program = (args.script, *args.args)
    try:
        recording = _begin(args, folder, here, program)
    except Exception as error:  # noqa: BLE001 - such as a name that torch no longer has: the script runs nevertheless
        recording = None
        _say(here, f"this run is not recorded: {type(error).__name__}: {error}")
    reason, before = "the process ended early", getrusage(RUSAGE_CHILDREN).ru_minflt
    cause: BaseException | None = None
    try:
        sys.argv = list(program)
        if args.module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(args.script).resolve().parent)
            runpy.run_path(args.script, run_name="__main__")
        reason = ""
    except BaseException as error:
        if recording is not None:
            from workbench.engine.explain import explain  # noqa: PLC0415 - torch

            explain(error)
        reason, cause = reason_of(error), error
        raise
    finally:
        if recording is not None:
            recording.end(reason, cause)
            has_children = getrusage(RUSAGE_CHILDREN).ru_minflt > before
            if recording.is_empty and has_children and not here.launcher:
                _say(
                    here,
                    "nothing was recorded, as this process trained nothing. If the script starts its ranks itself, let"
                    " it use torch.multiprocessing.spawn, or start it by torchrun",
                )


def _begin(args: argparse.Namespace, folder: Path, here: Place, program: tuple[str, ...]) -> RankRecording:
    # torch, after the arguments are checked
    from workbench.record.rank_recording import RankRecording  # noqa: PLC0415
    from workbench.record.spawned_ranks import Options, record_spawned  # noqa: PLC0415

    def complain(sentence: str) -> None:
        _say(here, sentence)

    options = Options(program=program, max_bytes=args.max_mb << 20, keep=args.keep, every=args.every)
    try:
        recording = RankRecording(folder, here, complain=complain, **vars(options))
    except FileExistsError:
        if folder.is_dir():
            _refuse(here, f"{folder} has a recording of rank {here.rank} already: choose another --out, or delete it")
        _refuse(here, f"--out {folder} is not a folder")
    except OSError as error:
        _refuse(here, f"cannot write to --out {folder}: {error.strerror}")
    free = shutil.disk_usage(folder).free
    if here.local_rank == 0 and free < (needed := here.local_world_size * args.max_mb << 20):
        _say(here, f"{folder} has {free >> 20} MB free, and its ranks may write {needed >> 20} MB; see --max-mb")
    recording.begin()
    if not here.launcher:
        recording.at_end(record_spawned(recording, folder.resolve(), options, complain).undo)
    return recording


def _say(here: Place, sentence: str) -> None:
    sys.stderr.write(f"workbench.record, rank {here.rank}: {sentence}\n")
    sys.stderr.flush()


def _refuse(here: Place, sentence: str) -> NoReturn:
    _say(here, sentence)
    sys.exit(2)


if __name__ == "__main__":
    main()
