"""Limit the size of requests, for every HTTP server of the package."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BoundedRequests:
    """Middleware that refuses a request whose body is too large, without reading the whole body.

    Args:
        app: ASGI application.
        max_bytes: Maximum size of a body, in bytes.
    """

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        """Handle a request.

        Args:
            scope: ASGI description of the connection.
            receive: Function that returns the next part of the request body.
            send: Function that sends a part of the response.

        Raises:
            HTTPException: If the body is larger than `max_bytes`.
        """
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise HTTPException(
                    413, f"a request must have at most {self.max_bytes:,} bytes, got more."
                )
            return message

        await self.app(scope, receive_bounded, send)
