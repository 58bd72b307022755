"""What a running server serves."""

from __future__ import annotations

from typing import Final

from sglbatch.api_spec.failures import redact
from sglbatch.api_spec.model import ApiModel
from sglbatch.errors import ModelError

ASK_S: Final = 30.0


def served_model(endpoint: ApiModel) -> str:
    """The name of the first model that a server lists under /models.

    Args:
        endpoint: its address and key; its model does not matter.

    Raises:
        ModelError: ``no-endpoint``: no server there, or none that lists a model; ``no-api-key``.
    """
    import httpx2

    key = endpoint.key()
    try:
        answer = httpx2.get(
            f"{endpoint.base_url}/models",
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=ASK_S,
            follow_redirects=False,
        )
        answer.raise_for_status()
        listed = answer.json()["data"]
        return str(listed[0]["id"])
    except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = redact(str(error), key) or type(error).__name__
        raise ModelError(
            "no-endpoint",
            f"no server at {endpoint.base_url} names its model: {reason}",
            hint='see that it is up, or name the model: RuntimeEndpoint(url, model="NAME")',
        ) from None
