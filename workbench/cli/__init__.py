"""The command ``workbench`` and what only it does: demo, doctor, grading, scripts on ranks, generated files."""
