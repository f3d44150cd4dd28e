"""Where each asset's numbers are in a trading observation, for networks that share weights over assets.

[features of asset 1 | … | of asset A | market-wide features | listed | weights | account fields]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailguard.data.scaling import Scaler
from tailguard.envs.episodes import ACCOUNT_FIELDS
from tailguard.errors import ConfigError


@dataclass(frozen=True)
class AssetLayout:
    """The observation of any number of assets; the number follows from its size."""

    own: int
    """Features of each asset."""
    market_wide: int
    """Features that are the same for all assets."""

    @classmethod
    def of(cls, scaler: Scaler) -> AssetLayout | None:
        """The layout of observations with this scaling; None where each symbol has a scaling of its own."""
        if scaler.market_wide is None:
            return None
        return cls(len(scaler.names) - scaler.market_wide, scaler.market_wide)

    @property
    def asset_size(self) -> int:
        """Numbers of one asset: its features and its weight."""
        return self.own + 1

    @property
    def account_size(self) -> int:
        """Numbers of the account: market-wide features and `ACCOUNT_FIELDS`."""
        return self.market_wide + len(ACCOUNT_FIELDS)

    @property
    def row_size(self) -> int:
        """Numbers that a network reads for one asset: its own and those of the account."""
        return self.asset_size + self.account_size

    def assets_in(self, observation_size: int) -> int:
        """Number of assets in an observation of this size."""
        assets, rest = divmod(observation_size - self.account_size, self.own + 2)
        if rest or assets < 1:
            raise ConfigError(
                f"an observation of {observation_size} numbers does not fit: there are {self.own + 2} for each asset "
                f"({self.own} features, whether it is listed, its weight) and {self.account_size} for the account"
            )
        return assets

    def of_assets(self, obs: Tensor) -> Tensor:
        """Features and weight of each asset, [..., O] -> [..., A, asset_size]."""
        features, _, _, weights, _ = self._split(obs)
        return torch.cat((features, weights.unsqueeze(-1)), dim=-1)

    def of_account(self, obs: Tensor) -> Tensor:
        """Market-wide features and the fields of the account, [..., O] -> [..., account_size]."""
        _, wide, _, _, fields = self._split(obs)
        return torch.cat((wide, fields), dim=-1)

    def present(self, obs: Tensor) -> Tensor:
        """Which assets are listed, with known features, [..., O] -> [..., A] bool. Scaling leaves the mask as it is."""
        return self._split(obs)[2] > 0.5

    def rows(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """What a network reads for each asset, [..., O] -> [..., A, row_size], and which are listed, [..., A] bool."""
        features, wide, listed, weights, fields = self._split(obs)
        shape = features.shape[:-1]
        each = (part.unsqueeze(-2).expand(*shape, part.shape[-1]) for part in (wide, fields))
        return torch.cat((features, weights.unsqueeze(-1), *each), dim=-1), listed > 0.5

    def _split(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Features [..., A, own], market-wide ones, which are listed [..., A], weights [..., A], account fields.

        One split, whose gradient is one tensor: each slice would have one of the size of the observation.
        """
        assets = self.assets_in(obs.shape[-1])
        sizes = [assets * self.own, self.market_wide, assets, assets, len(ACCOUNT_FIELDS)]
        features, *others = torch.split(obs, sizes, dim=-1)
        return features.reshape(*obs.shape[:-1], assets, self.own), *others

    def spread(self, of_asset: Tensor, of_account: Tensor, mask: float, observation_size: int) -> Tensor:
        """Numbers of an asset [asset_size] and of the account [account_size] at their places for all assets, [O].

        `mask`: the number for `listed`.
        """
        assets = self.assets_in(observation_size)
        listed = of_asset.new_full((assets,), mask)
        weights = of_asset[self.own :].expand(assets)
        wide, fields = of_account[: self.market_wide], of_account[self.market_wide :]
        return torch.cat((of_asset[: self.own].repeat(assets), wide, listed, weights, fields))
