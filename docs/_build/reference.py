"""Pages of the reference, written from the code: every setting, every command, every public name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
import yaml

from tailguard.config import RunConfig
from tailguard.field_docs import field_docs

MEASURED = Path(__file__).with_name("audit_measured.json")
"""Numbers of the audit, which `audit_tables.py` writes."""


def settings() -> str:
    """A section with a table for every group of settings."""
    whole = RunConfig()
    parts = []
    for item in dataclasses.fields(whole):
        value, text = getattr(whole, item.name), field_docs(RunConfig)[item.name]
        if dataclasses.is_dataclass(value):
            parts.append(f"## {item.name}\n\n{_markdown(text)}\n\n{_table(_rows(value, item.name))}")
    alone = list(_rows(whole, "", nested=False))
    return "\n\n".join([f"## Settings of the run\n\n{_table(alone)}", *parts]) + "\n"


def setting_names(config: Any = None, prefix: str = "") -> Iterator[str]:
    """Every setting by its full name, as the generated page must list it."""
    for item in dataclasses.fields(config or RunConfig()):
        value = getattr(config or RunConfig(), item.name)
        if dataclasses.is_dataclass(value):
            yield from setting_names(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}"


def _rows(config: Any, prefix: str, nested: bool = True) -> Iterator[tuple[str, str, str, str]]:
    """Name, values, default and description of every field, those of groups inside it with their whole name."""
    kind = type(config)
    hints, docs = typing.get_type_hints(kind), field_docs(kind)
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        name = f"{prefix}.{item.name}".lstrip(".")
        if not dataclasses.is_dataclass(value):
            yield name, _type(hints[item.name]), _default(value), docs[item.name]
        elif nested:
            yield from _rows(value, name)


def _table(rows: Any) -> str:
    lines = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | `{value}` | {_cell(text)} |" for name, kind, value, text in rows]
    return "\n".join(lines)


def _type(hint: Any) -> str:
    """The values that a setting takes, in words."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    names = {int: "integer", float: "number", str: "text", bool: "true, false", type(None): "null", dict: "table"}
    if hint in names:
        return names[hint]
    inside = [each for each in get_args(hint) if each is not Ellipsis]
    if get_origin(hint) is tuple:
        return f"list of {_type(inside[0])}" if inside else "list"
    if get_origin(hint) in (dict, Mapping):
        return "table"
    if inside:
        return ", ".join(dict.fromkeys(_type(each) for each in inside))
    return getattr(hint, "__name__", str(hint))


def _default(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _cell(text: str) -> str:
    """Text in a table: names of settings as code, no bars."""
    return _markdown(text).replace("|", "\\|")


def _markdown(text: str) -> str:
    """Text of a docstring, with brackets and stars as they are."""
    return re.sub(r"(?<!`)([*_<\[])(?=\S)", r"\\\1", text)


def commands() -> str:
    """A section for every command, with its arguments and options."""
    from tailguard.cli import app

    root = typer.main.get_command(app)
    return "\n\n".join(_command(root, "tailguard")) + "\n"


def command_names(root: Any = None, name: str = "tailguard") -> Iterator[str]:
    """Every command by its full name."""
    if root is None:
        from tailguard.cli import app

        root = typer.main.get_command(app)
    for key, command in getattr(root, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from command_names(command, f"{name} {key}")
        else:
            yield f"{name} {key}"


def _command(command: Any, name: str) -> Iterator[str]:
    for key, each in command.commands.items():
        whole = f"{name} {key}"
        if hasattr(each, "commands"):
            yield from _command(each, whole)
            continue
        arguments = [option for option in each.params if option.param_type_name == "argument"]
        options = [option for option in each.params if option.param_type_name == "option" and option.name != "help"]
        usage = " ".join([whole, *(_metavar(option) for option in arguments), *(["[OPTIONS]"] if options else [])])
        rows = [_option(option) for option in [*arguments, *options]]
        table = "\n".join(["| argument or option | meaning | default |", "|---|---|---|", *rows]) if rows else ""
        yield f"## {whole}\n\n```text\n{usage}\n```\n\n{_markdown(inspect.cleandoc(each.help or ''))}\n\n{table}"


def _metavar(option: Any) -> str:
    name = (option.metavar or option.name.upper()).strip("{}[].")
    return name if option.required else f"[{name}]"


def _option(option: Any) -> str:
    if option.param_type_name == "argument":
        title = _metavar(option)
    else:
        value = "" if option.is_flag else option.metavar or _value(option)
        title = " ".join([", ".join(option.opts), value]).strip()
    text = " ".join((option.help or "").split())
    default = None if callable(option.default) else option.default
    shown = "" if not default or "ENTINEL" in repr(default).upper() else f"`{getattr(default, 'value', default)}`"
    return f"| `{title}` | {_cell(text)} | {shown} |".replace(title, title.replace("|", "\\|"), 1)


def _value(option: Any) -> str:
    """What an option takes: its choices, or the kind of its value."""
    kind = getattr(getattr(option, "type_descriptor", None), "annotation", str)
    choices = (
        get_args(kind)
        if get_origin(kind) is Literal
        else [each.value for each in getattr(kind, "__members__", {}).values()]
    )
    return "|".join(map(str, choices)) or {"Path": "PATH", "int": "N", "float": "NUMBER"}.get(
        getattr(kind, "__name__", ""), "TEXT"
    )


def checks() -> str:
    """A section for every group of checks of the audit: question, number, bound, why it matters, what to do."""
    from tailguard.audit.audit_page import GROUPS
    from tailguard.audit.auditor import all_checks

    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["checks"]
    parts = []
    for letter, heading in GROUPS.items():
        rows = [check for check in all_checks() if check.id[0] == letter and "." not in check.id]
        if rows:
            table = ["| check | question | number | bound | why it matters | what to do |", "|---|---|---|---|---|---|"]
            for check in rows:
                when = "".join([" · fast" if check.fast else "", " · of a run" if check.of_run else ""])
                found = measured.get(check.id, {"number": "–", "bound": "–", "measured": ""})
                number = f"{found['number']} {found['measured']}".strip()
                cells = [_cell(text) for text in (check.question, number, found["bound"], check.why, check.remedy)]
                table.append(f"| **{check.id}**{when} | {' | '.join(cells)} |")
            parts.append("\n".join([f"### {heading}", "", *table]))
    return "\n\n".join(parts) + "\n"


def faults() -> str:
    """Every fault that is injected into the package, with the check that catches it."""
    table = ["| check | fault |", "|---|---|"]
    table += [f"| {one.check} | {_cell(one.name)} |" for one in in_order_of_checks(load_faults())]
    return "\n".join(table) + "\n"


def load_faults() -> list[Any]:
    """The faults of every file `benchmarks/audit_faults*.py`."""
    folder = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        for path in sorted(folder.glob("audit_faults_*.py")):
            importlib.import_module(path.stem)
        found: list[Any] = importlib.import_module("audit_faults").FAULTS
        return found
    finally:
        sys.path.remove(str(folder))


def in_order_of_checks(found: list[Any]) -> list[Any]:
    """By group and number of their checks."""
    return sorted(found, key=lambda one: (one.check[:1], int(one.check[1:]) if one.check[1:].isdigit() else 0))


def api(module: str) -> str:
    """Every public name of a module; constants without their values."""
    names = public_names(module)
    constants = [f"`{name}`" for name in names if name.isupper()]
    parts = [f"::: {module}.{name}" for name in names if not name.isupper()]
    if constants:
        parts.append(f"Constants and tables: {', '.join(constants)}.")
    return "\n\n".join(parts) + "\n"


def public_names(module: str) -> list[str]:
    names: list[str] = importlib.import_module(module).__all__
    return [name for name in names if not name.startswith("_")]
