"""A cloud's notice that it will take a machine becomes a drain of its Ray node. Open `watch.py` first."""
