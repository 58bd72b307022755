"""One run for each kind of bad input: what the user reads and the exit code, compared to a text in ``snapshots/``.

``UPDATE_SNAPSHOTS=1`` writes them anew; read the difference before committing it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglbatch.cli import main

SNAPSHOTS = Path(__file__).parent / "snapshots" / "bad_input"

PLAIN = """\
import sglbatch as sgl


@sgl.function
def ask(s, question):
    s += question + sgl.gen("answer", max_tokens=4, temperature=0)
"""
ECHO = PLAIN.replace('s += question + sgl.gen("answer", max_tokens=4, temperature=0)', 's["answer"] = question')
CHECK = '    if "?" not in question:\n        raise ValueError(f"what is {question}")\n'
RAISES = ECHO.replace('    s["', CHECK + '    s["')
BAD_REGEX = PLAIN.replace("temperature=0", 'regex="[a-"')
TWO = PLAIN + PLAIN.split("\n\n\n")[1].replace("ask", "tell")
USED = ["run", "t.py", "d.jsonl", "--model", "MODEL", "-o", "out.jsonl"]

Make = Callable[[Path], None]


def files(template: str, data: str | bytes) -> Make:
    def make(folder: Path) -> None:
        (folder / "t.py").write_text(template)
        (folder / "d.jsonl").write_bytes(data if isinstance(data, bytes) else data.encode())

    return make


def named(name: str, data: str) -> Make:
    def make(folder: Path) -> None:
        (folder / "t.py").write_text(PLAIN)
        (folder / name).write_text(data)

    return make


def rows(*questions: Any) -> str:
    return "".join(json.dumps({"question": question}) + "\n" for question in questions)


CASES: dict[str, tuple[Make, list[str]]] = {
    "not_json": (files(ECHO, '{"question": "one"}\n{"question": "two"\n{"question": "three"}\n'), USED),
    "not_an_object": (files(ECHO, '{"question": "one"}\n[1, 2]\n'), USED),
    "invalid_utf8": (files(ECHO, b'{"question": "one"}\n{"question": "caf\xe9"}\n'), USED),
    "nothing_readable": (files(ECHO, "question: one\nquestion: two\n"), USED),
    "program_raises": (files(RAISES, rows("one?", "two\x1b[2J")), USED),
    "null_text": (files(PLAIN, rows(None)), USED),
    "number_as_text": (files(PLAIN, rows(7)), USED),
    "empty_prompt": (files(PLAIN, rows("")), USED),
    "prompt_too_long": (files(PLAIN, rows("word " * 9000)), USED),
    "bad_regex": (files(BAD_REGEX, rows("one")), USED),
    "empty_data": (files(PLAIN, ""), USED),
    "missing_data": (files(PLAIN, ""), ["run", "t.py", "none.jsonl", "--model", "MODEL"]),
    "unknown_format": (files(PLAIN, ""), ["run", "t.py", "t.py", "--model", "MODEL"]),
    "missing_template": (files(PLAIN, rows("one")), ["run", "none.py", "d.jsonl", "--model", "MODEL"]),
    "template_does_not_import": (files("import no_such_module_here\n", rows("one")), USED),
    "template_syntax": (files("def f(:\n", rows("one")), USED),
    "two_functions": (files(TWO, rows("one")), USED),
    "async_function": (files(PLAIN.replace("def ask", "async def ask"), rows("one")), USED),
    "data_first": (files(PLAIN, rows("one")), ["run", "d.jsonl", "t.py", "--model", "MODEL"]),
    "folder_as_data": (files(PLAIN, rows("one")), ["run", "t.py", ".", "--model", "MODEL"]),
    "no_function": (files("x = 1\n", rows("one")), USED),
    "unknown_column": (files(PLAIN, '{"qestion": "one"}\n'), USED),
    "other_delimiter": (named("d.csv", "question;id\none;1\n"), ["run", "t.py", "d.csv", "--model", "MODEL"]),
    "unknown_argument": (files(PLAIN.replace("temperature=0", "tempreture=0"), rows("one")), USED),
    "unwritable_output": (files(PLAIN, rows("one")), [*USED[:-1], "none/out.jsonl"]),
    "unknown_output_format": (files(PLAIN, rows("one")), [*USED[:-1], "out.xlsx"]),
    "output_is_input": (files(PLAIN, rows("one")), [*USED[:-1], "d.jsonl"]),
    "output_needed": (files(PLAIN, rows("one")), ["run", "t.py", "d.jsonl", "d.jsonl", "--model", "MODEL"]),
    "unknown_model": (files(PLAIN, rows("one")), ["run", "t.py", "d.jsonl", "--model", "none/"]),
    "duplicate_id": (files(PLAIN, rows("one", "one")), [*USED, "--id", "question"]),
    "kept_name_taken": (files(PLAIN, '{"question": "one", "answer": "1"}\n'), [*USED, "--keep", "all"]),
    "infinite": (files(PLAIN, rows("one")), [*USED, "--temperature", "inf"]),
    "unknown_keep": (files(PLAIN, rows("one")), [*USED, "--keep", "none"]),
    "bad_param": (files(PLAIN, rows("one")), [*USED, "--param", "none=1"]),
    "bad_option": (files(PLAIN, rows("one")), [*USED, "--max-failures", "many"]),
    "no_job": (files(PLAIN, rows("one")), ["status", "out.jsonl"]),
    "unknown_init": (files(PLAIN, rows("one")), ["init", "none"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(
    name: str,
    tmp_path: Path,
    smollm2_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make, arguments = CASES[name]
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sglbatch", *(str(smollm2_dir) if a == "MODEL" else a for a in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    text = f"$ sglbatch {' '.join(arguments)}\n{printed.err}{printed.out}"
    output = tmp_path / "out.jsonl"
    if output.exists():
        text += f"--- out.jsonl\n{output.read_text()}"
    text += f"--- exit {ended.value.code}\n"
    check(name, normalised(text, tmp_path, smollm2_dir))
    if ended.value.code == 2:
        assert not list(tmp_path.glob("*.job")), "a mistake leaves no job behind"


def normalised(text: str, folder: Path, model: Path) -> str:
    text = text.replace(str(folder), "FOLDER").replace(str(model), "MODEL")
    return re.sub(r"(read|plan|load|run|write) \d+\.\d", r"\1 N", text)


def check(name: str, text: str) -> None:
    snapshot = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        snapshot.write_text(text)
    assert text == snapshot.read_text()


def test_every_snapshot_has_its_case() -> None:
    assert {path.stem for path in SNAPSHOTS.glob("*.txt")} == set(CASES)
