"""A worker process, from Ray Train's call of `work` to the end of the run.

Open `main.py` first, then `loop.py` (steps), `generation.py` (a fixed set of workers), and `checkpointing.py`.
"""
