"""Descriptions of settings: the docstring under each field of a dataclass, and YAML with them as comments."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from tailguard.plain_yaml import as_yaml


@functools.cache
def field_docs(kind: type) -> Mapping[str, str]:
    """The docstring under each field of a dataclass, read from its source; inherited fields have their parent's."""
    docs: dict[str, str] = {}
    for parent in kind.__bases__:
        if dataclasses.is_dataclass(parent):
            docs |= field_docs(parent)
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    for item, after in itertools.pairwise(body):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[item.target.id] = " ".join(str(after.value.value).split())
    return docs


def commented_yaml(config: Any, depth: int) -> Iterator[str]:
    """Lines of YAML with every field of a dataclass, at this depth of sections."""
    indent = "  " * depth
    kind: type = type(config)
    docs = field_docs(kind)
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        yield from (f"{indent}# {line}" for line in textwrap.wrap(docs[item.name], 110))
        if dataclasses.is_dataclass(value):
            yield f"{indent}{item.name}:"
            yield from commented_yaml(value, depth + 1)
        else:
            yield f"{indent}{item.name}: {as_yaml(value)}"
