"""Bars of tqdm.auto and tqdm.notebook in a process with ipykernel, like a rank's."""

import subprocess
import sys

ON_A_RANK = """
import sys
import ipykernel.zmqshell  # by which tqdm.auto tells a notebook
from workbench.runtime import text_bars
text_bars.install()
assert "tqdm" not in sys.modules
from tqdm.auto import tqdm, trange
from tqdm.autonotebook import tqdm as other
from tqdm.std import tqdm as text
assert issubclass(tqdm, text) and other is text, (tqdm, other)
import tqdm as package, tqdm.notebook
from tqdm.notebook import tnrange, tqdm_notebook
assert package.notebook.tqdm is tqdm_notebook is text
assert list(tnrange(2)) == [0, 1]
from tqdm.auto import tqdm
for _ in tqdm(range(3)):
    pass
"""


def test_bars_of_tqdm_are_text():
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", ON_A_RANK], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr
    assert "3/3" in done.stderr
