"""Profiles on a GPU: kernels in the trace, memory snapshots, and a run that one does not disturb."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import elastic_ddp as ed
from elastic_ddp.rendezvous.messages import MemberRequest, ProfileRequest
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.trace_recording import TraceRecording
from tests.inside_run import generation_of, rendezvous_client_of
from tests.integration import jobs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

FOLDER = "profiles/20261127T101500Z"


def test_a_recording_on_a_gpu_has_its_kernels_and_a_memory_snapshot(tmp_path: Path) -> None:
    device = torch.device("cuda")
    recording = TraceRecording(device, memory=True)
    matrix = torch.ones(2048, 2048, device=device)
    recording.start()
    for _ in range(3):
        matrix = matrix @ matrix / 2048
    recording.stop()
    recording.export()
    figures = recording.store(Storage(tmp_path), "profiles/rank-0", {"num_steps": 3})
    recording.close()
    assert figures["device"] == "gpu" and 0 < figures["compute_s"] <= figures["window_s"]
    assert figures["operators"][0] | {"seconds": 0} == {"name": "aten::mm", "seconds": 0, "calls": 3}
    assert {"aten::mm", "aten::div"} <= {each["name"] for each in figures["memory"]["operators"]}
    assert figures["peak_memory_bytes"] >= figures["memory"]["peak_bytes"] >= 2 * 2048 * 2048 * 4
    assert (tmp_path / figures["snapshot"]).stat().st_size > 0
    events = json.loads(gzip.decompress((tmp_path / figures["trace"]).read_bytes()))["traceEvents"]
    assert [event for event in events if event.get("cat") == "kernel"]
    again = TraceRecording(device, memory=True)
    again.start()
    again.cancel()
    again.close()


def ask(run: ed.Run, at: int) -> None:
    """A fault that asks for a profile in step 5."""
    if at == 5:
        generation = generation_of(run)
        assert generation is not None
        fields: dict[str, Any] = {
            "generation": generation.number,
            "ranks": tuple(range(run.world_size)),
            "folder": FOLDER,
        }
        profile = ProfileRequest(num_steps=3, memory=True, **fields)
        rendezvous_client_of(run).profile_requests.put(MemberRequest(number=1, profile=profile))


def test_a_profiled_run_on_a_gpu_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    jobs.write_rows(str(tmp_path / "data"))
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="WARNING")
    try:
        done = {}
        for name, workers, fault in (("undisturbed", 1, None), ("alone", 1, ask), ("shared", 2, ask)):
            resources = {"CPU": 1.0, "GPU": 1.0 / workers}
            config = jobs.settings(str(tmp_path / "runs"), name, workers, resources_per_worker=resources)
            trainer = ed.ElasticTrainer(jobs.make_train(fault), str(tmp_path / "data"), config, transform=jobs.jitter)
            done[name] = trainer.fit().summary
    finally:
        ray.shutdown()
    for name, workers in (("alone", 1), ("shared", 2)):
        assert jobs.same_bits(done[name], done["undisturbed"])
        for rank in range(workers):
            figures = json.loads((tmp_path / "runs" / name / FOLDER / f"rank-{rank}-figures.json").read_text())
            assert (figures["device"], figures["first_step"], figures["num_steps"]) == ("gpu", 7, 3)
            assert figures["compute_s"] > 0 and (figures["communication_s"] > 0) == (workers > 1)
            assert (tmp_path / "runs" / name / figures["snapshot"]).stat().st_size > 0
