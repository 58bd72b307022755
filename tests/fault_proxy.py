"""A proxy before a real server that injects the faults of bad networks and busy providers, and keeps a log."""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal[
    "429", "500", "reset", "cut", "slow", "drip", "html", "garbage", "no-choices", "no-usage", "wrong-usage",
    "quota", "bad-key", "content-filter", "no-model", "flood", "refusal", "filtered", "truncated", "huge-usage",
    "zero-usage",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One request: when it came, what it asked, what was done to it. ``ok``: a whole sound answer was sent back."""

    at: float
    path: str
    body: dict[str, Any]
    fault: str | None
    ok: bool
    usage: dict[str, Any] | None
    headers: dict[str, str]

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([self.path, self.body], sort_keys=True).encode()).hexdigest()


@dataclass(kw_only=True)
class FaultProxy:
    """Args:
    upstream: base URL of the real server.
    fault: number of the request (from 0) -> what to do to it.
    requests_per_min: answered with 429 above it, and named in the headers.
    burst: requests that may come at once.
    refuse: a request's body -> the message of the 400 that answers it.
    """

    upstream: str
    fault: Callable[[int], Fault | None] = lambda number: None
    requests_per_min: float | None = None
    burst: float = 1.0
    delay_s: float = 0.0
    refuse: Callable[[dict[str, Any]], str | None] = lambda body: None
    seen: list[Seen] = field(default_factory=list)
    starts: deque[float] = field(default_factory=deque)
    refused: int = 0
    base_url: str = ""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.level = self.burst
        self.level_at = time.monotonic()

    def admit(self) -> bool:
        """Whether the rate allows one more request now: a token bucket, 5% above the limit that the headers name."""
        if self.requests_per_min is None:
            return True
        with self.lock:
            now = time.monotonic()
            rate = self.requests_per_min * 1.05 / 60
            self.level = min(self.burst + rate, self.level + (now - self.level_at) * rate)
            self.level_at = now
            if self.level < 1:
                self.refused += 1
                return False
            self.level -= 1
            self.starts.append(now)
            return True

    def answered(self) -> Counter[str]:
        """How often each distinct request was answered soundly."""
        return Counter(seen.key for seen in self.seen if seen.ok)

    @contextmanager
    def running(self) -> Iterator[FaultProxy]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with proxy.lock:
                number, proxy.number = proxy.number, proxy.number + 1
            fault = proxy.fault(number)
            if fault is None and not proxy.admit():
                fault = "429"
            ok, usage = False, None
            try:
                ok, usage = self.treat(fault, body)
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                with proxy.lock:
                    proxy.seen.append(
                        Seen(
                            at=time.monotonic(), path=self.path, body=body, fault=fault, ok=ok, usage=usage,
                            headers={k.lower(): v for k, v in self.headers.items()},
                        )
                    )  # fmt: skip

        def treat(self, fault: Fault | None, body: dict[str, Any]) -> tuple[bool, dict[str, Any] | None]:  # noqa: PLR0911,PLR0912
            if proxy.delay_s:
                time.sleep(proxy.delay_s)
            if (refused := proxy.refuse(body)) is not None:
                return self.send(400, {"error": {"message": refused, "type": "invalid_request_error"}})
            match fault:
                case "429":
                    error = {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}
                    return self.send(429, {"error": error}, {"retry-after": "0.05"})
                case "quota":
                    error = {"message": "You exceeded your current quota", "code": "insufficient_quota"}
                    return self.send(429, {"error": error})
                case "bad-key":
                    key = self.headers.get("authorization", "")
                    error = {"message": f"Incorrect API key provided: {key}", "code": "invalid_api_key"}
                    return self.send(401, {"error": error})
                case "content-filter":
                    error = {"message": "The response was filtered", "code": "content_filter"}
                    return self.send(400, {"error": error})
                case "no-model":
                    error = {"message": "The model `smollm3` does not exist", "code": "model_not_found"}
                    return self.send(404, {"error": error})
                case "flood":
                    self.send_response(200)
                    self.send_header("transfer-encoding", "chunked")
                    self.end_headers()
                    while True:
                        self.wfile.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
                case "500":
                    return self.send(500, "<html><body><h1>Internal Server Error</h1></body></html>")
                case "reset":
                    self.close_connection = True
                    self.connection.close()
                    return False, None
                case "cut":
                    self.send_response(200)
                    self.send_header("content-length", "1000")
                    self.end_headers()
                    self.wfile.write(b'{"choices": [{"tex')
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.close()
                    return False, None
                case "slow":
                    time.sleep(10)
                    return self.send(500, "too late")
                case "drip":
                    self.send_response(200)
                    self.send_header("transfer-encoding", "chunked")
                    self.end_headers()
                    for _ in range(100):
                        self.wfile.write(b"1\r\n \r\n")
                        self.wfile.flush()
                        time.sleep(0.1)
                    self.close_connection = True
                    return False, None
                case "html":
                    return self.send(200, "<html>a login page</html>")
                case "garbage":
                    return self.send(200, '{"choices": [{"text": "half an ans')
                case "no-choices":
                    return self.send(200, {"choices": [], "usage": None})
            status, answer = self.ask(body)
            usage = answer.get("usage")
            if fault == "no-usage":
                answer.pop("usage", None)
            if fault == "wrong-usage":
                answer["usage"] = {"prompt_tokens": -5, "completion_tokens": "many"}
            if fault == "huge-usage":
                answer["usage"] = {"prompt_tokens": 1 << 60, "completion_tokens": 10**30}
            if fault == "zero-usage":
                answer["usage"] = {"prompt_tokens": 0, "completion_tokens": 0}
            choice = answer["choices"][0] if status == 200 else {}
            if fault == "refusal":
                choice["message"] = {"content": None, "refusal": "I'm sorry, I can't help with that."}
            if fault == "filtered":
                choice |= {"finish_reason": "content_filter", "text": ""}
            if fault == "truncated":
                choice |= {"finish_reason": "length", "text": ""}
            self.send(status, answer, self.rate_headers())
            return status == 200, usage

        def ask(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            parts = urlsplit(proxy.upstream)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
            connection.request("POST", self.path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            value = json.loads(response.read())
            connection.close()
            return response.status, value

        def rate_headers(self) -> dict[str, str]:
            if proxy.requests_per_min is None:
                return {}
            return {"x-ratelimit-limit-requests": f"{proxy.requests_per_min:g}"}

        def send(
            self, status: int, value: Any, headers: dict[str, str] | None = None
        ) -> tuple[bool, dict[str, Any] | None]:
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "text/html" if isinstance(value, str) else "application/json")
            self.send_header("content-length", str(len(data)))
            for name, text in (headers or {}).items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)
            return False, None

    return Handler
