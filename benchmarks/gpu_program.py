"""The program of ``gpu.py``: a row's prompt and one answer."""

from typing import Any

import sglbatch as sgl


@sgl.function(temperature=0)
def complete(s: Any, prompt: str, max_tokens: int, ignore_eos: bool, regex: str | None = None) -> None:
    s += prompt + sgl.gen("answer", max_tokens=max_tokens, ignore_eos=ignore_eos, regex=regex)
