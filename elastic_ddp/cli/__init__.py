"""The `elastic-ddp` command line. Open `main.py` first."""
