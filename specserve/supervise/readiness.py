"""When an engine is ready, and when it is dead although its process lives.

Asked by the supervisor.
"""

from __future__ import annotations

from collections.abc import Callable

from specserve.engine.http.client import EngineClient, EngineError
from specserve.supervise.state import Event, Failed, Ready

PROMPT = "The first ten numbers are one, two, three,"
HEALTH_SECONDS = 3.0
COMPLETION_SECONDS = 60.0
"""The first completion may compile kernels."""


class Readiness:
    """Ready: /health returns 200 and it is our engine that does, the served name is listed, a
    completion returned a token, and the canary allows it.
    """

    def __init__(
        self,
        client: EngineClient,
        model: str,
        canary: Callable[[], Failed | None],
        stranger: Callable[[], str | None] = lambda: None,
    ) -> None:
        """``canary`` says why the engine must not serve, None when it may; ``stranger`` says who
        else it is that answers, None when it is ours."""
        self._client, self._model, self._canary = client, model, canary
        self._stranger = stranger
        self.last_answer: str | None = None
        """Why the engine that listens is not ready yet; None while nothing listens."""

    def check_ready(self) -> Event | None:
        """None until it is decided."""
        try:
            healthy = self._client.health(timeout=HEALTH_SECONDS)
        except EngineError:
            return None
        if not healthy:
            self.last_answer = "/health returns an error"
            return None
        self.last_answer = self._stranger()
        if self.last_answer is not None:
            return None
        try:
            return self._serves()
        except EngineError as error:
            self.last_answer = str(error)
            return None

    def _serves(self) -> Event | None:
        names = self._client.models(timeout=HEALTH_SECONDS)
        if self._model not in names:
            cause = f"it serves {', '.join(names) or 'no model'} instead of {self._model}"
            return Failed(cause, retry=False, fix="remove served-model-name from engine.extra_args")
        answer = self._client.complete(
            PROMPT, max_tokens=2, temperature=0, timeout=COMPLETION_SECONDS
        )
        if not answer.completion_tokens:
            self.last_answer = "a completion returned no token"
            return None
        self.last_answer = None
        return self._canary() or Ready()

    def check_alive(self) -> Event | None:
        """vLLM returns 503 for /health once its engine core is dead, seconds before its API process
        ends. Silence proves nothing: a busy engine may be slow."""
        try:
            alive = self._client.health(timeout=HEALTH_SECONDS)
        except EngineError:
            return None
        if alive:
            return None
        return Failed("its engine core is dead (/health returns an error)")
