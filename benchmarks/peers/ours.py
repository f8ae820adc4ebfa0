"""elastic_ddp, with its defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import torch

from peers import workload
from peers.ray_cluster import RaySystem
from peers.system import About, module
from peers.workload import FEATURES, GLOBAL_BATCH_SIZE, StepLog, loss_fn, make_model, wait

NAME = "elasticity"
ROWS = 131_072


class ElasticDDP(RaySystem):
    about = About(
        name="elastic_ddp",
        settings="defaults; rows from Parquet through Ray Data",
        not_kept="nothing: the same batches, each sample once, the same bits at any number of workers",
    )

    standby_workers: ClassVar[int] = 0

    def start_driver(self, address: str) -> None:
        write_dataset(self.folder / "data")
        self._address = address
        self.spawn(module("ours", str(self.folder), str(self.standby_workers)), RAY_ADDRESS=address)

    def resize(self, num_workers: int) -> None:
        self._command("resize", NAME, str(num_workers))

    def standbys(self) -> list[int]:
        """Returns the process ids of standbys that are ready."""
        [status] = json.loads(self._command("status", NAME, "--json"))
        return [standby["pid"] for standby in status["standbys"]]

    def _command(self, *arguments: str) -> bytes:
        command = [sys.executable, "-m", "elastic_ddp.cli.main", *arguments]
        environment = {**os.environ, "RAY_ADDRESS": self._address}
        return subprocess.run(command, check=True, capture_output=True, env=environment).stdout


def write_dataset(folder: Path) -> None:
    """Writes 128 MiB: more than pipelines prefetch, so that they are active when membership changes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    values = np.random.default_rng(0).normal(size=(ROWS * FEATURES,)).astype(np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values), FEATURES)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=1024)


def run(folder: str, standby_workers: str) -> None:
    from ray import cloudpickle

    import elastic_ddp as ed

    cloudpickle.register_pickle_by_value(workload)  # nodes cannot import this folder

    def train(run: ed.Run) -> None:
        model = run.prepare(make_model())
        run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
        log = StepLog(folder)
        for step in run.steps():
            with step:
                wait()
                for batch in step.micro_batches():
                    step.backward(loss_fn(model, batch["x"]))
                step.optimize()
            if step.outcome.is_done:
                log.step_ended(step.index, rank=run.rank, world_size=run.world_size)

    config = ed.RunConfig(
        name=NAME,
        storage=folder,
        steps=10**6,
        global_batch_size=GLOBAL_BATCH_SIZE,
        micro_batch_size=GLOBAL_BATCH_SIZE // 4,
        max_workers=3,
        standby_workers=int(standby_workers),
    )
    ed.ElasticTrainer(train, f"{folder}/data", config).fit()


if __name__ == "__main__":
    run(*sys.argv[1:])
