"""Communication between the ranks of a generation: process group, gradient reduction, votes, and transfer of state.

Open `process_group` first, then `strategy` and `canonical_reduction`.
"""
