"""The WebSocket interface: bars, bids and offers for everybody, orders and balances for the account."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from tailguard.live.paper_exchange.replayed_exchange import PaperExchange
from tailguard.live.paper_exchange.rest import user_key

MOST_WAITING = 10_000
"""Events that may wait for a slow reader before it is disconnected."""


@dataclass(eq=False)
class Subscriber:
    """One connection, and the events that it has not been sent yet."""

    socket: web.WebSocketResponse
    streams: set[str]
    combined: bool
    """Whether events are wrapped with the name of their stream."""
    waiting: asyncio.Queue[str | None] = field(default_factory=lambda: asyncio.Queue(MOST_WAITING))
    """None: the connection ends."""

    def offer(self, stream: str, event: Mapping[str, Any]) -> None:
        if stream not in self.streams:
            return
        text = json.dumps({"stream": stream, "data": event} if self.combined else event)
        if self.waiting.full():
            self.end()
        else:
            self.waiting.put_nowait(text)

    def end(self) -> None:
        """Disconnect: what waits is lost."""
        while not self.waiting.empty():
            self.waiting.get_nowait()
        self.waiting.put_nowait(None)


class Streams:
    """All connections of an exchange. Events come late, twice, or not at all where faults ask for it."""

    def __init__(self, exchange: PaperExchange) -> None:
        self.exchange = exchange
        self.subscribers: set[Subscriber] = set()
        self._held: dict[str, list[Mapping[str, Any]]] = {}
        """Late events of each stream: they follow the next one."""
        exchange.listeners.append(self.publish)

    def publish(self, stream: str, event: Mapping[str, Any]) -> None:
        faults = self.exchange.faults
        if faults.is_silent:
            self.drop()
            return
        if faults.is_event_late():
            self._held.setdefault(stream, []).append(event)
            return
        for each in (event, *self._held.pop(stream, ())):
            for _ in range(faults.event_copies()):
                for subscriber in tuple(self.subscribers):
                    subscriber.offer(stream, each)

    def drop(self) -> None:
        """End every connection."""
        for subscriber in tuple(self.subscribers):
            subscriber.end()

    def add_routes(self, app: web.Application) -> None:
        """Binance's paths: /ws/<stream>, /ws with SUBSCRIBE, /stream?streams=…, and the same below public, market and
        private."""
        for prefix in ("", "/public", "/market", "/private"):
            app.router.add_get(f"{prefix}/ws", self._serve)
            app.router.add_get(f"{prefix}/ws/{{stream}}", self._serve)
            app.router.add_get(f"{prefix}/stream", self._serve)

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=30)
        await socket.prepare(request)
        named = [request.match_info.get("stream", ""), request.query.get("listenKey", "")]
        named += request.query.get("streams", "").split("/")
        subscriber = Subscriber(socket, set(), combined=request.path.endswith("/stream"))
        subscriber.streams |= {self._stream(name) for name in named if name}
        self.subscribers.add(subscriber)
        sending = asyncio.ensure_future(self._send(subscriber))
        try:
            async for message in socket:
                if message.type == WSMsgType.TEXT:
                    await self._obey(subscriber, message.data)
        finally:
            self.subscribers.discard(subscriber)
            sending.cancel()
        return socket

    def _stream(self, name: str) -> str:
        """The stream that a client names; the user's own has a secret name."""
        return "user" if name == user_key(self.exchange) else "" if name == "user" else name

    async def _obey(self, subscriber: Subscriber, text: str) -> None:
        """SUBSCRIBE and UNSUBSCRIBE; anything else is an error."""
        try:
            asked = json.loads(text)
            names = {self._stream(str(name)) for name in asked["params"]}
            method, number = asked["method"], asked.get("id")
            if method not in ("SUBSCRIBE", "UNSUBSCRIBE"):
                raise ValueError(method)
        except (ValueError, TypeError, KeyError):
            await subscriber.socket.send_json({"error": {"code": 2, "msg": "Invalid request"}, "id": None})
            return
        subscriber.streams = subscriber.streams | names if method == "SUBSCRIBE" else subscriber.streams - names
        await subscriber.socket.send_json({"result": None, "id": number})

    async def _send(self, subscriber: Subscriber) -> None:
        while (text := await subscriber.waiting.get()) is not None:
            try:
                await subscriber.socket.send_str(text)
            except ConnectionError:
                return
        await subscriber.socket.close()
