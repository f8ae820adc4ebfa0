"""Checks, before workers start, that every node of the cluster reads the data and uses the storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

CHECKS_WITHIN_S = 120.0
"""How long a node may take to start a process that checks its access: loading torch from a new cloud disk is slow."""
INSTALLS_WITHIN_S = 600.0
"""The limit if Ray may have to install packages first."""
NOTE_AFTER_S = 10.0
"""When the driver prints that it waits for nodes."""

Problem = ConfigError | DataError
"""The reason why a node cannot use the storage, or cannot read the data."""


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

    The check announces `session` in the storage, for workers on nodes that join later as well. No task runs on the
    driver's machine, which uses both already. Raises DataError if a node cannot read the data, and ConfigError if one
    cannot use the storage. A node that does not run the check in time is noted, and is an error only if workers can
    start nowhere else.
    """
    announce(storage, session)
    needs = config.resources_per_worker
    suitable = [node for node in nodes if node["Alive"] and workers_that_fit(node["Resources"], needs)]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in suitable}
    here = ray.util.get_node_ip_address()
    others = {node_id: address for node_id, address in addresses.items() if address != here}
    if not others:
        return
    copied = next((file.path for file in files if COPIES in file.path), None)
    if copied:
        raise DataError(
            f"{copied} is in a copy of the working directory, of which each node has its own. Use a bucket, or the "
            "absolute path of a folder that all nodes share."
        )
    may_install = bool(set(ray.get_runtime_context().runtime_env) - {"env_vars"})
    timeout_s = INSTALLS_WITHIN_S if may_install else CHECKS_WITHIN_S
    problems, late = probe_nodes(others, storage, session, files, timeout_s=timeout_s, note=note)
    for kind in (ConfigError, DataError):
        found = {node: str(problem) for node, problem in problems.items() if isinstance(problem, kind)}
        if found:
            first, *more = found
            raise kind(f"{found[first]} The same holds for {shorten(more, 8)}." if more else found[first])
    if late:
        silent = (
            f"Ray started no process within {timeout_s:g} s on {shorten(late, 8)}, to check the access to data "
            "and storage. /tmp/ray/session_latest/logs on the node has the reason."
        )
        if len(late) == len(addresses):
            raise ConfigError(f"{silent} Repair the node, or add another one.")
        note(silent)


def probe_nodes(
    nodes: Mapping[str, str],
    storage: Storage,
    session: str,
    files: Sequence[DataFile],
    *,
    timeout_s: float,
    note: Callable[[str], None],
) -> tuple[dict[str, Problem], list[str]]:
    """Returns the problems of `nodes`, addresses by Ray's node id, and the nodes that do not answer in time.

    A task without CPUs runs on each node, all at the same time. Nodes that leave meanwhile are in neither result. The
    caller has called `announce` with `storage` and `session`. Raises ConfigError if a node lacks this package or
    another module.
    """
    task = ray.remote(_find_problem)
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
    problems = {}
    for reference in done:
        try:
            problem = ray.get(reference)
        except ray.exceptions.RayError as error:
            missing = import_failure(error)
            if missing is not None:
                raise missing from None
            if isinstance(error, ray.exceptions.RayTaskError):
                raise
            continue
        if problem is not None:
            problems[nodes[pending[reference]]] = problem
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if late else set()
    for reference in late:
        ray.cancel(reference, force=True)
    return problems, [nodes[pending[reference]] for reference in late if pending[reference] in alive]


def _find_problem(address: str, storage: str, session: str, files: Sequence[DataFile]) -> Problem | None:
    """Uses the storage and reads the data, in a task on a node. Returns the first problem."""
    kind: type[Problem] = ConfigError
    try:
        run_folder = Storage(storage)
        check_storage(run_folder, session)
        run_folder.check_writable()
        kind = DataError
        check_data(files)
    except Exception as error:  # file systems raise whatever their client library does
        is_own = isinstance(error, ElasticDDPError)
        text = str(error) if is_own else f"{format_exception(error)}; {suggest_fix(error)}"
        return kind(text if address in text else f"node {address}: {text}")
    return None
