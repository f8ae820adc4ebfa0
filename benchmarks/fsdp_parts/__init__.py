"""The parts of `benchmarks/fsdp.py`: `memory.py`, `stalls.py` and `cost.py`, and what they share."""
