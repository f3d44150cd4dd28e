"""Arrays on disk: what was written is what is mapped, and damage is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tailguard.data.disk.arrays import ArrayWriter, map_array, verify_array
from tailguard.errors import BarsError


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_rows_come_back_in_order_whatever_the_pieces(tmp_path: Path, piece: int) -> None:
    values = np.random.default_rng(0).normal(size=(20, 3))
    writer = ArrayWriter(tmp_path / "a", "<f8", (3,))
    for start in range(0, 20, piece):
        writer.append(values[start : start + piece])
    entry = writer.close()
    mapped = map_array(tmp_path / "a", entry)
    np.testing.assert_array_equal(mapped, values)
    assert (tmp_path / "a").read_bytes() == values.tobytes()
    assert not mapped.flags.writeable
    verify_array(tmp_path / "a", entry)


def test_planes_lie_one_after_the_other(tmp_path: Path) -> None:
    values = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
    writer = ArrayWriter(tmp_path / "a", "<f4", (3,), planes=2, rows=5)
    for start in (0, 2, 4):
        writer.append(values[:, start : start + 2])
    entry = writer.close()
    assert entry["shape"] == [2, 5, 3]
    np.testing.assert_array_equal(map_array(tmp_path / "a", entry), values)
    verify_array(tmp_path / "a", entry)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict]:
    writer = ArrayWriter(tmp_path / "a", "<i8")
    writer.append(np.arange(100))
    return tmp_path / "a", writer.close()


def test_a_flipped_byte_is_found_when_the_file_is_verified(written) -> None:
    path, entry = written
    data = bytearray(path.read_bytes())
    data[401] ^= 1
    path.write_bytes(data)
    with pytest.raises(BarsError, match="the file has changed"):
        verify_array(path, entry)


def test_what_cannot_be_trusted_is_refused(written, tmp_path: Path) -> None:
    path, entry = written
    with pytest.raises(BarsError, match="800 bytes long; 808 were written"):
        map_array(path, entry | {"shape": [101]})
    os.symlink(path, tmp_path / "link")
    with pytest.raises(BarsError, match="links are not followed"):
        map_array(tmp_path / "link", entry)
    with pytest.raises(BarsError, match="cannot be read"):
        map_array(tmp_path / "nothing", entry)
    for change in (
        {"dtype": "|O"},
        {"dtype": "|V8"},
        {"shape": [-1]},
        {"shape": [2**60]},
        {"shape": "9"},
        {"sha256": 3},
    ):
        with pytest.raises(BarsError, match="its entry in the manifest"):
            map_array(path, entry | change)
