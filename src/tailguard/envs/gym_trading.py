"""The trading environment as standard Gymnasium environments: `tailguard/Trading-v0`, one account or many.

    import gymnasium, tailguard as tg
    env = gymnasium.make("tailguard/Trading-v0", bars=tg.load_bars("btc.parquet"), episode_length=168)
    envs = gymnasium.make_vec("tailguard/Trading-v0", num_envs=64, bars=bars)

Keyword arguments are those of `tailguard.TradingEnv`. Both step the same tensors as training does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from tailguard.envs.trading import TradingEnv
from tailguard.errors import TailguardError

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.data.prepare import PreparedBars

Array = NDArray[Any]


def _spaces(env: TradingEnv) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Box]:
    box = env.action_space
    return (
        gymnasium.spaces.Box(-np.inf, np.inf, (env.observation_size,), np.float32),
        gymnasium.spaces.Box(box.low.cpu().numpy(), box.high.cpu().numpy(), dtype=np.float32),
    )


def _to_tensor(action: Array, env: TradingEnv) -> torch.Tensor:
    if not np.isfinite(action).all():
        raise TailguardError(f"action {action} is not finite; give a number in the action space for every asset")
    return torch.as_tensor(action, dtype=torch.float32, device=env.device).reshape(env.num_envs, -1)


class TradingGymEnv(gymnasium.Env[Array, Array]):
    """One account. `reset` starts a flat account at a random row; `step` trades one bar."""

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium declares it as a plain attribute)

    def __init__(self, bars: Bars | PreparedBars, **options: Any) -> None:
        self.env = TradingEnv(bars, num_envs=1, **options)
        self.observation_space, self.action_space = _spaces(self.env)
        self.render_mode = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self.env.reset(seed)[0].cpu().numpy(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        step = self.env.step(_to_tensor(action, self.env))
        info = {name: value[0].item() for name, value in step.outcome.items()}
        return (
            step.final_obs[0].cpu().numpy(),
            float(step.reward[0]),
            bool(step.terminated[0]),
            bool(step.truncated[0]),
            info,
        )


class TradingGymVectorEnv(gymnasium.vector.VectorEnv[Array, Array, Array]):
    """Many accounts that restart in the step in which they end (`AutoresetMode.SAME_STEP`)."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 (as above)

    def __init__(self, bars: Bars | PreparedBars, num_envs: int = 1, **options: Any) -> None:
        self.env = TradingEnv(bars, num_envs=num_envs, **options)
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = _spaces(self.env)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        if isinstance(seed, list):
            raise TailguardError("Trading-v0 draws all accounts' starts from one generator: give one seed, not a list")
        if options:
            raise TailguardError(f"Trading-v0 has no reset options, got {sorted(options)}")
        return self.env.reset(seed).cpu().numpy(), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        step = self.env.step(_to_tensor(actions, self.env))
        info: dict[str, Any] = {}
        for name, value in step.outcome.items():
            info[name], info[f"_{name}"] = value.cpu().numpy(), np.ones(self.num_envs, bool)
        ended = step.ended.cpu().numpy()
        if ended.any():
            final = np.full(self.num_envs, None, dtype=object)
            last = step.final_obs.cpu().numpy()
            for index in np.flatnonzero(ended):
                final[index] = last[index]
            info["final_obs"], info["_final_obs"] = final, ended
        return (
            step.obs.cpu().numpy(),
            step.reward.cpu().numpy(),
            step.terminated.cpu().numpy(),
            step.truncated.cpu().numpy(),
            info,
        )
