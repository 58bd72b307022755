"""An API model: its name, where it is served, and which key goes there."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from sglbatch.api_spec.families import Family, family_of
from sglbatch.errors import ModelError, SglbatchError

PREFIX: Final = "openai/"
OPENAI_URL: Final = "https://api.openai.com/v1"
OPENAI_KEY: Final = "OPENAI_API_KEY"
UNKNOWN_CONTEXT: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ApiModel:
    """A model behind an endpoint.

    Args:
        name: as the user gave it; ``model``: as the endpoint knows it.
        base_url: without user name and password.
        key_env: the environment variable with the key; None sends none.
        context_len: tokens; what is not known is left to the endpoint to refuse.
    """

    name: str
    model: str
    base_url: str
    key_env: str | None
    family: Family
    context_len: int = UNKNOWN_CONTEXT
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        return f"api:{self.base_url}#{self.model}"

    def key(self) -> str | None:
        """The key, read now; it is kept nowhere else.

        Raises:
            ModelError: ``no-api-key``.
        """
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise ModelError(
                "no-api-key",
                f"the environment variable {self.key_env} is empty or not set",
                hint=f"export {self.key_env}=... with the key for {self.base_url}; --api-key-env NAME for another",
            )
        return key


def is_api_model(name: str) -> bool:
    """Whether ``--model NAME`` names an API model rather than weights."""
    return name.startswith(PREFIX)


def resolve_api_model(name: str, *, base_url: str | None = None, key_env: str | None = None) -> ApiModel:
    """The model of ``--model openai/NAME``; asks nobody.

    Raises:
        SglbatchError: ``bad-option``, ``unknown-api-model``, ``key-over-http``.
    """
    model = name.removeprefix(PREFIX)
    if not model:
        raise SglbatchError(
            "bad-option", f"--model {name} names no model", hint="for example --model openai/gpt-5-mini"
        )
    url = OPENAI_URL if base_url is None else clean_url(base_url)
    own = url != OPENAI_URL
    if key_env is None and not own:
        key_env = OPENAI_KEY
    if key_env is not None and not _is_safe(url):
        raise SglbatchError(
            "key-over-http",
            f"the key in {key_env} would travel unencrypted to {url}",
            hint="use https, or leave --api-key-env out where the server wants no key",
        )
    return ApiModel(name=name, model=model, base_url=url, key_env=key_env, family=family_of(model, own_endpoint=own))


def clean_url(url: str) -> str:
    """``url`` without user name, password, query and trailing slash.

    Raises:
        SglbatchError: ``bad-option``.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not host:
        raise SglbatchError(
            "bad-option",
            "--base-url takes an http or https address",
            hint="for example --base-url http://127.0.0.1:8081/v1",
        )
    place = f"[{host}]" if ":" in host else host
    return urlunsplit((parts.scheme, place + (f":{port}" if port else ""), parts.path.rstrip("/"), "", ""))


def _is_safe(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme == "https":
        return True
    host = parts.hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
