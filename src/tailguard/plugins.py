"""Users' own code, named in the setting `plugins`: it is imported before the settings are validated.

A plugin registers parts of its own, such as features, through the decorators of the registries. It runs with the rights
of the user, so it is loaded only where the user names it, and every load is announced on standard error. A worker
process that receives a config calls `load_plugins` before it looks anything up.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tailguard.errors import ConfigError, TailguardError
from tailguard.places import read_plain

CORRECT = "Correct the plugin, or remove it from plugins"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Plugin:
    """A module or a Python file, with the hash of its code."""

    name: str
    """As the settings name it: `my_module`, or a file such as `./my_features.py`."""
    path: Path
    """The file, or the folder of a package."""
    sha256: str
    """Of the file's bytes; for a package, of the names and bytes of all its Python files."""
    source: bytes | None
    """Code of a plugin that is named by its file; None for a module, which Python imports by itself."""


_LOADED: dict[Path, Plugin] = {}
"""Plugins that this process has run, by their absolute path."""


@functools.cache
def announce(line: str) -> None:
    """Print a line on standard error, once in this process: a command may open the same run several times."""
    print(line, file=sys.stderr, flush=True)


def load_plugins(names: Sequence[str], *, trusted: bool = True) -> tuple[Plugin, ...]:
    """Run the plugins that this process has not run yet, in their order, and return all of them.

    `names`: importable modules, or Python files relative to the working directory.
    `trusted`: False refuses to run a new one: somebody else may have written the run folder that names it.

    Raises `ConfigError` for a plugin that is missing, cannot run, or has changed since this process ran it.
    """
    plugins = tuple(find_plugin(name) for name in names)
    new: dict[Path, Plugin] = {}
    for plugin in plugins:
        earlier = _LOADED.get(plugin.path)
        if plugin.path in new:
            raise ConfigError(f"plugin {plugin.name}: the same file as {new[plugin.path].name}; name it once")
        if earlier is None:
            new[plugin.path] = plugin
        elif earlier.sha256 != plugin.sha256:
            raise ConfigError(f"plugin {plugin.name}: changed since this process loaded it; start a new process")
    if new and not trusted:
        shown = ", ".join(f"{plugin.name} (sha256 {plugin.sha256[:12]}…)" for plugin in new.values())
        raise ConfigError(
            f"the run names plugins, which run code with your rights: {shown}. Read them; if you trust them, add "
            "--trust-plugins (in Python: trust_plugins=True)"
        )
    for plugin in new.values():
        announce(f"plugin   {plugin.name} (sha256 {plugin.sha256[:12]}…) runs code")
        _run(plugin)
        _LOADED[plugin.path] = plugin
    return plugins


def find_plugin(name: str) -> Plugin:
    """The plugin of this name, read and hashed but not run."""
    if name.endswith(".py") or "/" in name:
        path = Path(name).absolute()
        try:
            source = read_plain(path)
        except OSError as error:
            raise ConfigError(
                f"plugin {name}: {path} cannot be read: {error.strerror}. File names are relative to the working "
                "directory; if the file has moved, name its new place in plugins"
            ) from None
        return Plugin(name, path.resolve(), hashlib.sha256(source).hexdigest(), source)
    if not _MODULE.fullmatch(name):
        raise ConfigError(f"plugin {name!r}: name an importable module, or a Python file like ./my_features.py")
    spec = _find_module(name)
    if spec is None:
        file = Path(*name.split(".")).with_suffix(".py")
        hint = f"Did you mean the file ./{file}?" if file.is_file() else "Install it, or name a file like ./my_parts.py"
        raise ConfigError(f"plugin {name}: no such module. {hint}")
    if spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations)))
        return Plugin(name, path.resolve(), _package_hash(path), None)
    if spec.origin is None or not Path(spec.origin).is_file():
        raise ConfigError(f"plugin {name}: the module has no file that could be recorded; choose one that has")
    path = Path(spec.origin)
    return Plugin(name, path.resolve(), hashlib.sha256(path.read_bytes()).hexdigest(), None)


def plugin_hashes(names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each plugin by its name, as a run records them."""
    return {plugin.name: plugin.sha256 for plugin in load_plugins(names)}


def changed_plugins(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Plugins whose code differs from the recorded one, in words; a plugin that only moved is the same."""
    return [
        f"plugin {name} was sha256 {old[:12]}… and is {new[:12]}…"
        for old, (name, new) in zip(then.values(), now.items(), strict=True)
        if old != new
    ]


def _find_module(name: str) -> ModuleSpec | None:
    """The module's spec. Unlike `importlib.util.find_spec`, this imports no parent package: nothing runs yet."""
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        within = None if depth == 1 else list(spec.submodule_search_locations or ()) if spec else []
        specs = (finder.find_spec(".".join(parts[:depth]), within) for finder in sys.meta_path)
        spec = next((each for each in specs if each is not None), None)
        if spec is None:
            return None
    return spec


def _package_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _run(plugin: Plugin) -> None:
    """Import the plugin; whatever it raises becomes one sentence that names its file and line."""
    try:
        if plugin.source is None:
            importlib.import_module(plugin.name)
        else:
            _run_file(plugin, plugin.source)
    except SyntaxError as error:
        line = "" if error.lineno is None else f", line {error.lineno}"
        raise ConfigError(f"plugin {error.filename or plugin.path}{line}: {error.msg}. {CORRECT}") from error
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, TailguardError) else f"{type(error).__name__}: {error}"
        where = _place(plugin, error)
        raise ConfigError(f"plugin {where}: {' '.join(reason.split())}. {CORRECT}") from error


def _run_file(plugin: Plugin, source: bytes) -> None:
    # The bytes that were hashed are the bytes that run: the file is not read a second time.
    code = compile(source, plugin.path, "exec", dont_inherit=True)
    module = ModuleType(f"tailguard_plugin_{plugin.path.stem}_{plugin.sha256[:12]}")
    module.__file__ = str(plugin.path)
    sys.modules[module.__name__] = module  # dataclasses look their module up by its name
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise


def _place(plugin: Plugin, error: BaseException) -> str:
    """The plugin's file and the line in it that failed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path == plugin.path or plugin.path in path.parents:
            return f"{path}, line {frame.lineno}"
    return str(plugin.path)
