"""Benchmarks: ``make bench`` measures, ``make bench-check`` compares the results with the targets."""
