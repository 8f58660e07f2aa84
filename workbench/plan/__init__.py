"""What a run would need and take: the engine itself, as one rank of many, on tensors without data."""
