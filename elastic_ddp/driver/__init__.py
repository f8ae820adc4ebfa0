"""The driver, the process that a user starts: it starts the workers, writes the ledger and shows progress.

Open `trainer.py` first, then `session.py` (one session of a run) and `ray_train.py` (how workers are started).
"""
