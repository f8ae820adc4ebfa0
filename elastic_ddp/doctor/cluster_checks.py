"""Checks of what nodes do together: storage, data, process groups, links, speeds. Pure functions of the facts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from elastic_ddp.distributed.sockets import selects
from elastic_ddp.doctor.facts import Cluster, Group, Link, Reduced, can_work, idle_gpus
from elastic_ddp.doctor.findings import Finding, differing, names, ok_unless, slow
from elastic_ddp.doctor.node_checks import Known, known

DEVICE_WARN, DEVICE_FAIL = 0.8, 0.5
"""Parts of the upper quartile. A step waits for the slowest device."""
LINK_WARN, LINK_FAIL = 0.5, 0.25
STORAGE_WARN = 0.5
BACKENDS = ("gloo", "nccl")
MIN_MIB_PER_S, MAX_LATENCY_MS = 100.0, 5.0
"""About 1 Gbit/s, and more than a data center is wide."""


def check_storage(cluster: Cluster) -> list[Finding]:
    """Every node writes to and reads from the storage."""
    if cluster.storage is None:
        return []
    if cluster.storage_problem is not None:
        return [Finding("storage", "fail", cluster.storage_problem)]
    problems = [
        Finding("storage", "fail", text, node.name)
        for node in cluster.nodes
        if (text := node.storage_problem or node.failures.get("storage")) is not None
    ]
    measured = {node.name: node.throughput for node in cluster.nodes if node.throughput is not None}
    for verb in ("write", "read"):
        speeds = {name: float(getattr(throughput, verb)) for name, throughput in measured.items()}
        for name, ratio in slow(speeds, STORAGE_WARN).items():
            text = f"{verb}s {speeds[name]:,.0f} MiB/s, {ratio:.0%} of the upper quartile. Check its network and mount."
            problems.append(Finding("storage", "warn", text, name))
    if not measured:
        return problems
    write, read = (sum(getattr(each, verb) for each in measured.values()) for verb in ("write", "read"))
    text = f"every node reads and writes {cluster.storage} (together {write:,.0f} MiB/s to write, {read:,.0f} to read)"
    return ok_unless(problems, "storage", text)


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
    nodes = [each for each in known(cluster) if can_work(each.node)]
    if not nodes:
        return []
    problems = [finding for each in nodes for finding in (*_interface_problems(each), *_infiniband_problems(each))]
    settings = {
        each.name: ", ".join(f"{key}={value}" for key, value in each.facts.environment.items()) for each in nodes
    }
    usual, others = differing(settings)
    for name, value in others.items():
        text = f"has the variables {value or 'none'}, and others {usual or 'none'}. Set the same on all nodes."
        problems.append(Finding("network", "warn", text, name))
    used = names(dict.fromkeys(each.facts.interface or "none" for each in nodes))
    ports = sum(len(each.facts.infiniband) for each in nodes)
    return ok_unless(problems, "network", f"interface {used}, InfiniBand ports: {ports or 'none'}")


def _interface_problems(each: Known) -> Iterator[Finding]:
    facts = each.facts
    gloo, nccl = (facts.environment.get(f"{backend}_SOCKET_IFNAME") for backend in ("GLOO", "NCCL"))
    for name, pattern, setting in (("GLOO_SOCKET_IFNAME", f"={gloo}", gloo), ("NCCL_SOCKET_IFNAME", nccl or "", nccl)):
        if setting and not any(selects(pattern, interface) for interface in facts.interfaces):
            text = f"{name}={setting} names none of the interfaces {names(facts.interfaces)}. Correct or unset it."
            yield Finding("network", "fail", text, each.name)
    if facts.interface is None and not gloo and not nccl:
        text = (
            f"no interface has the address {facts.address}, so gloo and NCCL may use the wrong "
            f"one. Set GLOO_SOCKET_IFNAME to one of {names(facts.interfaces)} before `ray start`."
        )
        yield Finding("network", "warn", text, each.name)


def _infiniband_problems(each: Known) -> Iterator[Finding]:
    facts = each.facts
    if not facts.infiniband or not each.num_gpus:
        return
    ports = names(facts.infiniband)
    if facts.environment.get("NCCL_IB_DISABLE") not in (None, "0"):
        text = f"NCCL_IB_DISABLE keeps NCCL off InfiniBand ({ports}). Unset it."
        yield Finding("network", "warn", text, each.name)
    if not facts.has_ibverbs:
        text = f"NCCL cannot use InfiniBand ({ports}) without libibverbs. Install libibverbs1 and ibverbs-providers."
        yield Finding("network", "warn", text, each.name)
    if facts.locked_bytes is not None:
        text = (
            f"NCCL may fail on InfiniBand ({ports}): locked memory is limited to {facts.locked_bytes >> 10:,} KiB. "
            "Call `ulimit -l unlimited` before `ray start`, or give containers --ulimit memlock=-1."
        )
        yield Finding("network", "warn", text, each.name)


def check_groups(cluster: Cluster) -> list[Finding]:
    """Process groups over all nodes form, and an all-reduce has the expected value on every rank."""
    unconnected = [
        Finding(backend, "fail", f"{node.failures[backend]}. Open all ports between the nodes.", node.name)
        for node in cluster.nodes
        for backend in BACKENDS
        if backend in node.failures
    ]
    return [*unconnected, *(each for backend, group in cluster.groups.items() for each in _check_group(backend, group))]


def _check_group(backend: str, group: Group) -> list[Finding]:
    size = len(group.nodes)
    expected = size * (size + 1) / 2
    problems = []
    for node, result in zip(group.nodes, group.results, strict=True):
        if isinstance(result, Reduced) and result.smallest == result.largest == expected:
            continue
        if isinstance(result, Reduced):
            text = (
                f"an all-reduce returned values from {result.smallest:g} to {result.largest:g} instead of "
                f"{expected:g}. Take this node out, and test its memory and devices."
            )
        else:
            text = f"no process group: {result}. Open all ports between the nodes, and check their interfaces."
        problems.append(Finding(backend, "fail", text, node))
    return ok_unless(problems, backend, f"an all-reduce has the expected value, {expected:g} (nodes: {size})")


def check_links(cluster: Cluster) -> list[Finding]:
    """No link between two nodes is much slower than the others."""
    problems = [
        Finding("links", "fail", f"no measurement: {node.failures['links']}", node.name)
        for node in cluster.nodes
        if "links" in node.failures
    ]
    by_backend: dict[str, list[Link]] = defaultdict(list)
    for link in cluster.links:
        by_backend[link.backend].append(link)
    oks = []
    for backend, links in by_backend.items():
        problems += _slow_links(backend, links)
        speeds = [link.mib_per_s for link in links]
        oks.append(
            f"{backend}: {min(speeds):,.0f} to {max(speeds):,.0f} MiB/s, at most "
            f"{max(link.latency_ms for link in links):.2f} ms one way"
        )
    return ok_unless(problems, "links", "; ".join(oks)) if oks or problems else []


def _slow_links(backend: str, links: list[Link]) -> Iterator[Finding]:
    by_name = {f"{link.nodes[0]} - {link.nodes[1]}": link for link in links}
    ratios = slow({name: link.mib_per_s for name, link in by_name.items()}, LINK_WARN)
    culprit = _common_node([by_name[name] for name in ratios], links)
    if culprit is not None:
        worst = min(ratios.values())
        text = (
            f"{backend}: all its links are slow, the slowest at {worst:.0%} of the upper quartile. Check its cable, "
            "switch port and placement."
        )
        yield Finding("links", "fail" if worst < LINK_FAIL else "warn", text, culprit)
    for name, link in by_name.items():
        measured = f"{backend}: {link.mib_per_s:,.0f} MiB/s, {link.latency_ms:.2f} ms"
        if name in ratios and culprit is None:
            text = f"{measured}, {ratios[name]:.0%} of the upper quartile. Check the path between the two nodes."
            yield Finding("links", "fail" if ratios[name] < LINK_FAIL else "warn", text, name)
        elif name not in ratios and (link.mib_per_s < MIN_MIB_PER_S or link.latency_ms > MAX_LATENCY_MS):
            text = (
                f"{measured}. Gradients need more than {MIN_MIB_PER_S:g} MiB/s and less than {MAX_LATENCY_MS:g} ms: "
                "place the nodes in one zone."
            )
            yield Finding("links", "warn", text, name)


def _common_node(slow_links: list[Link], links: list[Link]) -> str | None:
    """Returns the node whose links are the slow ones, all of them and no others; None if there is no such node."""
    if len(slow_links) < 2:
        return None
    for node in set(slow_links[0].nodes):
        if [link for link in links if node in link.nodes] == slow_links:
            return node
    return None


def check_speeds(cluster: Cluster) -> list[Finding]:
    """Devices of one model are equally fast."""
    problems = [
        Finding("speed", "fail", f"a matrix product failed: {node.failures['speed']}", node.name)
        for node in cluster.nodes
        if "speed" in node.failures
    ]
    by_model: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for node in cluster.nodes:
        for speed in node.speeds:
            by_model[speed.model][node.name, speed.device] = speed.tflops
    oks = []
    for model, speeds in by_model.items():
        labels = {f"{device} of {name}": (name, device) for name, device in speeds}
        for label, ratio in slow({label: speeds[key] for label, key in labels.items()}, DEVICE_WARN).items():
            name, device = labels[label]
            text = (
                f"{device} ({model}) makes {_tflops(speeds[name, device])}, {ratio:.0%} of the upper quartile. Every "
                "step waits for it. Check its temperature, clocks and other processes, or leave the node out."
            )
            problems.append(Finding("speed", "fail" if ratio < DEVICE_FAIL else "warn", text, name))
        oks.append(f"{len(speeds)} x {model or 'CPU'}, {_tflops(min(speeds.values()))} or more each")
    return ok_unless(problems, "speed", "; ".join(oks)) if oks or problems else []


def _tflops(value: float) -> str:
    return f"{value:.1f} TFLOP/s" if value >= 1 else f"{value * 1e3:.0f} GFLOP/s"


def check_unmeasured(cluster: Cluster) -> list[Finding]:
    """Names the nodes with GPUs in Ray on which NCCL was not measured."""
    measured = cluster.groups["nccl"].nodes if "nccl" in cluster.groups else ()
    with_gpus = {each.name: each for each in known(cluster) if each.num_gpus}
    skipped = [name for name, each in with_gpus.items() if name not in measured and "nccl" not in each.node.failures]
    if not skipped:
        return []
    why = "gloo fails" if any(idle_gpus(with_gpus[name].node) for name in skipped) else "no idle GPU that torch can use"
    return [Finding("nccl", "warn", f"not measured on {names(skipped)}: {why}")]
