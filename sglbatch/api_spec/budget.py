"""What a run has spent, and the most that it may."""

from __future__ import annotations

from decimal import Decimal

from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.prices import Prices, dollars
from sglbatch.errors import EXIT_COST_CAP, BackendStopped, SglbatchError


class Budget:
    """Holds back what a call can cost at most until its real usage is known, so that the cap is never passed.

    Args:
        max_cost: dollars; None is no cap.
        batch: calls cost what they cost in a batch.

    Raises:
        SglbatchError: ``unknown-price`` where there is a cap and no price.
    """

    def __init__(self, prices: Prices, *, max_cost: Decimal | None = None, batch: bool = False) -> None:
        self._prices = prices
        self._batch = batch
        self._max_cost = max_cost
        self._reserved = Decimal(0)
        self.spent = Decimal(0)
        self.source = prices.source
        self.known = prices.cost(Tokens(prompt=1, generated=1)) is not None
        if max_cost is not None and not self.known:
            raise SglbatchError(
                "unknown-price",
                "--max-cost needs the model's prices, and they are not known",
                hint="give them: --price input=0.25,output=2 (dollars for a million tokens)",
            )

    def reserve(self, most: Tokens) -> Decimal | None:
        """Put aside what a call can cost at most; None while it has to wait for what other calls leave over.

        Raises:
            BackendStopped: ``cost-cap`` where the call could pass the cap even so.
        """
        amount = self._prices.cost(most, batch=self._batch) or Decimal(0)
        if self._max_cost is not None and self.spent + self._reserved + amount > self._max_cost:
            if self._reserved > 0:
                return None
            raise BackendStopped(
                "cost-cap",
                f"{dollars(self.spent)} are spent, and the next call could pass the cap of {dollars(self._max_cost)}",
                hint="run the same command again with a higher --max-cost: everything answered so far is kept",
                exit_code=EXIT_COST_CAP,
            )
        self._reserved += amount
        return amount

    def settle(self, reserved: Decimal, used: Tokens | None) -> None:
        """A call has ended. Without its usage (``used`` None) it counts as what it could cost at most.

        A call that brought no answer is settled with no tokens: providers bill answers.
        """
        self._reserved -= reserved
        self.spent += reserved if used is None else self._prices.cost(used, batch=self._batch) or Decimal(0)
