"""Live views of a growing trace: one fold of it, the messages with the browser, and their answers."""
