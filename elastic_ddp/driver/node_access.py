"""Finds out, before workers start, whether every node of the cluster reads the data and uses the storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ddp.config.capacity import workers_that_fit
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.access import announce, check_data, check_storage
from elastic_ddp.data.files import DataFile
from elastic_ddp.data.user_code import import_failure
from elastic_ddp.errors import ConfigError, DataError, ElasticDDPError, format_exception, shorten
from elastic_ddp.ray_internals.this_job import COPIES
from elastic_ddp.storage.client_errors import suggest_fix
from elastic_ddp.storage.storage import Storage

ANSWERS_WITHIN_S = 120.0
"""How long a node may take to start a process that checks its access: loading torch from a new cloud disk is slow."""
INSTALLS_WITHIN_S = 600.0
"""The same if Ray may have to install packages first."""
NOTE_AFTER_S = 10.0
"""When the driver prints that it waits for nodes."""


@dataclass(frozen=True)
class NodeAccess:
    """What a node reported about its access; an empty text means that it has access."""

    node: str
    """The node's address."""
    storage: str = ""
    """Why it cannot use the storage."""
    data: str = ""
    """Why it cannot read the data."""
    has_answered: bool = True


def nodes_for_workers(nodes: Iterable[Mapping[str, Any]], resources_per_worker: Mapping[str, float]) -> dict[str, str]:
    """Returns the addresses of those of `ray.nodes()` that live and that a worker fits on, by Ray's node id."""
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in nodes
        if node["Alive"] and workers_that_fit(node["Resources"], resources_per_worker) > 0
    }


def probe_nodes(
    nodes: Mapping[str, str],
    storage: Storage,
    session: str,
    files: Sequence[DataFile],
    *,
    timeout_s: float = ANSWERS_WITHIN_S,
    note: Callable[[str], None] = print,
) -> list[NodeAccess]:
    """Returns what `nodes`, addresses by Ray's node id, report about their access; not those that leave meanwhile.

    It runs a task without CPUs on each node, all at the same time, for `timeout_s` at most. The caller has called
    `announce` with `storage` and `session`. Raises ConfigError if a node lacks this package or another module.
    """
    task = ray.remote(_report_access)
    pending = {}
    for node_id, address in nodes.items():
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = task.options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        pending[options.remote(address, storage.uri, session, files)] = node_id
    done, late = ray.wait(list(pending), num_returns=len(pending), timeout=min(NOTE_AFTER_S, timeout_s))
    if late and timeout_s > NOTE_AFTER_S:
        names = shorten([nodes[pending[reference]] for reference in late], 8)
        note(f"waiting up to {timeout_s:g} s for {names} to check the access to data and storage")
        done, late = ray.wait(list(pending), num_returns=len(pending), timeout=timeout_s - NOTE_AFTER_S)
    reports = []
    for reference in done:
        try:
            reports.append(ray.get(reference))
        except ray.exceptions.RayError as error:
            if (missing := import_failure(error)) is not None:
                raise missing from None
            if isinstance(error, ray.exceptions.RayTaskError):
                raise
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if late else set()
    for reference in late:
        ray.cancel(reference, force=True)
        if pending[reference] in alive:
            reports.append(NodeAccess(nodes[pending[reference]], has_answered=False))
    return reports


def _report_access(address: str, storage: str, session: str, files: Sequence[DataFile]) -> NodeAccess:
    """The task that runs on each node."""

    def use_storage() -> None:
        run_folder = Storage(storage)
        check_storage(run_folder, session)
        run_folder.check_writable()

    def problem_of(check: Callable[[], None]) -> str:
        try:
            check()
        except Exception as error:  # file systems raise whatever their client library does
            is_own = isinstance(error, ElasticDDPError)
            text = str(error) if is_own else f"{format_exception(error)}; {suggest_fix(error)}"
            return text if address in text else f"node {address}: {text}"
        return ""

    return NodeAccess(address, problem_of(use_storage), problem_of(lambda: check_data(files)))


def explain_access(reports: Sequence[NodeAccess]) -> str | None:
    """Returns which nodes lack access, and what to use instead; None if all have it."""
    sentences = []
    for name in ("storage", "data"):
        if found := [(report.node, text) for report in reports if (text := getattr(report, name))]:
            sentences.append(found[0][1])
            if others := [node for node, _ in found[1:]]:
                sentences.append(f"The same holds for {shorten(others, 8)}.")
    return " ".join(sentences) or None


def check_nodes(
    storage: Storage,
    session: str,
    files: Sequence[DataFile],
    note: Callable[[str], None],
    *,
    nodes: Sequence[Mapping[str, Any]],
    config: RunConfig,
) -> None:
    """Raises unless each of `nodes`, from `ray.nodes()`, that a worker fits on reads `files` and uses the storage.

    It announces `session` in the storage, for workers on nodes that join later as well. It starts no task on the
    driver's machine, which uses both already. Raises DataError if a node cannot read the data, and ConfigError if one
    cannot use the storage. A node that does not run the check in time is noted, and is an error only if workers can
    start nowhere else.
    """
    announce(storage, session)
    suitable = nodes_for_workers(nodes, config.resources_per_worker)
    here = ray.util.get_node_ip_address()
    others = {node_id: address for node_id, address in suitable.items() if address != here}
    if not others:
        return
    if copied := next((file.path for file in files if COPIES in file.path), None):
        raise DataError(
            f"{copied} is in a copy of the working directory, of which each node has its own. Use a bucket, or the "
            "absolute path of a folder that all nodes share."
        )
    may_install = bool(set(ray.get_runtime_context().runtime_env) - {"env_vars"})
    timeout_s = INSTALLS_WITHIN_S if may_install else ANSWERS_WITHIN_S
    reports = probe_nodes(others, storage, session, files, timeout_s=timeout_s, note=note)
    if (problem := explain_access(reports)) is not None:
        raise (ConfigError if any(report.storage for report in reports) else DataError)(problem)
    if late := [report.node for report in reports if not report.has_answered]:
        silent = (
            f"Ray started no process within {timeout_s:g} s on {shorten(late, 8)}, to check the access to data "
            "and storage. /tmp/ray/session_latest/logs on the node has the reason."
        )
        if len(late) == len(suitable):
            raise ConfigError(f"{silent} Repair the node, or add another one.")
        note(silent)
