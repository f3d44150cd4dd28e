"""Diagnostic tasks: small tensor-native environments with a known best return, to check that a learner can learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailguard.envs.protocol import Box, Discrete, Step
from tailguard.errors import ConfigError, TailguardError


class RecallEnv:
    """Remember a cue: it is shown once and queried `delay` steps later.

    The first observation of an episode carries a fair random cue, +1 or -1; all others are blank until the last,
    which queries it. Only the answer counts: choice 1 for the cue +1 and choice 0 for -1 pay +1, the wrong
    choice pays -1, and the episode terminates. An agent with memory earns 1 per episode; without memory the answer
    is independent of the cue, and no policy earns more than 0 on average.

    Observations are [cue or 0, 1 at the query or 0]. Episodes are `delay` + 1 steps long.
    `outcome` holds `episode_return` and `episode_length`, [N], up to and including the step.
    """

    observation_size = 2

    def __init__(
        self, num_envs: int = 64, delay: int = 32, *, seed: int | None = None, device: str | torch.device = "cpu"
    ) -> None:
        """Create the task.

        Args:
            num_envs: Environments that step together.
            delay: Steps between the cue and its query, at least 1.
            seed: Seed of the random stream; None takes a new one each time.
            device: Where the tensors live.
        """
        if num_envs < 1:
            raise ConfigError(f"num_envs is {num_envs}; at least 1 environment is needed.")
        if delay < 1:
            raise ConfigError(f"delay is {delay}; with less than 1 step between cue and question nothing is recalled.")
        self.num_envs = num_envs
        self.delay = delay
        self.device = torch.device(device)
        self.action_space = Discrete((2,))
        self._generator = torch.Generator(self.device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._cue = torch.ones(num_envs, device=self.device)
        self._time = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    def reset(self, seed: int | None = None) -> Tensor:
        """Start N new episodes and return their first observations, [N, 2].

        Without a seed the random stream continues.
        """
        if seed is not None:
            self._generator.manual_seed(seed)
        self._cue = self._draw_cues()
        self._time = torch.zeros_like(self._time)
        return self._observation(self._cue, self._time)

    def step(self, action: Tensor) -> Step:
        """Apply one choice to each environment, [N, 1] int64."""
        answered = self._time == self.delay
        right = action.reshape(self.num_envs) == (self._cue > 0)
        reward = torch.where(answered, torch.where(right, 1.0, -1.0), 0.0)
        length = self._time + 1
        final_obs = self._observation(self._cue, length)
        self._cue = torch.where(answered, self._draw_cues(), self._cue)
        self._time = torch.where(answered, 0, length)
        return Step(
            obs=self._observation(self._cue, self._time),
            reward=reward,
            terminated=answered,
            truncated=torch.zeros_like(answered),
            final_obs=final_obs,
            valid=torch.ones_like(answered),
            outcome={"episode_return": reward, "episode_length": length},
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Cues, clocks and the random stream."""
        return {
            "cue": self._cue.clone(),
            "time": self._time.clone(),
            "delay": torch.tensor(self.delay),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state; the next `step` acts on the observation after the save."""
        saved = len(state["cue"]), int(state["delay"])
        if saved != (self.num_envs, self.delay):
            raise TailguardError(
                f"RecallEnv: this one has num_envs {self.num_envs} and delay {self.delay}, the saved state has "
                f"{saved[0]} and {saved[1]}. Create it with the saved values."
            )
        self._cue = state["cue"].to(self.device, copy=True)
        self._time = state["time"].to(self.device, copy=True)
        self._generator.set_state(state["generator"].cpu())

    def close(self) -> None:
        """Nothing to release."""

    def _draw_cues(self) -> Tensor:
        bits = torch.randint(2, (self.num_envs,), generator=self._generator, device=self.device)
        return 2.0 * bits - 1.0

    def _observation(self, cue: Tensor, time: Tensor) -> Tensor:
        return torch.stack((torch.where(time == 0, cue, 0.0), (time == self.delay).to(cue.dtype)), dim=-1)


@dataclass(frozen=True)
class BetsState:
    """State of N episodes of bets."""

    pnl: Tensor
    """[N]"""
    time: Tensor
    """Bets placed, the same in all episodes, []."""


class BetsEnv:
    """Bet on one asset, `steps` times in a row: the reward is w·(μ + σ·noise), and the episode's P&L is its sum.

    With one step and a limit d on the expected shortfall, everything is known in closed form: the best weight is
    d / (k·σ − μ), with k = φ(z_α)/α for Gaussian noise, and the Lagrange multiplier is λ = S / (k − S) with
    S = μ/σ. With more steps the best *constant* weight is known; a policy that uses its P&L does better.

    Observations are [P&L so far, remaining share of the steps]. All episodes end together, by time.
    `outcome` holds `pnl`, [N]. A step is a pure, differentiable function of state, action and noise.
    """

    observation_size = 2
    differentiable = True

    def __init__(
        self,
        num_envs: int,
        steps: int = 1,
        mean: float = 0.05,
        volatility: float = 0.2,
        *,
        freedom: int | None = None,
        bounds: tuple[float, float] = (-1.0, 5.0),
    ) -> None:
        """Create the task.

        Args:
            num_envs: Environments that step together.
            steps: Bets in an episode.
            mean: Expected return of the asset in a step.
            volatility: Its standard deviation.
            freedom: Degrees of freedom of Student-t noise of the same standard deviation; None for Gaussian noise.
            bounds: Smallest and largest weight.
        """
        self.num_envs, self.steps, self.episode_length = num_envs, steps, steps
        self.mean, self.volatility, self.freedom = mean, volatility, freedom
        self.device = torch.device("cpu")
        self.action_space = Box(torch.tensor([bounds[0]]), torch.tensor([bounds[1]]))
        self.generator = torch.Generator()
        self.state = self._fresh()

    def reset(self, seed: int | None = None) -> Tensor:
        """Start N new episodes and return their first observations, [N, 2]."""
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state = self._fresh()
        return self._observe(self.state)

    def step(self, action: Tensor) -> Step:
        """Place the bets."""
        self.state, step = self.transition(self.state, action, self.draw())
        return step

    def transition(self, before: BetsState, action: Tensor, noise: Tensor) -> tuple[BetsState, Step]:
        """Place the bets; `noise` is that of each bet, [N]."""
        reward = action[:, 0] * (self.mean + self.volatility * noise)
        after = BetsState(before.pnl + reward, before.time + 1)
        final = self._observe(after)
        over = after.time == self.steps
        outcome = {"pnl": after.pnl}
        after = BetsState(torch.where(over, 0.0, after.pnl), torch.where(over, 0, after.time))
        ended = over.expand(self.num_envs)
        never = torch.zeros_like(ended)
        return after, Step(self._observe(after), reward, never, ended, final, ~never, outcome)

    def draw(self) -> Tensor:
        """Noise of one step, [N], with standard deviation 1."""
        noise = torch.randn(self.num_envs, generator=self.generator)
        if self.freedom is None:
            return noise
        squares: Tensor = torch.randn(self.freedom, self.num_envs, generator=self.generator).square().mean(0)
        return noise * ((1 - 2 / self.freedom) / squares).sqrt()

    def _fresh(self) -> BetsState:
        return BetsState(torch.zeros(self.num_envs), torch.zeros((), dtype=torch.int64))

    def _observe(self, state: BetsState) -> Tensor:
        return torch.stack((state.pnl, (1 - state.time / self.steps).expand_as(state.pnl)), dim=1)

    def state_dict(self) -> dict[str, Tensor]:
        """P&L, time and the random stream."""
        return {"pnl": self.state.pnl, "time": self.state.time, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state."""
        self.state = BetsState(state["pnl"], state["time"])
        self.generator.set_state(state["generator"])

    def close(self) -> None:
        """Nothing to release."""
