"""`env`, `runtime_env`, and credentials: what may be in a configuration, and what no file or message may show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp import ElasticTrainer, RunConfig
from elastic_ddp.config.environment import has_credential
from elastic_ddp.data.files import list_files
from elastic_ddp.driver import session as session_module
from elastic_ddp.driver.start_checks import check_runtime_env
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from tests.inside_run import finish, job_of
from tests.unit.driver.test_session import session_of
from tests.unit.inprocess_rendezvous import InProcessRendezvous
from tests.unit.single_worker import NewRun, compute_gradients, prepared

SECRET = "pr1v4te-v4lue"


def config(**changes: Any) -> RunConfig:
    settings = {"name": "a", "storage": "runs", "steps": 1, "global_batch_size": 8, "micro_batch_size": 8}
    return RunConfig(**{**settings, **changes})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"1ST": "x"}, "env.1ST: this is no name"),
        ({"A B": "x"}, "env.A B: this is no name"),
        ({"NCCL_DEBUG": 1}, 'env.NCCL_DEBUG: give text in quotes .*NCCL_DEBUG = "1"'),
        ({"A": "x\0"}, "env.A: give text"),
        ("NCCL_DEBUG=INFO", 'env is not a table; .*env = {NCCL_DEBUG = "INFO"}'),
    ],
)
def test_variables_that_cannot_be_set_are_refused(env: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(env=env)


CREDENTIALS = """
    AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN HF_TOKEN NGROK_AUTHTOKEN WANDB_API_KEY openai_api_key
    DB_PASSWORD DB_PASSWD DB_PASS PGPASSWORD MYSQL_PWD SMTP_USER_CREDENTIALS GOOGLE_APPLICATION_CREDENTIALS
    CLIENT_SECRETS AZURE_STORAGE_KEY AZURE_STORAGE_CONNECTION_STRING
"""
NO_CREDENTIALS = """
    NCCL_SOCKET_IFNAME==eth0 TOKENIZERS_PARALLELISM=false PAD_TOKEN_ID=128001 MAX_TOKENS=4096 NCCL_ALGO=Ring
    HF_HUB_DISABLE_IMPLICIT_TOKEN=1 RAY_AUTH_TOKEN_PATH=/home/ray/token PWD=/work MONKEY=a SORT_KEY=a
    AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/token GOOGLE_APPLICATION_CREDENTIALS=/etc/key.json
    HTTP_PROXY=http://proxy:3128 LD_PRELOAD=/opt/lib/libnccl.so.2
"""


def test_a_credential_in_env_is_refused_and_the_error_does_not_show_it() -> None:
    for name in CREDENTIALS.split():
        with pytest.raises(
            ConfigError, match=rf"env\.{name} looks like a credential, .*a role of the machine"
        ) as caught:
            config(env={name: SECRET})
        assert SECRET not in str(caught.value)
    env = dict(each.split("=", 1) for each in NO_CREDENTIALS.split())
    assert config(env=env).env == env


def test_a_password_in_the_address_of_storage_or_data_is_refused_and_not_shown() -> None:
    uri = f"sftp://user:{SECRET}@host/runs"
    for refused in (
        lambda: config(storage=uri),
        lambda: Storage(uri),
        lambda: list_files(uri),
        lambda: config(env={"HTTP_PROXY": f"http://user:{SECRET}@proxy"}),
        lambda: config(runtime_env={"pip": [f"git+https://{SECRET}@github.com/a/b"]}),
    ):
        with pytest.raises(ConfigError, match="credential") as caught:
            refused()
        assert SECRET not in str(caught.value)
    for query in ("X-Amz-Signature=1", "sv=1&sig=2", "AWSAccessKeyId=a&Signature=b", "token=c", "a=b&access_token=d"):
        assert has_credential(f"https://host/a.parquet?{query}")
    for plain in ("https://host/a?design=1", "s3://bucket/a@b:c", "sftp://user@host/a", "/data/a:b@c", "a@b"):
        assert not has_credential(plain)


def test_a_runtime_env_is_checked_before_ray_gets_it(tmp_path: Path) -> None:
    check_runtime_env({"working_dir": str(tmp_path), "excludes": ["runs"]})
    for given, message in (
        ({"workingdir": "."}, r"runtime_env\.workingdir: .* no such field; its fields are .*working_dir"),
        ({"working_dir": str(tmp_path / "none")}, "runtime_env=.*none"),
        ({"pip": ["a"], "conda": "b"}, "same time"),
    ):
        with pytest.raises(ConfigError, match=message):
            ElasticTrainer(lambda run: None, "data", config(storage=str(tmp_path), runtime_env=given))
    with pytest.raises(ConfigError, match=r"runtime_env\.env_vars: give environment variables in env"):
        config(runtime_env={"env_vars": {"A": "b"}})


def test_no_credential_is_in_a_file_of_the_run_or_in_its_output(
    new_run: NewRun,
    inprocess_rendezvous: Callable[..., InProcessRendezvous],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also none that is not recognized as one. The files are the ledger, the commits, the lease and the record."""
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "RAY_AUTH_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    run = new_run(env={"UNUSUAL": SECRET}, runtime_env={"py_modules": [f"s3://bucket/{SECRET}.zip"]})
    job = job_of(run)
    model = prepared(run)
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            step.optimize()
    outcome = {"status": "finished", **finish(run)}

    rendezvous = inprocess_rendezvous()
    monkeypatch.setattr(session_module, "run_workers", lambda *_: rendezvous.ask("end", None, None, outcome))
    with session_of(job, rendezvous) as session:
        session.run()
        session.close_ledger()
    print(job, job.config)

    written = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {re.sub(r"/.*", "", name.removeprefix("run/")) for name in written} >= {"checkpoints", "ledger"}
    assert [name for name, content in written.items() if SECRET.encode() in content] == []
    assert b"UNUSUAL" in b"".join(written.values())
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err
