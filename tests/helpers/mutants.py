"""``make mutants FILE=workbench/replay/spans.py``: which small changes of a file do the tests of its folder not notice?

mutmut changes one expression at a time and runs the tests that reach it; a change that no test notices has *survived*:
a test is missing, or the change has no effect. Survivors are printed as diffs, and in the end how many of the changes
were noticed. Several files may be named, separated by spaces, also as patterns: ``"workbench/replay/*.py"``.

All happens in a copy, build/mutants/. The tests are those of the folder of tests/ with the same name, without those
that need a browser or a cluster, and with :data:`ALSO`. Where these are many, name those that matter:
``"workbench/engine/reduction.py --sample 40 --tests tests/engine/test_gradients.py tests/engine/test_hsdp.py"``.
"""

import argparse
import itertools
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.helpers.package_source import REPO

COPY = REPO / "build" / "mutants"
MUTMUT = [sys.executable, "-m", "mutmut"]
MARKERS = "not browser and not cluster and not exhaustive and not thorough"
ALSO = {
    "workbench/errors.py": ["tests/magics"],
    "workbench/events.py": ["tests/replay"],
    "workbench/base/codec.py": ["tests/protocol"],
    "workbench/replay/": [
        "tests/reports",
        "tests/views/test_comms.py",
        "tests/views/test_compare.py",
        "tests/views/test_memory.py",
        "tests/views/test_paused_time.py",
        "tests/views/test_states.py",
        "tests/views/test_training.py",
    ],
    "workbench/protocol/": ["tests/session", "tests/reports", "tests/magics/test_command_lines.py"],
    "workbench/session/": ["tests/test_workbench.py", "tests/test_stopping.py", "tests/reports"],
}
"""Tests of a file, or of all files of a folder, besides those of its folder of tests/: where its sentences are read."""

SETTINGS = """\
[mutmut]
source_paths=
    workbench
only_mutate=
    {files}
also_copy=
    {others}
process_isolation=forkserver
forkserver_warmup={warmup}
preload_modules_file=preloaded
debug=true
timeout_constant=30
timeout_multiplier=4
pytest_add_cli_args=
    -m
    {markers}
    --hypothesis-seed=0
    --hypothesis-profile=unshrunk
    -W
    ignore::pytest.PytestAssertRewriteWarning
    -p
    no:cacheprovider
    --ignore
    tests/runtime/test_held_jobs.py
    --deselect
    tests/test_events.py::test_a_kind_is_one_row
    --deselect
    tests/runtime/test_recorder.py::test_events_from_the_garbage_collector_within_an_append_are_kept
pytest_add_cli_args_test_selection=
    {tests}
"""
"""A server forks: ranks that tests keep for the next one would not have the change. It has imported plugins of pytest
already, of which pytest warns.

The log names tests that fail. Left out are a file that numbers the frames of calls, as a function that can be changed
has two more; a test that adds lines to the text of a source; and one whose calls from within the garbage collector end
the process in mutmut's own code.
"""

PRELOADED = ("hypothesis", "numpy", "plotly.graph_objects")
"""Imported by the server once for all changes: not the package, as functions called by importing it may be changed."""

ON_RANKS = ("workbench/engine/", "workbench/runtime/", "workbench/models/", "workbench/record/")
"""Folders whose tests the server collects once for all changes: importing them calls few functions, and takes long."""

MISSED = ("survived", "no tests")


_OF_SINGLE_FILES = (Path("tests/base"), Path("tests/cli"))
"""Folders whose files have nothing to do with each other."""


def mirrored(file: str) -> list[str]:
    """Return the tests that should notice a change of ``file``, a path in the repository."""
    path = Path("tests", Path(file).relative_to("workbench"))
    is_alone = path.parent in (Path("tests"), *_OF_SINGLE_FILES)
    own = [path.with_name(f"test_{path.name}")] if is_alone else path.parents
    found = [each.as_posix() for each in own if (REPO / each).exists()]
    return [*found[:1], *(test for begin, tests in ALSO.items() if file.startswith(begin) for test in tests)]


def copy() -> None:
    """Copy what git knows of the repository, and files that it does not ignore."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=REPO, check=True, capture_output=True, text=True).stdout.splitlines():
        if (REPO / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, COPY / name)


def mutate(
    files: Sequence[str], tests: Sequence[str], jobs: int, sample: int | None = None, seed: int = 0
) -> dict[str, str]:
    """Try changes of ``files`` in the copy; return the outcome of each by its name.

    Args:
        files: paths in the repository.
        tests: paths of the tests that may notice them.
        jobs: number of changes that are tried at the same time.
        sample: number of changes to try, chosen at random; None for all.
        seed: what the choice depends on.

    Raises:
        subprocess.CalledProcessError: the tests fail without any change, or mutmut cannot run; pytest that cannot begin
            is reported by mutmut as a change that ran out of time.
    """
    others = sorted({path.name for path in COPY.iterdir()} - {"workbench", "mutants", "log", "setup.cfg", "preloaded"})
    warmup = "collect" if all(file.startswith(ON_RANKS) for file in files) else "import"
    settings = SETTINGS.format(
        files=_lines(files), others=_lines(others), warmup=warmup, markers=MARKERS, tests=_lines(tests)
    )
    (COPY / "setup.cfg").write_text(settings)
    (COPY / "preloaded").write_text("\n".join(PRELOADED))
    shutil.rmtree(COPY / "mutants", ignore_errors=True)
    _run(jobs, "none", check=False)  # makes the changes; none has this name
    names = list(_outcomes())
    chosen = names if sample is None or sample >= len(names) else random.Random(seed).sample(names, sample)
    if chosen:
        _run(jobs, *(chosen if len(chosen) < len(names) else ()))
    found = _outcomes()
    if chosen and all(found[name] == "timeout" for name in chosen):
        raise subprocess.CalledProcessError(1, MUTMUT)
    return {name: found[name] for name in chosen}


def _run(jobs: int, *names: str, check: bool = True) -> None:
    with (COPY / "log").open("w") as log:
        subprocess.run(
            [*MUTMUT, "run", "--max-children", str(jobs), *names], cwd=COPY, check=check, stdout=log, stderr=log
        )


def _failure(tests: Sequence[str]) -> str:
    """Return why no change could be tried, in one sentence."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", (COPY / "log").read_text(), re.MULTILINE)
    what = f"tests fail without any change: {', '.join(failed)}" if failed else f"mutmut cannot run {' '.join(tests)}"
    return f"{what}; {(COPY / 'log').relative_to(REPO)} says why"


def _outcomes() -> dict[str, str]:
    return dict(line.strip().split(": ") for line in _output_of("results", "--all", "true"))


def diff_of(name: str) -> str:
    """Return the lines that a change of the copy is about, as it was and as it became."""
    shown = _output_of("show", name)
    return "\n".join(line for line in shown if line[:1] in {"+", "-"} and line[:3] not in {"+++", "---"})


def _output_of(*arguments: str) -> list[str]:
    return subprocess.run(
        [*MUTMUT, *arguments], cwd=COPY, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def _lines(arguments: Sequence[str]) -> str:
    return "\n    ".join(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Report the survivors of each file; return 1 where less than ``--least`` of the changes were noticed.

    2 is returned where none could be tried, as the tests fail without any.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.mutants", description=__doc__)
    parser.add_argument("files", nargs="+", help="files, or patterns of files, of workbench/")
    parser.add_argument("--jobs", type=int, default=2, help="changes that are tried at the same time (default: 2)")
    parser.add_argument("--least", type=int, default=90, help="per cent that must be noticed (default: 90)")
    parser.add_argument("--sample", type=int, help="number of changes of each folder that are tried (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="another number chooses another sample (default: 0)")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="tests to run instead of those of the folder")
    args = parser.parse_args(argv)
    files = sorted({path.relative_to(REPO).as_posix() for given in args.files for path in REPO.glob(given)})
    files = [file for file in files if mirrored(file)]
    if not files:
        parser.error(f"no file of the repository is {' or '.join(args.files)}")
    copy()
    found: dict[str, str] = {}
    tests_of: Callable[[str], list[str]] = (lambda _: args.tests) if args.tests else mirrored
    for tests, alike in itertools.groupby(sorted(files, key=tests_of), key=tests_of):
        try:
            outcomes = mutate(list(alike), tests, args.jobs, args.sample, args.seed)
        except subprocess.CalledProcessError:
            print(_failure(tests), file=sys.stderr)  # noqa: T201
            return 2
        found |= outcomes
        for name, outcome in outcomes.items():
            if outcome in MISSED:
                print(f"{name}: {outcome}", diff_of(name), sep="\n", end="\n\n")  # noqa: T201 - what it is for
    by_file = {file: [found[name] for name in found if name.startswith(_module(file) + ".")] for file in files}
    for name, outcomes_of in {**by_file, "all": list(found.values())}.items():
        print(_rate(name, outcomes_of))  # noqa: T201
    return int(100 * _noticed(list(found.values())) < args.least * len(found))


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _noticed(outcomes: Sequence[str]) -> int:
    return sum(outcome not in MISSED for outcome in outcomes)


def _rate(name: str, outcomes: Sequence[str]) -> str:
    share = f", {_noticed(outcomes) / len(outcomes):.1%}" if outcomes else ""
    late = f" ({outcomes.count('timeout')} by running out of time)" if "timeout" in outcomes else ""
    return f"{name}: {_noticed(outcomes)} of {len(outcomes)} changes noticed{share}{late}"


if __name__ == "__main__":
    sys.exit(main())
