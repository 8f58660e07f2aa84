"""All that crosses between a notebook and its ranks: commands, requests, replies, breakpoints. Python's own only."""
