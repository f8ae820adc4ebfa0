"""The `elastic-ddp` command line."""
