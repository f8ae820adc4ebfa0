"""docs/guides/slurm.md and cluster/slurm/train.sbatch on a real Slurm, on machines made of namespaces.

`make hosts` runs it; `make test` runs one test. In most tests `ray` and the driver are fakes that note their calls, so
a job takes seconds. The last two run Ray.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from ray.scripts.scripts import start as start_command

from tests.chaos.machines import SHARED, Command, give_to_user, missing, site, until
from tests.chaos.onprem import Cluster, Run, marker, program, world_sizes
from tests.chaos.slurm import CLONE, PROGRAMS, Slurm, as_written, job_id
from tests.integration import jobs

WHY_NOT = missing(PROGRAMS)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

FAKES = {
    "ray": r"""
        echo "$SLURM_NODEID $RAY_AUTH_MODE $(cat "$RAY_AUTH_TOKEN_PATH") $*" >>"$CALLS/ray"
        case "$1 $2" in
            "start --head") [ ! -e "$CALLS/no-head" ] || exit 1; touch "$CALLS/head" ;;
            "health-check "*) exec test -e "$CALLS/head" ;;
            *) if [ "$SLURM_NODEID" = 2 ] && mkdir "$CALLS/node-2-failed" 2>/dev/null; then exit 1; fi ;;
        esac
        exec sleep 600""",
    "python": r"""
        case "$*" in
            *token_hex*) echo secret ;;
            *get_node_ip*) echo 198.51.100.130 ;;
            *)
                trap 'echo committed >>"$CALLS/commits"; kill $!; exit 0' TERM
                sleep 600 &
                echo "$RAY_ADDRESS $ELASTIC_DDP_STORAGE $*" >>"$CALLS/drivers"
                case "$*" in *fails.py*) kill $!; exit 7 ;; *finishes.py*) kill $!; exit 0 ;; esac
                wait ;;
        esac""",
    "sleep": r"""if [ "$1" = 600 ]; then exec SLEEP 600; fi; exec SLEEP 0.05""",
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with site(tmp_path_factory.mktemp("slurm") / "site", 3) as machines:
        slurm = Slurm(machines)
        programs = machines.shared / "fakes/bin"
        programs.mkdir(parents=True)
        (programs / "activate").write_text(f'PATH="{SHARED}/fakes/bin:$PATH"\n')
        for name, body in FAKES.items():
            code = body.replace("SLEEP", str(shutil.which("sleep")))
            (programs / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
            (programs / name).chmod(0o755)
        give_to_user(machines.shared / "fakes")
        yield slurm


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.site.boot(*(machine for machine in slurm.site.machines if not machine.is_on))
    slurm.type("scancel --user=$(id -un)")
    slurm.wait_until_idle()


class FakeJob:
    """A job with the fakes.

    Attributes:
        sbatch: `sbatch --wait`.
        id: the job's id.
        calls: the folder with what the fakes note.
    """

    def __init__(self, slurm: Slurm, number: int, arguments: str, has_head: bool = True, **environment: str) -> None:
        self.calls = slurm.site.shared / f"calls-{number}"
        self.calls.mkdir()
        if not has_head:
            (self.calls / "no-head").touch()
        give_to_user(self.calls)
        environment |= {"VENV": f"{SHARED}/fakes", "CALLS": f"{SHARED}/{self.calls.name}"}
        self.sbatch: Command = slurm.submit(arguments, **environment)
        self.id = job_id(self.sbatch)

    def wait_for(self, name: str, *texts: str) -> str:
        """Waits until a fake has noted these texts. Returns all that it has noted."""
        file = self.calls / name
        until(lambda: file.exists() and all(text in file.read_text() for text in texts), f"{name} lacks {texts}")
        return file.read_text()


Start = Callable[..., FakeJob]


@pytest.fixture(scope="module")
def start(slurm: Slurm) -> Start:
    numbers = itertools.count()
    return lambda arguments, **options: FakeJob(slurm, next(numbers), arguments, **options)


def test_the_head_is_on_the_first_node_the_others_join_it_and_a_stop_commits(slurm: Slurm, start: Start) -> None:
    job = start("train.py --name 'a b'")
    assert job.wait_for("drivers", "\n") == f"198.51.100.130:6379 {CLONE}/runs train.py --name a b\n"
    joins = [f"{node} token secret start --address=198.51.100.130:6379 --num-cpus=1 --block" for node in (1, 2)]
    calls = job.wait_for("ray", *joins).splitlines()
    [head] = [call for call in calls if "--head" in call]
    assert head.startswith("0 token secret start --head --port=6379 --node-ip-address=198.51.100.130 ")
    assert head.endswith("--block")
    for call in (head, *joins):  # raises if `ray start` lacks an option
        start_command.make_context("start", call.partition(" start ")[2].split())
    assert job.sbatch.process.poll() is None
    (name,) = re.findall(r"RAY_AUTH_TOKEN_PATH=\$PWD/(\S+)", as_written("export RAY_AUTH_MODE"))
    token = slurm.clone / name.replace("JOB", job.id)
    assert token.read_text() == "secret\n" and token.stat().st_mode & 0o777 == 0o600
    slurm.type(as_written("scancel").replace("JOB", job.id))
    job.sbatch.finish()
    assert job.wait_for("commits") == "committed\n"
    assert not token.exists(), "it lasts as long as the job"
    slurm.wait_for(job.id, "COMPLETED")  # not requeued


@pytest.mark.chaos
def test_a_node_whose_ray_ended_joins_again(start: Start) -> None:
    job = start("train.py")
    join = "2 token secret start --address=198.51.100.130:6379"
    until(lambda: job.wait_for("ray", join).count(join) >= 2, "the node does not join again")


@pytest.mark.chaos
def test_a_job_whose_head_does_not_start_fails_at_once(slurm: Slurm, start: Start) -> None:
    job = start("train.py", has_head=False)
    job.sbatch.finish(succeeds=False)
    slurm.wait_for(job.id, "FAILED")
    assert "Ray's head did not start" in slurm.output(job.id)


@pytest.mark.chaos
def test_at_its_signal_a_job_commits_and_is_requeued(slurm: Slurm, start: Start) -> None:
    job = start("train.py")
    job.wait_for("drivers")
    slurm.type(f"scancel --batch --signal=USR1 {job.id}")
    slurm.wait_for(job.id, "RUNNING", restarts=1)
    assert job.wait_for("commits") == "committed\n"
    until(lambda: job.wait_for("drivers").count("train.py") == 2, "the driver does not start again")


@pytest.mark.chaos
@pytest.mark.parametrize(("driver", "status"), [("finishes.py", 0), ("fails.py", 7)])
def test_the_job_ends_with_the_drivers_exit_status(driver: str, status: int, slurm: Slurm, start: Start) -> None:
    job = start(driver, ELASTIC_DDP_STORAGE="s3://bucket/runs")
    job.sbatch.finish(succeeds=not status)
    assert job.wait_for("drivers", "\n").split()[1] == "s3://bucket/runs", "the user's variable names another storage"
    shown = slurm.wait_for(job.id, "FAILED" if status else "COMPLETED")
    assert shown["ExitCode"] == f"{status}:0"


@pytest.mark.chaos
def test_slurm_requeues_a_job_whose_node_fails(slurm: Slurm, start: Start) -> None:
    job = start("train.py")
    job.wait_for("drivers")
    slurm.site.machines[2].kill()
    slurm.wait_for(job.id, "PENDING", restarts=1, timeout_s=200)
    slurm.site.boot(slurm.site.machines[2])
    slurm.wait_for(job.id, "RUNNING", restarts=1)
    until(lambda: job.wait_for("drivers").count("train.py") == 2, "the driver does not start again")


@pytest.mark.chaos
def test_the_example_trains_on_all_nodes_and_its_run_is_beside_it(slurm: Slurm) -> None:
    """The guide's command, with fewer steps and nodes."""
    arguments = as_written("sbatch").partition("train.sbatch ")[2]
    job = job_id(slurm.submit(f"{arguments} --steps 60", "--nodes=2"))
    slurm.wait_for(job, "COMPLETED", timeout_s=400)
    facts = jobs.summary(slurm.clone, "gpt")
    assert facts["status"] == "finished" and max(world_sizes(facts)) == 2
    assert f"gpt finished after 60 steps; weights {facts['weights_sha256']}" in slurm.output(job)


@pytest.mark.chaos
def test_a_job_is_requeued_before_its_time_limit_and_resumes(slurm: Slurm, calm: Mapping[str, Any]) -> None:
    cluster = Cluster(slurm.site)
    cluster.install_program()
    # Slurm's limit is in minutes, and it sends the signal up to a minute early.
    sbatch = slurm.submit(f"{SHARED}/job/{program('slurm', '')}", "--nodes=2 --time=5 --signal=B:USR1@120")
    job = job_id(sbatch)
    run = Run(cluster, "slurm", sbatch, slurm.site.shared / marker("slurm").name)
    run.wait_for(2)
    token = as_written("export RAY_AUTH_MODE").replace("JOB", job)
    assert "slurm" in slurm.type(f"{token}; {as_written('srun').replace('JOB', job).replace('gpt', 'slurm')}")
    slurm.wait_for(job, "RUNNING", restarts=1, timeout_s=300)
    facts = run.finish(calm)
    assert len(facts["generations"]) >= 2, "it has resumed"
