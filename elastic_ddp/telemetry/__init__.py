"""What happened in a run, as events, as a summary and on the screen."""

from elastic_ddp.telemetry.ledger import Ledger, new_session, read_ledger
from elastic_ddp.telemetry.progress import Progress
from elastic_ddp.telemetry.summary import summarize

__all__ = ["Ledger", "Progress", "new_session", "read_ledger", "summarize"]
