"""The systems that `benchmarks/elasticity.py` compares, one file each. Open `system.py` first.

Each file has a training script, written as the system's documentation shows, and a `System` that runs it.
"""
