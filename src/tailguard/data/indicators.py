"""The built-in features: indicators as Polars expressions over one gap-free stretch of one symbol's bars.

Every window trails and ends with the current bar, which has closed. Every feature is free of the price's and the
volume's unit. Each docstring states the value of 0/0 on a flat price or an empty book; where nothing moves it
is 0, "no signal".
"""

from __future__ import annotations

import math
from functools import partial

import polars as pl

from tailguard.data.registry import feature

EMA_MEMORY = 1e-6
"""Weight that bars before the warm-up may still have in an exponential average."""
NEGLIGIBLE = 1e-9
"""Spread of a window, relative to its level, below which it counts as constant: rounding, not movement."""
QUIET = 1e-7
"""Volatility per bar (a thousandth of a basis point) added to both sides of a ratio of volatilities."""

open_, high, low, close = (pl.col(name) for name in ("open", "high", "low", "close"))
volume = pl.col("volume")
log_close = close.log()


def ratio(numerator: pl.Expr, denominator: pl.Expr, floor: pl.Expr | float = 0.0, otherwise: float = 0.0) -> pl.Expr:
    """`numerator / denominator`, or `otherwise` where the denominator is not above `floor`; null stays null."""
    divided = pl.when(denominator > floor).then(numerator / denominator)
    return divided.when(denominator.is_not_null()).then(pl.lit(otherwise)).otherwise(None)


def zscore(values: pl.Expr, window: int, level: pl.Expr | float, ddof: int = 1) -> pl.Expr:
    """Distance from the mean of the last `window` values in standard deviations, |z| ≤ √window; a constant window: 0.

    Constant is a window whose extremes, which are exact, differ by no more than `NEGLIGIBLE · level`: a running
    deviation keeps rounding errors of values that have left the window.
    """
    varies = values.rolling_max(window) - values.rolling_min(window) > NEGLIGIBLE * level
    score = ratio(values - values.rolling_mean(window), values.rolling_std(window, ddof=ddof))
    bound = math.sqrt(window)
    return pl.when(varies).then(score.clip(-bound, bound)).when(varies.is_not_null()).then(0.0).otherwise(None)


def ema_warmup(alpha: float) -> int:
    """Bars until the weight of earlier bars is `EMA_MEMORY` in an exponential average with step `alpha`."""
    return math.ceil(math.log(EMA_MEMORY) / math.log(1 - alpha))


def wilder(values: pl.Expr, window: int) -> pl.Expr:
    """Wilder's smoothing: an exponential average with step 1/window that starts at the first value."""
    return values.ewm_mean(alpha=1 / window, adjust=False)


def ema(values: pl.Expr, span: int) -> pl.Expr:
    """Exponential average with step 2/(span + 1) that starts at the first value."""
    return values.ewm_mean(span=span, adjust=False)


def true_range() -> pl.Expr:
    """Wilder's true range; high − low on the first bar of a stretch, which has no previous close."""
    previous = close.shift(1)
    return pl.max_horizontal(high - low, (high - previous).abs(), (low - previous).abs())


def average_true_range(window: int) -> pl.Expr:
    return wilder(true_range(), window)


def scaled_return(horizon: int, window: int) -> pl.Expr:
    """Log return over `horizon` bars / (root mean square of the last `window` one-bar returns · √horizon); flat: 0."""
    square = log_close.diff().pow(2).rolling_mean(window).clip(lower_bound=0.0)
    return ratio(log_close.diff(horizon), (square * horizon).sqrt(), NEGLIGIBLE)


def parkinson_volatility(window: int) -> pl.Expr:
    """√(mean ln(high/low)² / (4 ln 2)) per bar (Parkinson 1980)."""
    square = (high / low).log().pow(2).rolling_mean(window).clip(lower_bound=0.0)
    return (square / (4 * math.log(2))).sqrt()


def yang_zhang_volatility(window: int) -> pl.Expr:
    """Volatility per bar from open, high, low and close, drift-free and with opening jumps (Yang & Zhang 2000, eq. 10).

    σ² = σ²_open + k σ²_close + (1 − k) σ²_RS, where σ²_open is the variance of ln(open/previous close), σ²_close that
    of ln(close/open), σ²_RS the mean of Rogers and Satchell's estimate and k = 0.34 / (1.34 + (n + 1)/(n − 1)).
    """
    jump = (open_ / close.shift(1)).log()
    up, down, body = (high / open_).log(), (low / open_).log(), (close / open_).log()
    rogers_satchell = up * (up - body) + down * (down - body)
    k = 0.34 / (1.34 + (window + 1) / (window - 1))
    square = jump.rolling_var(window) + k * body.rolling_var(window) + (1 - k) * rogers_satchell.rolling_mean(window)
    return square.clip(lower_bound=0.0).sqrt()


def log_relative(short: pl.Expr, long: pl.Expr) -> pl.Expr:
    """ln of a short-run over a long-run volatility; `QUIET` on both sides makes two flat windows 0 and one finite."""
    return ((short + QUIET) / (long + QUIET)).log()


def rsi(window: int) -> pl.Expr:
    """Wilder's relative strength index on [−1, 1]: (index − 50) / 50; 0 where the price has never moved."""
    change = close.diff()
    up, down = wilder(change.clip(lower_bound=0.0), window), wilder((-change).clip(lower_bound=0.0), window)
    return ratio(up - down, up + down)


def macd_line(fast: int = 12, slow: int = 26) -> pl.Expr:
    """Fast minus slow exponential average of the close, in units of price (Appel)."""
    return ema(close, fast) - ema(close, slow)


def in_true_ranges(price_difference: pl.Expr, window: int = 14) -> pl.Expr:
    """A difference of prices in average true ranges; 0 where the price does not move."""
    return ratio(price_difference, average_true_range(window), NEGLIGIBLE * close)


def bollinger_position(window: int, width: float = 2.0) -> pl.Expr:
    """Where the close lies in its Bollinger band: −1 lower band, 0 middle, 1 upper; a band of no width: 0.

    The band is the mean ± `width` population standard deviations of the last `window` closes.
    """
    return zscore(close, window, level=close.rolling_max(window), ddof=0) / width


def root_zscore(count: pl.Expr, window: int) -> pl.Expr:
    """z-score of the square root, which dampens bursts, allows zero and has no unit; a constant window: 0."""
    root = count.cast(pl.Float64).sqrt()
    return zscore(root, window, level=root.rolling_max(window))


def taker_imbalance(window: int) -> pl.Expr:
    """(taker buys − taker sells) / volume over the last `window` bars, in [−1, 1]; nothing traded: 0."""
    bought, traded = pl.col("taker_buy_base").rolling_sum(window), volume.rolling_sum(window)
    # The largest volume is exactly 0 in an empty window; a running sum may keep a rounding error there.
    empty = volume.rolling_max(window) <= 0
    return pl.when(empty).then(0.0).otherwise(ratio(2 * bought - traded, traded).clip(-1.0, 1.0))


def efficiency(window: int) -> pl.Expr:
    """Kaufman's efficiency ratio with the sign of the move: net over travelled log distance, in [−1, 1]; flat: 0."""
    travelled = log_close.diff().abs().rolling_sum(window)
    return ratio(log_close.diff(window), travelled).clip(-1.0, 1.0)


def cycle_phase(days: int) -> pl.Expr:
    """Angle of the bar's open time within a period of `days` days that starts on a Monday, 00:00 UTC."""
    period = days * 86_400_000
    monday = 4 * 86_400_000  # 1970-01-05
    elapsed = (pl.col("time").dt.epoch("ms") - monday) % period
    return elapsed.cast(pl.Float64) * (2 * math.pi / period)


VOLATILITY_WINDOW = 168
LONG_RUN = 720

for _horizon in (1, 4, 12, 24, 72, 168):
    feature(f"return_{_horizon}", warmup=max(VOLATILITY_WINDOW, _horizon))(
        partial(scaled_return, _horizon, VOLATILITY_WINDOW)
    )


@feature("range_volatility_24", warmup=LONG_RUN - 1)
def range_volatility_24() -> pl.Expr:
    return log_relative(parkinson_volatility(24), parkinson_volatility(LONG_RUN))


@feature("yang_zhang_24", warmup=LONG_RUN)
def yang_zhang_24() -> pl.Expr:
    return log_relative(yang_zhang_volatility(24), yang_zhang_volatility(LONG_RUN))


@feature("atr_14", warmup=ema_warmup(1 / 14))
def atr_14() -> pl.Expr:
    return average_true_range(14) / close


@feature("rsi_14", warmup=ema_warmup(1 / 14) + 1)
def rsi_14() -> pl.Expr:
    return rsi(14)


@feature("macd", warmup=ema_warmup(1 / 14))
def macd() -> pl.Expr:
    return in_true_ranges(macd_line())


@feature("macd_histogram", warmup=ema_warmup(1 / 14))
def macd_histogram() -> pl.Expr:
    return in_true_ranges(macd_line() - ema(macd_line(), 9))


@feature("bollinger_20", warmup=19)
def bollinger_20() -> pl.Expr:
    return bollinger_position(20)


for _window in (24, 168):
    feature(f"trend_{_window}", warmup=_window)(partial(efficiency, _window))


@feature("volume_168", warmup=167)
def volume_168() -> pl.Expr:
    return root_zscore(volume, 168)


@feature("trades_168", warmup=167, needs=("trades",))
def trades_168() -> pl.Expr:
    return root_zscore(pl.col("trades"), 168)


def taker_imbalance_zscore(window: int) -> pl.Expr:
    return zscore(taker_imbalance(window), LONG_RUN, level=1.0)


for _window in (1, 6, 24):
    feature(f"taker_imbalance_{_window}", warmup=LONG_RUN + _window - 2, needs=("taker_buy_base",))(
        partial(taker_imbalance_zscore, _window)
    )


@feature("funding", needs=("funding_rate",))
def funding() -> pl.Expr:
    return pl.col("funding_rate")


def phase_sine(days: int) -> pl.Expr:
    return cycle_phase(days).sin()


def phase_cosine(days: int) -> pl.Expr:
    return cycle_phase(days).cos()


for _cycle, _days in (("day", 1), ("week", 7)):
    feature(f"time_of_{_cycle}_sin", market_wide=True)(partial(phase_sine, _days))
    feature(f"time_of_{_cycle}_cos", market_wide=True)(partial(phase_cosine, _days))


@feature("closure", needs=("closed_hours",), market_wide=True)
def closure() -> pl.Expr:
    """ln(1 + hours closed before the session), all through it: elapsed time, not bars."""
    return pl.col("closed_hours").log1p()


@feature("session_bars", needs=("session_bar",), market_wide=True)
def session_bars() -> pl.Expr:
    """ln(1 + bars since the session began)."""
    return pl.col("session_bar").log1p()


def since_opening(price: pl.Expr) -> pl.Expr:
    """`price` of a session's first bar, all through the session."""
    return pl.when(pl.col("session_start") > 0).then(price).forward_fill()


def in_bar_volatilities(log_move: pl.Expr, window: int) -> pl.Expr:
    """A log return / root mean square of the last `window` one-bar returns; flat: 0; before the first closure: 0."""
    square = log_close.diff().pow(2).rolling_mean(window).clip(lower_bound=0.0)
    return ratio(log_move.fill_null(0.0), square.sqrt(), NEGLIGIBLE)


@feature("opening_gap", warmup=VOLATILITY_WINDOW, needs=("session_start",))
def opening_gap() -> pl.Expr:
    """Return from the close before the session to its first open, all through the session."""
    return in_bar_volatilities(since_opening((open_ / close.shift(1)).log()), VOLATILITY_WINDOW)


@feature("session_return", warmup=VOLATILITY_WINDOW, needs=("session_start", "session_bar"))
def session_return() -> pl.Expr:
    """Return from the session's first open to the close of the bar."""
    return in_bar_volatilities(log_close - since_opening(open_).log(), VOLATILITY_WINDOW)
