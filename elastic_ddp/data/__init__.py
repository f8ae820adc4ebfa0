"""Data sets in Parquet: indexed once, ordered by (seed, epoch), fed to workers as micro-batches by Ray Data."""
