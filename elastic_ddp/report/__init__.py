"""A report of runs, from their ledgers: a page for a browser, and a picture.

`history.py` reads a ledger; `timeline.py`, `curves.py` and `costs.py` make charts from it; `page.py` and `picture.py`
write them.
"""
