"""The widgets' ES modules as one text: anywidget takes a single module, and the browser must fetch nothing.

Each module becomes a function, which keeps its names local and returns its exports. Only these forms are supported:
``import { a, b } from "./other.js";`` at the beginning of a line, also from ``"./folder/other.js"`` and
``"../other.js"``, ``export`` before a declaration, and ``export default`` before an expression.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

STATIC = Path(__file__).parent / "static"

_IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.\.?/[\w./]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|class|async function|function)\b\*?\s*(\w+))", re.MULTILINE)
_DEFAULT = re.compile(r"^export default ", re.MULTILINE)
_UNKNOWN = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def joined(entry: str, folder: Path = STATIC) -> str:
    """Return ``entry`` and everything it imports as one module with the exports of ``entry``.

    Args:
        entry: path of a file in ``folder``, with ``/`` between its parts.
        folder: where the modules are, in it or in folders below it.

    Raises:
        ValueError: a module uses another form of import or export, is part of an import cycle, or imports a name
                that is not exported.
        FileNotFoundError: a module does not exist.
    """
    texts: dict[str, str] = {}
    _collect(entry, folder, texts, ())
    parts = [_enclosed(name, text) for name, text in texts.items()]
    exports = ", ".join(_EXPORT.findall(texts[entry]))
    named = f"export const {{ {exports} }} = {_variable(entry)};\n" if exports else ""
    default = f"export default {_variable(entry)}.default;\n" if _DEFAULT.search(texts[entry]) else ""
    return "\n".join((*parts, named + default))


def _collect(name: str, folder: Path, texts: dict[str, str], path: tuple[str, ...]) -> None:
    """Add a module to ``texts``, after everything it imports."""
    if name in texts:
        return
    if name in path:
        raise ValueError(f"circular import: {' -> '.join((*path, name))}")
    text = (folder / name).read_text("utf-8")
    for wanted, other in _imports(name, text):
        _collect(other, folder, texts, (*path, name))
        if missing := [word for word in wanted if word not in _EXPORT.findall(texts[other])]:
            raise ValueError(f"{name} imports {', '.join(missing)} from {other}, which does not export it")
    texts[name] = text


def _imports(name: str, text: str) -> Iterator[tuple[list[str], str]]:
    """Yield the names that a module imports and the path of the module with them, for each import."""
    for found in _IMPORT.finditer(text):
        yield [word for word in re.split(r"[\s,]+", found[1]) if word], _path(name, found[2])


def _path(name: str, address: str) -> str:
    """Return the path that ``address`` means in the module ``name``: ``../a.js`` in ``views/b.js`` -> ``a.js``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), address))


def _enclosed(name: str, text: str) -> str:
    exports = _EXPORT.findall(text)
    body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = {_variable(_path(name, found[2]))};", text)
    body, has_default = _DEFAULT.subn("const $default = ", _EXPORT.sub("", body))
    if unknown := _UNKNOWN.search(body):
        raise ValueError(f"{name}: unsupported import or export: {unknown[0]}")
    members = ", ".join([*exports, *(["default: $default"] if has_default else [])])
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {members} }};\n}})();\n"


def _variable(name: str) -> str:
    return "$" + name.removesuffix(".js").replace("/", "$")
