"""The configuration of a run and the checks that need no worker: settings, their error messages, and capacity.

Start with `run_config.py`.
"""
