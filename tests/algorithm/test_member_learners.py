"""Members that iterate as one are the learners that they would be alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tailguard as tg
from tailguard.algorithm.config import PathwiseConfig, PPOConfig
from tailguard.algorithm.learner import Learner
from tailguard.algorithm.member_learners import MemberLearners
from tailguard.models.policy import NetworkConfig
from tailguard.optim.config import UPGDConfig, VGSConfig
from tailguard.robust.config import RobustConfig

BARS = tg.make_market(1_500, seed=0).bars
MARKET = tg.TradingEnv(BARS, num_envs=8, episode_length=32, stagger=8, features=("return_24",))
ALL_ON: dict[str, Any] = {
    "optimizer": "upgdw",
    "vgs": VGSConfig(enabled=True, warmup_steps=2),
    "upgd": UPGDConfig(),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo, all on": (
        "ppo",
        ALL_ON | {"value_clip": "mean_and_variance", "target_kl": 3e-6, "twin_critics": True, "risk": {"alpha": 0.5}},
    ),
    "ppo, categorical": ("ppo", {"critic": "categorical", "microbatches": 2, "memory": "shared"}),
    "ppo without memory": ("ppo", {"memory": "none", "optimizer": "adamw", "weight_decay": 0.01}),
    "pathwise, all on": (
        "pathwise",
        ALL_ON | {"n_steps": 8, "stochastic": True, "dropout": 0.2, "risk": {"alpha": 0.5}},
    ),
    "pathwise, critics": ("pathwise", {"n_steps": 8, "critic_epochs": 1, "twin_critics": True}),
    "pathwise, drawdowns": ("pathwise", {"risk": {"alpha": 0.5, "measure": "drawdown"}}),
}
ITERATIONS = {"ppo, all on": 20, "pathwise, all on": 20}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"learning_rate": 3e-4, "clip_range": 0.2, "entropy_coef": 0.001, "limit": -0.01},
    {"learning_rate": "linear:1e-3:0", "clip_range": 0.05, "entropy_coef": 0.01, "limit": -0.03},
    {"learning_rate": 1e-4, "clip_range": 0.3, "entropy_coef": 0.0001, "limit": -0.05},
)
"""What members differ in, beside their seeds."""


def market() -> tg.TradingEnv:
    """An environment of its own on the same market."""
    env = copy.copy(MARKET)
    env.generator = torch.Generator().manual_seed(0)
    return env


def build(kind: str, seed: int, own: dict[str, Any], **options: Any) -> Learner:
    own, risk = dict(own), options.pop("risk", None)
    limit = own.pop("limit")
    budget = None if risk is None else tg.RiskConfig(limit=limit, **risk)
    network = NetworkConfig(hidden=(8,), lstm_size=8, quantiles=8)
    if kind == "ppo":
        config = PPOConfig(n_steps=8, minibatch_size=32, epochs=2, network=network).with_options(options | own)
        return tg.DistributionalPPO(market(), config, seed=seed, risk=budget)
    del own["clip_range"]
    if not options.get("stochastic"):
        del own["entropy_coef"]
    config = PathwiseConfig(network=network).with_options(options | own)
    return tg.PathwiseLearner(market(), config, seed=seed, risk=budget)


def all_learners(name: str) -> list[Learner]:
    kind, options = CASES[name]
    return [build(kind, seed, own, **copy.deepcopy(options)) for seed, own in enumerate(SETTINGS)]


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.policy.parameters()])


@pytest.mark.parametrize("name", CASES)
def test_each_member_equals_its_lone_run(name: str) -> None:
    alone, members = all_learners(name), MemberLearners(all_learners(name))
    begun = [weights(learner) for learner in alone]
    for iteration in range(ITERATIONS.get(name, 4)):
        for learner in (*alone, *members.learners):
            learner.state.progress = iteration / 20
        reports = members.iterate()
        expected = [learner.iterate() for learner in alone]
    for learner, member, start in zip(alone, members.learners, begun, strict=True):
        moved = float((weights(learner) - start).abs().max())
        assert moved > 1e-3
        assert float((weights(learner) - weights(member)).abs().max()) < 1e-5
        assert learner.num_timesteps == member.num_timesteps
    for mine, lone in zip(reports, expected, strict=True):
        assert mine.keys() == lone.keys()
        for key, value in lone.items():
            assert mine[key] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo, all on", "ppo, categorical"])
def test_compiled_members_equal_their_lone_runs(name: str) -> None:
    """Traced with the member axis, `no_grad` and all, and compiled."""
    alone, members = all_learners(name), MemberLearners(all_learners(name), compiles=True)
    for _ in range(3):
        members.iterate()
        for learner in alone:
            learner.iterate()
    for learner, member in zip(alone, members.learners, strict=True):
        assert float((weights(learner) - weights(member)).abs().max()) < 2e-5


def test_members_stop_their_epochs_on_their_own() -> None:
    members = MemberLearners(all_learners("ppo, all on"))
    steps = {report["train/n_updates"] for report in members.iterate()}
    assert len(steps) > 1  # with one flag for all, every member would take as many steps as the others


def test_an_exploiter_goes_on_as_its_source_would_with_its_own_rate() -> None:
    alone, members = all_learners("ppo, all on"), MemberLearners(all_learners("ppo, all on"))
    for _ in range(2):
        alone[0].iterate()
        members.iterate()
    held = weights(members.learners[2])
    members.exploit({2: 0})
    taker = members.learners[2]
    assert torch.equal(weights(taker), weights(members.learners[0]))
    taker.config = members.learners[0].config
    assert taker.risk is not None
    assert float(taker.risk.constraint.limit) == -0.01  # the limit is a part of the state until it is set
    for _ in range(2):
        alone[0].iterate()
        reports = members.iterate()
    # Both go on like the source alone, from the same streams, and share no memory.
    assert torch.allclose(weights(taker), weights(alone[0]), atol=1e-5)
    assert torch.equal(weights(taker), weights(members.learners[0]))
    assert not torch.equal(weights(taker), held)
    assert float(reports[2]["train/learning_rate"]) == pytest.approx(3e-4)
    with torch.no_grad():
        next(taker.policy.parameters()).add_(1.0)
    assert not torch.equal(weights(taker), weights(members.learners[0]))


def test_a_new_learning_rate_is_the_size_of_the_next_step() -> None:
    """Adam's first step is the rate itself, for every weight with a gradient well above ε."""
    moved = []
    for rate in (1e-3, 4e-3):
        learners = [build("ppo", 0, SETTINGS[0] | {"learning_rate": 1e-3}, epochs=1, minibatch_size=64) for _ in "ab"]
        members = MemberLearners(learners)
        members.learners[1].config = members.learners[1].config.with_options({"learning_rate": rate})
        before = weights(members.learners[1])
        members.iterate()
        moved.append(float((weights(members.learners[1]) - before).abs().median()))
    assert moved[1] / moved[0] == pytest.approx(4.0, rel=1e-3)


def test_a_member_whose_returns_do_not_vary_yet_waits_alone() -> None:
    alone, members = all_learners("ppo without memory")[:2], MemberLearners(all_learners("ppo without memory")[:2])
    for learner in (alone[0], members.learners[0]):
        learner.iterate() if learner is alone[0] else None
    members.iterate()
    alone[1].iterate()
    for learner in (alone[1], members.learners[1]):  # as if all rewards had been 0 so far
        learner.return_moments.clear()
        learner.return_moments.started = False
        learner.targets.note_started(False)
    members.iterate()
    for learner, member in zip(alone, members.learners, strict=True):
        learner.iterate()
        assert float(member.return_moments.std) == pytest.approx(float(learner.return_moments.std), rel=1e-6)
        assert torch.allclose(weights(learner), weights(member), atol=1e-6)


def test_a_member_can_be_saved_and_evaluated_like_any_learner() -> None:
    members, alone = MemberLearners(all_learners("ppo, all on")), all_learners("ppo, all on")[1]
    for _ in range(2):
        members.iterate()
        alone.iterate()
    member = members.learners[1]
    obs = MARKET.reset(seed=5).numpy()
    mine, _ = member.predict(obs, deterministic=True)
    assert mine == pytest.approx(alone.predict(obs, deterministic=True)[0], abs=1e-5)
    for name, part in alone.parts().items():
        assert part.state_dict().keys() == member.parts()[name].state_dict().keys()


@pytest.mark.parametrize("robust", [RobustConfig(coef=0.1), RobustConfig(adversary="alternate")])
def test_members_that_train_against_attacks_are_refused(robust: RobustConfig) -> None:
    network = NetworkConfig(hidden=(8,), lstm_size=8, quantiles=8)
    with pytest.raises(tg.ConfigError, match="training against attacks is not batched; use the local or ray executor"):
        MemberLearners([tg.DistributionalPPO(market(), PPOConfig(network=network), robust=robust) for _ in range(2)])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"gamma": 0.9}, "gamma is 0.9 for member 1 and 0.99 for member 0.*local or ray"),
        ({"network": NetworkConfig(hidden=(4,))}, "network.hidden"),
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
    ],
)
def test_settings_that_members_cannot_differ_in_are_refused(own: dict[str, Any], message: str) -> None:
    network = {} if "network" in own else {"network": NetworkConfig(hidden=(8,), lstm_size=8, quantiles=8)}
    with pytest.raises(tg.ConfigError, match=message):
        MemberLearners(
            [
                tg.DistributionalPPO(market(), PPOConfig(**options))
                for options in ({"network": NetworkConfig(hidden=(8,), lstm_size=8, quantiles=8)}, own | network)
            ]
        )
