"""Durable state: commits that are complete or do not exist."""

from elastic_ddp.checkpoint.catalog import CommitCatalog
from elastic_ddp.checkpoint.manifest import Commit, StoredObject
from elastic_ddp.checkpoint.retention import Retention
from elastic_ddp.checkpoint.saver import Save, Saver
from elastic_ddp.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "Commit", "CommitCatalog", "Retention", "Save", "Saver", "StoredObject"]
