"""The rendezvous of a run: one actor that forms generations and detects failed workers, and a worker's client for it.

`planner.py` chooses the members of a generation. `membership.py` is the state machine. `coordinator.py` applies its
decisions, `requests.py` and `supervisor.py` stand on it, and `actor.py` connects them to Ray. `client.py`,
`heartbeat.py` and `standby_process.py` run in a worker.
"""
