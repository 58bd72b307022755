"""What a model folder says about its tokenizer: ``tokenizer.json`` and the small files beside it, read once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from sglbatch.errors import ModelError


@dataclass(frozen=True, slots=True)
class Special:
    """An added token. The strips say whether white space beside it belongs to it."""

    id: int
    lstrip: bool
    rstrip: bool


class TokenizerFiles:
    """A model folder's statements about its tokenizer.

    Attributes:
        spec: tokenizer.json.
        added_tokens: its added tokens, all of them.
        specials: those of them that are more than plain text, by their text.
        bos_token, eos_token, bos_ids, eos_token_ids, chat_template: as in ``Tokenizer``.
    """

    def __init__(self, model_dir: Path) -> None:
        self.path = model_dir / "tokenizer.json"
        if not self.path.is_file():
            raise ModelError(
                "no-tokenizer",
                f"{model_dir} has no tokenizer.json",
                hint="save it beside the weights: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)",
            )
        self.spec: dict[str, Any] = _read_json(self.path)
        self.added_tokens: list[dict[str, Any]] = self.spec.get("added_tokens") or []
        self.specials = {
            token["content"]: Special(token["id"], token.get("lstrip", False), token.get("rstrip", False))
            for token in self.added_tokens
            if not _is_plain(token)
        }
        self._config = _read_json(model_dir / "config.json", optional=True)
        self._tokenizer_config = _read_json(model_dir / "tokenizer_config.json", optional=True)
        self._special_tokens_map = _read_json(model_dir / "special_tokens_map.json", optional=True)
        self.bos_token = self._named_token("bos_token")
        self.eos_token = self._named_token("eos_token")
        self.bos_ids = self._find_bos_ids()
        self.eos_token_ids = self._find_eos_ids(_read_json(model_dir / "generation_config.json", optional=True))
        self.chat_template = self._find_chat_template(model_dir / "chat_template.jinja")

    @property
    def model_vocab_size(self) -> int:
        text_config = self._config.get("text_config") or self._config
        return int(text_config.get("vocab_size") or 0)

    @property
    def plain_spec(self) -> dict[str, Any]:
        """The tokenizer without its special tokens, post-processor, and what would cut or blur a text."""
        kept = [token for token in self.added_tokens if _is_plain(token)]
        model = {**self.spec["model"], "dropout": None}
        return {
            **self.spec,
            "model": model,
            "added_tokens": kept,
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }

    @property
    def identity(self) -> str:
        digest = hashlib.sha256(self.path.read_bytes())
        rest = [self.bos_token, self.eos_token, self.bos_ids, sorted(self.eos_token_ids), self.chat_template]
        digest.update(json.dumps(rest).encode())
        return digest.hexdigest()[:16]

    def check_plain_encoder(self, encoder: tokenizers.Tokenizer) -> None:
        """Holds that plain text makes no special token, and that the added tokens that stay keep their ids."""
        true_specials = {token["content"]: token["id"] for token in self.added_tokens if token.get("special", False)}
        special_ids = set(true_specials.values())
        encodings = encoder.encode_batch_fast(list(true_specials), add_special_tokens=False)
        for text, encoding in zip(true_specials, encodings, strict=True):
            if special_ids.intersection(encoding.ids):
                raise self._unsupported(f"the plain text {text!r} cannot be told from the special token")
        for token in self.added_tokens:
            if _is_plain(token) and encoder.token_to_id(token["content"]) != token["id"]:
                raise self._unsupported(f"its added token {token['content']!r} cannot be kept at its id")

    def _unsupported(self, reason: str) -> ModelError:
        return ModelError(
            "unsupported-tokenizer",
            f"this tokenizer cannot be used: {reason}",
            hint="choose a model with a byte-level BPE tokenizer, or a BPE one with byte fallback",
            where=str(self.path),
        )

    def _named_token(self, key: str) -> str:
        for source in (self._tokenizer_config, self._special_tokens_map):
            value = source.get(key)
            if value:
                return str(value["content"] if isinstance(value, dict) else value)
        return ""

    def _find_bos_ids(self) -> tuple[int, ...]:
        """tokenizer_config's ``add_bos_token`` when it is given, as in transformers; else the post-processor's part."""
        explicit = self._tokenizer_config.get("add_bos_token")
        if explicit is None:
            return _post_processor_prefix(self.spec.get("post_processor"))
        return (self.specials[self.bos_token].id,) if explicit and self.bos_token in self.specials else ()

    def _find_eos_ids(self, generation_config: Mapping[str, Any]) -> frozenset[int]:
        ids: set[int] = set()
        for source in (generation_config, self._config, self._config.get("text_config") or {}):
            value = source.get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        if self.eos_token in self.specials:
            ids.add(self.specials[self.eos_token].id)
        return frozenset(ids)

    def _find_chat_template(self, path: Path) -> str | None:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        value = self._tokenizer_config.get("chat_template")
        if isinstance(value, list):  # named templates; the one called default is the chat's
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
        return value if value is None else str(value)


def _is_plain(token: Mapping[str, Any]) -> bool:
    """Runs of white space as added tokens are how some vocabularies spell plain text: they are no control tokens."""
    return not token.get("special", False) and not token["content"].replace("\u2581", " ").strip()


def _post_processor_prefix(processor: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The ids that a post-processor puts before a single text."""
    if processor is None:
        return ()
    match processor["type"]:
        case "Sequence":
            return tuple(i for part in processor["processors"] for i in _post_processor_prefix(part))
        case "TemplateProcessing":
            ids: list[int] = []
            for item in processor["single"]:
                if "Sequence" in item:
                    break
                ids.extend(processor["special_tokens"][item["SpecialToken"]["id"]]["ids"])
            return tuple(ids)
        case "BertProcessing" | "RobertaProcessing":
            return (int(processor["cls"][1]),)
        case _:
            return ()


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            "broken-tokenizer", f"cannot be read: {error}", hint="download the model again", where=str(path)
        ) from error
    if not isinstance(value, dict):
        raise ModelError("broken-tokenizer", "is not a JSON object", hint="download the model again", where=str(path))
    return value
