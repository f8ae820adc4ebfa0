"""Checks of what nodes do together: storage, data, and process groups. Pure functions of the facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elastic_ddp.distributed.sockets import selects
from elastic_ddp.doctor.facts import Cluster, Finding, NodeFacts, Reduced, Verdict, differing, names, ok_unless


def check_storage(cluster: Cluster) -> list[Finding]:
    """Every node writes to and reads from the storage."""
    if cluster.storage is None:
        return []
    if cluster.storage_problem is not None:
        return [Finding("storage", "fail", cluster.storage_problem)]
    problems = [
        Finding("storage", "fail", node.storage_problem, node.name)
        for node in cluster.nodes
        if node.storage_problem is not None
    ]
    return ok_unless(problems, "storage", f"every node reads and writes {cluster.storage}")


def check_data(cluster: Cluster) -> list[Finding]:
    """Every node reads the data files that the driver lists."""
    if cluster.data is None:
        return []
    if cluster.data_problem is not None:
        return [Finding("data", "fail", cluster.data_problem)]
    problems = [
        Finding("data", "fail", node.data_problem, node.name) for node in cluster.nodes if node.data_problem is not None
    ]
    return ok_unless(problems, "data", f"every node reads {cluster.data} ({cluster.num_files} files tried)")


def check_interfaces(cluster: Cluster) -> list[Finding]:
    """gloo and NCCL have an interface, and NCCL uses InfiniBand where there is one."""
    nodes = [(node, facts) for node, facts in cluster.known if node.can_work]
    if not nodes:
        return []
    problems = []
    for node, facts in nodes:
        problems += [Finding("network", verdict, text, node.name) for verdict, text in _interface_problems(facts)]
        if facts.infiniband and node.num_gpus:
            problems += [Finding("network", "warn", text, node.name) for text in _infiniband_problems(facts)]
    settings = {
        node.name: ", ".join(f"{key}={value}" for key, value in facts.environment.items()) for node, facts in nodes
    }
    usual, others = differing(settings)
    for name, value in others.items():
        text = f"has the variables {value or 'none'}, and others {usual or 'none'}. Set the same on all nodes."
        problems.append(Finding("network", "warn", text, name))
    used = names(dict.fromkeys(facts.interface or "none" for _, facts in nodes))
    ports = sum(len(facts.infiniband) for _, facts in nodes)
    return ok_unless(problems, "network", f"interface {used}, InfiniBand ports: {ports or 'none'}")


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


def check_groups(cluster: Cluster) -> list[Finding]:
    """Process groups over all nodes form, and an all-reduce has the expected value on every rank."""
    findings = [
        Finding("gloo", "fail", f"{node.connect_problem}. Open all ports between the nodes.", node.name)
        for node in cluster.nodes
        if node.connect_problem is not None
    ]
    for backend, results in cluster.groups.items():
        findings += _check_group(backend, results)
    tried = cluster.groups.get("nccl", {})
    with_gpus = [node for node, _ in cluster.known if node.num_gpus and node.connect_problem is None]
    if skipped := [node for node in with_gpus if node.name not in tried]:
        why = "gloo fails" if any(node.idle_gpus for node in skipped) else "no idle GPU that torch can use"
        findings.append(Finding("nccl", "warn", f"not tried on {names(node.name for node in skipped)}: {why}"))
    return findings


def _check_group(backend: str, results: Mapping[str, Reduced | str]) -> list[Finding]:
    size = len(results)
    expected = size * (size + 1) / 2
    problems = []
    for node, result in results.items():
        if isinstance(result, str):
            text = f"no process group: {result}. Open all ports between the nodes, and check their interfaces."
        elif result.smallest != expected or result.largest != expected:
            text = (
                f"an all-reduce returned values from {result.smallest:g} to {result.largest:g} instead of "
                f"{expected:g}. Take this node out, and test its memory and devices."
            )
        else:
            continue
        problems.append(Finding(backend, "fail", text, node))
    return ok_unless(problems, backend, f"an all-reduce has the expected value, {expected:g} (nodes: {size})")
