"""Helpers for crafted commits: valid checksums, and contents that no run writes."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import traceback
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from elastic_ddp.checkpoint import Commit
from elastic_ddp.checkpoint.manifest import Skeleton, StoredBlock, StoredObject, StoredTensor, attempt_prefix
from elastic_ddp.checkpoint.parts import Part, TensorKind, assemble
from elastic_ddp.checkpoint.planning import plan_blocks
from elastic_ddp.checkpoint.staging import BlockWriter
from elastic_ddp.storage.storage import Storage
from tests.ranks import PROCESSES

NAMES_NOTHING = json.dumps({"model": {"kind": "dict", "value": []}}).encode()


def plant(storage: Storage, step: int, skeleton: bytes, tensors: dict[str, torch.Tensor]) -> Commit:
    """Writes a commit of this skeleton and of tensors, by component and path."""
    prefix = attempt_prefix(step, f"{step:032x}")
    writer = BlockWriter()
    writer.stage(plan_blocks(tensors), tensors)
    part = writer.write(storage, prefix, "0")
    objects, stored = assemble([part], kinds_in([part]))
    return _put(storage, step, skeleton, objects, stored)


def kinds_in(parts: Iterable[Part]) -> dict[str, TensorKind]:
    """Returns dtype and shape of the tensors that ranks have written, by name."""
    return {block.tensor: (block.dtype, block.shape) for part in parts for block in part.blocks}


def plant_sparse(folder: Path, step: int, tensors: dict[str, tuple[int, int]]) -> Commit:
    """Writes a commit of sparse files of zeros.

    Args:
        tensors: the number of blocks and the bytes of each, by name; these may exceed the limit of a block.
    """
    prefix = attempt_prefix(step, f"{step:032x}")
    objects, stored = [], {}
    for place, (name, (count, size)) in enumerate(tensors.items()):
        key = f"{prefix}/0-{place}.bin"
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        with (folder / key).open("wb") as file:
            os.truncate(file.fileno(), count * size)
        objects.append(StoredObject(key=key, size=count * size))
        crc32 = zlib.crc32(bytes(size)) if size < 2**30 else 0
        blocks = tuple(
            StoredBlock(offsets=(n * size,), sizes=(size,), object=place, start=n * size, crc32=crc32)
            for n in range(count)
        )
        stored[name] = StoredTensor.model_construct(dtype="uint8", shape=(count * size,), blocks=blocks)
    return _put(Storage(folder), step, NAMES_NOTHING, tuple(objects), stored)


def _put(
    storage: Storage, step: int, skeleton: bytes, objects: tuple[StoredObject, ...], tensors: dict[str, StoredTensor]
) -> Commit:
    attempt = f"{step:032x}"
    key = f"{attempt_prefix(step, attempt)}/state.json"
    storage.write(key, skeleton)
    state = Skeleton(key=key, size=len(skeleton), crc32=zlib.crc32(skeleton))
    commit = Commit.model_construct(
        step=step, attempt=attempt, state=state, objects=objects, tensors=tensors, record={}
    )
    storage.write(commit.key, commit.to_bytes())
    return commit


def signed(body: dict[str, Any]) -> bytes:
    """Returns a manifest of this body with a valid checksum."""
    body = {name: value for name, value in body.items() if name != "sha256"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}).encode()


def in_little_memory(body: Callable[..., Any], *args: Any, more_bytes: int) -> tuple[Any, int]:
    """Returns the result of `body(*args)` in a process with a memory limit, and the bytes that it used.

    Args:
        more_bytes: what the process may allocate beyond what it starts with.
    """
    results = PROCESSES.SimpleQueue()
    process = PROCESSES.Process(target=_in_little_memory, args=(body, args, more_bytes, results), daemon=True)
    process.start()
    value, used, error = results.get()
    process.join()
    assert error is None, error
    return value, used


def limit_memory(more_bytes: int) -> None:
    """Limits this process to so many more bytes of memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _in_little_memory(body: Callable[..., Any], args: tuple[Any, ...], more_bytes: int, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        limit_memory(more_bytes)
        value = body(*args)
        used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        results.put((value, used, None))
    except BaseException:
        results.put((None, 0, traceback.format_exc()))
