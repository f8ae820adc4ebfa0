"""`elastic-ddp doctor`: checks a cluster before a run.

`cluster.examine` gathers facts from all nodes, and `checks.judge` derives the findings from them. Only `cluster` uses
Ray. Speeds are not measured.
"""
