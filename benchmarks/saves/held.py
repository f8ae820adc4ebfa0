"""How long a save blocks a training step: two ranks of a Ray Train job, on which the ways to save alternate.

A step is blocked from a barrier of all ranks before the save to one after it. Background work of a save ends on all
ranks before the next save begins.

    copy          this rank's share of the state into allocated memory, and nothing else
    ours          a save of elastic_ddp
    dcp           torch.distributed.checkpoint's async_save, as documented
    dcp, cached   the same with staging memory that is reused
    ray           rank 0's torch.save into a folder, and ray.train.report of that
    ray, async    the same with asynchronous upload
    torch         rank 0's torch.save to the storage
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils._pytree import tree_map

from elastic_ddp.storage.storage import Storage
from saves.state import make_state, num_bytes, tensors_of
from saves.stores import OurSaves
from saves.turns import turns

WORLD_SIZE = 2


class Side(Protocol):
    """A way to save."""

    def save(self, step: int) -> None:
        """The part of a save that blocks the step."""

    def wait(self) -> None:
        """Waits for the background work of the save."""


class Copy:
    def __init__(self, state: dict[str, Any]) -> None:
        self._share = tensors_of(state)[dist.get_rank() :: WORLD_SIZE]
        pinned = self._share[0].is_cuda
        self._copies = [torch.zeros_like(tensor, device="cpu", pin_memory=pinned) for tensor in self._share]

    def save(self, step: int) -> None:
        for copy, tensor in zip(self._copies, self._share, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if self._share[0].is_cuda:
            torch.cuda.synchronize()

    def wait(self) -> None:
        pass


class Ours:
    def __init__(self, state: dict[str, Any], uri: str) -> None:
        self._state = state
        address: list[Any] = [None]
        if dist.get_rank() == 0:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            address = [("127.0.0.1", self._store.port)]
        dist.broadcast_object_list(address)
        self._saves = OurSaves(Storage(f"{uri}/ours"), dist.get_rank(), WORLD_SIZE, address[0])

    def save(self, step: int) -> None:
        self._saves.begin(self._state, step)

    def wait(self) -> None:
        self._saves.wait()
        self._saves.wait_for_cleanup()


class Dcp:
    def __init__(self, state: dict[str, Any], uri: str, *, is_cached: bool) -> None:
        self._state, self._folder = state, f"{uri}/dcp-{is_cached}"
        self._group = dist.new_group(backend="gloo")
        if uri.startswith("s3://"):
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            self._writer: Any = FsspecWriter(self._folder, thread_count=2)
        else:
            self._writer = dcp.FileSystemWriter(self._folder, thread_count=2)
        on_gpu = tensors_of(state)[0].is_cuda
        plain = StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
        self._stager = DefaultStager(plain) if is_cached else None
        self._future: Any = None

    def save(self, step: int) -> None:
        self._future = dcp.async_save(
            self._state,
            checkpoint_id=self._folder,
            storage_writer=self._writer,
            async_stager=self._stager,
            process_group=self._group,
        )

    def wait(self) -> None:
        self._future.result()


class Torch:
    def __init__(self, state: dict[str, Any], uri: str) -> None:
        self._state, self._path = state, f"{uri}/torch.pt"

    def save(self, step: int) -> None:
        if dist.get_rank() == 0:
            import fsspec

            with fsspec.open(self._path, "wb") as file:
                torch.save(self._state, file)

    def wait(self) -> None:
        if dist.get_rank() == 0 and not self._path.startswith("s3://"):
            sync(Path(self._path))


class Ray:
    def __init__(self, state: dict[str, Any], storage: str, mode: CheckpointUploadMode) -> None:
        self._state, self._storage, self._mode, self._folder = state, storage, mode, ""

    def save(self, step: int) -> None:
        checkpoint = None
        if dist.get_rank() == 0:
            self._folder = tempfile.mkdtemp()
            torch.save(self._state, f"{self._folder}/state.pt")
            checkpoint = Checkpoint.from_directory(self._folder)
        ray.train.report(
            {},
            checkpoint=checkpoint,
            checkpoint_dir_name=f"{self._mode.value}-{step}",
            checkpoint_upload_mode=self._mode,
            delete_local_checkpoint_after_upload=False,
        )

    def wait(self) -> None:
        ray.train.get_all_reported_checkpoints()  # waits for uploads
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder)
            if not self._storage.startswith("s3://"):
                for path in Path(self._storage).rglob("*.pt"):
                    sync(path)


def sync(path: Path) -> None:
    """Writes a file to the disk now, and not while another side is measured."""
    with suppress(FileNotFoundError):  # Ray has removed it
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sides(state: dict[str, Any], uri: str, without: list[str]) -> dict[str, Side]:
    makers: dict[str, Callable[[], Side]] = {
        "copy": lambda: Copy(state),
        "ours": lambda: Ours(state, uri),
        "dcp": lambda: Dcp(state, uri, is_cached=False),
        "dcp, cached": lambda: Dcp(state, uri, is_cached=True),
        "ray": lambda: Ray(state, f"{uri}/ray", CheckpointUploadMode.SYNC),
        "ray, async": lambda: Ray(state, f"{uri}/ray", CheckpointUploadMode.ASYNC),
        "torch": lambda: Torch(state, uri),
    }
    return {name: make() for name, make in makers.items() if name not in without}


def take_turns(settings: dict[str, Any]) -> None:
    """The training function. Rank 0 writes how long each side blocked a step, by round."""
    torch.set_num_threads(1)
    state = make_state(settings["size_mib"], settings["tensor_kib"])
    if settings["gpu"]:
        state = tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, state)
    all_sides = sides(state, settings["uri"], settings["without"])
    held: dict[str, list[float]] = {name: [] for name in all_sides}
    for step, name in turns([*all_sides], settings["rounds"] + 1):
        if settings["gpu"]:
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        all_sides[name].save(step)
        dist.barrier()
        held[name].append(time.perf_counter() - begin)
        all_sides[name].wait()
        dist.barrier()
    if dist.get_rank() == 0:
        kept = {name: seconds[1:] for name, seconds in held.items()}  # the first round allocates memory
        Path(settings["output"]).write_text(json.dumps({"held_s": kept, "state_bytes": num_bytes(state)}))


def measure(uri: str, *, size_mib: int, tensor_kib: int, rounds: int, gpu: bool, without: list[str]) -> dict[str, Any]:
    """Returns the blocked seconds by side and round, and the size of the state.

    Args:
        uri: the folder for commits.
        size_mib: of the state.
        tensor_kib: of its tensors.
        rounds: of each side.
        gpu: put the state on a GPU that the ranks share.
        without: sides to skip.
    """
    share = {"GPU": 1 / WORLD_SIZE} if gpu else {}
    filesystem, path = Storage(uri).at("ray").filesystem_and_path()
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/held.json"
        TorchTrainer(
            take_turns,
            train_loop_config={
                "uri": uri,
                "size_mib": size_mib,
                "tensor_kib": tensor_kib,
                "rounds": rounds,
                "gpu": gpu,
                "without": without,
                "output": output,
            },
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=WORLD_SIZE, resources_per_worker={"CPU": 1, **share}, use_gpu=gpu),
            run_config=RunConfig(
                name="held",
                storage_path=path,
                storage_filesystem=filesystem,
                checkpoint_config=CheckpointConfig(num_to_keep=1),
            ),
        ).fit()
        return json.loads(Path(output).read_text())
