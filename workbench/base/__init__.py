"""What every part of the package needs and what needs none of them: bytes, clocks, devices, ports, texts, faults."""
