"""WHAT IT MEANS: pure folds over a trace, one file per quantity. numpy only."""
