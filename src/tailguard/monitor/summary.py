"""A short summary of an object: one line in a terminal, a small table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner


def one_line(name: str, facts: Mapping[str, str]) -> str:
    """`Name(fact: text, …)`."""
    return f"{name}({', '.join(f'{fact}: {text}' for fact, text in facts.items())})"


def html_table(name: str, facts: Mapping[str, str]) -> str:
    """A heading and one row per fact; all texts are escaped."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{html.escape(fact)}</td><td>{html.escape(text)}</td></tr>"
        for fact, text in facts.items()
    )
    return f"<div><strong>{html.escape(name)}</strong><table>{rows}</table></div>"


def learner_facts(learner: Learner) -> dict[str, str]:
    """A learner's main properties and its progress; its `config` has every setting."""
    network = learner.config.network
    memory = "none" if network.memory == "none" else f"LSTM {network.lstm_size} × {network.lstm_layers}"
    return {
        "observation": str(learner.env.observation_size),
        "memory": memory,
        "critic": network.critic,
        "parameters": f"{sum(weight.numel() for weight in learner.agent.parameters()):,}",
        "envs": f"{learner.env.num_envs:,}",
        "device": str(learner.device),
        "timesteps": f"{learner.num_timesteps:,}",
        "risk budget": "none" if learner.risk is None else "on",
    }
