"""Why a script ended, in a sentence."""

from __future__ import annotations

from traceback import walk_tb

_MAX_REASON = 500
"""Characters of an error's text that are recorded."""

_SCRIPTS = ("__main__", "__mp_main__")
"""Names under which a script runs: by itself, and in processes that multiprocessing starts."""


def reason_of(error: BaseException) -> str:
    """Return why a script ended that raised ``error``; empty if it ended well."""
    if isinstance(error, SystemExit):
        is_number = isinstance(error.code, int)
        return "" if error.code in (None, 0) else f"exit status {error.code}" if is_number else f"exit: {error.code}"
    text = " ".join(str(error).split())[:_MAX_REASON]
    return f"{type(error).__name__}: {text}".removesuffix(": ") + _line_of(error)


def _line_of(error: BaseException) -> str:
    """Return the script's innermost line in an error's traceback; empty if it has none."""
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        is_own = frame.f_globals.get("__package__") == __package__
        if frame.f_globals.get("__name__") in _SCRIPTS and not is_own:
            found = f", at line {line} of {frame.f_code.co_filename}"
    return found
