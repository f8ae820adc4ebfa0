"""The one place that touches Ray's internals, and the guard that it meets the Ray it was written for.

`dataset` runs Ray Data's executor; `controller` and `worker_group` change the number of Ray Train's workers in place.
With another Ray none of them is imported, and what Ray makes public has to do: see `ray_train` and `data.pipeline`.
"""

import ray

WRITTEN_FOR = "2.60"


def are_known() -> bool:
    """Whether the Ray that is installed is the one whose internals these are."""
    return ray.__version__.rpartition(".")[0] == WRITTEN_FOR
