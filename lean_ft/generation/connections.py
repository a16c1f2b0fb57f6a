"""Connections to `leanft serve`: a client that sends no request keeps no place from others."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512  # a further one replaces the oldest that has sent no request
HEAD_SECONDS = 10  # time to send a request's head


class Connection(H11Protocol):
    """An HTTP connection that is closed if a request's head does not arrive in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, transport.abort)
        if len(self.connections) > MOST_CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, Connection) and one._is_idle]
            min(idle, key=lambda one: one._timer.when()).transport.abort()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_idle:
            self._timer.cancel()
        elif self._timer.cancelled():  # the next request has begun
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
