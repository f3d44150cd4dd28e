"""Running statistics of observations of many assets: one for each feature, whatever the number of assets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tailguard.envs.asset_layout import AssetLayout
from tailguard.returns.normalise import MomentsChange, RunningMoments

ASSETS_A_ROW = 8
"""Samples of an asset's numbers that are counted for each row, on average; fewer where there are fewer assets."""


class AssetMoments:
    """As `RunningMoments`, over the rows of all listed assets for what belongs to an asset; the rest by account."""

    def __init__(self, layout: AssetLayout, device: torch.device | str | None = None) -> None:
        self.layout = layout
        self.of_asset = RunningMoments((layout.asset_size,), device=device)
        self.of_account = RunningMoments((layout.account_size,), device=device)

    @property
    def count(self) -> Tensor:
        """Rows seen, []."""
        return self.of_account.count

    def scale(self, observation_size: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every number of an observation of this size, [O] float64 each."""
        asset, account, spread = self.of_asset, self.of_account, self.layout.spread
        mean = spread(asset.mean, account.mean, 0.0, observation_size)
        return mean, spread(asset.std, account.std, 1.0, observation_size)

    def update(self, batch: Tensor, mask: Tensor | None = None) -> MomentsChange:
        """Merge raw observations [..., O]; rows where the mask [...] is False do not count, nor do absent assets."""
        account = self.of_account.update(self.layout.of_account(batch), mask)
        # Many assets give many samples, and following rows are alike.
        stride = max(1, self.layout.assets_in(batch.shape[-1]) // ASSETS_A_ROW)
        some = batch[::stride]
        present = self.layout.present(some)
        if mask is not None:
            present = present & mask[::stride].unsqueeze(-1)
        changes = self.of_asset.update(self.layout.of_assets(some), present), account
        names = MomentsChange.__dataclass_fields__
        return MomentsChange(**{name: torch.cat([getattr(change, name) for change in changes]) for name in names})

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the complete state."""
        return {"asset": self.of_asset.state_dict(), "account": self.of_account.state_dict()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore a saved state, in the same storage."""
        self.of_asset.load_state_dict(state["asset"])
        self.of_account.load_state_dict(state["account"])
