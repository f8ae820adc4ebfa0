"""Parquet data sets as micro-batches. Read the files in this order:

`index` (files and row groups) -> `order` (the rows of each micro-batch) -> `source` (reads chunks of rows) ->
`transform` (applies the user's function) -> `pipeline` (runs both in Ray Data) -> `micro_batches` (cuts chunks and
copies them to the device) -> `feed` (prefetches in the background) -> `feed_cache` (prepares the next feed).
"""
