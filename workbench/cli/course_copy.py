"""``workbench course``: copy the notebooks of the course into a folder of the reader."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.base.fault import listed
from workbench.base.text_formats import plural
from workbench.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CourseCopy:
    """The notebooks of the course in a folder.

    Attributes:
        folder: where they are.
        new: files that were copied, relative to the folder.
        kept: files that were there and differ from those of this version.
        first: the notebook to open.
    """

    folder: Path
    new: tuple[str, ...]
    kept: tuple[str, ...]
    first: Path

    def __str__(self) -> str:
        if not self.kept:
            return f"{plural(len(self.new), 'file')} copied to {self.folder}"
        return (
            f"{plural(len(self.new), 'file')} copied to {self.folder}; not replaced, as they differ from this version: "
            f"{listed(self.kept)}. To get one as it comes with the workbench, rename yours and repeat the command"
        )


def copy_course(source: Path, folder: Path) -> CourseCopy:
    """Copy the notebooks, and what they show, from ``source`` to ``folder``; files that are there stay as they are.

    Raises:
        UsageError: the copy fails.
    """
    new, kept = [], []
    try:
        for name in _files(source):
            mine = folder / name
            if not mine.exists():
                mine.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, mine)
                new.append(name)
            elif not filecmp.cmp(source / name, mine, shallow=False):
                kept.append(name)
    except OSError as error:
        raise UsageError(f"cannot copy the notebooks to {folder}: {error.strerror}") from error
    first = min(path for path in folder.glob("*.ipynb") if (source / path.name).exists())
    return CourseCopy(folder=folder, new=tuple(new), kept=tuple(kept), first=first)


def _files(source: Path) -> Iterator[str]:
    """Yield the files below a folder, relative to it, without hidden ones and those that Jupyter keeps beside them."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_file() and not any(part.startswith((".", "__")) for part in name.parts):
            yield name.as_posix()
