"""Users' own code, named in the settings: found, announced, run, recorded, and noticed when it changes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailguard import plugins
from tailguard.config import RunConfig, load_config, to_dict
from tailguard.data.features import FEATURES
from tailguard.errors import ConfigError
from tailguard.evaluate.baselines import BASELINES, BuyAndHold, standard_baselines
from tailguard.evaluate.trials import settings_hash
from tailguard.experiment.settings import recorded_settings, seal_settings
from tailguard.plugins import changed_plugins, find_plugin, load_plugins

MOMENTUM = """
import polars as pl
import tailguard as tg
from tailguard.evaluate.baselines import BuyAndHold, baseline

@tg.feature("my_momentum", warmup=5)
def my_momentum() -> pl.Expr:
    return pl.col("close").log().diff(5)

@baseline("half invested")
def half(exposure, allow_short):
    return BuyAndHold(0.5 * exposure)
"""
SMALL = """
plugins: [./my_features.py]
data: {synthetic_bars: 1200, embargo: 1d, features: [my_momentum, return_24]}
env: {num_envs: 4, episode_length: 16}
learner: ppo
ppo: {n_steps: 16, epochs: 1, network: {hidden: [4], lstm_size: 4}}
training: {total_timesteps: 128, threads: 1}
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from tailguard.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def registries() -> Iterator[None]:
    """What a plugin registers in this process is forgotten afterwards."""
    before = dict(FEATURES), dict(BASELINES), dict(plugins._LOADED), set(sys.modules)
    yield
    for registry, content in zip((FEATURES, BASELINES, plugins._LOADED), before[:3], strict=True):
        registry.clear()
        registry.update(content)
    for name in set(sys.modules) - before[3]:
        if name.startswith(("tailguard_plugin_", "my_package")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plugin and a run that was trained with it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "my_features.py").write_text(MOMENTUM)
    (folder / "run.yaml").write_text(SMALL)
    trained = run(folder, "train", "run.yaml", "--name", "own")
    assert trained.returncode == 0, trained.stderr
    digest = sha256(folder / "my_features.py")
    assert trained.stderr.count(f"plugin   ./my_features.py (sha256 {digest[:12]}…) runs code\n") == 1
    assert re.search(r"^half invested +\S", trained.stdout, re.MULTILINE)
    return folder


@pytest.fixture
def copied(home: Path, tmp_path: Path) -> Path:
    return shutil.copytree(home, tmp_path / "home")


def test_a_run_records_the_code_of_its_plugins(home: Path) -> None:
    sealed = json.loads((home / "runs/own/settings.json").read_text())
    assert sealed["settings"]["plugins"] == {"./my_features.py": sha256(home / "my_features.py")}
    assert "plugins: [./my_features.py]" in (home / "runs/own/config.yaml").read_text()


def test_a_run_is_opened_only_if_its_plugins_are_trusted(home: Path) -> None:
    refused = run(home, "backtest", "runs/own")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("runs/own/config.yaml: the run names plugins, which run code with your rights: ./my_feat")
    assert "add --trust-plugins" in line
    traded = run(home, "backtest", "runs/own", "--trust-plugins", "--json", "-")
    assert traded.returncode == 0, traded.stderr
    assert "runs code" in traded.stderr
    results = json.loads(traded.stdout)["results"]
    assert {"agent", "half invested", "buy & hold"} <= results.keys()
    assert 0 < results["half invested"]["volatility"] < results["buy & hold"]["volatility"]


def test_report_and_resume_load_the_plugins_of_the_run(copied: Path) -> None:
    for arguments in (("report", "runs/own"), ("train", "--resume", "runs/own")):
        assert "add --trust-plugins" in run(copied, *arguments).stderr
        done = run(copied, *arguments, "--trust-plugins")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("runs code") == 1


def test_a_changed_plugin_is_named_by_backtest_and_refused_by_resume(copied: Path) -> None:
    plugin = copied / "my_features.py"
    then = sha256(plugin)
    plugin.write_text(MOMENTUM + "\n# a remark\n")
    change = f"plugin ./my_features.py was sha256 {then[:12]}… and is {sha256(plugin)[:12]}…"
    traded = run(copied, "backtest", "runs/own", "--trust-plugins")
    assert traded.returncode == 0, traded.stderr
    assert traded.stderr.count(f"WARNING  runs/own: {change}") == 1
    for arguments in (("--resume", "runs/own", "--trust-plugins", "--yes"), ("run.yaml", "--name", "own", "--yes")):
        refused = run(copied, "train", *arguments)
        assert refused.returncode == 2
        assert f"runs/own: {change}: an agent must not be trained by two versions" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_plugin_that_moved_is_asked_for_and_known_by_its_code(copied: Path) -> None:
    (copied / "lib").mkdir()
    (copied / "my_features.py").rename(copied / "lib/features.py")
    missing = run(copied, "train", "--resume", "runs/own", "--trust-plugins")
    assert missing.returncode == 2
    assert missing.stderr.startswith("runs/own/config.yaml: plugin ./my_features.py: ")
    assert "No such file or directory" in missing.stderr
    assert "name its new place in plugins" in missing.stderr
    path = copied / "runs/own/config.yaml"
    path.write_text(path.read_text().replace("./my_features.py", "lib/features.py"))
    found = run(copied, "train", "--resume", "runs/own", "--trust-plugins")
    assert found.returncode == 0, found.stderr


def test_a_walk_forward_and_a_prepared_market_use_plugins(copied: Path) -> None:
    walked = run(copied, "train", "run.yaml", "--name", "walk", "--walk-forward", "--folds", "2")
    assert walked.returncode == 0, walked.stderr
    plan = json.loads((copied / "runs/walk/walk_forward.json").read_text())
    assert plan["settings"]["plugins"] == {"./my_features.py": sha256(copied / "my_features.py")}
    assert run(copied, "data", "make", "bars.parquet", "--bars", "3000").returncode == 0
    prepared = run(copied, "data", "prepare", "market", "run.yaml", "--data", "bars.parquet")
    assert prepared.returncode == 0, prepared.stderr
    trained = run(copied, "train", "run.yaml", "--data", "market", "--name", "disk")
    assert trained.returncode == 0, trained.stderr
    checked = run(copied, "data", "check", "bars.parquet", "--plugin", "./my_features.py")
    assert checked.returncode == 0, checked.stderr
    assert "runs code" in checked.stderr


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import polars\ndef broken(:\n    pass\n", r"line 2: invalid syntax\. Correct the plugin"),
        ("x = 1\ny = x / 0\n", r"line 2: ZeroDivisionError: division by zero\. Correct"),
        ("\nimport no_such_library\n", r"line 2: ModuleNotFoundError: No module named 'no_such_library'"),
        ("import sys\nsys.exit(3)\n", r"line 2: SystemExit: 3"),
        (
            "import tailguard as tg\n\n@tg.feature('return_1')\ndef f():\n    return None\n",
            r"line 3: feature 'return_1' is registered already; choose another name, or pass replace=True",
        ),
        ("from tailguard.evaluate.baselines import baseline\nbaseline('flat')\n", r"line 2: baseline 'flat' is reg"),
    ],
)
def test_a_plugin_that_cannot_run_is_one_sentence(tmp_path: Path, code: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}, {message}") as refused:
        load_config(overrides=[f"plugins=[{path}]"])
    assert "\n" not in str(refused.value)
    assert path.resolve() not in plugins._LOADED


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("[./nowhere.py]", r"plugin \./nowhere\.py: .*nowhere\.py cannot be read: No such file or directory"),
        ("[no_such_module]", r"plugin no_such_module: no such module\. Install it"),
        ("[json.nothing]", r"plugin json\.nothing: no such module"),
        ("[mine]", r"plugin mine: no such module\. Did you mean the file \./mine\.py\?"),
        ("['my module']", r"plugin 'my module': name an importable module"),
        ("[./mine.py, mine.py]", r"plugin mine\.py: the same file as \./mine\.py; name it once"),
        ("[time]", r"plugin time: the module has no file"),
        ("./mine.py", r"plugins: '\./mine\.py' is not a list"),
        ("[3]", r"plugins.*: 3 is not a text"),
    ],
)
def test_wrong_names_are_errors_that_show_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text("raise AssertionError('nothing may run')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^--set plugins={re.escape(names)}: {message}"):
        load_config(overrides=[f"plugins={names}"])


@pytest.mark.usefixtures("registries")
def test_the_example_in_the_documentation_is_a_plugin(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
    code, settings = (re.search(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S) for kind in ("python", "yaml"))
    assert code is not None
    assert settings is not None
    path = tmp_path / "my_parts.py"
    path.write_text(code[1])
    (tmp_path / "run.yaml").write_text(settings[1].replace("./my_parts.py", str(path)))
    config = load_config(tmp_path / "run.yaml")
    assert set(config.data.features) <= set(FEATURES)
    assert FEATURES["momentum_48"].warmup == 48
    assert standard_baselines(0.8)["half invested"] == BuyAndHold(0.4)


def test_unknown_keys_are_still_errors() -> None:
    with pytest.raises(ConfigError, match=r"plugin: no such setting\. Did you mean plugins\?"):
        load_config(overrides=["plugin=[x]"])


def test_a_traceback_of_a_plugin_never_reaches_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0\n")
    refused = run(tmp_path, "train", "--set", "plugins=[./bad.py]")
    assert refused.returncode == 2
    announced, line = refused.stderr.splitlines()
    assert announced.startswith("plugin   ./bad.py (sha256 ")
    assert line.startswith(f"--set plugins=[./bad.py]: plugin {tmp_path / 'bad.py'}, line 1: ZeroDivisionError")


@pytest.mark.usefixtures("registries")
def test_a_module_runs_once_and_a_package_is_hashed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("with open(__file__ + '.ran', 'a') as ran:\n    ran.write('x')\n")
    (package / "costs.py").write_text("FEE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    inner = find_plugin("my_package.costs")
    assert inner.sha256 == sha256(package / "costs.py")
    whole = find_plugin("my_package")
    assert not (package / "__init__.py.ran").exists()
    (package / "costs.py").write_text("FEE = 2\n")
    assert find_plugin("my_package").sha256 != whole.sha256
    for _ in range(2):
        load_plugins(["my_package"])
    assert capsys.readouterr().err.count("runs code") == 1
    assert (package / "__init__.py.ran").read_text() == "x"
    (package / "costs.py").write_text("FEE = 3\n")
    with pytest.raises(ConfigError, match="plugin my_package: changed since this process loaded it"):
        load_plugins(["my_package"])


@pytest.mark.usefixtures("registries")
def test_untrusted_plugins_do_not_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("raise AssertionError('nothing may run')\n")
    with pytest.raises(ConfigError, match="add --trust-plugins"):
        load_config(overrides=[f"plugins=[{path}]"], trust_plugins=False)


@pytest.mark.usefixtures("registries")
def test_settings_without_plugins_are_recorded_as_before_and_code_makes_another_trial(tmp_path: Path) -> None:
    assert recorded_settings(RunConfig()) == {key: v for key, v in to_dict(RunConfig()).items() if key != "plugins"}
    assert b"plugins" not in seal_settings(RunConfig())
    hashes = []
    for name, text in (("a.py", "x = 1\n"), ("b.py", "x = 1\n"), ("c.py", "x = 2\n")):
        (tmp_path / name).write_text(text)
        hashes.append(settings_hash(load_config(overrides=[f"plugins=[{tmp_path / name}]"])))
    assert hashes[0] == hashes[1] != hashes[2]
    assert settings_hash(RunConfig()) not in hashes


def test_a_moved_plugin_is_the_same_and_a_changed_one_is_named() -> None:
    assert changed_plugins({"a.py": "1" * 64, "b": "2" * 64}, {"lib/a.py": "1" * 64, "b": "2" * 64}) == []
    assert changed_plugins({"a.py": "1" * 64, "b": "2" * 64}, {"a.py": "1" * 64, "b": "3" * 64}) == [
        "plugin b was sha256 222222222222… and is 333333333333…"
    ]
