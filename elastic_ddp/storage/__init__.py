"""A folder on local disk, S3 or any fsspec file system, with a watchdog, and the driver's lease on a run.

Start with `storage.py`. A worker's chain is `WatchedStorage` → `Storage` → `Folder`.
`temporary_folder.py` makes temporary folders on this node.
"""
