"""The wheel holds the package with all its files, and nothing else. `make release-check` installs and uses it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import tailguard as tg

ROOT = Path(__file__).parents[1]
pytest.importorskip("setuptools", minversion="77")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools writes into the tree that it builds from."""
    place = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=place, check=True, capture_output=True)
    return zipfile.ZipFile(next(place.glob("*.whl")))


def test_every_file_of_the_package_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    files = {path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    wanted = {path.relative_to(source).as_posix() for path in files if "egg-info" not in path.parts[-2]}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == wanted
    for name in ("py.typed", "evaluate/report/page.css", "live/live_page.html", "audit/registry.py"):
        assert f"tailguard/{name}" in packed


def test_its_metadata_say_what_it_is(wheel: zipfile.ZipFile) -> None:
    folder = f"tailguard-{tg.__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("tailguard", tg.__version__)
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert wheel.read(f"{folder}/entry_points.txt").decode().split() == [
        "[console_scripts]", "tailguard", "=", "tailguard.cli:main",
    ]  # fmt: skip
    assert f"## [{tg.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
