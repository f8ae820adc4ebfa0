"""A run's configuration."""
