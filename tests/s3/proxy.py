"""A proxy before an S3 server: it passes requests on, but for those with which a plan has something else happen."""

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
    """What a client asks for."""

    number: int
    """From 0."""
    method: str
    target: str
    """Path and query."""


@dataclass(frozen=True)
class Refusal:
    """The server's own answer would not be known: an error of S3's comes back, and the request goes nowhere."""

    status: int
    code: str


class Fault(enum.Enum):
    """Each ends the connection as a host does that is gone (RST)."""

    RESET = "before anything was passed on"
    HALF_READ = "when the client has sent half of its request"
    HALF_SENT = "when the server has the first half of the request"
    LOST = "when the server is done, without its answer"
    HALF_ANSWERED = "within the answer"


SLOW_DOWN = Refusal(503, "SlowDown")
Plan = Callable[[Request], Fault | Refusal | None]


class Proxy:
    """Listens on loopback for the length of a block.

    Attributes:
        plan: what becomes of a request; it may be changed at any time.
        met: requests with which something else happened, in their order.
    """

    def __init__(self, endpoint: str) -> None:
        self._server = urlsplit(endpoint).hostname, urlsplit(endpoint).port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._count = 0
        self._clients: set[socket.socket] = set()
        self.plan: Plan = lambda request: None
        self.met: list[tuple[Request, Fault | Refusal]] = []
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for each in self._clients:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """A client's requests, one after the other."""
        with self._lock:
            self._clients.add(client)
        with suppress(OSError, http.client.HTTPException), client, client.makefile("rb") as stream:
            while (first := stream.readline()) and self._pass_on(client, stream, first.decode()):
                pass
        with self._lock:
            self._clients.discard(client)

    def _pass_on(self, client: socket.socket, stream: BufferedReader, first: str) -> bool:
        """Whether the connection goes on."""
        method, target, _ = first.split()
        headers = http.client.parse_headers(stream)
        if "100-continue" in headers.get("Expect", "").lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        with self._lock:
            request = Request(self._count, method, target)
            self._count += 1
            if fate := self.plan(request):
                self.met.append((request, fate))
        if fate is Fault.HALF_READ:
            stream.read(int(headers.get("Content-Length", 0)) // 2)
            return _cut_off(client)
        body = _body(stream, headers)
        if isinstance(fate, Refusal):
            client.sendall(_refused(fate, method))
            return True
        if fate is Fault.RESET:
            return _cut_off(client)
        with socket.create_connection(self._server) as server:
            server.sendall(_head(first, headers))
            if fate is Fault.HALF_SENT:
                server.sendall(body[: len(body) // 2])
                return _cut_off(client)
            server.sendall(body)
            answer = http.client.HTTPResponse(server, method=method)
            answer.begin()
            data = answer.read()
        if fate is Fault.LOST:
            return _cut_off(client)
        client.sendall(_answered(answer, data if method != "HEAD" else None))
        client.sendall(data if fate is None else data[: len(data) // 2])
        return True if fate is None else _cut_off(client)


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


def _answered(answer: http.client.HTTPResponse, data: bytes | None) -> bytes:
    """The head of an answer, with the length of its data, or the one it says where there is no data to be sent."""
    ours = {"connection", "transfer-encoding"} | ({"content-length"} if data is not None else set())
    lines = [f"{name}: {value}" for name, value in answer.getheaders() if name.lower() not in ours]
    if data is not None and answer.status != 204:
        lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join([f"HTTP/1.1 {answer.status} {answer.reason}", *lines, "", ""]).encode("latin-1")


def _refused(refusal: Refusal, method: str) -> bytes:
    words = f"<Error><Code>{refusal.code}</Code><Message>as planned</Message></Error>".encode()
    length = f"Content-Type: application/xml\r\nContent-Length: {len(words)}"
    head = f"HTTP/1.1 {refusal.status} {refusal.code}\r\n{length}\r\n\r\n".encode()
    return head if method == "HEAD" else head + words


def _cut_off(client: socket.socket) -> bool:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.shutdown(socket.SHUT_RD)  # closed, and so reset, once its stream is, too
    return False
