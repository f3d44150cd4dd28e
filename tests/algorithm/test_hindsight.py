"""Advantages in hindsight against accounts that are traded one by one, and against the gradient that they estimate."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from tailguard.algorithm.hindsight import Track, weigh
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.rollout import Rollout, collect
from tailguard.algorithm.saving import capture, restore
from tailguard.algorithm.update import minibatch_loss
from tailguard.data.bars import Bars
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.data.synthetic import make_market
from tailguard.envs.protocol import Box, FunctionalEnv, Step
from tailguard.envs.shield import Shield
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.market import MarketConfig
from tailguard.models.actions import GaussianHead
from tailguard.risk import RiskConfig

LENGTH, ROWS, ACCOUNTS = 20, 12, 6
RUINOUS = MarketConfig(leverage=10.0, capital=1_000.0, participation=np.inf)
DEAR = MarketConfig(leverage=2.0, borrow_rate=0.1)


@pytest.fixture(scope="module")
def prepared(bars: Bars) -> PreparedBars:
    return prepare(bars)


@pytest.fixture(scope="module")
def crash(make_panel: Any, prepare_panel: Any) -> PreparedBars:
    """A quiet market that loses 40 % inside one bar and stays there."""
    panel = make_panel(32, volatility=1e-4)
    fallen = np.where(np.arange(32) >= 16, 0.6, 1.0)[:, None]
    before = np.where(np.arange(32) > 16, 0.6, 1.0)[:, None]
    panel = replace(
        panel,
        open=panel.open * before,
        high=panel.high * before,
        low=panel.low * fallen,
        close=panel.close * fallen,
    )
    found: PreparedBars = prepare_panel(panel)
    return found


def make_env(bars: PreparedBars, config: MarketConfig = DEAR, accounts: int = ACCOUNTS, **options: Any) -> TradingEnv:
    """Accounting in float64, so that replays agree to the last digits; accounts of different ages."""
    settings: dict[str, Any] = {"episode_length": LENGTH, "stagger": 4, "dtype": torch.float64}
    return TradingEnv(bars, config, accounts, **(settings | options))


def hindsight_learner(make_learner: Any, env: TradingEnv, **options: Any) -> DistributionalPPO:
    """A learner whose mean action is different in every row."""
    learner: DistributionalPPO = make_learner(env, **({"advantages": "hindsight", "memory": "none"} | options))
    with torch.no_grad():
        learner.agent.action_head.linear.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return learner


def trading(learner: DistributionalPPO) -> TradingEnv:
    return cast(TradingEnv, learner.env)


def head_of(learner: DistributionalPPO) -> GaussianHead:
    head = learner.agent.action_head
    assert isinstance(head, GaussianHead)
    return head


# --- accounts traded one by one --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A rollout, and where the accounts stood before each of its rows and after the last."""

    learner: DistributionalPPO
    rollout: Rollout
    states: list[dict[str, Tensor]]
    one: TradingEnv
    """The same market for a single account."""

    def trade(self, row: int, n: int, actions: list[Tensor]) -> list[Step]:
        """Account n from this row on, alone, until the actions or the episode are over."""
        state = self.states[row]
        self.one.load_state_dict({name: v if name == "generator" else v[n : n + 1] for name, v in state.items()})
        steps: list[Step] = []
        while len(steps) < len(actions) and not (steps and bool(steps[-1].ended)):
            steps.append(self.one.step(actions[len(steps)]))
        return steps

    def both_ways(self, row: int, n: int) -> tuple[list[Step], list[Step]]:
        """One or two rows with the real action, and as many with the mean action in its place."""
        head = head_of(self.learner)
        mean = head.to_env(self.rollout.parameters[row, n, : head.raw_size]).unsqueeze(0)
        real = head.to_env(self.rollout.actions[row, n]).unsqueeze(0)
        following = head.to_env(self.rollout.actions[row + 1, n]).unsqueeze(0) if row + 1 < ROWS else mean
        taken = self.trade(row, n, [real, following])
        return taken, self.trade(row, n, [mean, following][: 1 if bool(taken[0].ended) else 2])

    def for_all(self, figure: Callable[[list[Step], int, int], float]) -> NDArray[np.float64]:
        """Figure of the real actions less that of the mean actions, [T, N]."""
        found = np.zeros(self.rollout.rewards.shape)
        for row, n in np.ndindex(found.shape):
            taken, instead = self.both_ways(row, n)
            found[row, n] = figure(taken, row, n) - figure(instead, row, n)
        return found


def observe(learner: DistributionalPPO) -> Seen:
    """The learner's next rollout, and the same once more by an environment that steps and nothing else."""
    env = trading(learner)
    if learner.state.carry is None:
        learner.state.carry = learner._begin()
    task = env.task
    again, one = (
        make_env(env.prepared, task.market.config, accounts, reward=task.reward, shield=task.shield)
        for accounts in (env.num_envs, 1)
    )
    again.load_state_dict(env.state_dict())
    rollout = learner._collect()
    states = []
    for action, reward in zip(head_of(learner).to_env(rollout.actions), rollout.rewards, strict=True):
        states.append(again.state_dict())
        torch.testing.assert_close(again.step(action).reward, reward, atol=1e-8, rtol=0)
    return Seen(learner, rollout, [*states, again.state_dict()], one)


def discounted(gamma: float) -> Callable[[list[Step], int, int], float]:
    def total(steps: list[Step], row: int, n: int) -> float:  # noqa: ARG001
        return sum(gamma**k * float(step.reward) for k, step in enumerate(steps))

    return total


CASES: dict[str, dict[str, Any]] = {
    "log": {},
    "pnl": {"reward": "pnl"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_an_advantage_is_what_a_single_account_earns_more(
    make_learner: Any, prepared: PreparedBars, options: dict[str, Any]
) -> None:
    """Every row of every account. After the last row both go on with the last mean; an end leaves its own row."""
    learner = hindsight_learner(make_learner, make_env(prepared, **options), gamma=0.9)
    learner.iterate()
    seen = observe(learner)
    assert seen.rollout.hindsight is not None
    assert seen.rollout.ended[:-1].any()
    expected = seen.for_all(discounted(0.9))
    assert expected.std() > 1e-3
    np.testing.assert_allclose(seen.rollout.hindsight.advantages(0.9), expected, atol=2e-8, rtol=0)


def test_all_assets_of_an_account_count_together(make_learner: Any) -> None:
    env = make_env(prepare(make_market(1_200, assets=2, seed=3).bars))
    seen = observe(hindsight_learner(make_learner, env, gamma=0.9))
    assert seen.rollout.hindsight is not None
    assert seen.rollout.actions.shape == (ROWS, ACCOUNTS, 2)
    np.testing.assert_allclose(seen.rollout.hindsight.advantages(0.9), seen.for_all(discounted(0.9)), atol=2e-8, rtol=0)


@pytest.mark.parametrize("bias", [1.5, -1.5], ids=["long", "short"])
def test_an_account_that_only_one_of_the_two_loses(make_learner: Any, crash: PreparedBars, bias: float) -> None:
    """Ten times its equity long, an account does not live through the crash. An account that is over earns nothing."""
    env = make_env(crash, RUINOUS, accounts=40)
    learner = hindsight_learner(make_learner, env, gamma=1.0, log_std_init=1.0, log_std_bounds=(-5.0, 2.0))
    with torch.no_grad():
        learner.agent.action_head.linear.bias.fill_(bias)
    seen = observe(learner)
    found = seen.rollout.hindsight
    assert found is not None
    alone = np.zeros((2, ROWS, 40), bool)  # lost by the real account alone, by the shadow alone
    for row, n in np.ndindex(ROWS, 40):
        taken, instead = (bool(steps[0].outcome["liquidated"]) for steps in seen.both_ways(row, n))
        alone[:, row, n] = taken and not instead, instead and not taken
    lost = torch.from_numpy(alone[int(bias > 0)])
    assert lost.sum() >= 2
    np.testing.assert_allclose(found.advantages(1.0), seen.for_all(discounted(1.0)), atol=1e-6, rtol=0)
    assert (found.instead.reward[1][lost] == 0).all()
    for name, value in found.instead.outcome[0].items():
        assert torch.equal(found.instead.outcome[1][name][lost], value[lost]), name
    if bias > 0:
        assert (found.instead.reward[0][lost] < -1).all()
        assert (found.advantages(1.0)[lost] > 1).all()
        assert (found.taken.reward[1][lost] != 0).any()  # the real one goes on


def test_the_next_episode_is_nobodys_merit(make_learner: Any, prepared: PreparedBars) -> None:
    """Whatever is done and earned after an episode's end, poison included, changes nothing up to it."""
    learner = hindsight_learner(make_learner, make_env(prepared, stagger=None, episode_length=5))
    env, head, track = trading(learner), head_of(learner), Track()
    rollout, _ = collect(
        learner.agent,
        env,
        learner._begin(),
        learner._observation_scale(),
        ROWS,
        learner.generator,
        track=track,
    )
    ends = torch.nonzero(rollout.ended.all(1)).flatten().tolist()
    assert ends == [4, 9]

    def poisoned(rows: Tensor) -> Tensor:
        return torch.cat((rows[:10], torch.full_like(rows[10:], torch.nan)))

    other = replace(
        rollout,
        actions=poisoned(rollout.actions),
        rewards=poisoned(rollout.rewards),
        outcome={n: poisoned(v) if v.is_floating_point() else v for n, v in rollout.outcome.items()},
    )
    plain, changed = weigh(head, env, rollout, track), weigh(head, env, other, track)
    for one, two in ((plain.taken, changed.taken), (plain.instead, changed.instead)):
        for k in range(2):
            assert torch.equal(one.reward[k][:10], two.reward[k][:10])
            for name, value in one.outcome[k].items():
                assert torch.equal(value[:10], two.outcome[k][name][:10]), name
    assert changed.advantages(0.9)[10:].isnan().all()


# --- the gradient ----------------------------------------------------------------------------------------------------


def constant_policy(learner: DistributionalPPO, mean: float) -> None:
    with torch.no_grad():
        learner.agent.action_head.linear.weight.zero_()
        learner.agent.action_head.linear.bias.fill_(mean)


def scores(rollout: Rollout) -> Tensor:
    """∂log π/∂μ, [T, N], of one action dimension."""
    mean, log_std = rollout.parameters.unbind(-1)
    return (rollout.actions.squeeze(-1) - mean) / (2 * log_std).exp()


def test_the_gradient_is_that_of_the_mean_reward(make_learner: Any, make_panel: Any, prepare_panel: Any) -> None:
    """20,000 episodes of 8 rows of a policy that ignores what it sees, in a rising market with dear trades. The score
    function's gradient with these advantages, beside the central difference with the same starts and the same noise.

    The difference of the two has a standard error of 1/109 of the gradient; without the second row it is 155 of them.
    """
    panel = make_panel(600, volatility=0.005)
    rise = np.exp(0.004 * np.arange(600))[:, None]
    panel = replace(
        panel, open=panel.open * rise, high=panel.high * rise, low=panel.low * rise, close=panel.close * rise
    )
    config = MarketConfig(fee=0.005, capital=1_000.0)
    env = make_env(prepare_panel(panel), config, accounts=20_000, episode_length=8, stagger=None)
    learner = hindsight_learner(make_learner, env, n_steps=8, gamma=1.0, log_std_init=-1.0)
    constant_policy(learner, 0.5)
    learner.state.carry = learner._begin()
    rollout, head = learner._collect(), head_of(learner)
    assert rollout.hindsight is not None
    assert rollout.ended[-1].all()
    assert not rollout.ended[:-1].any()
    assert (rollout.outcome["unfilled"] == 0).all()
    by_score = (rollout.hindsight.advantages(1.0) * scores(rollout)).double().sum(0)

    def earned(shift: float) -> Tensor:
        env.reset(learner.seed)
        return torch.stack([env.step(head.to_env(raw + shift)).reward for raw in rollout.actions]).double().sum(0)

    torch.testing.assert_close(earned(0.0), rollout.rewards.double().sum(0))
    by_difference = (earned(0.01) - earned(-0.01)) / 0.02
    error = float((by_score - by_difference).std()) / np.sqrt(20_000)
    value = float(by_difference.mean())
    assert error < abs(value) / 100
    assert abs(float(by_score.mean()) - value) < 4 * error


def test_the_market_s_noise_is_gone(make_learner: Any, prepared: PreparedBars) -> None:
    """Long 0.76 with a noise of 0.02: what a row says of the gradient is 36 times as noisy with GAE."""
    spread = {}
    for kind in ("gae", "hindsight"):
        env = make_env(prepared, accounts=256)
        learner = hindsight_learner(make_learner, env, advantages=kind, log_std_init=-3.0)
        constant_policy(learner, 1.0)
        learner.state.carry = learner._begin()
        rollout = learner._collect()
        prepared_rollout = learner._prepare(rollout, usable=True)
        spread[kind] = float((prepared_rollout.estimates.advantages * scores(rollout)).std())
    assert spread["gae"] > 18 * spread["hindsight"]


def test_the_policy_learns_from_hindsight_and_critics_from_returns(make_learner: Any, prepared: PreparedBars) -> None:
    """On one rollout: other advantages and another gradient of the policy, the same of everything else."""
    found = {}
    for kind in ("gae", "hindsight"):
        learner = hindsight_learner(make_learner, make_env(prepared), advantages=kind, memory="separate")
        learner.state.carry = learner._begin()
        rollout = learner._collect()
        ready = learner._prepare(rollout, usable=True)
        assert ready.batch is not None
        loss = minibatch_loss(learner.agent, ready.batch, learner.set_hyper(), learner.config)
        loss.total.backward()  # type: ignore[no-untyped-call]
        gradients = {name: one.grad for name, one in learner.agent.named_parameters() if one.grad is not None}
        found[kind] = rollout, ready.estimates, gradients
    (plain, by_gae, before), (rollout, by_hindsight, after) = found.values()
    assert torch.equal(plain.rewards, rollout.rewards)
    assert rollout.hindsight is not None
    assert torch.equal(by_hindsight.advantages, rollout.hindsight.advantages(0.99))
    assert torch.corrcoef(torch.stack((by_gae.advantages.flatten(), by_hindsight.advantages.flatten())))[0, 1] < 0.99
    torch.testing.assert_close(by_hindsight.value_targets, by_gae.advantages + by_gae.values)
    assert torch.equal(by_hindsight.value_targets, by_gae.value_targets)
    assert before.keys() == after.keys()
    assert {name.split(".")[0] for name in before} == {"trunks", "critics", "action_head"}
    for name, gradient in before.items():
        of_policy = name.startswith(("trunks.0", "action_head"))
        assert torch.equal(gradient, after[name]) != of_policy, name
        assert gradient.any(), name


# --- the risk budget -------------------------------------------------------------------------------------------------


def tail_cost(seen: Seen, worst: NDArray[np.float64]) -> Callable[[list[Step], int, int], float]:
    """What rows cost a budget, from its threshold and its moments; worst: the episode's drawdown so far, [T, N]."""
    risk = seen.learner.risk
    assert risk is not None
    config, threshold = risk.config, float(risk.constraint.threshold)
    unit = config.alpha * float(risk.constraint.scale)
    mean, std = float(risk.changes.mean), float(risk.changes.std)

    def cost(steps: list[Step], row: int, n: int) -> float:
        if config.measure == "bar":
            return sum(max(-float(step.outcome["net"]) - threshold, 0.0) for step in steps) / unit / LENGTH
        if config.measure == "drawdown":
            deepest = max(worst[row, n], *(-float(step.outcome["drawdown"]) for step in steps))
            return max(deepest - threshold, 0.0) / unit
        to_come = 0 if bool(steps[-1].ended) else LENGTH - int(seen.states[row]["age"][n]) - len(steps)
        distance, spread = -float(steps[-1].outcome["pnl"]) + to_come * mean - threshold, np.sqrt(to_come) * std
        if to_come == 0:
            return max(distance, 0.0) / unit
        # Bachelier: a call on a normal price
        return float(distance * norm.cdf(distance / spread) + spread * norm.pdf(distance / spread)) / unit

    return cost


def follow_drawdowns(rollout: Rollout, worst: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Deepest fall of the episode before each row, [T, N], and after the last, [N]."""
    rows = []
    for fall, start in zip(-rollout.outcome["drawdown"].double().numpy(), rollout.episode_start.numpy(), strict=True):
        rows.append(np.where(start, 0.0, worst))
        worst = np.maximum(rows[-1], fall)
    return np.stack(rows), worst


@pytest.mark.parametrize("measure", ["episode", "drawdown", "bar"])
@pytest.mark.parametrize("limit", [-0.005, None], ids=["limit", "penalty"])
def test_a_budget_charges_what_the_action_cost_more(
    make_learner: Any, prepared: PreparedBars, measure: Any, limit: float | None
) -> None:
    """And the policy is told the reward less the cost at its price."""
    budget = RiskConfig(limit=limit, penalty=0.0 if limit else 2.0, alpha=0.5, window=40, measure=measure)
    learner = hindsight_learner(
        make_learner, make_env(prepared), risk=budget, gamma=0.9, normalise_advantages="off", learning_rate=0.0
    )
    worst = np.zeros(ACCOUNTS)
    for _ in range(13):  # until every episode began at age 0 and the window holds enough of them
        learner.iterate()
        assert learner.snapshot is not None
        _, worst = follow_drawdowns(learner.snapshot.rollout, worst)
    seen, risk = observe(learner), learner.risk
    assert risk is not None
    kept = copy.deepcopy((risk.state_dict(), risk.running.state_dict()))
    costs = risk.costs(seen.rollout)[1]
    assert costs is not None
    expected = seen.for_all(tail_cost(seen, follow_drawdowns(seen.rollout, worst)[0]))
    assert (np.abs(expected) > 1e-4).mean() > 0.1
    np.testing.assert_allclose(costs, expected, atol=2e-6 * max(1.0, np.abs(expected).max()), rtol=0)

    risk.load_state_dict(kept[0])
    risk.running.load_state_dict(kept[1])
    batch = learner._prepare(seen.rollout, usable=True).batch
    price, scale = float(risk.constraint.price), float(risk.constraint.scale)
    assert price > 0
    assert batch is not None
    told = (seen.for_all(discounted(0.9)) - price * scale * expected) / (1 + price)
    np.testing.assert_allclose(batch.advantages, told, atol=1e-6, rtol=0)


def test_a_budget_without_a_price_leaves_the_rewards_advantages(make_learner: Any, prepared: PreparedBars) -> None:
    learner = hindsight_learner(
        make_learner, make_env(prepared), risk=RiskConfig(limit=-0.99, alpha=0.5, window=40), normalise_advantages="off"
    )
    for _ in range(13):
        learner.iterate()
    seen = observe(learner)
    batch = learner._prepare(seen.rollout, usable=True).batch
    assert learner.risk is not None
    assert bool(learner.risk.constraint.ready)
    assert learner.risk.constraint.price == 0
    assert batch is not None
    np.testing.assert_allclose(batch.advantages, seen.for_all(discounted(0.99)), atol=2e-8, rtol=0)


@pytest.mark.parametrize("measure", ["episode", "drawdown", "bar"])
def test_a_lost_account_is_charged_once_and_has_nothing_to_come(
    make_learner: Any, crash: PreparedBars, measure: Any
) -> None:
    """The mean action's account is liquidated in the crash, the real one not always."""
    env = make_env(crash, RUINOUS, accounts=40, stagger=None)
    options: dict[str, Any] = {"log_std_init": 1.0, "log_std_bounds": (-5.0, 2.0)}
    budget = RiskConfig(penalty=1.0, alpha=0.5, window=40, measure=measure)
    learner = hindsight_learner(make_learner, env, risk=budget, **options)
    with torch.no_grad():
        learner.agent.action_head.linear.bias.fill_(1.5)
    seen = observe(learner)
    assert learner.risk is not None
    learner.risk.constraint.observe(torch.linspace(-0.1, 0.9, 40), torch.ones(40, dtype=torch.bool))
    costs = learner.risk.costs(seen.rollout)[1]
    found = seen.rollout.hindsight
    assert costs is not None
    assert found is not None
    lost = ((found.instead.reward[0] < -1) & ~seen.rollout.ended).numpy()
    assert lost.sum() >= 2
    expected = seen.for_all(tail_cost(seen, follow_drawdowns(seen.rollout, np.zeros(40))[0]))
    np.testing.assert_allclose(costs.numpy()[lost], expected[lost], atol=1e-5, rtol=0)


# --- a run with it ---------------------------------------------------------------------------------------------------


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(other[name], value), name


def test_the_environment_does_not_notice(make_learner: Any, prepared: PreparedBars) -> None:
    """After the rollout it stands where one stands that was only stepped."""
    learner = hindsight_learner(make_learner, make_env(prepared))
    for _ in range(3):
        seen = observe(learner)
        state = learner.env.state_dict()
        for name in ("row", "equity", "weights", "start_equity", "peak_equity", "age"):
            torch.testing.assert_close(state[name], seen.states[-1][name], atol=1e-8, rtol=0, msg=name)
        assert torch.equal(state["row"], seen.states[-1]["row"])


def test_a_run_goes_the_same_way_twice_and_on_from_a_checkpoint(
    make_learner: Any, everything_in: Any, prepared: PreparedBars
) -> None:
    def make() -> DistributionalPPO:
        budget = RiskConfig(limit=-0.02, alpha=0.5, window=40)
        return hindsight_learner(make_learner, make_env(prepared), memory="separate", risk=budget, seed=4)

    first, second, third = make(), make(), make()
    for _ in range(3):
        first.iterate()
    saved = copy.deepcopy(capture(first))
    goes_on = [first.iterate() for _ in range(3)]
    again = [second.iterate() for _ in range(6)]
    assert again[3:] == goes_on
    same(everything_in(first), everything_in(second))
    restore(third, saved, "here", episodes=True)
    assert [third.iterate() for _ in range(3)] == goes_on
    same(everything_in(first), everything_in(third))
    same(first.env.state_dict(), third.env.state_dict())


def test_an_environment_that_cannot_tell_is_refused(make_learner: Any, scripted_env: Any) -> None:
    for env, options in ((scripted_env(), {}), ("Pendulum-v1", {"num_envs": 2}), ("CartPole-v1", {"num_envs": 2})):
        with pytest.raises(ConfigError, match=r"ppo\.advantages: .*TradingEnv, or set ppo\.advantages to gae"):
            make_learner(env, advantages="hindsight", **options).learn(1)


class OrderEnv:
    """Every member of `FunctionalEnv` and `VectorEnv` and a box of actions, but each action adds to the position."""

    num_envs, observation_size, device = 4, 1, torch.device("cpu")
    action_space = Box(torch.tensor([-1.0]), torch.tensor([1.0]))

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.state = torch.zeros(4)

    def draw(self) -> Tensor:
        return torch.randn(4, generator=self.generator)

    def transition(self, before: Tensor, action: Tensor, chance: Tensor) -> tuple[Tensor, Step]:
        after = before + action[:, 0]
        never = torch.zeros(4, dtype=torch.bool)
        return after, Step(after.unsqueeze(1), after * chance, never, never, after.unsqueeze(1), ~never)

    def reset(self, seed: int | None = None) -> Tensor:  # noqa: ARG002
        self.state = torch.zeros(4)
        return self.state.unsqueeze(1)

    def step(self, action: Tensor) -> Step:
        self.state, step = self.transition(self.state, action, self.draw())
        return step

    def state_dict(self) -> dict[str, Tensor]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state = state["state"]

    def close(self) -> None:
        pass


def test_actions_that_are_orders_are_refused(make_learner: Any) -> None:
    """An order stays in the position: the next action does not bring both accounts to the same weights."""
    assert isinstance(OrderEnv(), FunctionalEnv)
    with pytest.raises(
        ConfigError, match=r"OrderEnv cannot tell\. Train on a TradingEnv, or set ppo\.advantages to gae"
    ):
        make_learner(OrderEnv(), advantages="hindsight").learn(1)


def test_a_shield_is_refused(make_learner: Any, prepared: PreparedBars) -> None:
    env = make_env(prepared, shield=Shield(shock=0.1, budget=0.1))
    with pytest.raises(ConfigError, match=r"the shield .shock 0\.1, budget 0\.1.*or set ppo\.advantages to gae"):
        hindsight_learner(make_learner, env).iterate()


@pytest.mark.parametrize("short", [True, False])
def test_a_cap_on_participation_that_can_bind_is_refused(
    make_learner: Any, prepared: PreparedBars, short: bool
) -> None:
    """The largest order turns 2 × leverage of the capital, or once without shorts; bars with less volume are counted.

    The capital is chosen such that a given share of the bars is too small: refused above 1 %, warned of below.
    """
    traded = prepared.panel.volume * prepared.panel.open
    largest = 2.0 * (2 if short else 1)
    for share, text in ((0.5, "wrong sign.*market.participation .inf: no cap.*gae"), (0.02, "wrong sign")):
        capital = 0.1 * float(np.quantile(traded, share)) / largest
        config = replace(DEAR, capital=capital, allow_short=short)
        with pytest.raises(ConfigError, match=text) as caught:
            hindsight_learner(make_learner, make_env(prepared, config)).iterate()
        said = float(re.search(r"the volume of (\S+) % of the bars", str(caught.value))[1])  # type: ignore[index]
        assert said == pytest.approx(100 * float((0.1 * traded < largest * capital).mean()), rel=0.05, abs=0.1)
        hindsight_learner(make_learner, make_env(prepared, replace(config, participation=np.inf))).iterate()
    smallest = 0.1 * float(np.quantile(traded, 0.004)) / largest
    with pytest.warns(UserWarning, match="its advantages are wrong there"):
        hindsight_learner(
            make_learner, make_env(prepared, replace(DEAR, capital=smallest, allow_short=short))
        ).iterate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hindsight_learner(make_learner, make_env(prepared, replace(DEAR, allow_short=short))).iterate()


def test_unknown_advantages_are_refused(make_learner: Any) -> None:
    with pytest.raises(ConfigError, match=r"ppo\.advantages: 'foresight'.*gae, hindsight"):
        make_learner(advantages="foresight")


def test_a_saved_agent_predicts_without_its_environment(
    make_learner: Any, prepared: PreparedBars, tmp_path: Path
) -> None:
    learner = hindsight_learner(make_learner, make_env(prepared))
    learner.iterate()
    learner.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent")
    observation = np.zeros(learner.env.observation_size, np.float32)
    ours, theirs = (agent.predict(observation, deterministic=True)[0] for agent in (learner, loaded))
    assert np.array_equal(ours, theirs)
