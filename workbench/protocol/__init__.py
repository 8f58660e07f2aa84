"""Messages between a notebook and its ranks: commands, requests, replies. Needs no third-party package."""
