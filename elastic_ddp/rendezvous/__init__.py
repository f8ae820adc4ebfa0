"""The rendezvous of a run: one actor that forms generations and detects failed workers, and a worker's client for it.

Open `actor.py` first, then `coordinator.py` and `membership.py`, which decide, and `planner.py`.
`standby.py` is the side of a process that waits for a place.
"""
