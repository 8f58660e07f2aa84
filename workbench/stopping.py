"""Class Stopping: what a workbench does with ranks inside a step: stop, look around, go on. It draws nothing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from workbench.cluster.pending import Output
from workbench.errors import Interrupted, UsageError, WorkbenchError
from workbench.session import cursor as cursors
from workbench.session.breakpoints import check_condition, nearest, parse_event
from workbench.session.jobs import Company, Jobs, check_held, to_error
from workbench.session.looking import where
from workbench.session.outputs import compare
from workbench.session.places import live_units
from workbench.session.pulse import Pulse
from workbench.session.reports import CellReport, Report
from workbench.session.request import Listener, OnOutput, OnProgress, Request, no_output, no_progress
from workbench.session.session import RECOVER_S, Session, busy_sentence
from workbench.session.standing import OnStanding, no_standing
from workbench.session.stop_reports import (
    BackgroundReport,
    BackReport,
    BreakReport,
    EndReport,
    EvalReport,
    InspectReport,
    WhereReport,
)
from workbench.session.watch import PATIENT_S
from workbench.trace.columns import Trace

STOP_S = 10.0
"""How long a pause that somebody else carries out is waited for, in seconds; after an abort the ranks recover."""

NOTHING = "nothing is stopped and nothing runs: %fsdp step --until all_gather, or %fsdp break add EVENT and %fsdp step"


class Stopping:
    """The part of a workbench that stops ranks inside a step. Its methods may be called from any thread.

    Attributes:
        num_ranks: number of ranks.
        cursor: up to where views show what was recorded; None: all of it.
    """

    num_ranks: int

    def __init__(self) -> None:
        self.cursor: cursors.Cursor | None = None
        self._session: Session | None = None
        self._last_trace = Trace.empty()
        self._news: deque[tuple[Request, str]] = deque()  # added to by the threads that wait in the background

    def _begin(self, session: Session) -> None:
        """Take ranks that were just started; nothing of earlier ones is left."""
        self._session, self._last_trace = session, Trace.empty()
        self.cursor = None
        self._news.clear()

    # ---- stop and go on

    def pause(self) -> Report:
        """Stop all ranks at the same event of what they are doing, and return where they stand.

        Raises:
            UsageError: nothing is under way.
        """
        session, request = self._under_way("pause")
        with session.changed:
            if request.state == "running":
                request.watch.ask_pause()
                self._wait(session, request, "running")
            if request.state == "stopped" and request.report is not None:
                return EndReport(sentence=busy_sentence(request)) if request.dead else request.report
        ended = "is over" if request.state == "over" else "stops at its next event: %fsdp where"
        return EndReport(sentence=f"{request.work.words} {ended}")

    def resume(
        self,
        *,
        background: bool | None = None,
        on_progress: OnProgress = no_progress,
        on_output: OnOutput = no_output,
        on_standing: OnStanding = no_standing,
    ) -> Report:
        """Let stopped ranks go on (``%fsdp continue``), and return how it ended or where it stopped again.

        Args:
            background: return at once; None: if it was begun so.
            on_progress: as for ``step``.
            on_output: as for ``run_cell``; if it is not given, the one of before goes on.
            on_standing: as for ``run_cell``.

        Raises:
            UsageError: nothing is stopped.
        """
        listener = Listener(on_progress=on_progress, on_output=on_output, on_standing=on_standing)
        return self._go(None, listener, background)

    @property
    def is_background(self) -> bool:
        """Whether what is under way was begun in the background, and goes on there."""
        request = self._session.request if self._session is not None else None
        return request is not None and request.is_background

    def next(
        self,
        what: str = "event",
        *,
        background: bool = False,
        on_progress: OnProgress = no_progress,
        on_output: OnOutput = no_output,
        on_standing: OnStanding = no_standing,
    ) -> Report:
        """Let stopped ranks go on to the next ``event``, ``collective``, ``unit`` or ``phase``; else as ``resume``."""
        listener = Listener(on_progress=on_progress, on_output=on_output, on_standing=on_standing)
        return self._go(what, listener, background)

    def abort(self) -> Report:
        """Give up what the ranks do; they are ready again afterwards.

        Raises:
            UsageError: nothing is under way.
            WorkbenchError: they could not be made ready again.
        """
        session, request = self._under_way("abort")
        with session.changed:
            request.watch.ask_abort()
            is_mine = request.state == "stopped"
            if is_mine:
                request.state = "running"
            else:
                self._wait(session, request, "running", STOP_S + RECOVER_S)
        if is_mine:
            try:
                return session.attend(request)
            except Interrupted as ended:
                return EndReport(sentence=str(ended))
        if request.thread is not None:
            self._take_news(request)
        return EndReport(
            sentence=request.ending if request.state == "over" else f"{request.work.words} is being aborted"
        )

    def news(self) -> tuple[str, ...]:
        """Return what ended or stopped in the background since the last time, a sentence each.

        What stopped ranks had written and what came too late to be shown then is handed on first.
        """
        request = self._session.request if self._session is not None else None
        if request is not None and request.state == "stopped":
            request.work.on_slice(request.listener)
        news = []
        with suppress(IndexError):  # one at a time: another may be added meanwhile, and none is to be lost
            while True:
                news.append(self._news.popleft()[1])
        return tuple(news)

    def _go(self, what: str | None, listener: Listener, background: bool | None) -> Report:
        session, request = self._under_way("continue" if what is None else "next")
        with session.changed:
            if request.state != "stopped":
                raise UsageError(f"nothing is stopped: {busy_sentence(request)}")
            request.watch.stopper.release(set(request.watch.running), session.where(timeout_s=PATIENT_S), what)
            request.state = "running"
        if listener.on_output is no_output:  # such as a button's: what is printed stays with the one who was told of it
            listener = replace(listener, on_output=request.listener.on_output)
        return self._run(session, request, listener, request.is_background if background is None else background)

    def _run(self, session: Session, request: Request, listener: Listener, background: bool) -> Report:
        """Wait for a request here, or have a thread wait for it."""
        self.cursor = None  # what they do now is what there is to see
        request.listener, request.thread = listener, None
        if not background:
            return session.attend(request)
        name = f"workbench: {request.work.words}"
        request.thread = threading.Thread(target=self._attend_behind, args=(session, request), name=name, daemon=True)
        request.thread.start()
        return BackgroundReport(words=request.work.words)

    def _attend_behind(self, session: Session, request: Request) -> None:
        try:
            said = session.attend(request).headline
        except WorkbenchError as error:
            said = str(error)
        except Exception as error:  # noqa: BLE001 - nobody else is there to be told of it
            said = f"{type(error).__name__}: {error}"
        if not session.is_closed:
            self._news.append((request, f"in the background, {request.work.words}: {said}"))

    def _take_news(self, request: Request) -> None:
        """Leave out what the caller is told anyway."""
        if request.thread is not None and request.thread is not threading.current_thread():
            request.thread.join(STOP_S)
        for entry in tuple(self._news):
            if entry[0] is request:
                self._news.remove(entry)

    @staticmethod
    def _wait(session: Session, request: Request, state: str, timeout_s: float = STOP_S) -> None:
        if request.watcher is not threading.current_thread():  # a callback of the one who waits cannot wait for itself
            session.changed.wait_for(lambda: request.state != state, timeout_s)

    def _under_way(self, word: str) -> tuple[Session, Request]:
        session = self._started()
        request = session.request
        if request is None:
            raise UsageError(f"{word}: {NOTHING}")
        return session, request

    def _stopped(self, word: str) -> tuple[Session, Request, tuple[int, ...]]:
        """Return what is stopped, and the ranks that stand in the gate now."""
        session, request = self._under_way(word)
        if request.state != "stopped":
            raise UsageError(f"nothing is stopped: {busy_sentence(request)}")
        here = session.where(timeout_s=PATIENT_S)
        held = tuple(sorted(rank for rank, position in here.items() if position.get("held")))
        if not held:
            raise UsageError(f"no rank stands in the gate, so there is nothing to {word}: see %fsdp where")
        return session, request, held

    # ---- look around

    def where(self, *, stacks: bool = False) -> WhereReport:
        """Return where every rank is, with ``stacks`` also its Python threads; ranks at work answer as well."""
        return where(self._started(), stacks=stacks)

    def inspect(self, fqn: str) -> InspectReport:
        """Return what every stopped rank has of the parameter ``fqn``: its shard, gradient, optimizer state and more.

        Raises:
            UsageError: nothing is stopped, or there is no such parameter.
        """
        session, request, held = self._stopped("inspect")
        known = self.parameters()
        if fqn not in known:
            near = ", ".join(nearest(fqn, known)[:5]) or "none"
            raise UsageError(f"there is no parameter {fqn!r}; the parameters, nearest first: {near}")
        done = self._jobs(session, held, held).run("inspect", fqn)
        error = to_error(done, str(request.stop))
        if error is not None:
            raise error
        by_rank = {rank: ended.result or {} for rank, ended in done.items()}
        return InspectReport(fqn=fqn, by_rank=by_rank, others=self._others(held))

    def evaluate(self, expr: str, ranks: Sequence[int] | None = None, *, frame: int = 0) -> EvalReport:
        """Return what a Python expression is on stopped ranks (``%fsdp eval``), evaluated in the step's own thread.

        Its names are the variables of the functions under way, innermost first, and then those of the cells.

        Args:
            expr: the expression.
            ranks: which ranks; None: all that stand in the gate.
            frame: number of the function at which the search for names begins: 0 the innermost, 1 its caller.

        Raises:
            UsageError: nothing is stopped, or the expression waits for ranks that would not evaluate it.
            RankError: it raised; the stop stays.
        """
        session, request, held = self._stopped("evaluate")
        chosen = self._chosen_held(ranks, held)
        done = self._jobs(session, chosen, held).run("evaluate", expr, frame=frame)
        error = to_error(done, str(request.stop))
        if error is not None:
            raise error
        texts = {rank: ended.text for rank, ended in done.items()}
        return EvalReport(expr=expr, texts=texts, others=self._others(held) if ranks is None else ())

    def _cell_inside(self, code: str, ranks: Sequence[int] | None, on_output: OnOutput) -> CellReport:
        """Run a cell in the stopped step's own threads."""
        session, request, held = self._stopped("run a cell in")
        chosen = self._chosen_held(ranks, held)
        done = self._jobs(session, chosen, held).run("cell", code)
        texts = {rank: ended.text for rank, ended in sorted(done.items())}
        if texts[chosen[0]]:
            on_output(Output("stdout", text=texts[chosen[0]]))
        remarks = compare(texts, chosen[0])
        if remarks:
            on_output(Output("stdout", text=remarks))
        error = to_error(done, str(request.stop))
        if error is not None:
            raise error
        return CellReport(texts=texts, remarks=remarks)

    def _jobs(self, session: Session, ranks: Sequence[int], held: Sequence[int]) -> Jobs:
        return Jobs(session.cluster, Company(ranks=ranks, held=held, num_ranks=self.num_ranks))

    def _others(self, held: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that cannot be asked, for they do not stand in the gate."""
        return tuple(rank for rank in range(self.num_ranks) if rank not in held)

    def parameters(self) -> list[str]:
        """Return the names of all sharded parameters."""
        return [param.fqn for unit in live_units(self.trace.header) for param in unit.params]

    # ---- where to stop

    def break_add(self, event: str, *, rank: int | None = None, when: str | None = None) -> BreakReport:
        """Have ranks stop before every such event (``%fsdp break add``).

        Args:
            event: such as ``all_gather``, ``all_gather:blocks.2``, ``backward.end:*``.
            rank: the only rank that stops; None: all of them.
            when: condition over num_bytes, unit, kind, edge, phase, step, ordinal and rank; None: always.

        Raises:
            UsageError: there is no such event, unit or rank, or it is no such condition.
        """
        session = self._started()
        kind, unit = parse_event(event, self.units())
        if rank is not None:
            self._chosen([rank])
        if when is not None:
            check_condition(when, rank)
        added = session.breakpoints.add(kind, unit, rank=rank, when=when)
        session.push_breakpoints()
        return BreakReport(breakpoints=tuple(session.breakpoints), said=f"breakpoint {added.id}: {added}")

    def break_list(self) -> BreakReport:
        """Return the breakpoints there are."""
        return BreakReport(breakpoints=tuple(self._started().breakpoints))

    def break_clear(self, id: int | None = None) -> BreakReport:
        """Take the breakpoint ``id`` away, or all.

        Raises:
            UsageError: there is no such breakpoint.
        """
        session = self._started()
        count = session.breakpoints.clear(id)
        session.push_breakpoints()
        said = f"{count} of {count + len(tuple(session.breakpoints))} breakpoints taken away" if count else ""
        return BreakReport(breakpoints=tuple(session.breakpoints), said=said)

    def units(self) -> list[str]:
        """Return the names of all units, root ``""`` included."""
        return [unit.name for unit in live_units(self.trace.header)]

    # ---- step back

    def back(self, n: int = 1) -> BackReport:
        """Move the cursor ``n`` recorded events back: views then show what was recorded up to there. 0: to the newest.

        What the ranks computed is not undone.

        Raises:
            UsageError: ``n`` is negative.
        """
        if n < 0:
            raise UsageError(f"the cursor goes back by a whole number of events, 0 for the newest, not {n}")
        if n == 0:
            self.cursor = None
            return BackReport(sentence="at the newest event")
        self.cursor, sentence = cursors.back(self.trace, self.cursor, n)
        return BackReport(sentence=sentence)

    @property
    def trace(self) -> Trace:
        """What happened so far, brought up to date when ranks run."""
        session = self._session
        if session is None:
            return self._last_trace
        session.drain()
        return session.trace

    def pulse(self) -> Pulse:
        """Return the trace so far and how each rank is: what a live view asks several times a second."""
        session = self._session
        found = Pulse(trace=self._last_trace) if session is None else session.pulse()
        return replace(found, cursor=self.cursor)

    @property
    def shown_trace(self) -> Trace:
        """What views show: the trace, up to the cursor if there is one."""
        return self.trace if self.cursor is None else cursors.cut(self.trace, self.cursor)

    # ---- which ranks

    def _started(self) -> Session:
        if self._session is None:
            raise UsageError("there are no ranks: first %fsdp start -n 4")
        return self._session

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        chosen = tuple(range(self.num_ranks)) if ranks is None else tuple(sorted(set(ranks)))
        unknown = [rank for rank in chosen if rank not in range(self.num_ranks)]
        if unknown or not chosen:
            named = f"there is no rank {', '.join(map(str, unknown))}" if unknown else "no rank is named"
            raise UsageError(f"{named}: the ranks are 0 to {self.num_ranks - 1}")
        return chosen

    def _chosen_held(self, ranks: Sequence[int] | None, held: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that are to do something inside the step: all of them, or all that can."""
        if ranks is None:
            return held
        chosen = self._chosen(ranks)
        check_held(chosen, held)
        return chosen
