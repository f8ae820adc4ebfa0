"""The configuration of a run, and checks that need no worker. Start with `run_config.py`."""
