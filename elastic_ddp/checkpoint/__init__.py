"""Checkpoints: a commit is complete, or it does not exist.

`manifest.py` describes the format of a commit: open it first. `saver.py` writes commits, `catalog.py` reads them.
"""

from elastic_ddp.checkpoint.catalog import CommitCatalog
from elastic_ddp.checkpoint.manifest import Commit, StoredObject
from elastic_ddp.checkpoint.retention import Retention
from elastic_ddp.checkpoint.saver import Save, Saver
from elastic_ddp.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "Commit", "CommitCatalog", "Retention", "Save", "Saver", "StoredObject"]
