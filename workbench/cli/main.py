"""The command ``workbench`` and its subcommands, from ``demo`` to ``verify``.

Each subcommand imports its modules only when it runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from workbench import INSTALL, __version__
from workbench.errors import Interrupted, RankError, TraceError, UsageError, WorkbenchError, without_colours

if TYPE_CHECKING:
    from workbench.protocol.commands import Plan
    from workbench.reports.plan_report import PlanReport


TOUR = "01_tour.ipynb"

CALCULATOR = "calculator.html"
"""The page that ``workbench course --calculator`` writes into the folder."""

COURSE_FOLDER = "fsdp-course"
"""Where ``workbench course`` copies the notebooks by default."""

_PACKAGE = Path(__file__).parents[1]
_CHECKOUT = _PACKAGE.parent / "notebooks"  # of a clone
_INSTALLED = _PACKAGE / "notebooks"  # of a wheel
_PLANNED = ("fit", "checkpoint", "wrap", "mesh", "reshard_after_forward", "mp", "offload")
"""Options of ``%fsdp plan`` that ``workbench plan`` has too."""

_RUN_SCRIPTS = {"lint", "verify", "plan"}  # what follows the script's name, or --, is for the script
_START_KERNELS = {"demo", "lab", "course", "grade"}
_KERNEL_FILES = 100  # with fewer than 66 it ends, or lives and never answers
_ALIASES = {"ServerApp.ip": "ip", "ServerApp.root_dir": "notebook-dir"}  # of jupyter_server


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``workbench``; return its exit code: 0: success, 1: a failure, or a stalled run, 2: wrong usage."""
    parser, parser_of = _parsers()
    given = list(sys.argv[1:] if argv is None else argv)
    runs_script = bool(given) and given[0] in _RUN_SCRIPTS
    if given[:1] == ["plan"]:
        _add_plan_options(parser_of["plan"])
    if given[:1] == ["calibrate"]:
        _add_calibrate_options(parser_of["calibrate"])
    end = given.index("--") if runs_script and "--" in given else len(given)
    args, rest = parser.parse_known_args(given[:end])
    args.rest = [*rest, *given[end + 1 :]]
    if rest and args.word not in {"course", "lab", *_RUN_SCRIPTS}:
        parser_of[args.word].error(f"unknown argument {rest[0]!r}")
    try:
        if args.word in _START_KERNELS:
            from workbench.base.open_files import check_open_files  # noqa: PLC0415 - loaded when used

            check_open_files(_KERNEL_FILES, "a Jupyter kernel", "this terminal")
        if args.word == "lab":
            return _lab(rest)
        return _COMMANDS[args.word](args)
    except WorkbenchError as error:
        return _fail(args, error, 1)
    except ModuleNotFoundError as error:
        install = INSTALL.replace("notebook", "mcp") if args.word == "mcp" else INSTALL
        message = f"workbench {args.word} needs more packages: {install} ({error})"
        return _fail(args, ImportError(message), 1)


def _fail(args: argparse.Namespace, error: Exception, status: int) -> int:
    """Say why a command failed; return its exit status."""
    _write_document(args, error=error)
    sys.stderr.write(f"{error}\n")
    return status


def _write_report(args: argparse.Namespace, report: object, **more: Any) -> None:  # noqa: ANN401 - of document
    """Write a report as text, or its document if ``--json`` asks for it."""
    if args.json:
        _write_document(args, report, **more)
    else:
        sys.stdout.write(f"{report}\n")


def _write_document(args: argparse.Namespace, report: object = None, **more: Any) -> None:  # noqa: ANN401 - of document
    """Write the document of a command, if ``--json`` asks for it."""
    if args.json:
        from workbench.reports.json_document import document, to_line  # noqa: PLC0415 - loaded when used

        sys.stdout.write(f"{to_line(document(args.word, report, **more))}\n")


def find_tour() -> Path:
    """Return the path of the tour: in the clone that this package runs from, else in the installed package.

    Raises:
        UsageError: the tour is in neither place.
    """
    for folder in (_CHECKOUT, _INSTALLED):
        if (folder / TOUR).exists():
            return folder / TOUR
    raise UsageError(f"{TOUR} is neither in {_CHECKOUT} nor in {_INSTALLED}; install the workbench again")


def lab_command(tour: Path, extra: Sequence[str] = ()) -> list[str]:
    """Return the command that opens ``tour`` in JupyterLab, reachable from this machine only.

    Args:
        tour: the notebook.
        extra: further arguments for JupyterLab; they override ours.
    """
    from workbench.base.ports import LOOPBACK  # noqa: PLC0415 - loaded when used

    ours = {"ServerApp.ip": LOOPBACK, "ServerApp.root_dir": str(tour.parent)}
    # JupyterLab accepts each option only once
    flags = [f"--{name}={value}" for name, value in ours.items() if _given(extra, name) is None]
    return [sys.executable, "-m", "jupyterlab", *flags, *extra, str(tour)]


def _given(extra: Sequence[str], name: str) -> str | None:
    """Return the value that ``extra`` gives a JupyterLab option, by name or alias; None if it sets none."""
    for flag, following in zip_longest(extra, extra[1:], fillvalue=""):
        written, equals, value = flag.partition("=")
        if written in {f"--{name}", f"--{_ALIASES[name]}"}:
            return value if equals else following
    return None


_COURSE = """\
Copy the notebooks of the course, and the pictures that they show, into a folder, and open them in JupyterLab, reachable
from this machine only. Files that are there already, such as notebooks that you worked on, stay as they are. Further
arguments go to JupyterLab, such as --port 9000 or --no-browser. With --pages, the first two notebooks are run, and each
becomes a page in the folder that needs no installation: what follows a prediction is hidden until a guess is locked."""
_GRADE = """\
Run a notebook without a browser, in its own folder and with a new kernel of this Python, and print the result of each
check. No file is changed, and all processes that the notebook starts are ended. The exit status is 0 if all checks
passed, 1 if some failed or never ran, and 2 if the notebook could not be run: it is missing, is no notebook, or has no
check. With --against, graded cells of the instructor's copy take the place of those with the same nbgrader id, cell id
or names of checks; a cell that was deleted is put back, and no other check counts. Without it, a notebook of the course
has to have all its checks. With --board, the results in a folder, files of --json, become a page; nothing is run."""
_DEMO = "Run the tour on 4 ranks, and write it as a page (tour.html) and as a trace (tour.trace) that %fsdp open shows."
_LAB = f"""\
Open the tour, {TOUR}, in JupyterLab, reachable from this machine only. Without a clone of the repository, the tour is
first copied into the current directory, unless it is there already. Further arguments go to JupyterLab, such as
--port 9000 or --no-browser; with --ServerApp.root_dir FOLDER the tour is copied into FOLDER."""
_LINT = """\
Run a training script on CPU ranks of this machine, unchanged, as torchrun would; then check each sharded model that a
variable of the script holds, or one of its functions that trains, as %fsdp lint does. Arguments that are not listed
here go to the script, and so does everything after --. The exit status is 0 if nothing was found, 1 if there are
faults, and 2 if nothing could be checked: the script failed, or holds no sharded model."""
_VIEW = """\
Write a trace file, or the recording in a folder, as a page that replays it in any browser. Profiles of torch.profiler
and dumps of the Flight Recorder are read too: a file, a folder with one for each rank, or a pattern in quotes, such as
'out/rank*.json.gz'."""
_WHERE = """\
Say where the ranks of a recorded run are, which collective they wait for, and which rank has not started it. The folder
is that of python -m workbench.record --out FOLDER; the run may continue meanwhile, on other hosts. It may also have
dumps of the Flight Recorder, one for each rank. The exit status is 1 if the run is stalled, or a rank failed or was
killed, and 2 if the folder cannot be read."""
_VERIFY = """\
Check a training recipe: run a script on CPU ranks, as %fsdp run does, then compare one step of its sharded model with
the same step of an unsharded copy. The workbench's engine takes the place of torch's fully_shard and
FullyShardedDataParallel in the script; DistributedDataParallel stays torch's. The script must define a function or
method of one training step (train_step, or --fn), which gets the arguments of its last call. Further arguments go to
the script. The exit status is 0 if the steps are the same, 1 if they are not, and 2 if they could not be compared."""
_VERIFY_NEEDS = (
    "The script must shard a model with fully_shard or FullyShardedDataParallel, or wrap it in "
    "DistributedDataParallel, in a global variable or in a function that trains it, and define a function "
    "or method that trains it for one step: train_step, or --fn NAME."
)
_PLAN = """\
Say what a training script would need and take on machines that need not exist: run its first steps as one rank of many,
on tensors without data. The workbench's engine takes the place of torch's fully_shard and FullyShardedDataParallel in
the script. Bytes and collectives are what the engine would hold and send; times are the least that the device's
published peaks allow, or what workbench calibrate has measured. The trace can be opened with view, and compared. The
script writes no file, and its environment has WORKBENCH_PLAN=1. Further arguments go to the script. The exit status is
0 if the bytes fit into the device, 1 if they do not, and 2 if the script could not be planned."""
_CALIBRATE = """\
Measure how long operations and collectives take on ranks of this machine, within a minute, and write a file that
workbench plan and %fsdp plan take as --device. Then plan training steps that were not measured for it, run them, and
write how far the plan was off. Nothing else should be at work meanwhile. The exit status is 1 if a rank failed."""
_MCP = """\
Serve the commands of %fsdp as tools of the Model Context Protocol, over standard input and output, to the program that
starts this command. Without --control, tools that change ranks or write files are not offered, and ranks that a
notebook controls can only be viewed. Ranks that it starts end with it."""
_SKILL = """\
Print what an agent should read before it debugs a run with these tools, or write it to fsdp-workbench/SKILL.md in a
folder, where it replaces an earlier version."""
_DOCTOR = "Check Python, torch, Jupyter and the panel, train on two ranks, and say how to repair what failed."


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and the parsers of its subcommands by name."""
    parser = argparse.ArgumentParser(prog="workbench", description="See, debug and teach sharded training.")
    parser.set_defaults(json=False)
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    words = parser.add_subparsers(
        dest="word",
        required=True,
        metavar="demo | lab | course | grade | doctor | lint | view | where | verify | plan | calibrate | mcp | skill",
    )
    demo = words.add_parser("demo", description=_DEMO, help="run the tour; write it as a page and a trace")
    demo.add_argument("--out", default="build/demo", metavar="FOLDER", help="output folder (default build/demo)")
    words.add_parser("lab", description=_LAB, help="open the tour in JupyterLab; further arguments go to JupyterLab")
    course = words.add_parser("course", description=_COURSE, help="copy the notebooks into a folder and open them")
    course.add_argument("folder", nargs="?", default=COURSE_FOLDER, metavar="DIR", help=f"default: {COURSE_FOLDER}")
    course.add_argument("--copy-only", action="store_true", help="copy the notebooks, and do not open them")
    instead = course.add_mutually_exclusive_group()
    instead.add_argument("--solutions", action="store_true", help="for teachers: with the exercises solved")
    instead.add_argument("--pages", action="store_true", help="run the first notebooks, and write each as a page")
    about = f"plan what fits for many policies, and write a page with a form ({CALCULATOR}); takes minutes"
    instead.add_argument("--calculator", action="store_true", help=about)
    instead.add_argument("--nbgrader", action="store_true", help="as the source of an nbgrader assignment")
    grade = words.add_parser("grade", description=_GRADE, help="run a notebook and print the results of its checks")
    _add_grade_options(grade)
    about = "check the installation, train on two ranks, and say how to repair it"
    words.add_parser("doctor", description=_DOCTOR, help=about)
    about = "run a script on CPU ranks, and check how its models are sharded"
    lint = words.add_parser("lint", description=_LINT, help=about, allow_abbrev=False)
    lint.add_argument("script", help="the training script; further arguments are the script's")
    lint.add_argument("-n", "--num-ranks", type=int, default=2, metavar="N", help="number of ranks (default 2)")
    lint.add_argument("-m", dest="module", action="store_true", help="the script is a module, as for python -m")
    view = words.add_parser("view", description=_VIEW, help="write a trace or a recording as a page")
    view.add_argument("trace", help="a trace file, the folder of a recording, or files of a profiler")
    view.add_argument("--out", metavar="FILE", help="the page to write (default: the trace's name, with .html)")
    view.add_argument("--steps", default="", help="the steps to write, such as 3..5, or -20.. for the newest 20")
    where = words.add_parser("where", description=_WHERE, help="say where the ranks of a recorded run are")
    where.add_argument("folder", help="the folder of the recording, or of dumps")
    verify = words.add_parser(
        "verify", description=_VERIFY, help="compare a script's step with that of an unsharded copy", allow_abbrev=False
    )
    verify.add_argument(
        "-n", dest="num_ranks", type=int, default=2, metavar="RANKS", help="number of ranks (default 2)"
    )
    verify.add_argument(
        "--fn", default="train_step", help="the script's function or method of one step (default train_step)"
    )
    verify.add_argument("--model", default="", help="the script's sharded model (default: the only one)")
    verify.add_argument(
        "--repeat", action="store_true", help="run the sharded step twice instead, and compare all bits"
    )
    verify.add_argument(
        "script", help="the training script; all other arguments are its own, and so are those after --"
    )
    words.add_parser(
        "plan", description=_PLAN, help="say what a script would need on other machines", allow_abbrev=False
    )
    words.add_parser("calibrate", description=_CALIBRATE, help="measure this machine, for plans")
    mcp = words.add_parser("mcp", description=_MCP, help="serve the commands of %%fsdp as tools of an agent")
    mcp.add_argument("--control", action="store_true", help="offer tools that change ranks or write files")
    skill = words.add_parser("skill", description=_SKILL, help="print what an agent should know of these tools")
    skill.add_argument("folder", nargs="?", metavar="FOLDER", help="the folder of an agent's skills")
    for word, each in words.choices.items():
        if word not in {"lab", "course", "grade", "mcp", "skill"}:
            each.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    return parser, words.choices


def _add_grade_options(grade: argparse.ArgumentParser) -> None:
    grade.add_argument("notebook", metavar="NOTEBOOK", help="the notebook; with --board, a folder of results")
    grade.add_argument("--against", metavar="REFERENCE", help="the instructor's copy, whose checks count")
    grade.add_argument("--timeout", type=float, metavar="SECONDS", help="for the whole notebook (default 1800)")
    grade.add_argument("--cell-timeout", type=float, metavar="SECONDS", help="for each cell (with --keep-going: 120)")
    grade.add_argument("--keep-going", action="store_true", help="run the cells after one that raised or took too long")
    grade.add_argument("--reveal", action="store_true", help="for teachers: write right answers beside wrong ones")
    grade.add_argument("--json", dest="json_file", metavar="FILE", help="write the report as JSON")
    grade.add_argument("--junit", metavar="FILE", help="write the checks as JUnit XML")
    grade.add_argument("--gradescope", metavar="FILE", help="write the checks as Gradescope's results.json")
    grade.add_argument("--board", metavar="FILE", help="write a leader board of a folder of files of --json, as a page")


def _add_calibrate_options(calibrate: argparse.ArgumentParser) -> None:
    from workbench.base.devices import HOST, OFFERED  # noqa: PLC0415 - loaded when used

    calibrate.add_argument("-n", "--num-ranks", type=int, default=2, metavar="N", help="number of ranks (default 2)")
    calibrate.add_argument("--device", choices=OFFERED, default=HOST, help=f"kind of their devices (default {HOST})")
    calibrate.add_argument("--out", default="machine.json", metavar="FILE", help="the file (default machine.json)")


def _add_plan_options(plan: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``, which other subcommands do without: some are declared with those of ``%fsdp``."""
    from workbench.base.machines import DEFAULT  # noqa: PLC0415 - loaded when used
    from workbench.protocol.arguments import argument_of  # noqa: PLC0415
    from workbench.protocol.commands import Plan  # noqa: PLC0415

    plan.add_argument("--ranks", type=int, default=8, metavar="N", help="number of ranks (default 8)")
    plan.add_argument("--hosts", type=int, metavar="N", help="number of hosts (default: as few as their devices need)")
    plan.add_argument(
        "--device",
        default=DEFAULT,
        metavar="NAME|FILE.json",
        help=f"such as a100-80gb (default {DEFAULT}), or a file of workbench calibrate",
    )
    plan.add_argument(
        "--steps", type=int, default=2, metavar="N", help="steps to run; the last is described (default 2)"
    )
    plan.add_argument(
        "--out",
        metavar="FILE",
        help="the trace to write (default: the script's name, with .plan.trace); with --fit, the picture (.plan.html)",
    )
    declared = {f.name: argument_of(f) for f in fields(Plan)}
    for name in _PLANNED:
        known = declared[name]
        flag, about = f"--{name.replace('_', '-')}", known.about.replace("%", "%%")
        if known.is_switch and name == "offload":
            plan.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=about)
        else:
            read = partial(_read_option, known.read)
            plan.add_argument(flag, type=read, default=argparse.SUPPRESS, metavar=known.metavar, help=about)
    plan.add_argument("-m", dest="module", action="store_true", help="the script is a module, as for python -m")
    plan.add_argument("script", help="the training script; all other arguments are its own, and so are those after --")


def _read_option(read: Callable[[str], Any], text: str) -> Any:  # noqa: ANN401 - of the option
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _demo(args: argparse.Namespace) -> int:
    from workbench.cli import demo  # noqa: PLC0415 - loaded when used

    stream = sys.stderr if args.json else sys.stdout
    report = demo.run(find_tour(), Path(args.out), partial(_say, stream))
    _write_document(args, report)
    if report.communication.as_expected:
        return 0
    sys.stderr.write("Some collectives differ from the expected ones: see `%fsdp comms` in the page.\n")
    return 1


def _say(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()


def _lab(extra: Sequence[str]) -> int:
    _need_lab()
    tour, root = find_tour(), _given(extra, "ServerApp.root_dir")
    if root is not None:
        folder = Path(root).expanduser().absolute()
        tour = tour if tour.is_relative_to(folder) else _copied(tour, folder)  # Lab opens only files below its root
    elif tour.parent == _INSTALLED:  # users do not work inside an installed package
        tour = _copied(tour, Path.cwd())
    os.execv(sys.executable, lab_command(tour, extra))


def _need_lab() -> None:
    """Raise ModuleNotFoundError if JupyterLab is not installed."""
    if find_spec("jupyterlab") is None:
        raise ModuleNotFoundError("JupyterLab is not installed")


def _course(args: argparse.Namespace) -> int:
    from workbench.cli import course_copy  # noqa: PLC0415 - loaded when used

    folder = Path(args.folder).expanduser().absolute()
    if args.pages:
        from workbench.cli import course_page  # noqa: PLC0415 - loaded when used

        for page in course_page.write_pages(find_tour().parent, folder):
            sys.stdout.write(f"{page}\n")
        return 0
    if args.calculator:
        from workbench.cli import calculator_page  # noqa: PLC0415 - loaded when used

        page = calculator_page.write_calculator(folder / CALCULATOR, partial(_say, sys.stderr))
        sys.stdout.write(f"{page}\n")
        return 0
    change = course_copy.with_solution if args.solutions else course_copy.for_nbgrader if args.nbgrader else None
    copied = course_copy.copy_course(find_tour().parent, folder, change)
    sys.stderr.write(f"{copied}\n")
    if args.copy_only:
        return 0
    _need_lab()
    os.execv(sys.executable, lab_command(copied.first, args.rest))


def _grade(args: argparse.Namespace) -> int:
    from workbench.cli import grade, grade_files  # noqa: PLC0415 - loaded when used
    from workbench.course.checks import REVEAL  # noqa: PLC0415
    from workbench.reports.json_document import document, to_line  # noqa: PLC0415

    against = None if args.against is None else Path(args.against)
    limit = grade.TIMEOUT_S if args.timeout is None else args.timeout
    if args.reveal:
        os.environ[REVEAL] = "1"  # the kernel inherits it
    try:
        if args.board is not None:
            return _board(Path(args.notebook), args.board)
        report = grade.grade(
            Path(args.notebook),
            against=against,
            course=find_tour().parent,
            timeout_s=limit,
            cell_timeout_s=args.cell_timeout,
            keep_going=args.keep_going,
        )
    except UsageError as error:
        _write_file(args.json_file, to_line(document(args.word, error=error)))
        _write_file(args.gradescope, grade_files.not_run(error))
        return _fail(args, error, 2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: all processes of the notebook have ended\n")
        return 130
    sys.stdout.write(f"{_printable(str(report))}\n")
    try:
        _write_file(args.json_file, to_line(document(args.word, report)))
        _write_file(args.junit, grade_files.to_junit(report))
        _write_file(args.gradescope, grade_files.to_gradescope(report))
    except UsageError as error:
        return _fail(args, error, 2)
    return 0 if report.passed else 1


def _board(folder: Path, page: str) -> int:
    """Write the leader board of a folder of results; return the exit status.

    Raises:
        UsageError: there are no results, or the page cannot be written.
    """
    from workbench.base.fault import listed  # noqa: PLC0415 - loaded when used
    from workbench.base.text_formats import plural  # noqa: PLC0415
    from workbench.cli import leader_board  # noqa: PLC0415

    entries, others = leader_board.read_results(folder)
    _write_file(page, leader_board.to_page(entries))
    skipped = f"; not results of `workbench grade --json`: {listed(others)}" if others else ""
    sys.stdout.write(_printable(f"{plural(len({each.who for each in entries}), 'result')} on {page}{skipped}\n"))
    return 0


def _write_file(file: str | None, text: str) -> None:
    """Write a text into a file, if there is one.

    Raises:
        UsageError: it cannot be written.
    """
    if file is not None:
        try:
            Path(file).write_text(f"{text}\n", "utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}") from error


def _copied(tour: Path, folder: Path) -> Path:
    """Return the path of the tour in ``folder``; copy it there unless it exists.

    Raises:
        UsageError: the copy fails.
    """
    copy = folder / TOUR
    try:
        if not copy.exists():
            shutil.copy(tour, copy)
            sys.stderr.write(f"The tour was copied to {copy}\n")
    except OSError as error:
        raise UsageError(f"cannot copy the tour to {folder}: {error.strerror}") from error
    return copy


def _doctor(args: argparse.Namespace) -> int:
    from workbench.cli import doctor  # noqa: PLC0415 - loaded when used

    if args.json:
        found = doctor.run(lambda _: None)
        _write_document(args, found)
    else:
        found = doctor.run()
        verdict = "All checks passed." if found.is_well else "Some checks failed: see the lines marked BAD."
        sys.stdout.write(f"\n{verdict}\n")
    return 0 if found.is_well else 1


def _lint(args: argparse.Namespace) -> int:
    from workbench.cli import lint_script  # noqa: PLC0415 - loaded when used

    try:
        report = lint_script.run(
            args.script, args.rest, module=args.module, num_ranks=args.num_ranks, on_output=_show_output
        )
    except WorkbenchError as error:
        return _fail_of_script(args, error)
    _write_report(args, report)
    return int(bool(report.faults))


def _fail_of_script(args: argparse.Namespace, error: WorkbenchError) -> int:
    """Say why nothing was checked; return the exit status. The ranks are stopped: advice about them does not hold."""
    if isinstance(error, RankError) and error.traceback:
        sys.stderr.write(f"{without_colours(error.traceback)}\n\n")
    done = "planned" if args.word == "plan" else "checked"
    again = f"nothing was {done}: correct {args.script} and run workbench {args.word} again"
    if error.advice:
        error.args = (str(error).removesuffix(error.advice) + again,)
    elif isinstance(error, Interrupted):
        error.args = (f"interrupted: nothing was {done}",)
    return _fail(args, error, 2)


def _show_output(output: Any) -> None:  # noqa: ANN401 - an Output, whose module is loaded when used
    """Write output of a script to standard error: standard output is the report's."""
    from workbench.session.outputs import text_of  # noqa: PLC0415 - loaded when used

    sys.stderr.write(text_of([output]))


def _view(args: argparse.Namespace) -> int:
    from workbench.export import export  # noqa: PLC0415 - loaded when used
    from workbench.session.trace_selectors import opened_with_notes  # noqa: PLC0415

    opened = opened_with_notes(args.trace)
    for note in opened.notes:
        sys.stderr.write(f"note: {_printable(note)}\n")
    report = export(opened.trace, args.out or Path(args.trace).resolve().name + ".html", args.steps)
    _write_report(args, report, notices=opened.notes)
    return 0


def _where(args: argparse.Namespace) -> int:
    from workbench.reports.run_where import where  # noqa: PLC0415 - loaded when used
    from workbench.session.recorded_run import recorded_run  # noqa: PLC0415

    try:
        recording, now_ns = recorded_run(Path(args.folder))
    except TraceError as error:
        return _fail(args, error, 2)
    report = where(recording, now_ns)
    if args.json:
        _write_document(args, report)
    else:
        sys.stdout.write(f"{_printable(str(report))}\n")
    return int(report.is_stalled)


def _verify(args: argparse.Namespace) -> int:
    from workbench.session.script_ranks import ScriptRanks, run_of  # noqa: PLC0415 - loaded when used

    try:
        run_of(args.script, args.rest)
        with ScriptRanks(args.num_ranks, _show_output) as ranks:
            ranks.take_our_engine()
            ranks.run_script(args.script, args.rest)
            try:
                report = ranks.verify(args.model, args.fn, repeat=args.repeat)
            except UsageError as error:
                why = str(error).partition(": first %fsdp ")[0]  # which a notebook would type
                raise UsageError(f"{args.script} cannot be verified: {why}\n{_VERIFY_NEEDS}") from None
    except WorkbenchError as error:
        return _fail_of_script(args, error)
    _write_report(args, report)
    return int(bool(report.problem)) if report.could_compare else 2


def _plan(args: argparse.Namespace) -> int:
    from workbench.protocol.commands import Plan, to_text  # noqa: PLC0415 - loaded when used
    from workbench.protocol.planning import CALLED, planned_ranks  # noqa: PLC0415
    from workbench.script.fit_search import FitSearch  # noqa: PLC0415
    from workbench.script.planner import PlannedRank, plan_script  # noqa: PLC0415
    from workbench.session.request import no_output  # noqa: PLC0415
    from workbench.views.fit import fit as fit_figure  # noqa: PLC0415

    planned_ranks(args.device, args.ranks, args.hosts)
    given = {name: getattr(args, name) for name in ("ranks", "hosts", "device", *_PLANNED) if hasattr(args, name)}
    try:
        command = Plan(CALLED, **given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    words = shlex.join([*(["-m"] if args.module else []), args.script, *args.rest])
    out = args.out or f"{Path(args.script).stem}.plan.{'html' if command.fit else 'trace'}"

    def plan(each: Plan, path: str, rank: PlannedRank) -> PlanReport:
        return plan_script(args.script, args.rest, each, path, rank, module=args.module, steps=args.steps)

    try:
        if not command.fit:
            with PlannedRank(_show_output) as rank:
                report = plan(command, out, rank)
            _write_report(args, report)
            return int(not report.fits)
        with tempfile.TemporaryDirectory(prefix="workbench-plan-") as folder, PlannedRank(no_output) as rank:
            search = FitSearch(
                lambda each: plan(each, f"{folder}/plan.trace", rank),
                lambda each: f"workbench {to_text(each).replace(f'plan {CALLED}', 'plan', 1)} {words}",
                lambda each: sys.stderr.write(f"{each.replace(CALLED, args.script, 1)}\n"),
            )
            found = search.limit(command.fit).run(command)
    except WorkbenchError as error:
        return _fail_of_script(args, error)
    fit_figure(found.policies, found.limit_bytes, found.headline, found.time_error).write_html(out)
    _write_report(args, found)
    return int(not found.best)


def _calibrate(args: argparse.Namespace) -> int:
    from workbench.script.calibrator import calibrate  # noqa: PLC0415 - loaded when used

    _write_report(args, calibrate(args.num_ranks, args.device, args.out, partial(_say, sys.stderr)))
    return 0


def _mcp(args: argparse.Namespace) -> int:
    from workbench.agents.mcp_server import serve  # noqa: PLC0415 - loaded when used

    serve(control=args.control)
    return 0


def _skill(args: argparse.Namespace) -> int:
    text = (_PACKAGE / "agents" / "SKILL.md").read_text("utf-8")
    if args.folder is None:
        sys.stdout.write(text)
        return 0
    file = Path(args.folder).expanduser() / "fsdp-workbench" / "SKILL.md"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
    sys.stdout.write(f"{file}\n")
    return 0


def _printable(text: str) -> str:
    """Return text of a file without control characters, through which it could command a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


_COMMANDS = {
    "demo": _demo,
    "course": _course,
    "grade": _grade,
    "doctor": _doctor,
    "lint": _lint,
    "view": _view,
    "where": _where,
    "verify": _verify,
    "plan": _plan,
    "calibrate": _calibrate,
    "mcp": _mcp,
    "skill": _skill,
}


if __name__ == "__main__":
    sys.exit(main())
