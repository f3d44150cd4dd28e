"""The process: an HTTP server on localhost that lets a paper exchange's time pass."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from tailguard.live.paper_exchange.replayed_exchange import PaperExchange
from tailguard.live.paper_exchange.rest import add_routes
from tailguard.live.paper_exchange.streams import Streams

HOST = "127.0.0.1"
"""Never anything else: the venue is for this machine alone."""
TICK_S = 0.02


def make_app(exchange: PaperExchange) -> web.Application:
    """The server's routes."""
    app = web.Application()
    add_routes(app, exchange)
    Streams(exchange).add_routes(app)
    return app


@contextlib.asynccontextmanager
async def serving(exchange: PaperExchange, port: int = 0) -> AsyncIterator[str]:
    """Serve on localhost; gives the address. Port 0: any free one."""
    runner = web.AppRunner(make_app(exchange), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        bound = runner.addresses[0][1]
        ticking = asyncio.ensure_future(_tick(exchange))
        try:
            yield f"http://{HOST}:{bound}"
        finally:
            ticking.cancel()
    finally:
        await runner.cleanup()


async def _tick(exchange: PaperExchange) -> None:
    """Let time pass although nobody asks."""
    while exchange.config.speed:
        exchange.advance()
        await asyncio.sleep(TICK_S)


def serve(exchange: PaperExchange, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `announce` gets the address as soon as it answers."""

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with serving(exchange, port) as address:
            announce(address)
            await stop.wait()

    asyncio.run(run())
