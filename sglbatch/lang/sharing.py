"""One backend under several drivers: programs that are read while they run go on side by side.

Each driver gets a port. A port gives requests and programs numbers of their own, and whoever steps the backend hands
the others' results to their ports. The results of a port that is gone are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from weakref import WeakValueDictionary

from sglbatch.lang.environment import TellsPartialTexts
from sglbatch.types import Backend, BackendStats, Request, Result


class Port:
    """A ``Backend`` for one driver."""

    def __init__(self, shared: SharedBackend) -> None:
        self._shared = shared
        self._program_ids: dict[int, int] = {}
        self._own_ids: dict[int, int] = {}
        self._results: list[Result] = []

    @property
    def identity(self) -> str:
        return self._shared.backend.identity

    @property
    def context_len(self) -> int:
        return self._shared.backend.context_len

    @property
    def has_unfinished(self) -> bool:
        return bool(self._own_ids or self._results)

    def submit(self, requests: Sequence[Request]) -> None:
        numbered = []
        for request in requests:
            if request.program_id not in self._program_ids:
                self._program_ids[request.program_id] = next(self._shared.numbers)
            number = next(self._shared.numbers)
            self._own_ids[number] = request.request_id
            self._shared.ports[number] = self
            program_id = self._program_ids[request.program_id]
            numbered.append(replace(request, request_id=number, program_id=program_id))
        self._shared.backend.submit(numbered)

    def step(self) -> list[Result]:
        if not self._results:
            self._shared.step()
        results, self._results = self._results, []
        return results

    def take(self, result: Result) -> None:
        self._results.append(replace(result, request_id=self._own_ids.pop(result.request_id)))

    def partial_texts(self) -> Mapping[int, str]:
        """See ``environment.TellsPartialTexts``; nothing where the backend does not tell."""
        backend = self._shared.backend
        texts = backend.partial_texts() if isinstance(backend, TellsPartialTexts) else {}
        return {self._own_ids[number]: text for number, text in texts.items() if number in self._own_ids}

    def finish_program(self, program_id: int) -> None:
        number = self._program_ids.pop(program_id, None)
        if number is not None:  # else another program's equal calls were asked in its place
            self._shared.backend.finish_program(number)

    def stats(self) -> BackendStats:
        return self._shared.backend.stats()

    def close(self) -> None:
        """The backend is its owner's to close."""


class SharedBackend:
    """Attributes:
    ports: by request number.
    """

    def __init__(self, backend: Backend, numbers: Iterator[int]) -> None:
        self.backend = backend
        self.numbers = numbers
        self.ports: WeakValueDictionary[int, Port] = WeakValueDictionary()

    def step(self) -> None:
        for result in self.backend.step():
            port = self.ports.pop(result.request_id, None)
            if port is not None:
                port.take(result)


class SharedBackends:
    """The shared form of each backend that has ports."""

    def __init__(self) -> None:
        self._numbers = count()  # of all backends: a request may outlive its port, and must not be taken for another's
        self._shared: WeakValueDictionary[int, SharedBackend] = WeakValueDictionary()

    def port(self, backend: Backend) -> Port:
        """A new port to ``backend``."""
        shared = self._shared.get(id(backend))
        if shared is None:
            shared = self._shared[id(backend)] = SharedBackend(backend, self._numbers)
        return Port(shared)
