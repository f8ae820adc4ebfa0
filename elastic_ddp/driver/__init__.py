"""The driver: the process that a person starts."""
