"""The rendezvous of a run: one actor that forms generations and detects failed workers, and a worker's client for it.

Open `actor.py` first, then `coordinator.py` and `membership.py`, which decide, and `planner.py`.
`standby_process.py` runs in a worker, and waits for its place if the worker is a standby.
"""
