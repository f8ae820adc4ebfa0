"""A proxy in front of an S3 server that injects the faults of a plan and passes all other requests on."""

from __future__ import annotations

import enum
import http.client
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from io import BufferedReader
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    number: int
    """Counted from 0."""
    method: str
    target: str
    """Path and query."""


@dataclass(frozen=True)
class Refusal:
    """The client gets an S3 error, and the server does not get the request."""

    status: int
    code: str


class Fault(enum.Enum):
    """When the connection is reset (RST), as by a host that is gone."""

    RESET = "before the server gets anything"
    HALF_READ = "after half of the client's request"
    HALF_SENT = "after the server has half of the request"
    LOST = "after the server is done, without its answer"
    HALF_ANSWERED = "after half of the answer"


SLOW_DOWN = Refusal(503, "SlowDown")
Plan = Callable[[Request], Fault | Refusal | None]


class Proxy:
    """Listens on loopback inside its `with` block.

    Attributes:
        plan: returns the fault of a request, or None; it may be replaced at any time.
        injected: the requests that got a fault, in order, with the fault.
    """

    def __init__(self, endpoint: str) -> None:
        self._server = urlsplit(endpoint).hostname, urlsplit(endpoint).port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._count = 0
        self._clients: set[socket.socket] = set()
        self.plan: Plan = lambda request: None
        self.injected: list[tuple[Request, Fault | Refusal]] = []
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for client in self._clients:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # the socket is closed
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Serves the requests of one connection."""
        with self._lock:
            self._clients.add(client)
        with suppress(OSError, http.client.HTTPException), client, client.makefile("rb") as stream:
            while (first := stream.readline()) and self._pass_on(client, stream, first.decode()):
                pass
        with self._lock:
            self._clients.discard(client)

    def _pass_on(self, client: socket.socket, stream: BufferedReader, first: str) -> bool:
        """Serves one request. Returns whether the connection stays open."""
        method, target, _ = first.split()
        headers = http.client.parse_headers(stream)
        if "100-continue" in headers.get("Expect", "").lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        with self._lock:
            request = Request(self._count, method, target)
            self._count += 1
            if fault := self.plan(request):
                self.injected.append((request, fault))
        if fault is Fault.HALF_READ:
            stream.read(int(headers.get("Content-Length", 0)) // 2)
            return _reset(client)
        body = _body(stream, headers)
        if isinstance(fault, Refusal):
            client.sendall(_error_response(fault, method))
            return True
        if fault is Fault.RESET:
            return _reset(client)
        with socket.create_connection(self._server) as server:
            server.sendall(_head(first, headers))
            if fault is Fault.HALF_SENT:
                server.sendall(body[: len(body) // 2])
                return _reset(client)
            server.sendall(body)
            answer = http.client.HTTPResponse(server, method=method)
            answer.begin()
            data = answer.read()
        if fault is Fault.LOST:
            return _reset(client)
        client.sendall(_response_head(answer, data if method != "HEAD" else None))
        client.sendall(data if fault is None else data[: len(data) // 2])
        return True if fault is None else _reset(client)


def _body(stream: BufferedReader, headers: Message) -> bytes:
    if "chunked" not in headers.get("Transfer-Encoding", ""):
        return stream.read(int(headers.get("Content-Length", 0)))
    raw = b""
    while True:
        line = stream.readline()
        size = int(line.split(b";")[0], 16)
        raw += line + stream.read(size + 2)
        if not size:
            return raw


def _head(first: str, headers: Message) -> bytes:
    passed = [f"{name}: {value}" for name, value in headers.items() if name.lower() not in ("expect", "connection")]
    return "\r\n".join([first.strip(), *passed, "Connection: close", "", ""]).encode()


def _response_head(answer: http.client.HTTPResponse, data: bytes | None) -> bytes:
    """Returns the head of a response. Without data, as for HEAD, it keeps the length that the server gave."""
    replaced = {"connection", "transfer-encoding"} | ({"content-length"} if data is not None else set())
    lines = [f"{name}: {value}" for name, value in answer.getheaders() if name.lower() not in replaced]
    if data is not None and answer.status != 204:
        lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join([f"HTTP/1.1 {answer.status} {answer.reason}", *lines, "", ""]).encode("latin-1")


def _error_response(refusal: Refusal, method: str) -> bytes:
    body = f"<Error><Code>{refusal.code}</Code><Message>as planned</Message></Error>".encode()
    length = f"Content-Type: application/xml\r\nContent-Length: {len(body)}"
    head = f"HTTP/1.1 {refusal.status} {refusal.code}\r\n{length}\r\n\r\n".encode()
    return head if method == "HEAD" else head + body


def _reset(client: socket.socket) -> bool:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.shutdown(socket.SHUT_RD)  # the reset follows when its stream is closed too
    return False
