"""Run a field script on the ranks of a notebook, ask where they are, and print the answer as one line of JSON."""

from __future__ import annotations

import json
import re
import sys
import time

from bench.field.cases import CASES, Kind
from workbench import Workbench
from workbench.reports import as_json

POLL_S = 1.0
FAILED = re.compile(r"\b(raised|failed|died|killed|ended with|sys\.exit|is gone)\b")


def main(name: str, limit_s: float) -> None:
    case = next(each for each in CASES if each.name == name)
    found: dict[str, object] = {}
    with Workbench(case.ranks, device="cpu") as wb:
        wb.run_script(case.script, case.args, background=True)
        end, news = time.monotonic() + limit_s, ()
        while time.monotonic() < end and not news and not found.get("cause"):
            time.sleep(POLL_S)
            found = as_json(wb.where())
            news = wb.news()
        text = "\n".join(news)
        failed = FAILED.search(text)
        if failed and (case.kind is Kind.DEATH or not found.get("cause")):
            found["cause"] = {"rule": "the error", "verdict": text, "evidence": [], "fix": ""}
        found["news"] = text
        sys.stdout.write(json.dumps({"report": found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
