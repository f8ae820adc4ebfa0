"""An S3 server in this process: moto."""

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
    """Runs a server on loopback for the block and yields its address.

    Moto checks whether an object exists and then creates it, in one thread per request, so two PUTs with
    `If-None-Match: *` can both succeed. S3 rules this out. Here a lock serializes the creation of objects.
    """
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line for each request otherwise
    lock = threading.Lock()
    with ExitStack() as patches:
        for name in ("put_object", "_key_response_post"):  # the latter completes a multipart upload
            patches.enter_context(mock.patch.object(S3Response, name, _serialized(lock, getattr(S3Response, name))))
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        patches.callback(server.stop)
        yield "http://{}:{}".format(*server.get_host_and_port())


def _serialized(lock: threading.Lock, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def serialized(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return serialized
