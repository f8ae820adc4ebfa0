"""Parquet data sets as micro-batches. Read the files in this order:

`index` (files and row groups) -> `order` (the rows of each micro-batch) -> `source` (reads chunks of rows) ->
`transform` (applies the user's function) -> `pipeline` (runs both in Ray Data) -> `micro_batches` (cuts chunks and
copies them to the device) -> `feed` (prefetches in the background) -> `feed_cache` (prepares the next feed).

Beside them: `files` and `local_files` list and read files, `weights` samples rows by weight, and `user_calls` reports
the call of the user's function in which a data process died or hangs.
"""
