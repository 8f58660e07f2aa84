"""An exam of what the workbench says about training scripts of strangers: scripts, right verdicts, runner."""
