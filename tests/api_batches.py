"""An implementation of /v1/files and /v1/batches before a real server: batches are worked off as a script says."""

from __future__ import annotations

import json
import random
import re
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(kw_only=True)
class Fate:
    """What becomes of a batch.

    Args:
        status: how it ends; ``in_progress`` never does.
        answered: how many of its requests are answered; None for all.
        failing: requests whose prompt contains this come back with HTTP 400 in the error file.
        spoil: two of its answers are damaged, and lines that are none stand among the others.
        lose_reply: the batch is made, but whoever asked for it gets no answer.
    """

    status: str = "completed"
    answered: int | None = None
    failing: str | None = None
    lose_reply: bool = False
    spoil: bool = False


@dataclass(kw_only=True)
class BatchServer:
    """``fates``: of the batches in their order; the last counts for all that follow."""

    upstream: str
    fates: list[Fate] = field(default_factory=lambda: [Fate()])
    base_url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    batches: list[dict[str, Any]] = field(default_factory=list)
    executed: Counter[str] = field(default_factory=Counter)

    def upload(self, data: bytes) -> dict[str, Any]:
        file_id = f"file-{len(self.files)}"
        self.files[file_id] = data
        return {
            "id": file_id,
            "object": "file",
            "bytes": len(data),
            "filename": "x",
            "purpose": "batch",
            "created_at": 0,
        }

    def create(self, request: dict[str, Any]) -> dict[str, Any]:
        number = len(self.batches)
        fate = self.fates[min(number, len(self.fates) - 1)]
        batch = {
            "id": f"batch_{number}",
            "object": "batch",
            "created_at": 0,
            "status": "in_progress",
            **request,
        }
        self.batches.append(batch)
        lines = [json.loads(line) for line in self.files[request["input_file_id"]].splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines), "Duplicate custom_id"
        assert all(line["url"] == request["endpoint"] and line["method"] == "POST" for line in lines)
        if fate.status == "failed":
            batch |= {
                "status": "failed",
                "errors": {"object": "list", "data": [{"message": "the file is not to our taste"}]},
            }
        elif fate.status != "in_progress":
            self.work_off(batch, lines, fate)
        return batch

    def work_off(self, batch: dict[str, Any], lines: list[dict[str, Any]], fate: Fate) -> None:
        good, bad = [], []
        for line in lines[: fate.answered]:
            if fate.failing is not None and fate.failing in json.dumps(line["body"]):
                body = {"error": {"message": "not this one", "code": "invalid_request"}}
                bad.append(
                    {"custom_id": line["custom_id"], "response": {"status_code": 400, "body": body}, "error": None}
                )
                continue
            self.executed[line["custom_id"]] += 1
            body = self.execute(line)
            good.append({"custom_id": line["custom_id"], "response": {"status_code": 200, "body": body}, "error": None})
        for line in lines[len(good) + len(bad) :]:
            error = {"code": "batch_expired", "message": "This request could not be executed in time."}
            bad.append({"custom_id": line["custom_id"], "response": None, "error": error})
        random.Random(0).shuffle(good)
        batch["status"] = fate.status
        junk = _spoil(good) if fate.spoil else b""
        for name, found in (("output_file_id", good), ("error_file_id", bad)):
            if found:
                batch[name] = self.upload(junk + b"".join(json.dumps(value).encode() + b"\n" for value in found))["id"]

    def execute(self, line: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.upstream + line["url"], json.dumps(line["body"]).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            value: dict[str, Any] = json.loads(response.read())
            return value

    @contextmanager
    def running(self) -> Iterator[BatchServer]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def _spoil(good: list[dict[str, Any]]) -> bytes:
    """Takes the body out of one answer and another answer away; gives lines that mean nothing."""
    good[0]["response"] = {"status_code": 200}
    good.pop(1)
    other = {**good[-1], "response": {"status_code": 200, "body": {"choices": [{"text": "another"}]}}}
    good.append(other)
    strange = [{"custom_id": "of another job", "response": None}, {"custom_id": [1]}, {"custom_id": None}, [1], 7]
    return b"not JSON\n\xff\n\n" + b"".join(json.dumps(value).encode() + b"\n" for value in strange)


def _handler(server: BatchServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if match := re.fullmatch(r"/v1/files/([\w-]+)/content", path):
                self.send(server.files[match[1]])
            elif match := re.fullmatch(r"/v1/batches/(\w+)", path):
                self.send(next(batch for batch in server.batches if batch["id"] == match[1]))
            elif path == "/v1/batches":
                self.send({"object": "list", "data": server.batches[::-1], "has_more": False})
            else:
                self.send({"error": {"message": "no such thing"}}, 404)

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/files":
                self.send(server.upload(self.file_of(data)))
            elif self.path == "/v1/batches":
                batch = server.create(json.loads(data))
                if server.fates[min(len(server.batches), len(server.fates)) - 1].lose_reply:
                    self.close_connection = True
                    self.connection.close()
                    return
                self.send(batch)
            else:
                self.send({"error": {"message": "only batches here"}}, 400)

        def file_of(self, data: bytes) -> bytes:
            head = f"content-type: {self.headers['content-type']}\r\n\r\n".encode()
            message = BytesParser().parsebytes(head + data)
            parts = {part.get_param("name", header="content-disposition"): part for part in message.get_payload()}
            assert parts["purpose"].get_payload() == "batch"
            content = parts["file"].get_payload(decode=True)
            assert isinstance(content, bytes)
            return content

        def send(self, value: Any, status: int = 200) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
