"""A run's folder, on a disk or in object storage, and the lease on it."""
