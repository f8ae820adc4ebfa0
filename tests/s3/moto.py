"""A stand-in for S3 on this machine: moto's server, in this process."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def running() -> Iterator[str]:
    """The address of one that listens on loopback for the block.

    Moto looks whether an object is there, and then makes it, in as many threads as there are requests: now and then
    two of `If-None-Match: *` both succeed, which S3 rules out. Here what makes an object does so one after the other.
    """
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line for each request otherwise
    lock = threading.Lock()
    with ExitStack() as patches:
        for name in ("put_object", "_key_response_post"):  # the latter completes an upload in parts
            patches.enter_context(mock.patch.object(S3Response, name, _in_turn(lock, getattr(S3Response, name))))
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        patches.callback(server.stop)
        yield "http://{}:{}".format(*server.get_host_and_port())


def _in_turn(lock: threading.Lock, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def in_turn(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return in_turn
