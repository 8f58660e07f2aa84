import contextlib
import io
from dataclasses import dataclass, field

import pytest
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.interactiveshell import InteractiveShell

from tests.helpers.fake_cluster import FakeCluster
from tests.helpers.ipython_shell import ipython_shell
from workbench.magics import register, unregister
from workbench.workbench import Workbench


@dataclass
class Cell:
    """The results of running a cell."""

    out: str
    err: str
    error: BaseException | None
    shown: list[dict]


@dataclass
class Notebook:
    """A real IPython shell with the magics, on fake clusters; ``fake`` is the newest one."""

    shell: InteractiveShell
    fakes: list[FakeCluster] = field(default_factory=list)
    published: list[dict] = field(default_factory=list)

    @property
    def fake(self):
        return self.fakes[-1]

    def make(self, *args, **settings):
        return Workbench(*args, cluster_factory=self.new_cluster, **settings)

    def new_cluster(self, *args, **settings):
        self.fakes.append(FakeCluster(*args, **settings))
        return self.fake

    def run(self, code):
        """Run a cell, which may raise."""
        self.published.clear()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            result = self.shell.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        return Cell(out.getvalue(), err.getvalue(), error, list(self.published))

    def ok(self, code):
        """Run a cell that must not raise."""
        cell = self.run(code)
        assert cell.error is None, cell.out
        return cell

    def complete(self, line):
        """Complete as ipykernel does for JupyterLab."""
        completer = self.shell.Completer
        with provisionalcompleter():
            return [found.text for found in rectify_completions(line, completer.completions(line, len(line)))]


@pytest.fixture
def bare(monkeypatch):
    with ipython_shell() as shell:
        notebook = Notebook(shell)
        monkeypatch.setattr(
            shell.display_pub, "publish", lambda data, metadata=None, **more: notebook.published.append(data | more)
        )
        register(shell, notebook.make)
        yield notebook
        unregister(shell)


@pytest.fixture
def notebook(bare):
    """A notebook with four ranks started."""
    bare.ok("%fsdp start -n 4")
    return bare
