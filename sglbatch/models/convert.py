"""GGUF file -> folder in Hugging Face format with bf16 safetensors. Run as a program: ``convert.py GGUF FOLDER``.

The one place outside the engine that imports torch and transformers. Warnings for the user go to standard output, one a
line; the reason of a failure is the last line of standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import torch
import transformers

_GPT2_SPLIT: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS_THEN_GPT2: Final = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2_SPLIT],
}
_PRE_TOKENIZERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gpt-2": _GPT2_SPLIT,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
}
"""What ``tokenizer.ggml.pre`` stands for: the conversion by transformers does not read it."""


def convert(source: Path, folder: Path) -> list[str]:
    """Writes config, bf16 weights, tokenizer and chat template of a GGUF file; gives warnings.

    Raises:
        ValueError: for a file that transformers would convert to a model that computes something else.
    """
    metadata = _metadata(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    _check_config(model.config, metadata)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    _finish_generation_config(folder, metadata)
    _finish_tokenizer_config(folder, metadata)
    return _finish_tokenizer(folder, metadata)


def _metadata(source: Path) -> dict[str, Any]:
    """The scalar values of the file's header, and ``has_rope_factors``."""
    reader = gguf.GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}
    metadata["has_rope_factors"] = any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors)
    return metadata


def _check_config(config: Any, metadata: Mapping[str, Any]) -> None:
    """Holds the converted configuration against the header, where a loss would change what the model computes."""
    arch = metadata["general.architecture"]
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
        if scaling != "none" or metadata["has_rope_factors"]:
            raise ValueError("its scaled rotary embedding would be lost")
    expected = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.rope.freq_base": rope.get("rope_theta"),
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.attention.head_count": config.num_attention_heads,
    }
    for key, value in expected.items():
        if key in metadata and metadata[key] != value:
            raise ValueError(f"{key} is {metadata[key]} in the file and {value} after conversion")


def _finish_generation_config(folder: Path, metadata: Mapping[str, Any]) -> None:
    """A chat model may end its turn with another token than its documents."""
    path = folder / "generation_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    values["eos_token_id"] = sorted({token_id for token_id in ends if token_id is not None})
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _finish_tokenizer_config(folder: Path, metadata: Mapping[str, Any]) -> None:
    if "tokenizer.ggml.add_bos_token" in metadata:
        path = folder / "tokenizer_config.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        values["add_bos_token"] = metadata["tokenizer.ggml.add_bos_token"]
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _finish_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> list[str]:
    """Puts back the way the text is split before the merges, for byte-level vocabularies."""
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return []
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        return [
            f"warning: this GGUF file's way to split text ({name}) is not known here; "
            "the model may see text split in another way than it was trained on"
        ]
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    spec["pre_tokenizer"] = _PRE_TOKENIZERS[name]
    path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    return []


def main() -> None:
    source, folder = (Path(argument) for argument in sys.argv[1:])
    for warning in convert(source, folder):
        print(warning)


if __name__ == "__main__":
    main()
