"""Sends the steps to Weights & Biases."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_ddp.errors import ConfigError
from elastic_ddp.loggers.logger import LoggedRun

PROJECT = "elastic_ddp"
"""Project without WANDB_PROJECT."""
_BLOCK_BYTES, _HEADER_BYTES = 32 * 1024, 7
_FULL, _LAST = 1, 4
"""Kinds of the last part of a record in a `.wandb` file, which has LevelDB's log format."""
NO_CREDENTIAL = (
    "loggers='wandb': W&B has no credential. Run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline in the "
    "environment of the driver"
)


class WandbLogger:
    """Continues the same W&B run in all sessions.

    Online, the newest step comes from the server. Offline, it comes from the files of earlier sessions: W&B writes them
    with a delay, so what `log` got is not in them if the driver was killed.

    Raises:
        ConfigError: no credential is configured, and the mode is not offline; or the package is too old.
    """

    def __init__(self) -> None:
        import wandb

        if "finish_timeout" not in wandb.Settings.model_fields:
            raise ConfigError(
                f"loggers='wandb' needs wandb 0.31 or newer, and {wandb.__version__} is installed: pip install -U wandb"
            )
        self._run: Any = None
        self.destination = ""
        _check_credentials()

    def start(self, run: LoggedRun) -> int | None:
        import wandb

        self._leave_broken_run()
        folder = Path(os.environ.get("WANDB_DIR") or ("." if "://" in run.uri else run.uri))
        newest = _newest_offline(folder, run.id) if _is_offline() else None
        self._run = wandb.init(
            id=run.id,
            name=run.name,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            config={**run.config},
            dir=folder,
            resume="allow",
            reinit="create_new",
            # The console belongs to the driver. The exit of the process waits for the service, at most this long.
            settings=wandb.Settings(console="off", silent=True, init_timeout=20.0, finish_timeout=20.0),
        )
        self.destination = self._run.url or ("" if self._run.disabled else f"{Path(folder, 'wandb')}, offline")
        # The server returns the next step, 0 for none.
        return self._run.starting_step - 1 if self._run.starting_step else newest

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({**values, "_timestamp": time}, step=step)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)

    def _leave_broken_run(self) -> None:
        """Ends the run of an earlier start. If W&B's service has died, a new one starts."""
        import wandb

        broken = self._run
        self._run = None
        if broken is None:
            return
        try:
            broken.finish(exit_code=1)
        except Exception:
            with suppress(Exception):
                wandb.teardown()


def _is_offline() -> bool:
    """Whether WANDB_MODE or `wandb offline` has turned uploads off."""
    import wandb

    return wandb.setup().settings.mode in ("offline", "dryrun", "disabled")


def _check_credentials() -> None:
    """Raises ConfigError without any credential. Does not check it: that would need the server."""
    import wandb

    if _is_offline():
        return
    settings = wandb.setup().settings
    silent = settings.silent
    settings.silent = True  # otherwise it asks the server for the user's name, to print it
    try:
        is_known = wandb.login(prompt=False, verify=False)
    finally:
        settings.silent = silent
    if not is_known:
        raise ConfigError(NO_CREDENTIAL)


def _newest_offline(folder: Path, run_id: str) -> int | None:
    """Returns the newest step in the files of offline sessions; None if they have none."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps = [
        record.history.step.num
        for file in folder.glob(f"wandb/offline-run-*-{run_id}/*.wandb")
        for data in read_records(file.read_bytes())
        if (record := Record.FromString(data)).HasField("history")
    ]
    return max(steps, default=None)


def read_records(data: bytes) -> Iterator[bytes]:
    """Yields the records of a `.wandb` file, up to one that is incomplete."""
    position = _HEADER_BYTES  # the file has a header as long as the header of a part
    record = b""
    while position + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        _, length, kind = struct.unpack_from("<IHB", data, position) if left >= _HEADER_BYTES else (0, 0, 0)
        if not kind:  # the rest of a block is padding
            position += left
            continue
        part = data[position + _HEADER_BYTES : position + _HEADER_BYTES + length]
        if len(part) < length:
            return
        position += _HEADER_BYTES + length
        record += part
        if kind in (_FULL, _LAST):
            yield record
            record = b""
