"""Whether Jupyter finds the panel, and the notice if it does not."""

import pytest

import workbench
from tests.helpers.ipython_shell import ipython_shell
from workbench.cli import jupyter_extensions


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which Jupyter looks for extensions, without any."""
    monkeypatch.setattr(jupyter_extensions, "jupyter_path", lambda kind: [str(tmp_path / kind)])
    return tmp_path / "labextensions"


def loaded(capsys):
    with ipython_shell() as shell:
        workbench.load_ipython_extension(shell)
        workbench.unload_ipython_extension(shell)
    return capsys.readouterr().out


def test_a_missing_panel_is_reported_if_a_server_started_the_kernel(folder, monkeypatch, capsys):
    monkeypatch.setenv("JPY_SESSION_NAME", "/a/notebook.ipynb")
    message = loaded(capsys)
    assert message.startswith("panel not installed: ")
    assert message.endswith("in JupyterLab's environment.\nnext: %fsdp start -n 2\n")


def test_a_missing_panel_is_not_reported_without_a_server(folder, monkeypatch, capsys):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert loaded(capsys) == "next: %fsdp start -n 2\n"


def test_an_installed_panel_is_not_reported(folder, monkeypatch, capsys):
    monkeypatch.setenv("JPY_SESSION_NAME", "/a/notebook.ipynb")
    (folder / "fsdp-workbench").mkdir(parents=True)
    (folder / "fsdp-workbench" / "package.json").write_text("{}")
    assert loaded(capsys) == "next: %fsdp start -n 2, or the icon with the shards\n"
