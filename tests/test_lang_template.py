"""Loading templates and binding columns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglbatch.errors import SglbatchError
from sglbatch.lang import Driver, Template, load_template
from sglbatch.tokenizer import Tokenizer
from tests.lang_backend import ScriptedBackend

GOOD = """
import sglbatch as sgl
from typing import Optional

@sgl.function(max_new_tokens=5)
def answer(s, question, note: Optional[str], shots=2, hint=None):
    s += f"{question} {note} {shots} {hint}" + sgl.gen("x")
"""


def write(folder: Path, text: str, name: str = "template.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_of(path: Path, **options: Any) -> SglbatchError:
    with pytest.raises(SglbatchError) as caught:
        load_template(path, **options)
    return caught.value


def load(folder: Path, **options: Any) -> Template:
    return load_template(write(folder, GOOD), **options)


def test_parameters(tmp_path: Path) -> None:
    template = load(tmp_path)
    found = [(p.name, p.required, p.nullable, p.default) for p in template.parameters]
    assert found == [
        ("question", True, False, None),
        ("note", True, True, None),
        ("shots", False, False, 2),
        ("hint", False, True, None),
    ]
    assert template.name == "answer"
    assert template.function.defaults.max_tokens == 5


def test_constants(tmp_path: Path) -> None:
    template = load(tmp_path, params={"shots": "5", "note": "as text"})
    assert [p.name for p in template.parameters] == ["question", "hint"]
    assert template.function.bound == {"shots": 5, "note": "as text"}
    error = error_of(tmp_path / "template.py", params={"shot": "5"})
    assert (error.code, error.hint) == ("unknown-parameter", "--param shots=5")


def test_columns(tmp_path: Path) -> None:
    template = load(tmp_path)
    with pytest.raises(SglbatchError) as caught:
        template.bind(["Question", "note"], {})
    assert (caught.value.code, caught.value.hint) == ("unknown-column", "--map question=Question")
    with pytest.raises(SglbatchError) as caught:
        template.bind(["q", "note"], {"question": "queue"})
    assert caught.value.code == "unknown-column" and "choose one of these columns" in str(caught.value.hint)
    with pytest.raises(SglbatchError) as caught:
        template.bind(["q", "note"], {"qestion": "q"})
    assert (caught.value.code, caught.value.hint) == ("unknown-parameter", "--map question=q")
    binding = template.bind(["q", "note", "unused", "shots"], {"question": "q"})
    assert binding.arguments({"q": 1, "note": None, "unused": 3}) == {"question": 1, "note": None}


def test_null_values(tmp_path: Path, smollm2_tokenizer: Tokenizer) -> None:
    binding = load(tmp_path).bind(["question", "note", "hint"], {})
    rows = [{"question": "q", "note": None, "hint": None}, {"question": None, "note": "n", "hint": "h"}]
    backend = ScriptedBackend(smollm2_tokenizer, lambda *_: "a")
    driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=99, backend=backend)
    programs = [binding.program(row, program_id=i, row_key=str(i)) for i, row in enumerate(rows)]
    for program in programs:
        driver.add(program)
    while driver.unfinished:
        driver.step()
    assert programs[0].outcome.transcript == "q None 2 Nonea"
    error = programs[1].outcome.error
    assert error is not None and error.code == "null-value" and "'question'" in error.message


def test_what_is_wrong_with_a_template(tmp_path: Path) -> None:
    assert error_of(tmp_path / "missing.py").code == "template-not-found"
    path = write(tmp_path, "import sglbatch\nx = 1\n")
    error = error_of(path)
    assert error.code == "no-function" and error.hint is not None and "@sgl.function" in error.hint
    write(tmp_path, "x = 1\ny = x / 0\n")
    error = error_of(path)
    assert (error.code, error.where) == ("template-import", f"{path}:2")
    assert "ZeroDivisionError" in error.message
    write(tmp_path, "x = 1\ndef f(:\n")
    error = error_of(path)
    assert (error.code, error.where) == ("template-import", f"{path}:2")
    write(tmp_path, "import sglbatch as sgl\n@sgl.function(max_new_tokens=0)\ndef f(s): pass\n")
    assert (error_of(path).code, error_of(path).where) == ("invalid-argument", f"{path}:2")
    write(tmp_path, "import sglbatch as sgl\n@sgl.function\ndef f(s, *rest): pass\n")
    assert (error_of(path).code, error_of(path).where) == ("bad-function", f"{path}:2")


def test_two_programs(tmp_path: Path) -> None:
    two = "import sglbatch as sgl\n@sgl.function\ndef one(s): pass\n@sgl.function\ndef two(s): pass\n"
    path = write(tmp_path, two)
    error = error_of(path)
    assert (error.code, error.hint) == ("several-functions", "--program two") and "one, two" in error.message
    assert load_template(path, program="two").name == "two"
    assert error_of(path, program="tow").hint == "--program two"


def test_source_hash_covers_local_modules(tmp_path: Path) -> None:
    helper = write(tmp_path, "PREFIX = 'a <|im_end|>'\ndef f(): return 1\n", "local_helper_module.py")
    text = "import json\nimport sglbatch as sgl\nfrom local_helper_module import f\n@sgl.function\ndef one(s): f()\n"
    path = write(tmp_path, text)
    first = load_template(path)
    assert first.function.source_files == (helper, path)
    assert "a <|im_end|>" in first.function.strings()
    assert load_template(path).source_hash == first.source_hash
    helper.write_text(helper.read_text() + "# changed\n")
    second = load_template(path)
    assert second.source_hash != first.source_hash
    write(tmp_path, text + "\n")
    assert load_template(path).source_hash != second.source_hash


def test_importing_the_language_loads_no_model_library() -> None:
    code = "import sglbatch, sys; print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
