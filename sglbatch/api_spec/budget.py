"""What a job has spent, and the most that it may."""

from __future__ import annotations

from decimal import Decimal
from typing import Protocol

from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.prices import Prices, dollars
from sglbatch.errors import EXIT_COST_CAP, BackendStopped, SglbatchError


class Ledger(Protocol):
    """Where what is spent is kept from run to run; ``job.spending`` has it on disk."""

    def earlier(self, prices: Prices) -> Decimal:
        """Dollars that earlier runs of the job have spent."""

    def add(self, tokens: Tokens, dollars: Decimal | None, *, batch: bool) -> None:
        """An answer has come; ``dollars`` None where its price is not known."""

    def close(self) -> None: ...


class Budget:
    """Holds back what a call can cost at most until its real usage is known, so that the cap is never passed.

    Attributes:
        spent: dollars of this run; ``earlier``: of the job's runs before.

    Args:
        max_cost: dollars for the whole job, earlier runs included; None is no cap.
        batch: calls cost what they cost in a batch.
        ledger: None keeps nothing.

    Raises:
        SglbatchError: ``unknown-price`` where there is a cap and no price.
    """

    def __init__(
        self, prices: Prices, *, max_cost: Decimal | None = None, batch: bool = False, ledger: Ledger | None = None
    ) -> None:
        self._prices = prices
        self._batch = batch
        self._max_cost = max_cost
        self._ledger = ledger
        self._reserved = Decimal(0)
        self.spent = Decimal(0)
        self.earlier = Decimal(0) if ledger is None else ledger.earlier(prices)
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
        spent = self.earlier + self.spent
        if self._max_cost is not None and spent + self._reserved + amount > self._max_cost:
            if self._reserved > 0:
                return None
            raise BackendStopped(
                "cost-cap",
                f"{dollars(spent)} are spent, and the next call could pass the cap of {dollars(self._max_cost)}",
                hint="run the same command again with a higher --max-cost: everything answered so far is kept",
                exit_code=EXIT_COST_CAP,
            )
        self._reserved += amount
        return amount

    def settle(self, reserved: Decimal, most: Tokens, used: Tokens | None) -> None:
        """A call was answered. Without its usage (``used`` None) it counts as what it could cost at most.

        Args:
            most: what was reserved for.
        """
        self._reserved -= reserved
        tokens = most if used is None else used
        amount = self._prices.cost(tokens, batch=self._batch)
        self.spent += amount or Decimal(0)
        if self._ledger is not None:
            self._ledger.add(tokens, amount, batch=self._batch)

    def release(self, reserved: Decimal) -> None:
        """A call brought no answer: providers bill answers."""
        self._reserved -= reserved

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
