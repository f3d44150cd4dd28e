"""Values with publication times: a bar knows what was published by its close, and nothing later."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import tailguard as tg
from tailguard.config import load_config
from tailguard.data.features import FEATURES, FeatureError, compute_features, feature, leaking_features
from tailguard.data.published import with_published
from tailguard.errors import BarsError
from tailguard.experiment.build import load_bars_in_memory

START, HOUR = datetime(2021, 1, 4, tzinfo=UTC), timedelta(hours=1)


def bars(symbols: tuple[str, ...] = ("A",), count: int = 48) -> tg.Bars:
    close = 100 + np.sin(np.arange(count))
    frames = [
        pl.DataFrame({"symbol": symbol, "time": [START + hour * HOUR for hour in range(count)], "close": close})
        for symbol in symbols
    ]
    return tg.load_bars(pl.concat(frames))


def releases() -> pl.DataFrame:
    """At 02:30, at 05:00 sharp, and one at 09:59:59."""
    moments = [START + 2.5 * HOUR, START + 5 * HOUR, START + 10 * HOUR - timedelta(seconds=1)]
    return pl.DataFrame({"published": moments, "surprise": [1.0, 2.0, 3.0]})


def test_a_value_is_known_from_the_first_close_after_its_publication() -> None:
    frame = with_published(bars(), releases(), before=0.0).frame
    # The bar of 02:00 closes at 03:00, after 02:30. 05:00 is the close of the bar of 04:00. 09:59:59 is before 10:00.
    assert frame["surprise"].to_list()[:12] == [0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]
    later = with_published(bars(), releases(), before=0.0, delay="1h").frame
    assert later["surprise"].to_list()[:12] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3]


def test_values_of_symbols_stay_with_them_and_files_are_read_too(tmp_path: Path) -> None:
    tenfold = releases().with_columns(pl.col("surprise") * 10, ticker=pl.lit("B"))
    table = pl.concat([releases().with_columns(ticker=pl.lit("A")), tenfold])
    path = tmp_path / "surprise.csv"
    table.write_csv(path)
    for given in (table, path):
        joined = with_published(bars(("A", "B")), given, before=-1.0)
        assert joined.select("A").frame["surprise"][20] == 3
        assert joined.select("B").frame["surprise"][20] == 30
        assert joined.symbols == ("A", "B")
        assert joined.frame.columns[-1] == "segment"


def test_a_feature_reads_it_and_does_not_see_the_future() -> None:
    joined = with_published(bars(count=300), releases(), before=0.0)
    try:
        feature("surprise_decay", needs=("surprise",))(lambda: pl.col("surprise") / 3)
        assert compute_features(joined, ["surprise_decay"]).values[:12, 0].tolist() == pytest.approx(
            [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 2 / 3, 2 / 3, 1, 1, 1]
        )
        assert leaking_features(joined, ["surprise_decay"]) == []
    finally:
        FEATURES.pop("surprise_decay", None)


def test_a_change_of_a_later_publication_changes_no_earlier_bar() -> None:
    first = with_published(bars(), releases(), before=0.0).frame["surprise"]
    other = releases().with_columns(surprise=pl.Series([1.0, 2.0, 99.0]))
    second = with_published(bars(), other, before=0.0).frame["surprise"]
    assert first[:9].equals(second[:9])
    assert (second[9:] == 99).all()


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (releases().rename({"published": "date"}), {}, "no column 'published' of publication times"),
        (releases().with_columns(published=pl.lit("soon")), {}, "'soon' in 'published' is not a time"),
        (releases().drop("surprise"), {}, "no numeric column"),
        (releases().rename({"surprise": "close2"}), {"columns": ["surprise"]}, "no numeric column 'surprise'|surprise"),
        (releases().with_columns(pl.col("published") + timedelta(days=90)), {}, "no value for A by the last bar"),
    ],
)
def test_what_cannot_be_joined_is_named(table: pl.DataFrame, options: dict[str, object], message: str) -> None:
    with pytest.raises(BarsError, match=message):
        with_published(bars(), table, **options)  # type: ignore[arg-type]


def test_a_feature_before_the_first_publication_names_the_column_and_the_way_out() -> None:
    feature("surprise_again", needs=("surprise",))(lambda: pl.col("surprise") / 3)
    try:
        joined = with_published(bars(), releases())
        with pytest.raises(FeatureError, match=r"column 'surprise'.* has no value for A at .*data.published_before"):
            compute_features(joined, ["surprise_again"])
        assert compute_features(with_published(bars(), releases(), before=0.0), ["surprise_again"]).valid.all()
    finally:
        FEATURES.pop("surprise_again", None)


def test_settings_join_as_the_call_does(tmp_path: Path) -> None:
    path, news = tmp_path / "bars.parquet", tmp_path / "news.csv"
    bars().frame.drop("segment").write_parquet(path)
    releases().write_csv(news)
    settings = [f"data.path={path}", f"data.published={news}"]
    config = load_config(overrides=[*settings, "data.published_delay=1h", "data.published_before=-1"])
    expected = with_published(bars(), releases(), delay="1h", before=-1.0).frame["surprise"]
    assert load_bars_in_memory(config).frame["surprise"].equals(expected)
    assert expected[0] == -1


def test_a_value_after_the_close_of_a_session_belongs_to_the_next_bar() -> None:
    """The session of Tuesday ends at 21:00 UTC, and Wednesday's opens then: a value of 23:50 is Wednesday's."""
    days = pl.date_range(datetime(2021, 6, 1), datetime(2021, 6, 30), "1d", eager=True)
    weekdays = days.filter(days.dt.weekday() <= 5)
    table = pl.DataFrame({"date": weekdays, "close": 1 + 0.1 * np.sin(np.arange(len(weekdays)))})
    currency = tg.load_bars(table, calendar="fx", symbol="EURUSD")
    for moment, expected in (
        ("2021-06-08 23:50", datetime(2021, 6, 9)),
        ("2021-06-08 21:00", datetime(2021, 6, 8)),
        ("2021-06-08 21:01", datetime(2021, 6, 9)),
    ):
        news = pl.DataFrame({"published": [moment], "surprise": [1.0]})
        joined = with_published(currency, news, before=0.0).frame
        assert joined.filter(pl.col("surprise") == 1)["time"][0] == expected.replace(tzinfo=UTC)


def test_what_was_not_published_yet_is_missing() -> None:
    assert with_published(bars(), releases()).frame["surprise"].null_count() == 2
