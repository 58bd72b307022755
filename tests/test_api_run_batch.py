"""``run-batch``: files of OpenAI's Batch API on the local engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


def line(custom_id: Any, url: str, method: str = "POST", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "sglbatch",
            "run-batch",
            "in.jsonl",
            "-m",
            "smollm2-135m",
            "-o",
            "out.jsonl",
            *arguments,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_every_line_is_answered_or_says_why(smollm2_dir: Path, tmp_path: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": AGE}}
    remote = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "https://example.com/a.json"}}}
    greedy = {"temperature": 0, "max_tokens": 12}
    good = [
        line("chat", CHAT, model="gpt-4o", messages=user("What is the capital of France?"), **greedy),
        line("parts", CHAT, messages=user([{"type": "text", "text": "What is the capital of France?"}]), **greedy),
        line("text", COMPLETIONS, prompt="The capital of France is", stop=["."], **greedy),
        line("schema", CHAT, messages=user("Ada is 36. How old is she?"), response_format=schema, **greedy),
        line("../../etc/passwd", COMPLETIONS, prompt="One two three", max_tokens=2, n=2, stream=False),
    ]
    bad = [
        (line("chat", COMPLETIONS, prompt="x", max_tokens=1), "duplicate_custom_id"),
        (line("", COMPLETIONS, prompt="x", max_tokens=1), "invalid_custom_id"),
        (line("1", "/v1/embeddings", input="x"), "unsupported_endpoint"),
        (line("2", CHAT, method="GET", messages=user("x")), "invalid_method"),
        (
            line("3", CHAT, messages=user([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])),
            "unsupported_content",
        ),
        (line("4", CHAT, messages=user("x"), tools=[{"type": "function"}]), "unsupported_parameter"),
        (line("5", CHAT, messages=user("x"), temperature="hot"), "invalid-argument"),
        (line("6", CHAT, messages=[]), "invalid_messages"),
        (line("7", COMPLETIONS, prompt=""), "invalid_prompt"),
        (line("8", CHAT, messages=user("x"), stream=True), "unsupported_parameter"),
        ("this is not JSON", "bad-json"),
    ]
    refused = line("9", CHAT, messages=user("x"), response_format=remote, **greedy)
    (tmp_path / "in.jsonl").write_text("\n".join([*good, *(text for text, _ in bad), refused]) + "\n")
    done = run(tmp_path)
    assert done.returncode == 1, done.stderr
    answers = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(answers) == len(good) + len(bad) + 1
    bodies = [answer["response"]["body"] for answer in answers[: len(good)]]
    texts = [body["choices"][0].get("message", {}).get("content") or body["choices"][0]["text"] for body in bodies]
    assert "Paris" in texts[0] and texts[1] == texts[0]
    assert texts[2].startswith(" Paris") and "." not in texts[2]
    assert isinstance(json.loads(texts[3])["age"], int)
    assert len(bodies[4]["choices"]) == 2 and bodies[4]["choices"][0]["finish_reason"] == "length"
    assert (
        bodies[0]["usage"]["total_tokens"]
        == bodies[0]["usage"]["prompt_tokens"] + bodies[0]["usage"]["completion_tokens"]
    )
    failed = answers[len(good) :]
    assert all(answer["response"] is None for answer in failed)
    assert [answer["error"]["code"] for answer in failed[:-1]] == [code for _, code in bad]
    assert failed[-1]["error"]["code"]

    before = (tmp_path / "out.jsonl").read_bytes()
    again = run(tmp_path)
    assert again.returncode == 1 and "nothing to do" in again.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run(tmp_path, "--max-failures", "100%").returncode == 0
