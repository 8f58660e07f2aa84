"""The public names: ``__all__`` of each package, the list in docs/python.md, and docstrings."""

import importlib
import inspect
import re

import pytest

from tests.helpers import documents
from tests.helpers.package_source import sources

PACKAGES = [
    source.module
    for source in sources()
    if (source.path.name == "__init__.py" or len(source.path.parts) == 1)
    and re.search(r"^__all__ = ", source.text, re.M)
]
NOT_FOR_PEOPLE = {"__version__", "load_ipython_extension", "unload_ipython_extension"}  # used by IPython and pip


def public_names(package):
    return set(importlib.import_module(package).__all__) - NOT_FOR_PEOPLE


def test_the_documents_list_every_package():
    assert [documents.code(row[0])[0] for row in documents.table("module")] == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_the_documents_list_every_name(package):
    listed = {documents.code(row[0])[0]: set(documents.code(row[1])) for row in documents.table("module")}
    assert listed[package] == public_names(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_names_resolve_and_are_documented(package):
    module = importlib.import_module(package)
    assert inspect.getdoc(module)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_nothing_twice(package):
    names = importlib.import_module(package).__all__
    assert len(names) == len(set(names))


def test_a_missing_name_is_an_error():
    with pytest.raises(AttributeError, match="'workbench' has no attribute 'Werkbank'"):
        importlib.import_module("workbench").Werkbank  # noqa: B018 - reading it is the test
