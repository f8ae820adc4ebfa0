"""Data sets as micro-batches. Read the files in this order:

`index` (files and row groups) or `map_style` (data sets in memory) -> `order` (the rows of each micro-batch) ->
`source` (reads chunks of rows) -> `work` (makes chunks or whole micro-batches, with the user's transform and
`collate_fn`) -> `pipeline` (does the work in processes, with Ray Data) -> `split` (cuts chunks into micro-batches) ->
`micro_batches` (copies them to the device) -> `feed` (prefetches in the background) -> `feed_cache` (prepares the next
feed).

Other files: `files` and `local_files` list and read files, `access` checks whether a node reads them, `weights` samples
rows by weight, `packing` moves objects between processes, `user_code` sends the user's functions to data processes and
workers, and `user_calls` reports the call of such a function in which a data process died or hangs.
"""
