"""The trading environment as standard Gymnasium environments: `tailguard/Trading-v0`, one account or many.

    import gymnasium, tailguard as tg
    env = gymnasium.make("tailguard/Trading-v0", bars=tg.load_bars("btc.parquet"), episode_length=168)
    envs = gymnasium.make_vec("tailguard/Trading-v0", num_envs=64, bars=bars)

`bars` may be a file or folder for `tailguard.load_bars` too. The other keyword arguments are those of
`tailguard.TradingEnv`. Both step the same tensors as training does.

Copies of an environment share their features, also with `vectorization_mode="async"`: they are computed in the first
process, before Gymnasium forks the others. Polars, which computes them, hangs in a forked process.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from tailguard.data.prepare import PreparedBars
from tailguard.envs.prepared_market import PreparedMarket, is_prepared_market
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError, TailguardError

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.envs.episodes import EpisodeState

Array = NDArray[Any]
Source: TypeAlias = "Bars | PreparedBars | PreparedMarket | str | Path"

LOADED_IN = os.getpid()
"""Id of the process that imported this module; it differs from the current one after a fork."""
OPTIONS = frozenset(inspect.signature(TradingEnv).parameters) - {"bars", "num_envs"}

_shared: dict[Any, PreparedBars] = {}
"""Cache of the features of the last bars, as long as these are alive; copies of an environment share them."""


def _make_env(bars: Source, num_envs: int, options: dict[str, Any]) -> TradingEnv:
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: Trading-v0 has no such option; there are {', '.join(sorted(OPTIONS))}"
        )
    if os.getpid() != LOADED_IN:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and waiting for them would never end
    given = {name: value for name, value in options.items() if name not in ("features", "scaler")}
    if isinstance(bars, PreparedBars | PreparedMarket):
        return TradingEnv(bars, num_envs=num_envs, **options)
    if isinstance(bars, str | Path) and is_prepared_market(Path(bars)):
        return TradingEnv(bars, num_envs=num_envs, **options)
    return TradingEnv(_prepared(bars, options), num_envs=num_envs, **given)


def _prepared(bars: Bars | str | Path, options: dict[str, Any]) -> PreparedBars:
    """The bars with features, made once for all copies of an environment."""
    features, scaler = options.get("features"), options.get("scaler")
    source = _on_disk(Path(bars)) if isinstance(bars, str | Path) else id(bars)
    key = (source, features and tuple(features), scaler and scaler.digest(), options.get("accounts", "portfolio"))
    if key not in _shared:
        if os.getpid() != LOADED_IN and "polars" in sys.modules:
            raise TailguardError(
                "this process was forked from one that has loaded Polars, and Polars hangs here. Start processes with "
                "spawn (AsyncVectorEnv(…, context='spawn'), SubprocVecEnv(…, start_method='spawn')), or make the first "
                "environment in the parent process"
            )
        from tailguard.data.prepare import prepare
        from tailguard.data.sources import load_bars

        loaded = load_bars(bars) if isinstance(bars, str | Path) else bars
        prepared = prepare(loaded, features, scaler, options.get("accounts", "portfolio"))
        _shared.clear()
        _shared[key] = prepared
        if loaded is bars:  # an id may be reused once this object is deleted
            weakref.finalize(bars, _shared.pop, key, None)
    return _shared[key]


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


def _on_disk(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Fingerprint of a file or a folder's files: names, sizes and modification times."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)


class TradingGymEnv(gymnasium.Env[Array, Array]):
    """One account. `reset` starts a flat account at a random row; `step` trades one bar."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (Gymnasium declares a plain attribute)

    def __init__(self, bars: Source, render_mode: str | None = None, **options: Any) -> None:
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"render_mode: Trading-v0 has no {render_mode!r}; choose 'ansi', a line of text, or None")
        self.env = _make_env(bars, 1, options)
        self.observation_space, self.action_space = _spaces(self.env)
        self.render_mode = render_mode
        self.line = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        first = self.env.reset(seed)[0].cpu().numpy()
        if self.render_mode == "ansi":
            assert self.env.state is not None  # it was reset
            self.line = self._line(self.env.state, 0, {})
        return first, {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        before = self.env.state
        step = self.env.step(_to_tensor(action, self.env))
        rows = {name: value[0] for name, value in step.outcome.items()}
        info = {name: value.item() if value.numel() == 1 else value.cpu().numpy() for name, value in rows.items()}
        if self.render_mode == "ansi":
            assert before is not None  # it has stepped
            self.line = self._line(before, 1, info)
        return (
            step.final_obs[0].cpu().numpy(),
            float(step.reward[0]),
            bool(step.terminated[0]),
            bool(step.truncated[0]),
            info,
        )

    def render(self) -> str | None:
        """The bar that has just closed, the weights, P&L and drawdown of the episode; None without a render mode."""
        return self.line if self.render_mode == "ansi" else None

    def _line(self, state: EpisodeState, steps: int, info: dict[str, Any]) -> str:
        """The account `steps` bars after `state`; a step that ends an episode has already started the next one."""
        panel, row = self.env.prepared.panel, int(state.market.row[0]) + steps
        time = datetime.fromtimestamp(float(panel.time[row]) / 1000, UTC)
        weights = np.atleast_1d(info.get("weights", np.zeros(self.env.task.market.assets)))
        symbols = panel.symbols if len(panel.symbols) == len(weights) else ("weight",) * len(weights)
        held = " ".join(f"{symbol} {weight:+.3f}" for symbol, weight in zip(symbols, weights, strict=True))
        return (
            f"{time:%Y-%m-%d %H:%M}  bar {int(state.age[0]) + steps} of {self.env.episode_length}  {held}  "
            f"P&L {100 * info.get('pnl', 0.0):+.2f} %  drawdown {100 * info.get('drawdown', 0.0):.2f} %"
        )


class TradingGymVectorEnv(gymnasium.vector.VectorEnv[Array, Array, Array]):
    """Many accounts that restart in the step in which they end (`AutoresetMode.SAME_STEP`)."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 (as above)

    def __init__(self, bars: Source, num_envs: int = 1, render_mode: str | None = None, **options: Any) -> None:
        if render_mode is not None:
            raise ConfigError(
                f"render_mode: {render_mode!r} was given; several accounts cannot be rendered. Leave it out"
            )
        self.env = _make_env(bars, num_envs, options)
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
