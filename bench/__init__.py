"""Benchmarks: ``make bench`` measures, ``make bench-check`` compares with the figures that are wanted."""
