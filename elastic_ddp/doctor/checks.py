"""All checks, in the order of the report."""

from __future__ import annotations

from elastic_ddp.doctor import cluster_checks, node_checks
from elastic_ddp.doctor.facts import Cluster, Finding

CHECKS = (
    node_checks.check_nodes,
    node_checks.check_versions,
    node_checks.check_driver,
    node_checks.check_token,
    node_checks.check_clocks,
    cluster_checks.check_storage,
    cluster_checks.check_data,
    node_checks.check_gpus,
    node_checks.check_cpus,
    node_checks.check_mirrors,
    node_checks.check_memory,
    node_checks.check_open_files,
    cluster_checks.check_interfaces,
    cluster_checks.check_groups,
)


def judge(cluster: Cluster) -> list[Finding]:
    """Returns the findings about a cluster. Each check has at least one, unless it does not apply."""
    return [finding for check in CHECKS for finding in check(cluster)]
