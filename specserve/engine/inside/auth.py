"""ASGI middleware for vLLM's ``--middleware``: with an API key set, nearly every path asks for it.

vLLM's own check covers ``/v1``, ``/v2``, ``/inference`` and ``/cohere``
(``entrypoints/serve/middleware``, 0.32, read 2026-11-29): ``/invocations`` completes a prompt for
anybody. Runs inside the engine: standard library only.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from specserve.engine.command import environment
from specserve.engine.inside.asgi import App, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
"""What load balancers, Kubernetes and Prometheus ask for without a key.

Nothing there is about prompts or answers.
"""

_BODY = b'{"error": "Unauthorized"}'


class RequireKey:
    """Returns 401 for a request without ``Authorization: Bearer KEY``; passes everything through
    when no key is set.
    """

    def __init__(self, app: App, key: str | None = None) -> None:
        """``key`` None takes the engine's own: VLLM_API_KEY, or several of ours."""
        self._app = app
        keys = environment.api_keys()
        if key is not None:
            keys = (key,)
        self._digests = tuple(sha256(each.encode()).digest() for each in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._digests or _is_open(scope) or self._knows_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})

    def _knows_key(self, scope: Scope) -> bool:
        """Digests of equal length are compared in constant time: neither the key nor its length
        leaks.
        """
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                digest = sha256(given.strip()).digest()
                # Every key is compared, so that the time does not tell which one comes near.
                known = [hmac.compare_digest(digest, mine) for mine in self._digests]
                return scheme.lower() == b"bearer" and any(known)
        return False


def _is_open(scope: Scope) -> bool:
    """Start-up messages, CORS preflights (browsers send them without a key), and the open paths."""
    if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
        return True
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN_PATHS
