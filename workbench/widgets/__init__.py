"""THE SHELL: what is alive in the notebook. Plain HTML where that is enough."""
