"""What a run's report says of an API model, for people."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from sglbatch.api_spec.prices import dollars


def api_lines(facts: Mapping[str, Any]) -> list[str]:
    """Lines of the report; [] for a local model."""
    if not facts:
        return []
    retries = ", ".join(f"{count:,} x {code}" for code, count in sorted(facts["retries"].items())) or "none"
    speculation = facts["speculation"]
    lines = [
        f"{'endpoint':<10}{facts['http_requests']:,} requests to {facts['endpoint']}; tried again: {retries}",
        f"{'ahead':<10}{facts['calls_ahead']:,} calls answered by an earlier one: "
        f"{speculation['saved_prompt_tokens']:,} prompt tokens saved, "
        f"{speculation['wasted_tokens']:,} generated for nothing"
        + (f"; switched off at {speculation['places_off']} places" if speculation["places_off"] else ""),
    ]
    if facts["methods"]:
        methods = ", ".join(f"{name} {count:,}" for name, count in sorted(facts["methods"].items()))
        lines.append(f"{'means':<10}{methods}")
    if facts["answers_without_usage"]:
        lines.append(f"{'warning':<10}{facts['answers_without_usage']:,} answers named no tokens: counts are too low")
    cost = facts["cost"]
    shown = "unknown" if cost["dollars"] is None else f"{dollars(Decimal(str(cost['dollars'])))} by {cost['prices']}"
    earlier = Decimal(str(cost["earlier_dollars"] or 0))
    behind = f"; {dollars(earlier)} by earlier runs of the job" if earlier else ""
    lines.append(f"{'cost':<10}{shown}{behind}")
    return lines
