"""The events of a run, the ledger that stores them, and figures from them.

Open `events.py` first, then `ledger.py`.
"""

from elastic_ddp.telemetry.ledger import Ledger, LedgerReader, new_session, newest_number, read_ledger
from elastic_ddp.telemetry.progress import Progress
from elastic_ddp.telemetry.summary import summarize

__all__ = ["Ledger", "LedgerReader", "Progress", "new_session", "newest_number", "read_ledger", "summarize"]
