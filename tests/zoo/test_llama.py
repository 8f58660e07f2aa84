"""The shapes of Llama 3: parameters as published, and sizes that no model can have."""

import runpy
import sys

import pytest
import torch

from workbench.zoo.llama import SIZES, Llama


@pytest.mark.parametrize(("size", "billions"), [("8b", 8.03), ("70b", 70.55), ("405b", 405.85)])
def test_a_model_has_the_published_number_of_parameters(size, billions):
    with torch.device("meta"):
        model = Llama(SIZES[size])
    assert sum(param.numel() for param in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--blocks", "0"], "blocks is at least 1, not 0"),
        (["--heads", "7"], "heads divide the width, and kv_heads the heads: 4096, 7, 8 do not"),
        (["--kv-heads", "5"], "4096, 32, 5 do not"),
        (["--depth", "3"], "unrecognized arguments: --depth 3"),
    ],
)
def test_sizes_that_no_model_has_are_refused(args, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["llama", "8b", *args])
    monkeypatch.delitem(sys.modules, "workbench.zoo.llama")
    with pytest.raises(SystemExit):
        runpy.run_module("workbench.zoo.llama", run_name="__main__")
    assert sentence in capsys.readouterr().err
