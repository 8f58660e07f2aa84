"""The kinds of devices: one class and one line of a table each."""

import os
import subprocess
import sys

import pytest

from tests.helpers.added_device import LINE
from tests.helpers.package_source import PACKAGE, REPO
from workbench.base.devices import Device


@pytest.mark.thorough
def test_a_kind_of_device_is_a_class_and_a_line(tmp_path):
    """With one line added to the text of ``devices.py``, and nothing else, ranks start on the new kind by its name."""
    copied = tmp_path / "workbench" / "base" / "devices.py"
    copied.parent.mkdir(parents=True)
    for there in (PACKAGE, PACKAGE / "base"):
        for path in there.iterdir():
            if path.name not in {"base", "devices.py", "__pycache__"}:
                (tmp_path / path.relative_to(REPO)).symlink_to(path)
    before, after = (PACKAGE / "base" / "devices.py").read_text(encoding="utf-8").split('    "cuda": ')
    copied.write_text(f'{before}{LINE}    "cuda": {after}', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.added_device"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("driver", "library", "found"),
    [
        ("", "", True),
        (__file__, "", True),
        ("/no/such/file", "libc.so.6", True),
        ("/no/such/file", "libnone.so", False),
    ],
)
def test_a_host_without_the_driver_of_a_device_has_none(driver, library, found):
    assert Device("module:Class", driver=driver, library=library).may_be_here() is found
