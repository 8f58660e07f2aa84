"""Memory and time of a run: the engine itself, as one rank of many, on tensors without data."""
