"""docs/guides/cluster-machines.md, in a short form. `make hosts` follows the rest of the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.machines import missing, site
from tests.chaos.onprem import Cluster, world_sizes

WHY_NOT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


def test_a_run_over_ssh_survives_a_power_failure_and_ray_down_leaves_nothing(
    tmp_path: Path, calm: Mapping[str, Any]
) -> None:
    with site(tmp_path / "site", 3) as machines:
        cluster = Cluster(machines)
        cluster.install_program()
        machines.boot(cluster.head, *cluster.workers)
        cluster.install(quick=True)
        cluster.up()
        run = cluster.start_by_exec("power")
        run.wait_for(2)
        cluster.workers[1].kill()
        run.wait_for(1)
        machines.boot(cluster.workers[1])
        run.wait_for(2)
        facts = run.finish(calm)
        assert world_sizes(facts)[-3:] == [2, 1, 2] and facts["workers_failed"] == 1
        cluster.down()
        cluster.wait_until_nothing_is_left()
