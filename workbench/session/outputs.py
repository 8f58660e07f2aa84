"""What ranks printed, compared: equal output is said once, different output stands apart with its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from workbench.cluster.pending import Output, Pending
from workbench.replay.alike import label
from workbench.views.theme import plural

MAX_GROUPS = 8
"""Different outputs shown in full; of more only the ranks are named."""

MAX_LINES = 40
"""Lines shown of one such output."""


def text_of(outputs: Iterable[Output]) -> str:
    """Return what a rank wrote and showed as plain text; what it later updated or cleared counts as first shown."""
    parts = []
    for output in outputs:
        if output.kind in {"stdout", "stderr"}:
            parts.append(output.text)
        elif output.kind in {"display", "result"}:
            parts.append(str(output.data.get("text/plain", "")) + "\n")
    return "".join(parts)


def compare(texts: Mapping[int, str], shown: int) -> str:
    r"""Return what is left to print once the output of one rank has been shown; ``""`` if there is nothing to say.

    Example: ``{0: "a", 1: "a", 2: "b"}``, shown 0 -> ``"--- rank 2:\nb\n--- ranks 0-1 agree\n"``.

    Args:
        texts: all output per rank, as plain text.
        shown: the rank whose output was shown already.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text.strip(), []).append(rank)
    if len(texts) < 2 or list(groups) == [""]:
        return ""
    if len(groups) == 1:
        return f"--- {plural(len(texts), 'rank')} agree\n"
    alike = groups.pop(texts[shown].strip())
    apart = list(groups.items())
    lines = [_apart(text, ranks) for text, ranks in apart[:MAX_GROUPS]]
    if len(apart) > MAX_GROUPS:
        rest = [rank for _, ranks in apart[MAX_GROUPS:] for rank in ranks]
        lines.append(f"--- {label(rest)}: different again, not shown\n")
    lines.append(f"--- above: {label(alike)}\n" if len(alike) == 1 else f"--- {label(alike)} agree\n")
    return "".join(lines)


def _apart(text: str, ranks: list[int]) -> str:
    lines = text.splitlines()
    cut = [f"... {plural(len(lines) - MAX_LINES, 'line')} more"] if len(lines) > MAX_LINES else []
    body = "\n".join([*lines[:MAX_LINES], *cut]) or "(no output)"
    return f"--- {label(ranks)}:\n{body}\n"


class Stream:
    """Hands on the output of one rank as it arrives, and compares the others' with it when they stop and at the end.

    What was compared once is not shown again.

    Args:
        pending: the request.
        rank: whose output is handed on.
    """

    def __init__(self, pending: Pending, rank: int) -> None:
        self._pending, self._rank = pending, rank
        self._num_seen = 0
        self._compared = dict.fromkeys(pending.ranks, 0)

    def forward(self, on_output: Callable[[Output], None]) -> bool:
        """Hand on what is new; tell whether anything was."""
        new = self._pending.outputs(self._rank, self._num_seen)
        for output in new:
            self._num_seen += 1
            on_output(output)
        return bool(new)

    def num_outputs(self) -> int:
        """Return how much all ranks have written and shown, in pieces."""
        return sum(len(self._pending.outputs(rank)) for rank in self._pending.ranks)

    def pause(self, on_output: Callable[[Output], None]) -> None:
        """Hand on the rest, then what other ranks wrote and the one whose output is seen did not, so far.

        A rank that stands earlier in the same output has written nothing that cannot be seen; what the others are
        ahead is compared later.
        """
        self.forward(on_output)
        texts = self._texts()
        shown = texts[self._rank]
        if all(shown.startswith(text) for text in texts.values()):
            shortest = min(map(len, texts.values()))
            texts = {rank: text[:shortest] for rank, text in texts.items()}
        self._compare(texts, on_output, also_agreement=True)

    def finish(self, on_output: Callable[[Output], None], *, also_agreement: bool) -> str:
        """Hand on the rest, then how the ranks differ; return the latter."""
        self.forward(on_output)
        return self._compare(self._texts(), on_output, also_agreement=also_agreement)

    def _texts(self) -> dict[int, str]:
        """Return what each rank wrote and was not compared yet."""
        return {rank: text_of(self._pending.outputs(rank))[n:] for rank, n in self._compared.items()}

    def _compare(self, texts: Mapping[int, str], on_output: Callable[[Output], None], *, also_agreement: bool) -> str:
        agree = len({text.strip() for text in texts.values()}) == 1
        remarks = compare(texts, self._rank) if also_agreement or not agree else ""
        for rank, text in texts.items():
            self._compared[rank] += len(text)
        if remarks:
            on_output(Output("stdout", text=remarks))
        return remarks
