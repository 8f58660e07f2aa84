"""THE SHELL: live displays in the notebook. Plain HTML where that is enough."""
