"""What a process sets once for all its programs; the language has it so (``sgl.global_config``)."""

from __future__ import annotations

from sglbatch.errors import SglbatchError
from sglbatch.lang.environment import LanguageBackend
from sglbatch.lang.sharing import SharedBackends


class GlobalConfig:
    """Attributes:
    default_backend: of programs that are run without one.
    verbosity: from 2 on, every finished program's text is printed.
    """

    def __init__(self) -> None:
        self.default_backend: LanguageBackend | None = None
        self.verbosity = 0
        self.shared_backends = SharedBackends()

    def backend(self, given: LanguageBackend | None = None) -> LanguageBackend:
        """``given``, or the default one.

        Raises:
            SglbatchError: ``no-backend``.
        """
        backend = given if given is not None else self.default_backend
        if backend is None:
            raise SglbatchError(
                "no-backend",
                "there is no backend to run on",
                hint='sgl.set_default_backend(sgl.Runtime(model_path="smollm2-135m"))',
            )
        return backend


global_config = GlobalConfig()


def set_default_backend(backend: LanguageBackend | None) -> None:
    """The backend for ``run`` and ``run_batch`` where none is given."""
    global_config.default_backend = backend
