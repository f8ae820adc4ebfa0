"""`elastic-ddp doctor`: checks a cluster before a run.

`examination.examine` gathers facts from all nodes, and `checks.judge` derives the findings from them. Only
`examination` uses Ray. Speeds are not measured.
"""
