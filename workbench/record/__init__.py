"""Recording of runs outside the notebook: ``torchrun ... -m workbench.record --out DIR train.py`` (``__main__.py``)."""
