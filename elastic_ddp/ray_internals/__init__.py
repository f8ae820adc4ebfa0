"""The one place that touches Ray's internals, and the guard that it meets the Ray it was written for.

`dataset` runs Ray Data's executor; `controller` and `worker_group` change the number of Ray Train's workers in place.
"""

import ray

from elastic_ddp.errors import ConfigError

WRITTEN_FOR = "2.60"

if ray.__version__.rpartition(".")[0] != WRITTEN_FOR:
    raise ConfigError(
        f"Ray {ray.__version__} is installed, and this version of elastic_ddp uses internals of Ray {WRITTEN_FOR}; "
        f"install ray[train]=={WRITTEN_FOR}.*"
    )
