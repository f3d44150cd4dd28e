"""Nothing in the package can be made to run code that a file brings: no such function is called anywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tailguard"
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "runpy", "imp", "code"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    *("torch.load", "torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "np.load", "numpy.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "importlib.import_module", "os.system", "os.popen"),
    *("pandas.read_pickle", "pd.read_pickle"),
}


ALLOWED = {
    (name, "importlib.import_module")
    for name in (
        *("__init__.py", "cli/__init__.py", "cli/application.py", "config.py", "deprecated.py"),
        *("audit/auditor.py", "monitor/trackers.py"),
    )
}
"""Parts of this package and optional packages, by names that stand in those very modules."""
PLUGINS = {("plugins.py", call) for call in ("compile", "exec", "importlib.import_module")}
"""The one door for users' code: only what the user names, and only with consent (tests/test_plugins.py)."""


def dangers(code: str) -> Iterator[str]:
    """What in a module could run code from a file, as `line: what`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found = {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            named = {f"{module}.{alias.name}" for alias in node.names} & CALLS
            found = ({module.split(".")[0]} & MODULES) | named
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found = {name} & (CALLS | BUILTINS)
            found |= {
                f"{keyword.arg}=True"
                for keyword in node.keywords
                if keyword.arg in ("allow_pickle", "trust_remote_code") and ast.unparse(keyword.value) != "False"
            }
        else:
            continue
        yield from (f"line {node.lineno}: {name}" for name in sorted(found))


def test_the_package_calls_nothing_that_runs_what_a_file_holds() -> None:
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 50
    found = [
        (path.relative_to(SOURCE).as_posix(), danger)
        for path in files
        for danger in dangers(path.read_text(encoding="utf-8"))
    ]
    called = {(name, danger.split(": ")[1]) for name, danger in found}
    assert called - ALLOWED - PLUGINS == set()
    assert called >= PLUGINS  # the list holds nothing that is not there


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as x",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "f(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "importlib.import_module(name)",
        "from importlib import import_module",
    ],
)
def test_the_scan_sees(code: str) -> None:
    assert list(dangers(code))


@pytest.mark.parametrize(
    "code", ["model.eval()", "re.compile(x)", "yaml.safe_load(x)", "from safetensors.torch import load"]
)
def test_the_scan_lets_pass(code: str) -> None:
    assert not list(dangers(code))
