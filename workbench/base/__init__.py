"""The part that all others need and that needs none of them: bytes, clocks, devices, ports, texts, faults."""
