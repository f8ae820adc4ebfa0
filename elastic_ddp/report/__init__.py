"""A report of runs, from their ledgers: a page for a browser, and a picture.

`history.py` reads a ledger, `charts.py` makes charts from it, and `page.py` and `picture.py` write them.
"""
