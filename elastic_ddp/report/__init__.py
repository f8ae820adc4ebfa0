"""A report of runs, from their ledgers: a page for a browser.

`history.py` reads a ledger; `timeline.py`, `curves.py` and `costs.py` make charts from it; `page.py` writes them.
"""
