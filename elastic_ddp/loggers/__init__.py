"""Loggers: where the values of a run's steps are sent to, each step once and in order.

Open `logger.py` first, then `delivery.py`.
"""
