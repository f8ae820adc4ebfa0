"""Ways to train that `benchmarks/elasticity.py` compares: the same workload, the same events, a file for each.

A file holds two programs: the training script, as a user of that tool would write it from its documentation, and a
`System`, which starts it, adds a worker, has one killed and takes one away.
"""
