"""Cells whose effects outside the ranks happen again when they run again: files, processes, the network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from workbench.session.program import CompletedCell, Entry, Omission

_EFFECTS = {
    r"^\s*[!%]": "runs a command of the shell or of IPython",
    r"\b(subprocess|os\.system|os\.popen)\b": "starts a process",
    r"\b(torch\.save|np\.savez?|save_pretrained|to_csv|to_parquet|savefig|write_text|write_bytes|write_html)\b": (
        "writes a file"
    ),
    r"\bopen\([^)]*[\"'][wax]b?\+?[\"']": "writes a file",
    r"\b(shutil\.|os\.(remove|unlink|rename|makedirs|mkdir)|unlink\(|rmtree\(|mkdir\()": "changes files or folders",
    r"\b(requests\.|urlopen|wandb\.|mlflow\.|push_to_hub|SummaryWriter)": "sends to another machine, or logs",
}
"""Effects of a cell outside the ranks, by a pattern of its code."""


def effects_of(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a sentence for each cell that seems to have effects outside the ranks."""
    for entry in entries:
        code = entry.code if isinstance(entry, (CompletedCell, Omission)) else ""
        found = [what for pattern, what in _EFFECTS.items() if re.search(pattern, code, re.MULTILINE)]
        if found:
            first = code.strip().splitlines()[0]
            yield f"runs again: the cell that begins with {first!r}, which {' and '.join(dict.fromkeys(found))}"
