"""Generate ``extension/src/protocol.ts`` from :mod:`workbench.live.panel_messages` and the commands of ``%fsdp``.

Run ``python -m workbench.panel.generate_protocol`` after a change of either. It also writes the device kinds that the
panel's settings offer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from workbench.devices import CHOICES
from workbench.live import panel_messages
from workbench.live.panel_messages import DASHBOARD_TARGET, TARGET, VERSION, Answer, Question
from workbench.magics.command_lines import WORDS, DrawCommand
from workbench.protocol.commands import summary
from workbench.protocol.policy import HYBRID, STRATEGIES
from workbench.widgets.typescript import module

_EXTENSION = Path(__file__).parents[2] / "extension"
TYPES = _EXTENSION / "src" / "protocol.ts"
SETTINGS = _EXTENSION / "schema" / "plugin.json"

_HEADING = f"""\
Made of workbench/live/panel_messages.py and the words of %fsdp by: python -m workbench.panel.generate_protocol
{(panel_messages.__doc__ or "").partition(chr(10))[0]}"""


def programs() -> dict[Path, str]:
    """Return the text of each file that is generated in whole or in part."""
    return {TYPES: _types(), SETTINGS: _settings()}


def _settings() -> str:
    settings = json.loads(SETTINGS.read_text("utf-8"))
    settings["properties"]["device"]["enum"] = CHOICES
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _types() -> str:
    questions, answers, commands = get_args(Question), get_args(Answer), list(WORDS.values())
    return module(
        _HEADING,
        [*questions, *answers, *commands],
        unions={"Question": questions, "Answer": answers, "Command": commands},
        constants={
            **{"TARGET": TARGET, "DASHBOARD_TARGET": DASHBOARD_TARGET, "VERSION": VERSION},
            **{"DEVICES": CHOICES, "STRATEGIES": STRATEGIES, "HYBRID": HYBRID},
            "VIEWS": {word: summary(cls) for word, cls in WORDS.items() if issubclass(cls, DrawCommand)},
        },
        sent=[*questions, *commands],
    )


if __name__ == "__main__":
    for path, text in programs().items():
        path.write_text(text, encoding="utf-8")
