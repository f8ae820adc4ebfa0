"""A worker: a process that trains."""
