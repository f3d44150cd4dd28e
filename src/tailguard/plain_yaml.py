"""YAML as plain values: without aliases, without types of its own, and every fault an error that names its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tailguard.errors import ConfigError

BOOLEAN = "tag:yaml.org,2002:bool"
LARGEST_CONFIG = 2**18
"""Bytes of a config file; all settings with their comments take about 15,000."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a file; none where it is empty."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: cannot be read: not a plain file")
        if path.exists() and path.stat().st_size > LARGEST_CONFIG:
            raise ConfigError(f"{path}: {path.stat().st_size:,} bytes; a config has at most {LARGEST_CONFIG:,}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file. To begin with all defaults: tailguard config > {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    sections = parse_yaml(text, str(path))
    if sections is None:
        return {}
    if not isinstance(sections, dict):
        raise ConfigError(f"{path}: a config is a list of sections with settings, not {type(sections).__name__}")
    return sections


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, which can expand a few lines to gigabytes.

    Only true and false are booleans, as in YAML 1.2: `off` is a choice of several settings.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs give it no types
            raise yaml.composer.ComposerError(
                None, None, f"aliases (*{event.anchor}) are not allowed; write the value out", event.start_mark
            )
        return super().compose_node(parent, index)


_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in patterns if tag != BOOLEAN]
    for first, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.add_implicit_resolver(BOOLEAN, re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))


def parse_yaml(text: str, what: str) -> Any:
    """The parsed value; any fault in the text is a `ConfigError` that starts with `what`."""
    loader = None
    try:
        loader = _PlainLoader(text)
        return loader.get_single_data()
    except RecursionError as error:
        raise ConfigError(f"{what}: nested too deeply") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        # A date such as 2021-13-40 and an integer of 5,000 digits are ValueErrors.
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{what}: not readable as YAML: {reason}") from error
    finally:
        if loader is not None:
            loader.dispose()


def shortened(value: Any, quoted: bool = True) -> str:
    """A value in a message, which a long one must not fill."""
    text = repr(value) if quoted else str(value)
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text):,} characters)"


def as_yaml(value: Any) -> str:
    """A value on one line."""
    return yaml.safe_dump(plain(value), default_flow_style=True).removesuffix("...\n").strip()


def plain(value: Any) -> Any:
    """Dicts and lists at every depth, as YAML writes them."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else value
