"""What a heal has done, as text."""

import pytest

from workbench.reports.heal_report import HealReport

LOST = (
    "6 steps: no whole snapshot, and no replica with a whole state; models and optimizers are as the cells made them. "
    "Views keep the lost steps, and call the next step 6"
)
KEEPS = "%fsdp step 6, with --snapshot 10 to lose no more than 10 steps"


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({}, {"repeated": "1 cell or command, on all ranks; nothing is recorded twice"}),
        ({"cells": 3}, {"repeated": "3 cells and commands, on all ranks; nothing is recorded twice"}),
        ({"steps_lost": 6, "next": "%fsdp step 6", "next_step": 6}, {"lost": LOST, "next": KEEPS}),
        ({"steps_lost": 6, "next": "%fsdp step 6 --snapshot 3"}, {"next": "%fsdp step 6 --snapshot 3"}),
        ({"has_snapshot": True, "next": "%fsdp step 3"}, {"next": "%fsdp step 3"}),
        ({"failed_again": ("the cell 'x': ValueError",)}, {"raised as before": "the cell 'x': ValueError"}),
        ({"failed": ("the cell 'x': no",)}, {"not as before": "the cell 'x': no"}),
    ],
)
def test_facts(more, facts):
    report = HealReport(**{"ranks": (1,), "seconds": 2.5, "start_s": 1.0, "cells": 1} | more)
    assert facts.items() <= dict(report.facts()).items()
    assert report.headline == "rank 1 was replaced in 2.5 s"
    assert report.problem == "; ".join(report.failed)
