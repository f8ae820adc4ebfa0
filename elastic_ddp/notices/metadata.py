"""The metadata services of AWS and GCP, which tell a machine that it will be interrupted."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from elastic_ddp.errors import ConfigError

ADDRESS = "169.254.169.254"
"""Of the metadata service, in both clouds."""
TIMEOUT_S = 2.0
ATTEMPTS = 3
_TOKEN = "X-aws-ec2-metadata-token"
_TOKEN_TTL_S = 6 * 3600
_GCP_PREEMPTION_S = 30.0
"""Seconds from GCP's notice to the end of a spot VM."""
_GCP_MAINTENANCE_S = 60.0
"""Seconds from GCP's notice to host maintenance; an hour on some machine types."""

FAILURES = (OSError, HTTPException, ValueError, LookupError)
"""Errors of a request: no connection, a status like 503, and responses that cannot be read."""


@dataclass(frozen=True)
class Notice:
    """An announcement of a cloud for this machine."""

    text: str
    """A sentence without its full stop."""
    deadline: float | None
    """Unix time in seconds when the machine goes away, if the cloud gives one."""
    is_advice: bool = False
    """Whether the machine may also stay, as after a rebalance recommendation."""


def most_urgent(notices: Sequence[Notice]) -> Notice | None:
    """Returns the notice to act on. A later drain of a node replaces an earlier one, so only its deadline may count."""
    return min(notices, key=lambda each: (each.is_advice, each.deadline or math.inf), default=None)


class AWS:
    """Reads spot interruption notices and rebalance recommendations, with IMDSv2's token. Methods raise `FAILURES`."""

    name = "AWS"

    def __init__(self, url: str) -> None:
        self.url = url
        self._token = ""

    def responds(self) -> bool:
        """Returns whether this machine is in this cloud."""
        ttl = {f"{_TOKEN}-ttl-seconds": str(_TOKEN_TTL_S)}
        self._token = _fetch(f"{self.url}/latest/api/token", ttl, "PUT") or ""
        return bool(self._token)

    def poll(self) -> list[Notice]:
        """Returns the notices that hold now."""
        notices = []
        found = self._get("spot/instance-action")
        if found is not None:
            deadline = datetime.fromisoformat(found["time"]).timestamp()
            notices.append(Notice(f"AWS will {found['action']} this machine at {found['time']}", deadline))
        try:
            found = self._get("events/recommendations/rebalance")
            if found is not None:
                text = f"AWS recommends to leave this machine (rebalance recommendation of {found['noticeTime']})"
                notices.append(Notice(text, None, is_advice=True))
        except FAILURES:
            if not notices:  # otherwise advice adds nothing
                raise
        return notices

    def _get(self, path: str) -> dict[str, str] | None:
        try:
            answer = _fetch(f"{self.url}/latest/meta-data/{path}", {_TOKEN: self._token})
        except HTTPError as error:
            if error.code != 401 or not self.responds():  # the token has expired
                raise
            answer = _fetch(f"{self.url}/latest/meta-data/{path}", {_TOKEN: self._token})
        fields: dict[str, str] | None = None if answer is None else json.loads(answer)
        return fields


class GCP:
    """Reads preemption and host maintenance notices, as `AWS` does."""

    name = "GCP"

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self.url = url
        self._clock = clock
        self._deadlines: dict[str, float] = {}
        """Of notices that hold now: GCP gives none, so they count from when a notice was first read."""

    def responds(self) -> bool:
        return self._get("preempted") in ("TRUE", "FALSE")

    def poll(self) -> list[Notice]:
        announced = {}
        if self._get("preempted") == "TRUE":
            announced["GCP preempts this machine"] = _GCP_PREEMPTION_S
        if self._get("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":  # a machine that migrates keeps running
            announced["GCP stops this machine for host maintenance"] = _GCP_MAINTENANCE_S
        now = self._clock()
        self._deadlines = {text: self._deadlines.get(text, now + within_s) for text, within_s in announced.items()}
        return [Notice(text, deadline) for text, deadline in self._deadlines.items()]

    def _get(self, name: str) -> str | None:
        text = _fetch(f"{self.url}/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"})
        return text and text.strip()


def find_service(
    environment: Mapping[str, str],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> AWS | GCP:
    """Returns the metadata service of this machine. Raises ConfigError if it is not in one of these clouds.

    `AWS_EC2_METADATA_SERVICE_ENDPOINT` (a URL) and `GCE_METADATA_HOST` (host[:port]) in `environment` override the
    address, as for these clouds' own libraries. `clock` is the Unix time of deadlines.
    """
    aws = AWS(environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{ADDRESS}").rstrip("/"))
    gcp = GCP(f"http://{environment.get('GCE_METADATA_HOST', ADDRESS)}", clock)
    for attempt in range(ATTEMPTS):
        if attempt:
            sleep(1.0)
        for service in (aws, gcp):
            with suppress(*FAILURES):  # also if this is the other cloud, whose service rejects the request
                if service.responds():
                    return service
    raise ConfigError(
        f"no metadata service of AWS ({aws.url}) or GCP ({gcp.url}) responds, so this machine gets no notices. Run "
        "watch-notices on machines of these clouds only; in a container on AWS, set HttpPutResponseHopLimit to 2."
    )


def _fetch(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Returns the body of a response, or None for status 404."""
    opener = build_opener(ProxyHandler({}))  # a proxy would answer for its own machine
    try:
        with opener.open(Request(url, headers=dict(headers), method=method), timeout=TIMEOUT_S) as response:
            body: bytes = response.read()
            return body.decode()
    except HTTPError as error:
        if error.code != 404:
            raise
        return None
