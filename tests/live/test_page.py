"""The session on the screen and on the page: the numbers of its state, in a real browser, for local readers alone."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.live.bar_history import ReplaySource
from tailguard.live.equity_curve import MOST_POINTS, EquityCurve
from tailguard.live.page_server import PageServer
from tailguard.live.simulation import World
from tailguard.live.venue import SimulatedClock
from tailguard.live.view import session_view

from .conftest import ShadowMaker, WorldMaker, open_time

COMMAND = "tailguard live runs/demo --mode paper --release"


def read(server: PageServer, path: str = "/state.json", method: str = "GET", **headers: str) -> tuple[int, dict, bytes]:
    """Status, headers and body, asked for as a stranger could."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.headers), body


@pytest.fixture
def traded(paper_world: WorldMaker) -> World:
    """Two symbols after 60 bars, with a stranger's position and a guard that has tripped."""
    world = paper_world(tg.make_market(90, assets=2, seed=3).bars)
    world.running = world.session()
    world.trade(world.running, 59)
    world.venue.trade_outside(world.panel.symbols[0], 7)
    world.trade(world.running, 1)
    return world


def test_a_short_curve_is_every_close_and_a_long_one_keeps_its_extremes() -> None:
    """Brute force: every stretch of the thinned curve against the closes in it."""
    import numpy as np

    closes = np.exp(np.cumsum(np.random.default_rng(0).normal(size=5_000) * 0.01))
    curve = EquityCurve()
    for time_ms, equity in enumerate(closes[:1_000]):
        curve.add(time_ms, equity)
    assert curve.points == [(row, equity, equity, equity) for row, equity in enumerate(closes[:1_000])]
    for time_ms, equity in enumerate(closes[1_000:], 1_000):
        curve.add(time_ms, equity)
    assert curve.stride == 8
    assert len(curve.points) == 5_000 / 8 < MOST_POINTS
    stretches = closes.reshape(-1, 8)
    ends = np.arange(7, 5_000, 8)
    expected = np.column_stack([ends, closes[ends], stretches.min(1), stretches.max(1)])
    np.testing.assert_array_equal(curve.points, expected)


def test_the_view_has_the_numbers_of_state_and_venue(traded: World) -> None:
    session = traded.running
    view = session_view(session, COMMAND)
    decisions = traded.records("decision")
    assert view["equity"] == decisions[-1]["equity"]
    assert [point[1] for point in view["curve"]] == [each["equity"] for each in decisions]
    assert [row["target"] for row in view["positions"]] == decisions[-1]["target"]
    for row in view["positions"]:
        assert row["ours"] + row["foreign"] == float(traded.venue.books.positions[row["symbol"]])
    assert view["positions"][0]["foreign"] != 0
    assert view["state"] == "frozen"
    assert list(view["frozen"]) == ["position"]
    assert view["alarms"][0]["active"]
    peak = max(each["equity"] for each in decisions)
    used = {row["name"]: row["used"] for row in view["limits"]}
    assert used["drawdown"] == pytest.approx((1 - view["equity"] / peak) / session.guards.config.drawdown)
    bought = [record for record in traded.records("order") if record["filled"] != "0"]
    hour = view["now_ms"] - 3_600_000
    last, notional = {}, 0.0
    for record in bought:
        fresh = abs(float(record["filled"])) - last.get(record["id"], 0.0)
        last[record["id"]] = abs(float(record["filled"]))
        notional += fresh * record["price"] if record["time"] > hour else 0.0
    assert used["notional, hour"] == pytest.approx(
        notional / (session.guards.config.hour_notional * session.guards.unit)
    )
    json.dumps(view, allow_nan=False)


def test_the_budget_that_is_used_is_the_loss_of_the_open_window(paper_world: WorldMaker) -> None:
    from dataclasses import replace

    from .conftest import LOOSE

    world = paper_world(guards=replace(LOOSE, cvar_limit=-0.5, cvar_alpha=0.05))
    session = world.session()
    world.trade(session, 80)  # windows of 32 bars: the third began at decision 64
    equities = [each["equity"] for each in world.records("decision")]
    budget = session_view(session, COMMAND)["budget"]
    assert budget["age"] == 15
    assert budget["change"] == pytest.approx(equities[79] / equities[64] - 1, rel=1e-12)
    assert budget["used"] == pytest.approx(max(0, budget["change"] / -0.5))


def test_only_local_names_are_answered(traded: World) -> None:
    with PageServer(0) as server:
        server.publish(session_view(traded.running, COMMAND))
        status, headers, body = read(server)
        assert status == 200
        assert json.loads(body)["run"] == "world"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers
        assert read(server, Host=f"localhost:{server.port}")[0] == 200
        for name in (
            "evil.example",
            f"evil.example:{server.port}",
            "127.0.0.1",
            "",
            f"127.0.0.1:{server.port}.evil.example",
        ):
            status, _, body = read(server, Host=name)
            assert status == 421, name
            assert b"world" not in body
        for path in ("/../view.py", "/journal.jsonl", "/state", "/live_page.html"):
            assert read(server, path)[0] == 404
        host, port = server._server.server_address
        assert host == "127.0.0.1"
        other = socket.create_server(("127.0.0.2", 0))  # another loopback address of this machine
        with other, pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=5):
            pass


def test_nothing_can_be_written(traded: World) -> None:
    before = traded.journal_path.read_bytes()
    with PageServer(0) as server:
        server.publish(session_view(traded.running, COMMAND))
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            status, headers, _ = read(server, "/", method)
            assert status == 405
            assert headers["Allow"] == "GET, HEAD"
        status, headers, body = read(server, "/state.json", "HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 1_000
    assert traded.journal_path.read_bytes() == before


def test_numbers_that_json_lacks_become_null() -> None:
    with PageServer(0) as server:
        server.publish({"a": [1.5, float("nan"), {"b": float("-inf")}]})
        content = json.loads(read(server)[2], parse_constant=lambda name: pytest.fail(name))
    assert content["a"] == [1.5, None, {"b": None}]


def test_a_port_that_is_taken_or_impossible_is_refused_in_words() -> None:
    with PageServer(0) as server, pytest.raises(ConfigError, match=f"--page {server.port}: Address already in use"):
        PageServer(server.port)
    with pytest.raises(ConfigError, match="from 0 to 65535"):
        PageServer(70_000)


def test_the_page_is_gone_when_the_session_is() -> None:
    with PageServer(0) as server:
        url = server.url
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


WIDTH = "return document.documentElement.scrollWidth"
INK = "return getComputedStyle(document.body).color + getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False), (360, True)])
def test_the_page_in_a_browser(traded: World, tmp_path: Path, browser, width: int, dark: bool) -> None:
    view = session_view(traded.running, COMMAND)
    with PageServer(0) as server, browser(width, 900, dark) as window:
        server.publish(view)
        window.open(server.url, drawn="drawn")
        text = window.run("return document.body.innerText")
        assert window.run(WIDTH) <= width
        assert window.run("const t = document.querySelector('.wide'); return t.scrollWidth <= t.clientWidth")
        assert window.run("return document.querySelectorAll('#chart polyline')[0].points.length") == 60
        assert window.run("return document.querySelectorAll('#positions td').length") == 10
        assert window.run(INK) == ("rgb(230, 233, 236)rgb(20, 24, 28)" if dark else "rgb(27, 31, 36)rgb(255, 255, 255)")
        asked = [url for url in window.requests() if not url.startswith("data:")]
        assert {url.removeprefix(server.url) for url in asked} == {"live_page.css", "live_page.js", "state.json"}
        assert window.log("browser") == []
        window.screenshot(tmp_path / "page.png", whole=True)
    assert "frozen" in text
    assert f"{view['equity']:,.4f}" in text
    assert f"{view['money']:,.2f} in money" in text
    for row in view["positions"]:
        assert f"{row['weight']:+.4f}".replace("-", "−") in text
        assert f"{row['target']:+.4f}".replace("-", "−") in text
    assert COMMAND in text
    assert view["frozen"]["position"] in text


def test_the_page_shows_what_moved_the_last_decision(
    agent, shadow_session: ShadowMaker, tmp_path: Path, browser
) -> None:
    bars = tg.make_market(260, seed=8).bars
    first = open_time(bars, 200)
    clock = SimulatedClock(first)
    session = shadow_session(agent, bars, first, clock)
    session.start()
    source = ReplaySource(bars, first - 1, clock)
    for _ in range(40):
        session.on_bar(source.next_bar())
    view = session_view(session, COMMAND)
    with PageServer(0) as server, browser(700, 900) as window:
        server.publish(view)
        window.open(server.url, drawn="drawn")
        text = window.run("return document.getElementById('moved').innerText")
        shown = window.run("return document.body.innerText")
        heads = window.run("return [...document.querySelectorAll('#positions th')].map(h => h.textContent)")
        widths = window.run("return [...document.querySelectorAll('#moved rect')].map(r => +r.getAttribute('width'))")
        assert window.log("browser") == []
        window.screenshot(tmp_path / "moved.png", whole=True)
    assert heads == ["symbol", "weight at the close", "target"]  # nothing is held at a venue
    assert "No orders: the account is simulated." in shown
    assert "in money" not in shown
    found = view["moved"]["SYN01"]
    shares = [*(share for _, share, _ in found["moved"]), found["others"]]
    largest = max(abs(share) for share in shares)
    assert widths == pytest.approx([100 * abs(share) / largest for share in shares], rel=1e-6)
    for name, share, size in found["moved"]:
        assert f"{name}, at {size:+.1f} sd".replace("-", "−") in text.replace("-", "−")
        assert f"{share:+.4f}".replace("-", "−") in text


def test_the_page_follows_the_session_and_says_when_it_is_alone(traded: World, browser) -> None:
    """New numbers come by themselves; when the process is gone the page says so and keeps its last word."""
    import time

    def until(window, script: str) -> None:
        end = time.monotonic() + 60
        while not window.run(script):
            assert time.monotonic() < end, window.run("return document.body.innerText")
            time.sleep(0.1)

    with browser(800, 900) as window:
        with PageServer(0) as server:
            window_url = server.url
            server.publish(session_view(traded.running, COMMAND))
            window.open(window_url, drawn="drawn")
            traded.running.ledger.record("kill", message="<img src=x onerror=document.title='owned'>", flatten=False)
            server.publish(session_view(traded.running, COMMAND))
            until(window, "return document.getElementById('state').textContent === 'killed'")
            assert "<img src=x" in window.run("return document.getElementById('blocked').innerText")
            assert window.run("return document.querySelectorAll('img').length") == 0
            assert "owned" not in window.run("return document.title.split(':')[0]")
        until(window, "return !document.getElementById('link').hidden")
        assert "No answer from the session's process since" in window.run(
            "return document.getElementById('link').innerText"
        )
        assert window.run("return document.querySelectorAll('#positions td').length") == 10
