"""A trunk that shares its weights over assets: the order of the assets does not matter, nor does their number.

    token      e_a = encoder(features of asset a, its weight, the account)         the same encoder for every asset
    attention  e_a ← e_a + what asset a reads of a few points that gathered from all assets, on request
    context    c = mean over the listed assets of e_a
    memory     m = LSTM(c)                                                          of the account
    action     f_a = e_a·q(m) + b(m), see `AssetHead`

Means and attention over a set do not depend on the order of its members (Zaheer et al. 2017), so that actions are
permuted as the assets are, and values do not change. Assets that are not listed are in no mean and are not attended to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tailguard.envs.asset_layout import AssetLayout
from tailguard.models.memory import MemoryState
from tailguard.models.precision import autocast
from tailguard.models.trunk import Trunk

if TYPE_CHECKING:
    from tailguard.models.policy import NetworkConfig

POINTS = 8
"""Learned points through which assets attend to each other."""
HEADS = 4
HIDDEN_SCORE = -1e4
"""Added to the scores of absent assets: their share of the attention is 0, and finite if all are absent."""


class Attention(nn.Module):
    """Multi-head attention of one set to another (Vaswani et al. 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = HEADS if width % HEADS == 0 else 1
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        for linear, gain in ((self.query, 1.0), (self.key, 1.0), (self.value, 1.0), (self.output, 0.1)):
            nn.init.orthogonal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)

    def forward(self, asking: Tensor, asked: Tensor, present: Tensor | None = None) -> Tensor:
        """asking [M, Q, E], asked [M, A, E], present [M, A] bool -> [M, Q, E]"""
        query, key, value = (
            layer(rows).reshape(*rows.shape[:-1], self.heads, -1).transpose(-2, -3)
            for layer, rows in ((self.query, asking), (self.key, asked), (self.value, asked))
        )
        hidden = None
        if present is not None:
            hidden = torch.zeros_like(present, dtype=query.dtype).masked_fill(~present, HIDDEN_SCORE)[:, None, None]
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=hidden)
        output: Tensor = self.output(read.transpose(-2, -3).flatten(-2))
        return output


class InducedAttention(nn.Module):
    """Every asset attends to a few learned points that attend to all assets, so that the cost grows with their number
    and not with its square (Lee et al. 2019, Set Transformer)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(POINTS, width) / width**0.5)
        self.gather, self.read = Attention(width), Attention(width)

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        """tokens [..., A, E], present [..., A] -> [..., A, E]"""
        rows = tokens.flatten(0, -3)
        gathered = self.gather(self.points.expand(rows.shape[0], -1, -1), rows, present.flatten(0, -2))
        read: Tensor = self.read(rows, gathered)
        return tokens + read.view_as(tokens)


class AssetTrunk(Trunk):
    """Encoder of each asset, pooling over them, and the account's memory.

    `acts`: features are those of the memory [H], then the tokens of all assets [A·E] and which are listed [A], for the
    action head; else those of the memory alone, for critics.
    """

    def __init__(self, layout: AssetLayout, config: NetworkConfig, *, acts: bool) -> None:
        super().__init__(layout.row_size, config)
        self.layout, self.acts = layout, acts
        self.token_size = self.encoder.output_size
        self.attention = InducedAttention(self.token_size) if config.encoder == "attention" else None

    def step(
        self, obs: Tensor, state: MemoryState, episode_start: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        with autocast(self.precision, obs.device):
            tokens, present, context = self._read(obs, mask)
            remembered, state = self.memory.step(context, state, episode_start)
            return self._features(remembered, tokens, present), state

    def sequence(
        self, obs: Tensor, state: MemoryState, episode_start: Tensor, inner_resets: bool | None = None
    ) -> tuple[Tensor, MemoryState]:
        with autocast(self.precision, obs.device):
            tokens, present, context = self._read(obs)
            remembered, state = self.memory.sequence(context, state, episode_start, inner_resets)
            return self._features(remembered, tokens, present), state

    def every_state(self, obs: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:
        with autocast(self.precision, obs.device):
            tokens, present, context = self._read(obs)
            remembered, state = self.memory.every_state(context, state, episode_start)
            return self._features(remembered, tokens, present), state

    def _read(self, obs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """obs [..., O] -> tokens [..., A, E], which assets are listed [..., A], and their mean [..., E]."""
        rows, present = self.layout.rows(obs)
        tokens: Tensor = self.encoder(rows)
        if self.attention is not None:
            tokens = self.attention(tokens, present)
        if mask is not None:
            tokens = tokens * mask.unsqueeze(-2)
        share = present.to(tokens.dtype)
        share = share / share.sum(-1, keepdim=True).clamp(min=1.0)
        # As a matrix product, which reads the tokens once and keeps nothing of their size for the gradient.
        return tokens, present, (share.unsqueeze(-2) @ tokens).squeeze(-2)

    def _features(self, remembered: Tensor, tokens: Tensor, present: Tensor) -> Tensor:
        if not self.acts:
            return remembered
        parts = (remembered, tokens.flatten(-2), present)
        return torch.cat([part.to(remembered.dtype) for part in parts], dim=-1)
