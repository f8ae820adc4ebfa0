"""All checks of a cluster: pure functions of the facts.

Each check yields its problems, and at last an `ok` that counts if there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from elastic_ddp.distributed.sockets import selects
from elastic_ddp.doctor.facts import ALL, Cluster, Finding, Node, NodeFacts, Verdict, differing, names

Result = tuple[Verdict, str, str]
"""Verdict, text and node of a finding."""
MINIMUM_DRIVER = {12: 525, 13: 580}
"""The first branch of NVIDIA's driver for each major version of CUDA, from NVIDIA's "CUDA Compatibility"."""
OPEN_FILES = 65_536
LOGS = "/tmp/ray/session_latest/logs"
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 10.0
_DOCKERS_SHM_BYTES = 64 << 20
_MIB, _GIB = 1 << 20, 1 << 30


def judge(cluster: Cluster) -> list[Finding]:
    """Returns the findings about a cluster. Each check has at least one, unless it does not apply."""
    findings = []
    for name, check in CHECKS:
        results = [Finding(name, *result) for result in check(cluster)]
        findings += [finding for finding in results if finding.verdict != "ok"] or results
    return findings


def check_nodes(cluster: Cluster) -> Iterator[Result]:
    """Every node runs a process, and some node has resources for workers."""
    for node in cluster.nodes:
        if node.facts is None:
            yield "fail", f"no process reports facts: {node.problem} (logs: {LOGS} on the node)", node.name
    workers = [node for node in cluster.nodes if node.can_work]
    if not workers:
        yield "warn", "no node has CPUs or GPUs in Ray, so workers were not checked. Start worker nodes.", ALL
    total = {name: sum(node.resources.get(name, 0.0) for node in workers) for name in ("CPU", "GPU")}
    amounts = ", ".join(f"{name}={amount:g}" for name, amount in total.items())
    yield "ok", f"{len(cluster.nodes)} in Ray, {len(workers)} for workers ({amounts})", ALL


def check_versions(cluster: Cluster) -> Iterator[Result]:
    """Python and packages are the same everywhere; CUDA, NCCL and the driver on all nodes with GPUs."""
    nodes = cluster.known
    if not nodes:
        return
    packages = dict.fromkeys(name for _, facts in nodes for name in facts.versions)
    values = {name: {node.name: facts.versions.get(name, "missing") for node, facts in nodes} for name in packages}
    with_gpus = {node.name: facts for node, facts in nodes if node.num_gpus}
    if with_gpus:
        values |= {
            "torch's CUDA": {name: facts.cuda or "none" for name, facts in with_gpus.items()},
            "NCCL": {name: facts.nccl or "none" for name, facts in with_gpus.items()},
            "NVIDIA's driver": {name: facts.driver or "none" for name, facts in with_gpus.items()},
        }
    common = []
    for name, of_nodes in values.items():
        usual, others = differing(of_nodes)
        common.append(f"{name} {usual}")
        same = f"{len(of_nodes) - len(others)} of {len(of_nodes)} nodes"
        for node, value in others.items():
            text = f"{name} is {value}, and {usual} on {same}. Install the same version on all nodes."
            yield "warn" if name == "NVIDIA's driver" else "fail", text, node
    yield "ok", ", ".join(common), ALL


def check_driver(cluster: Cluster) -> Iterator[Result]:
    """NVIDIA's driver is new enough for the CUDA of torch."""
    for node, facts in cluster.known:
        if not node.num_gpus:
            continue
        cuda = facts.cuda
        driver = facts.driver
        if cuda is None:
            yield "fail", "torch is a build without CUDA. Install a CUDA build, for example from PyPI.", node.name
        elif driver is None:
            yield "fail", f"no NVIDIA driver responds: {facts.gpu_error}. Install {_needed(cuda)}.", node.name
        elif not _is_new_enough(cuda, driver, facts.driver_cuda):
            text = (
                f"NVIDIA's driver is {driver}, and torch is built for CUDA {cuda}. Install {_needed(cuda)}, or a torch "
                "build for an older CUDA."
            )
            yield "fail", text, node.name
    for facts in [facts for node, facts in cluster.known if node.num_gpus][:1]:
        yield "ok", f"NVIDIA's driver {facts.driver} runs CUDA {facts.cuda}, for which torch is built", ALL


def _is_new_enough(cuda: str, driver: str, driver_cuda: int | None) -> bool:
    major = int(cuda.split(".")[0])
    if driver_cuda is not None:
        return driver_cuda // 1000 >= major
    return int(driver.split(".")[0]) >= MINIMUM_DRIVER.get(major, 0)


def _needed(cuda: str) -> str:
    branch = MINIMUM_DRIVER.get(int(cuda.split(".")[0]))
    return f"driver R{branch} or newer" if branch else f"a driver for CUDA {cuda} or newer"


def check_token(cluster: Cluster) -> Iterator[Result]:
    """Ray checks a token, and only its user can read the token's file."""
    nodes = cluster.known
    for node, facts in nodes:
        token = facts.token
        if token.auth_mode != "token":
            continue
        if token.path and token.permissions is None:
            text = f"{token.path} is missing, and RAY_AUTH_MODE=token. Copy the cluster's token to it, with mode 0600."
            yield "fail", text, node.name
        elif token.permissions is not None and token.permissions & 0o077:
            text = f"{token.path} has mode {token.permissions:04o}, so other users can read it."
            yield "fail", f"{text} Run chmod 600 {token.path}", node.name
    without = [node.name for node, facts in nodes if facts.token.auth_mode != "token"]
    if without:
        text = (
            "Ray checks no token (RAY_AUTH_MODE is not token), so any process that reaches its ports can run code. "
            "Run `ray get-auth-token --generate`, and start Ray with RAY_AUTH_MODE=token on all nodes."
        )
        yield "warn", text, ALL if len(without) == len(nodes) else names(without)
    yield "ok", "Ray checks a token, which only its user can read", ALL


def check_clocks(cluster: Cluster) -> Iterator[Result]:
    """Clocks agree with the clock of the machine that runs the check."""
    offsets = []
    for node, _ in cluster.known:
        clock = node.clock
        if clock is None:
            yield "fail", "the node did not answer with its time", node.name
            continue
        offsets.append(abs(clock.offset_s))
        certain = abs(clock.offset_s) - clock.uncertainty_s
        if certain > CLOCK_WARN_S:
            text = (
                f"{clock.offset_s:+.1f} s off (±{clock.uncertainty_s:.3f} s). Deadlines of drains and signatures for "
                f"S3 need clocks within {CLOCK_WARN_S:g} s. Start chrony or systemd-timesyncd on the node."
            )
            yield "fail" if certain > CLOCK_FAIL_S else "warn", text, node.name
    yield "ok", f"all within {max(offsets, default=0.0) * 1e3:.1f} ms of this machine's", ALL


def check_storage(cluster: Cluster) -> Iterator[Result]:
    """Every node writes to and reads from the storage."""
    if cluster.storage_problem is not None:
        yield "fail", cluster.storage_problem, ALL
    for node in cluster.nodes:
        if node.storage_problem is not None:
            yield "fail", node.storage_problem, node.name
    if cluster.storage is not None:
        yield "ok", f"every node reads and writes {cluster.storage}", ALL


def check_data(cluster: Cluster) -> Iterator[Result]:
    """Every node reads the data files that the driver lists."""
    if cluster.data_problem is not None:
        yield "fail", cluster.data_problem, ALL
    for node in cluster.nodes:
        if node.data_problem is not None:
            yield "fail", node.data_problem, node.name
    if cluster.data is not None:
        yield "ok", f"every node reads {cluster.data} ({cluster.num_files} files tried)", ALL


def check_gpus(cluster: Cluster) -> Iterator[Result]:
    """The GPUs in Ray's resources exist, torch can use them, and no GPU that Ray counts as free is in use."""
    nodes = [(node, facts) for node, facts in cluster.known if node.num_gpus or facts.gpus]
    for node, facts in nodes:
        present = len(facts.gpus)
        in_ray = node.num_gpus
        if present < in_ray:
            why = f" ({facts.gpu_error})" if facts.gpu_error else ""
            text = f"Ray has GPU={in_ray}, and {present} are present{why}."
            yield "fail", f"{text} Repair the node, or start Ray with --num-gpus={present}.", node.name
        elif in_ray and facts.gpu_error is not None:
            yield "fail", f"{facts.gpu_error}. Repair torch or the driver.", node.name
        elif present > in_ray > 0:
            text = f"Ray has GPU={in_ray}, and {present} are present. Start Ray with --num-gpus={present} to use all."
            yield "warn", text, node.name
        yield from _check_use(node, facts)
    models = dict.fromkeys(gpu.model for _, facts in nodes for gpu in facts.gpus)
    total = sum(node.num_gpus for node, _ in nodes)
    used = f"{total} in Ray, none in use by another process ({names(models)})"
    yield "ok", used if nodes else "no node has GPUs", ALL


def _check_use(node: Node, facts: NodeFacts) -> Iterator[Result]:
    used = [gpu for gpu in facts.gpus if not gpu.is_idle]
    if not used or not node.num_gpus:
        return
    held = node.num_gpus - int(node.free.get("GPU", 0.0))
    which = ", ".join(f"GPU {gpu.index} ({gpu.used_mib:,} of {gpu.total_mib:,} MiB)" for gpu in used)
    if len(used) <= held:
        yield "warn", f"in use by Ray jobs, and not tried: {which}. Check again when no run is live.", node.name
    else:
        text = f"memory in use: {which}, but Ray has given out only {held}. End the processes that nvidia-smi lists."
        yield "fail", text, node.name


def check_cpus(cluster: Cluster) -> Iterator[Result]:
    """Ray's CPUs exist, and some are left for the data pipelines."""
    nodes = [(node, facts) for node, facts in cluster.known if node.can_work]
    for node, facts in nodes:
        cpus = node.resources.get("CPU", 0.0)
        usable = facts.usable_cpus
        workers = node.num_gpus or 1
        if cpus > usable + 0.5:
            text = f"Ray has CPU={cpus:g}, and its processes may use {usable:g}."
            yield "warn", f"{text} Start Ray with --num-cpus={int(usable)}.", node.name
        if cpus < 2 * workers:
            text = (
                f"CPU={cpus:g} for {workers} {'workers' if workers > 1 else 'worker'}. Each needs one for itself and "
                "one for its data. Use larger nodes, or data.num_cpus_per_task=0."
            )
            yield "warn", text, node.name
    if nodes:
        fewest = min(node.resources.get("CPU", 0.0) / (node.num_gpus or 1) for node, _ in nodes)
        per = "GPU" if any(node.num_gpus for node, _ in nodes) else "node"
        yield "ok", f"at least {fewest:g} for each {per}", ALL


def check_memory(cluster: Cluster) -> Iterator[Result]:
    """/dev/shm holds Ray's object store."""
    for node, facts in cluster.known:
        shm = facts.shm_bytes
        needed = node.resources.get("object_store_memory", 0.0)
        if shm < max(needed, 2 * _DOCKERS_SHM_BYTES):
            text = (
                f"{shm / _MIB:,.0f} MiB, and Ray's object store is {needed / _MIB:,.0f} MiB. Give containers more: "
                "`docker run --shm-size`, or on Kubernetes an emptyDir with medium Memory at /dev/shm."
            )
            yield "fail" if shm <= _DOCKERS_SHM_BYTES else "warn", text, node.name
    least = min((facts.shm_bytes for _, facts in cluster.known), default=0)
    yield "ok", f"at least {least / _GIB:.1f} GiB", ALL


def check_open_files(cluster: Cluster) -> Iterator[Result]:
    """Ray's processes may open enough files and sockets."""
    for node, facts in cluster.known:
        if 0 <= facts.open_files < OPEN_FILES:
            text = (
                f"the limit is {facts.open_files:,}, and a large run needs {OPEN_FILES:,}. Call "
                f"`ulimit -n {OPEN_FILES}` before `ray start`, or set LimitNOFILE={OPEN_FILES} in its systemd unit."
            )
            yield "warn", text, node.name
    yield "ok", f"the limit is at least {OPEN_FILES:,} on all nodes", ALL


def check_interfaces(cluster: Cluster) -> Iterator[Result]:
    """gloo and NCCL have an interface, and NCCL uses InfiniBand where there is one."""
    nodes = [(node, facts) for node, facts in cluster.known if node.can_work]
    if not nodes:
        return
    for node, facts in nodes:
        for verdict, text in _interface_problems(facts):
            yield verdict, text, node.name
        if facts.infiniband and node.num_gpus:
            for text in _infiniband_problems(facts):
                yield "warn", text, node.name
    settings = {
        node.name: ", ".join(f"{key}={value}" for key, value in facts.environment.items()) for node, facts in nodes
    }
    usual, others = differing(settings)
    for name, value in others.items():
        text = f"has the variables {value or 'none'}, and others {usual or 'none'}. Set the same on all nodes."
        yield "warn", text, name
    used = names(dict.fromkeys(facts.interface or "none" for _, facts in nodes))
    ports = sum(len(facts.infiniband) for _, facts in nodes)
    yield "ok", f"interface {used}, InfiniBand ports: {ports or 'none'}", ALL


def _interface_problems(facts: NodeFacts) -> Iterator[tuple[Verdict, str]]:
    gloo, nccl = (facts.environment.get(f"{backend}_SOCKET_IFNAME") for backend in ("GLOO", "NCCL"))
    for name, pattern, setting in (("GLOO_SOCKET_IFNAME", f"={gloo}", gloo), ("NCCL_SOCKET_IFNAME", nccl or "", nccl)):
        if setting and not any(selects(pattern, interface) for interface in facts.interfaces):
            text = f"{name}={setting} names none of the interfaces {names(facts.interfaces)}. Correct or unset it."
            yield "fail", text
    if facts.interface is None and not gloo and not nccl:
        text = (
            f"no interface has the address {facts.address}, so gloo and NCCL may use the wrong one. Set "
            f"GLOO_SOCKET_IFNAME to one of {names(facts.interfaces)} before `ray start`."
        )
        yield "warn", text


def _infiniband_problems(facts: NodeFacts) -> Iterator[str]:
    ports = names(facts.infiniband)
    if facts.environment.get("NCCL_IB_DISABLE") not in (None, "0"):
        yield f"NCCL_IB_DISABLE keeps NCCL off InfiniBand ({ports}). Unset it."
    if not facts.has_ibverbs:
        yield f"NCCL cannot use InfiniBand ({ports}) without libibverbs. Install libibverbs1 and ibverbs-providers."
    if facts.locked_bytes >= 0:
        yield (
            f"NCCL may fail on InfiniBand ({ports}): locked memory is limited to {facts.locked_bytes >> 10:,} KiB. "
            "Call `ulimit -l unlimited` before `ray start`, or give containers --ulimit memlock=-1."
        )


def check_connections(cluster: Cluster) -> Iterator[Result]:
    """Nodes reach the store in which process groups form."""
    for node in cluster.nodes:
        if node.connect_problem is not None:
            yield "fail", f"{node.connect_problem}. Open all ports between the nodes.", node.name


def check_group(cluster: Cluster, backend: str) -> Iterator[Result]:
    """A process group over all nodes forms, and an all-reduce has the expected value on every rank."""
    results = cluster.groups.get(backend)
    if results is None:
        return
    size = len(results)
    expected = size * (size + 1) / 2
    for node, result in results.items():
        if isinstance(result, str):
            text = f"no process group: {result}. Open all ports between the nodes, and check their interfaces."
            yield "fail", text, node
        elif result.smallest != expected or result.largest != expected:
            text = (
                f"an all-reduce returned values from {result.smallest:g} to {result.largest:g} instead of "
                f"{expected:g}. Take this node out, and test its memory and devices."
            )
            yield "fail", text, node
    yield "ok", f"an all-reduce has the expected value, {expected:g} (nodes: {size})", ALL


def check_untried_gpus(cluster: Cluster) -> Iterator[Result]:
    """Every node with GPUs is in the group of NCCL."""
    tried = cluster.groups.get("nccl", {})
    with_gpus = [node for node, _ in cluster.known if node.num_gpus and node.connect_problem is None]
    skipped = [node for node in with_gpus if node.name not in tried]
    if skipped:
        why = "gloo fails" if any(node.idle_gpus for node in skipped) else "no idle GPU that torch can use"
        yield "warn", f"not tried on {names(node.name for node in skipped)}: {why}", ALL


CHECKS: tuple[tuple[str, Callable[[Cluster], Iterator[Result]]], ...] = (
    ("nodes", check_nodes),
    ("versions", check_versions),
    ("driver", check_driver),
    ("token", check_token),
    ("clock", check_clocks),
    ("storage", check_storage),
    ("data", check_data),
    ("GPUs", check_gpus),
    ("CPUs", check_cpus),
    ("/dev/shm", check_memory),
    ("open files", check_open_files),
    ("network", check_interfaces),
    ("gloo", check_connections),
    ("gloo", partial(check_group, backend="gloo")),
    ("nccl", partial(check_group, backend="nccl")),
    ("nccl", check_untried_gpus),
)
"""The name and the function of each check, in the order of the report."""
