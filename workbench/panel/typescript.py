"""The panel's types: ``extension/src/protocol.ts``, made of :mod:`workbench.panel.messages` and the words of ``%fsdp``.

``python -m workbench.panel.typescript`` writes it again after one of them has changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from workbench.magics.words import WORDS
from workbench.panel import messages
from workbench.panel.messages import DASHBOARD_TARGET, TARGET, VERSION, Answer, Question
from workbench.protocol.policy import HYBRID, STRATEGIES
from workbench.widgets.typescript import module

FILE = Path(__file__).parents[2] / "extension" / "src" / "protocol.ts"

_HEADING = f"""\
Made of workbench/panel/messages.py and the words of %fsdp by: python -m workbench.panel.typescript
{(messages.__doc__ or "").partition(chr(10))[0]}"""


def program() -> str:
    """Return what the file has to hold."""
    questions, answers, commands = get_args(Question), get_args(Answer), list(WORDS.values())
    return module(
        _HEADING,
        [*questions, *answers, *commands],
        unions={"Question": questions, "Answer": answers, "Command": commands},
        constants={
            **{"TARGET": TARGET, "DASHBOARD_TARGET": DASHBOARD_TARGET, "VERSION": VERSION},
            **{"STRATEGIES": STRATEGIES, "HYBRID": HYBRID},
        },
        sent=[*questions, *commands],
    )


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(program(), encoding="utf-8")
