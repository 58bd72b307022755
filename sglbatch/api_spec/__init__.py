"""API models: the same programs over OpenAI and endpoints that speak its protocol.

Importing this loads neither the client library nor the price list; nothing here is needed for planning but text.
"""

from __future__ import annotations

from sglbatch.api_spec.dialect import ApiDialect
from sglbatch.api_spec.model import ApiModel, resolve_api_model

__all__ = ["ApiDialect", "ApiModel", "resolve_api_model"]
