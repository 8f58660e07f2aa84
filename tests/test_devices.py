"""Which kinds of device there are: a class each, and a line that names it."""

import os
import subprocess
import sys

from tests.added_device import LINE
from tests.source import PACKAGE, REPO


def test_a_kind_of_device_is_a_class_and_a_line(tmp_path):
    """With a line more in the text of ``devices.py``, and nothing else, ranks start on one kind more, by its name."""
    package = tmp_path / "workbench"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in {"devices.py", "__pycache__"}:
            (package / path.name).symlink_to(path)
    before, after = (PACKAGE / "devices.py").read_text(encoding="utf-8").split('    "cuda": ')
    (package / "devices.py").write_text(f'{before}{LINE}    "cuda": {after}', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.added_device"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
