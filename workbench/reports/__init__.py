"""Reports for the user: pure functions of the ranks' replies and of what they recorded."""
