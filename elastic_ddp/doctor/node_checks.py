"""Checks of single nodes: versions, driver, token, clock, resources, GPUs, limits. Pure functions of the facts."""

from __future__ import annotations

from elastic_ddp.doctor.facts import ALL, Cluster, Finding, Node, NodeFacts, Verdict, differing, names, ok_unless

MINIMUM_DRIVER = {12: 525, 13: 580}
"""The first branch of NVIDIA's driver that runs programs of each major version of CUDA, from NVIDIA's "CUDA
Compatibility"."""
OPEN_FILES = 65_536
LOGS = "/tmp/ray/session_latest/logs"
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 10.0
_DOCKERS_SHM_BYTES = 64 << 20
_MIB, _GIB = 1 << 20, 1 << 30


def check_nodes(cluster: Cluster) -> list[Finding]:
    """Every node runs a process, and some node has resources for workers."""
    problems = [
        Finding("nodes", "fail", f"no process reports facts: {node.problem} (logs: {LOGS} on the node)", node.name)
        for node in cluster.nodes
        if node.facts is None
    ]
    workers = [node for node in cluster.nodes if node.can_work]
    if not workers:
        text = "no node has CPUs or GPUs in Ray, so workers were not checked. Start worker nodes."
        problems.append(Finding("nodes", "warn", text))
    total = {name: sum(node.resources.get(name, 0.0) for node in workers) for name in ("CPU", "GPU")}
    amounts = ", ".join(f"{name}={amount:g}" for name, amount in total.items())
    return ok_unless(problems, "nodes", f"{len(cluster.nodes)} in Ray, {len(workers)} for workers ({amounts})")


def check_versions(cluster: Cluster) -> list[Finding]:
    """Python and packages are the same everywhere; CUDA, NCCL and the driver on all nodes with GPUs."""
    nodes = cluster.known
    if not nodes:
        return []
    packages = dict.fromkeys(name for _, facts in nodes for name in facts.versions)
    values = {name: {node.name: facts.versions.get(name, "missing") for node, facts in nodes} for name in packages}
    with_gpus = {node.name: facts for node, facts in nodes if node.num_gpus}
    if with_gpus:
        values |= {
            "torch's CUDA": {name: facts.cuda or "none" for name, facts in with_gpus.items()},
            "NCCL": {name: facts.nccl or "none" for name, facts in with_gpus.items()},
            "NVIDIA's driver": {name: facts.driver or "none" for name, facts in with_gpus.items()},
        }
    problems, common = [], []
    for name, of_nodes in values.items():
        usual, others = differing(of_nodes)
        common.append(f"{name} {usual}")
        verdict: Verdict = "warn" if name == "NVIDIA's driver" else "fail"
        same = f"{len(of_nodes) - len(others)} of {len(of_nodes)} nodes"
        for node, value in others.items():
            text = f"{name} is {value}, and {usual} on {same}. Install the same version on all nodes."
            problems.append(Finding("versions", verdict, text, node))
    return ok_unless(problems, "versions", ", ".join(common))


def check_driver(cluster: Cluster) -> list[Finding]:
    """NVIDIA's driver is new enough for the CUDA of torch."""
    nodes = [(node, facts) for node, facts in cluster.known if node.num_gpus]
    problems = []
    for node, facts in nodes:
        cuda, driver = facts.cuda, facts.driver
        if cuda is None:
            text = "torch is a build without CUDA. Install a CUDA build, such as the one of PyPI."
        elif driver is None:
            text = f"no NVIDIA driver responds: {facts.gpu_error}. Install {_needed(cuda)}."
        elif not _is_new_enough(cuda, driver, facts.driver_cuda):
            text = (
                f"NVIDIA's driver is {driver}, and torch is built for CUDA {cuda}. Install {_needed(cuda)}, or a torch "
                "build for an older CUDA."
            )
        else:
            continue
        problems.append(Finding("driver", "fail", text, node.name))
    if not nodes:
        return []
    _, facts = nodes[0]
    return ok_unless(
        problems, "driver", f"NVIDIA's driver {facts.driver} runs CUDA {facts.cuda}, for which torch is built"
    )


def _is_new_enough(cuda: str, driver: str, driver_cuda: int | None) -> bool:
    major = int(cuda.split(".")[0])
    if driver_cuda is not None:
        return driver_cuda // 1000 >= major
    return int(driver.split(".")[0]) >= MINIMUM_DRIVER.get(major, 0)


def _needed(cuda: str) -> str:
    branch = MINIMUM_DRIVER.get(int(cuda.split(".")[0]))
    return f"driver R{branch} or newer" if branch else f"a driver for CUDA {cuda} or newer"


def check_gpus(cluster: Cluster) -> list[Finding]:
    """The GPUs in Ray's resources exist, torch can use them, and those that Ray counts as free are not in use."""
    nodes = [(node, facts) for node, facts in cluster.known if node.num_gpus or facts.gpus]
    problems = []
    for node, facts in nodes:
        present, in_ray = len(facts.gpus), node.num_gpus
        if present < in_ray:
            why = f" ({facts.gpu_error})" if facts.gpu_error else ""
            text = (
                f"Ray has GPU={in_ray}, and {present} are present{why}. Repair the node, or start Ray with "
                f"--num-gpus={present}."
            )
            problems.append(Finding("GPUs", "fail", text, node.name))
        elif in_ray and facts.gpu_error is not None:
            problems.append(Finding("GPUs", "fail", f"{facts.gpu_error}. Repair torch or the driver.", node.name))
        elif present > in_ray > 0:
            text = f"Ray has GPU={in_ray}, and {present} are present. Start Ray with --num-gpus={present} to use all."
            problems.append(Finding("GPUs", "warn", text, node.name))
        problems += _check_use(node, facts)
    if not nodes:
        return [Finding("GPUs", "ok", "no node has GPUs")]
    models = dict.fromkeys(gpu.model for _, facts in nodes for gpu in facts.gpus)
    total = sum(node.num_gpus for node, _ in nodes)
    return ok_unless(problems, "GPUs", f"{total} in Ray, none in use by another process ({names(models)})")


def _check_use(node: Node, facts: NodeFacts) -> list[Finding]:
    used = [gpu for gpu in facts.gpus if not gpu.is_idle]
    if not used or not node.num_gpus:
        return []
    held = node.num_gpus - int(node.free.get("GPU", 0.0))
    which = ", ".join(f"GPU {gpu.index} ({gpu.used_mib:,} of {gpu.total_mib:,} MiB)" for gpu in used)
    if len(used) <= held:
        text = f"in use by Ray jobs, and not tried: {which}. Check again when no run is live."
        return [Finding("GPUs", "warn", text, node.name)]
    text = f"memory in use: {which}, but Ray has given out only {held}. End the processes that nvidia-smi lists."
    return [Finding("GPUs", "fail", text, node.name)]


def check_token(cluster: Cluster) -> list[Finding]:
    """Ray checks a token, and only its user can read the token's file."""
    problems = []
    nodes = cluster.known
    for node, facts in nodes:
        token = facts.token
        if token.auth_mode != "token":
            continue
        if token.path and token.permissions is None:
            text = f"{token.path} is missing, and RAY_AUTH_MODE=token. Copy the cluster's token to it, with mode 0600."
            problems.append(Finding("token", "fail", text, node.name))
        elif token.permissions is not None and token.permissions & 0o077:
            text = (
                f"{token.path} has mode {token.permissions:04o}, so other users can read it. Run chmod 600 {token.path}"
            )
            problems.append(Finding("token", "fail", text, node.name))
    without = [node.name for node, facts in nodes if facts.token.auth_mode != "token"]
    if without:
        text = (
            "Ray checks no token (RAY_AUTH_MODE is not token), so any process that reaches its ports can run code. "
            "Run `ray get-auth-token --generate`, and start Ray with RAY_AUTH_MODE=token on all nodes."
        )
        problems.append(Finding("token", "warn", text, ALL if len(without) == len(nodes) else names(without)))
    return ok_unless(problems, "token", "Ray checks a token, which only its user can read")


def check_clocks(cluster: Cluster) -> list[Finding]:
    """Clocks agree with that of the machine that runs the check."""
    problems, offsets = [], []
    for node, _ in cluster.known:
        clock = node.clock
        if clock is None:
            problems.append(Finding("clock", "fail", "the node did not answer with its time", node.name))
            continue
        offsets.append(abs(clock.offset_s))
        certain = abs(clock.offset_s) - clock.uncertainty_s
        if certain > CLOCK_WARN_S:
            text = (
                f"{clock.offset_s:+.1f} s off (±{clock.uncertainty_s:.3f} s). Deadlines of drains and signatures for "
                f"S3 need clocks within {CLOCK_WARN_S:g} s. Start chrony or systemd-timesyncd on the node."
            )
            problems.append(Finding("clock", "fail" if certain > CLOCK_FAIL_S else "warn", text, node.name))
    return ok_unless(problems, "clock", f"all within {max(offsets, default=0.0) * 1e3:.1f} ms of this machine's")


def check_cpus(cluster: Cluster) -> list[Finding]:
    """Ray's CPUs exist, and some are left for the data pipelines."""
    problems = []
    nodes = [(node, facts) for node, facts in cluster.known if node.can_work]
    for node, facts in nodes:
        cpus, usable = node.resources.get("CPU", 0.0), facts.usable_cpus
        workers = node.num_gpus or 1
        if cpus > usable + 0.5:
            text = (
                f"Ray has CPU={cpus:g}, and its processes may use {usable:g}. Start Ray with --num-cpus={int(usable)}."
            )
            problems.append(Finding("CPUs", "warn", text, node.name))
        if cpus < 2 * workers:
            text = (
                f"CPU={cpus:g} for {workers} {'workers' if workers > 1 else 'worker'}. Each needs one for itself and "
                "one for its data. Use larger nodes, or data.num_cpus_per_task=0."
            )
            problems.append(Finding("CPUs", "warn", text, node.name))
    if not nodes:
        return []
    fewest = min(node.resources.get("CPU", 0.0) / (node.num_gpus or 1) for node, _ in nodes)
    per = "GPU" if any(node.num_gpus for node, _ in nodes) else "node"
    return ok_unless(problems, "CPUs", f"at least {fewest:g} for each {per}")


def check_mirrors(cluster: Cluster) -> list[Finding]:
    """No node can have more than half of the workers, if there are several."""
    nodes = [node for node in cluster.nodes if node.can_work]
    kind = "GPU" if any(node.resources.get("GPU", 0.0) for node in nodes) else "CPU"
    amounts = {node.name: node.resources.get(kind, 0.0) for node in nodes}
    largest, total = max(amounts, key=lambda name: amounts[name], default=""), sum(amounts.values())
    if len(nodes) < 2 or 2 * amounts[largest] <= total:
        return []
    text = (
        f'it has {amounts[largest]:g} of {total:g} {kind}s. With strategy = "fsdp", a shard and its mirror may both be '
        "on it; if it dies, the run then resumes from its newest commit. Use nodes of equal size."
    )
    return [Finding("mirrors", "ok", text, largest)]


def check_memory(cluster: Cluster) -> list[Finding]:
    """/dev/shm holds Ray's object store."""
    problems, sizes = [], []
    for node, facts in cluster.known:
        shm, needed = facts.shm_bytes, node.resources.get("object_store_memory", 0.0)
        sizes.append(shm)
        if shm < max(needed, 2 * _DOCKERS_SHM_BYTES):
            text = (
                f"{shm / _MIB:,.0f} MiB, and Ray's object store is {needed / _MIB:,.0f} MiB. Give containers more: "
                "`docker run --shm-size`, or on Kubernetes an emptyDir with medium Memory at /dev/shm."
            )
            verdict: Verdict = "fail" if shm <= _DOCKERS_SHM_BYTES else "warn"
            problems.append(Finding("/dev/shm", verdict, text, node.name))
    return ok_unless(problems, "/dev/shm", f"at least {min(sizes, default=0) / _GIB:.1f} GiB")


def check_open_files(cluster: Cluster) -> list[Finding]:
    """Ray's processes may open enough files and sockets."""
    problems = []
    for node, facts in cluster.known:
        if 0 <= facts.open_files < OPEN_FILES:
            text = (
                f"the limit is {facts.open_files:,}, and a large run needs {OPEN_FILES:,}. Call "
                f"`ulimit -n {OPEN_FILES}` before `ray start`, or set LimitNOFILE={OPEN_FILES} in its systemd unit."
            )
            problems.append(Finding("open files", "warn", text, node.name))
    return ok_unless(problems, "open files", f"the limit is at least {OPEN_FILES:,} on all nodes")
