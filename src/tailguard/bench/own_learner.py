"""The benchmarked learner: its shape and enabled features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailguard.algorithm.bc import BehaviourCloning
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.bench.timing import Workload
from tailguard.envs.trading import TradingEnv
from tailguard.optim.config import VGSConfig
from tailguard.risk.config import RiskConfig

if TYPE_CHECKING:
    from tailguard.data.prepare import PreparedBars

EPISODE = 256
UNITS = 64
EPOCHS = 4
RISK_STACK: dict[str, Any] = {"twin_critics": True, "risk": RiskConfig(limit=-0.05)}
"""What a tail-risk budget needs: twin quantile critics, the budget and its cost critic."""
EVERYTHING: dict[str, Any] = RISK_STACK | {
    "optimizer": "upgdw",
    "vgs": VGSConfig(enabled=True),
    "value_clip": "mean_and_variance",
    "entropy_coef": 0.001,
    "target_kl": 1.0,
    "extensions": (BehaviourCloning(0.01, beta=1.0),),
}
"""All features on. The KL target is checked and never reached: an early stop would look like speed."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a training iteration."""

    envs: int
    steps: int
    minibatch: int

    def __str__(self) -> str:
        return f"{self.envs:,} × {self.steps}, {self.minibatch:,}"

    @property
    def samples(self) -> int:
        """Environment steps in an iteration."""
        return self.envs * self.steps

    def at_most(self, envs: int) -> Shape:
        """The shape cut to so many environments, with as many minibatches."""
        kept = min(self.envs, envs)
        return Shape(kept, self.steps, max(2, self.minibatch * kept // self.envs))


EQUAL = Shape(64, 64, 1_024)
"""The shape in which learners are compared on equal terms."""
DEFAULTS = Shape(256, 64, 4_096)
"""Our own defaults."""
AS_PEOPLE_RUN_IT = Shape(8, 128, 128)
"""What users of CPU learners choose: few environments, small minibatches."""


def trading_env(
    prepared: PreparedBars, num_envs: int, stagger: int, device: str = "cpu", episode_length: int = EPISODE
) -> TradingEnv:
    """The environment that all learners train on.

    Episodes are staggered: environments that restart together let some learners take a fast path most of the time.
    """
    return TradingEnv(prepared, num_envs=num_envs, device=device, episode_length=episode_length, stagger=stagger)


def our_learner(
    prepared: PreparedBars, shape: Shape, stagger: int = 64, *, device: str = "cpu", seed: int = 0, **options: Any
) -> DistributionalPPO:
    """Our learner in this shape; `options` as for `DistributionalPPO`."""
    settings: dict[str, Any] = {"epochs": EPOCHS, "hidden": (UNITS,), "lstm_size": UNITS} | options
    env = trading_env(prepared, shape.envs, stagger, device)
    return DistributionalPPO(env, n_steps=shape.steps, minibatch_size=shape.minibatch, seed=seed, **settings)


def ours(prepared: PreparedBars, shape: Shape, stagger: int = 64, *, device: str = "cpu", **options: Any) -> Workload:
    """One iteration of our learner: a rollout and all epochs on it."""
    return Workload(our_learner(prepared, shape, stagger, device=device, **options).iterate, shape.samples)
