"""Shorter ways of a CPU to the same numbers, a bar in NumPy and a policy's row as one node, against PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tailguard.audit.registry import Measurement, at_most, within
from tailguard.audit.subject import Subject
from tailguard.envs.trading import TradingEnv
from tailguard.market import MarketConfig, host_step
from tailguard.models import policy

COSTLY = MarketConfig(fee=0.002, half_spread=0.001, impact=2.0, funding_rate=0.002, participation=1.0, leverage=3.0)
"""Costs that decide the gradient; no order reaches its cap."""
COMPARED = ("pathwise/earned", "train/grad_norm", "pathwise/slope_first", "pathwise/slope_last")


@contextmanager
def by_operations() -> Iterator[None]:
    """Every operation on its own, as on a GPU."""
    of_market, of_policy = vars(host_step), vars(policy)
    most, takes_rows = of_market["MOST_NUMBERS"], of_policy["takes_rows"]
    of_market["MOST_NUMBERS"], of_policy["takes_rows"] = 0, lambda *_: False
    try:
        yield
    finally:
        of_market["MOST_NUMBERS"], of_policy["takes_rows"] = most, takes_rows


def _window(subject: Subject, memory: str) -> dict[str, float]:
    """Metrics of a window that is differentiated through the market, in an iteration after the first step."""
    env = TradingEnv(subject.bars, COSTLY, num_envs=12, episode_length=48, stagger=8, seed=subject.seed)
    learner = subject.pathwise_learner(env, n_steps=12, memory=memory, activation="tanh", runtime="eager")
    learner.iterate()
    return learner.iterate()


def fast_path_gaps(subject: Subject) -> list[Measurement]:
    """Gaps of what a window earned and of its gradient between the two ways, with an LSTM and without."""
    found = []
    for memory in ("separate", "none"):
        fast = _window(subject, memory)
        with by_operations():
            plain = _window(subject, memory)
        gap = max(abs(fast[name] - plain[name]) / max(abs(plain[name]), 1e-6) for name in COMPARED)
        # float32 through twelve bars, and one step of the optimiser before.
        found.append(at_most(f"relative gap of a window's P&L and gradient by shorter ways of a CPU, memory {memory}",
                             gap, 1e-3))  # fmt: skip
        found.append(within("length of that gradient", plain["train/grad_norm"], 1e-6, 1e6))
    return found
