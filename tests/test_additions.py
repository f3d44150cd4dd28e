"""One part of every kind, added from outside the package: trained, logged, stressed, reported, saved and loaded."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

import tailguard as tg
from tailguard.algorithm.config import PathwiseConfig, PPOConfig
from tailguard.algorithm.loss_terms import LOSS_TERMS, check_names, register_loss_term
from tailguard.algorithm.scale import move_return_scale
from tailguard.algorithm.update import make_batch, minibatch_loss
from tailguard.cli import main
from tailguard.config import load_config
from tailguard.envs.protocol import Box, Step
from tailguard.errors import ConfigError
from tailguard.models.critics import (
    CRITICS,
    DistributionalCritic,
    LossSettings,
    QuantileCritic,
    ValueClip,
    register_critic,
)
from tailguard.models.policy import NetworkConfig
from tailguard.monitor.health import OWN_RULES, Rule, register_alarm
from tailguard.optim import OPTIMIZERS, OptimizerKind, register_optimizer
from tailguard.returns import GRADIENT, MomentsChange, RunningMoments

PARTS = Path(__file__).with_name("own_parts.py")
RATE, DUTY, COEFFICIENT = 0.002, 0.002, 0.5
LEARNER = {
    "n_steps": 16,
    "optimizer": "sign",
    "learning_rate": RATE,
    "loss_terms": {"action_size": COEFFICIENT},
    "network": {"hidden": [4], "lstm_size": 4, "critic": "gaussian", "quantiles": 8},
}
SETTINGS = {
    "plugins": ["./own_parts.py"],
    "data": {"synthetic_bars": 1200, "embargo": "1d", "features": ["momentum_12", "return_24"]},
    "market": {"extra_costs": {"stamp_duty": DUTY}},
    "env": {"num_envs": 8, "episode_length": 16},
    "training": {"total_timesteps": 512, "threads": 1, "select": "last"},
    "ppo": LEARNER | {"epochs": 1},
    "pathwise": LEARNER | {"critic_epochs": 1, "critic_learning_rate": RATE},
}


@pytest.fixture(scope="module")
def home(own_tables: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    """A folder with the plugin, which this process has loaded as the command line does."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copy(PARTS, folder)
    load_config(overrides=[f"plugins=[{folder / PARTS.name}]"])
    return folder


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which knows nothing of the plugin."""
    command = [sys.executable, "-c", "from tailguard.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def train(home: Path, learner: str) -> Path:
    """A run with every part, in the folder `home/runs/LEARNER`."""
    other = {"ppo": "pathwise", "pathwise": "ppo"}[learner]
    settings = {name: value for name, value in SETTINGS.items() if name != other} | {"learner": learner}
    (home / f"{learner}.yaml").write_text(json.dumps(settings))
    command(home, "train", f"{learner}.yaml", "--name", learner)
    return home / "runs" / learner


def command(home: Path, *arguments: str) -> None:
    """The command in this process, which has loaded the plugin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(sys, "argv", ["tailguard", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0


@pytest.fixture(scope="module")
def ppo_run(home: Path) -> Path:
    return train(home, "ppo")


@pytest.fixture(scope="module")
def pathwise_run(home: Path) -> Path:
    return train(home, "pathwise")


@pytest.fixture(params=["ppo", "pathwise"])
def trained(request: pytest.FixtureRequest) -> Path:
    run: Path = request.getfixturevalue(f"{request.param}_run")
    return run


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# --- everywhere ------------------------------------------------------------------------------------------------------


def test_every_part_is_in_the_metrics_of_a_run(trained: Path) -> None:
    lines = metrics_of(trained)
    assert len(lines) == 4
    for line in lines:
        assert line["data/stamp_duty"] > 0
        assert line["train/action_size_loss"] == pytest.approx(COEFFICIENT * line["action/size"], rel=1e-5)
        assert 0 < line["own/largest_weight"] < 1.1  # a full position that gained
        assert line["sign/largest_average"] > 0
        assert math.isfinite(line["critic/log_sd"])
        # The quantiles of a normal distribution lie evenly about its median.
        low, middle, high = (line[f"critic/return_p{level:02d}"] for level in (5, 50, 95))
        assert low < middle < high
    assert [line["warn/trades_much"] for line in lines] == [0.0, 1.0, 2.0, 3.0]


def test_the_agent_is_saved_and_loaded_with_its_parts(trained: Path) -> None:
    agent = tg.load_agent(trained / "agent")
    (critic,) = agent.policy.each_critic()
    assert type(critic.distribution) is CRITICS["gaussian"]
    assert type(agent.optimizer) is OPTIMIZERS["sign"].type
    assert agent.num_timesteps == 512
    assert [term.name for term in agent.weighted_terms] == ["action_size"]
    moments = [state["average"] for state in agent.optimizer.state.values()]
    assert len(moments) == len(list(agent.policy.parameters()))
    # Without noise the policy's standard deviation has no gradient.
    assert sum(bool(average.any()) for average in moments) == len(moments) - (trained.name == "pathwise")
    assert agent.spec.scaler.names == ("momentum_12", "return_24")


def test_backtests_stress_tests_and_the_report_show_the_parts(home: Path, ppo_run: Path) -> None:
    """Buy & hold buys once: its order pays the duty once, and twice as much when costs double."""
    found = {}
    for factor in (1, 2):
        command(home, "backtest", "runs/ppo", "--json", f"{factor}.json", "--costs", str(factor))
        found[factor] = json.loads((home / f"{factor}.json").read_text())["results"]
    years = 172 / 8766
    for factor, results in found.items():
        duty = results["buy & hold"]["cost_stamp_duty_per_year"] * years
        assert duty == pytest.approx(factor * DUTY, rel=0.02)
        half = results["half invested"]["cost_stamp_duty_per_year"] * years
        assert half == pytest.approx(0.5 * duty, rel=0.05)
        assert results["agent"]["cost_stamp_duty_per_year"] > 0
    command(home, "report", "runs/ppo")
    page = (ppo_run / "report.html").read_text()
    for name in ("half invested", "stamp_duty", "trades_much", "an untrained agent.", "action_size", "gaussian"):
        assert name in page, name


def test_the_audit_of_a_run_asks_the_plugins_check(home: Path, ppo_run: Path) -> None:
    command(home, "audit", "runs/ppo", "--only", "own.duty", "--trust-plugins")
    (check,) = json.loads((ppo_run / "audit.json").read_text())["checks"]
    assert (check["verdict"], check["measured"]) == ("ok", "stamp duty a year in the test")
    assert check["number"] > 0
    assert check["place"].startswith(f"{home / PARTS.name}:")


def test_a_run_resumes_with_its_parts(home: Path, ppo_run: Path) -> None:
    copy = home / "runs" / "longer"
    shutil.copytree(ppo_run, copy, symlinks=True)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("total_timesteps: 512", "total_timesteps: 768"))
    resumed = call(home, "train", "--resume", "runs/longer", "--trust-plugins", "--yes")
    assert resumed.returncode == 0, resumed.stderr
    assert [line["warn/trades_much"] for line in metrics_of(copy)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_an_agent_whose_parts_are_not_registered_is_refused_with_the_way_out(ppo_run: Path) -> None:
    code = f"import tailguard as tg; tg.load_agent({str(ppo_run / 'agent')!r})"
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "network.critic: 'gaussian' is not one of" in refused.stderr
    assert "Register your own with tailguard.models.critics.register_critic" in refused.stderr


def test_a_command_of_a_plugin_is_one_of_tailguards(home: Path, ppo_run: Path) -> None:
    done = call(home, "--plugin", "./own_parts.py", "weights", "runs/ppo/agent")
    count = sum(weight.numel() for weight in tg.load_agent(ppo_run / "agent").policy.parameters())
    assert (done.returncode, done.stdout) == (0, f"{count} weights\n")
    unknown = call(home, "weights", "runs/ppo/agent")
    assert unknown.returncode == 2
    assert "No such command 'weights'" in unknown.stderr


# --- a cost ----------------------------------------------------------------------------------------------------------


def make_env(bars: tg.Bars) -> tg.TradingEnv:
    market = tg.MarketConfig(extra_costs={"stamp_duty": DUTY})
    return tg.TradingEnv(bars, features=("momentum_12", "return_24"), num_envs=6, episode_length=16, config=market)


SMALL: dict[str, Any] = {"n_steps": 16, "hidden": (5,), "lstm_size": 4, "quantiles": 8, "minibatch_size": 4096}


@pytest.mark.usefixtures("home")
def test_the_duty_of_a_purchase_is_its_rate_and_that_of_a_sale_nothing(bars: tg.Bars) -> None:
    agent = tg.DistributionalPPO(make_env(bars), epochs=1, **SMALL)
    agent.iterate()
    outcome = agent.snapshot.rollout.outcome
    turnover, duty = outcome["turnover"], outcome["stamp_duty"]
    bought = duty > 0
    torch.testing.assert_close(duty[bought], DUTY * turnover[bought])
    assert 0.2 < float(bought.float().mean()) < 0.8
    assert float(turnover[~bought].max()) > 0.1


# --- an alarm --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("home")
def test_an_own_alarm_is_raised_once_after_its_patience_and_knows_the_past(bars: tg.Bars) -> None:
    agent = tg.DistributionalPPO(make_env(bars), epochs=1, **SMALL)
    counts = [agent.iterate()["warn/trades_much"] for _ in range(3)]
    assert counts == [0.0, 1.0, 2.0]
    (alarm,) = [alarm for alarm in agent.alarms if alarm.name == "trades_much"]
    assert alarm.what.endswith("after 1 iterations.")
    assert str(alarm).endswith("Usually: an untrained agent.")  # the documentation knows nothing of it


# --- a critic --------------------------------------------------------------------------------------------------------


class WhiteNoise:
    """Episodes of one step with rewards from N(2, 3²): the return is the reward."""

    num_envs, observation_size, device, episode_length = 512, 1, torch.device("cpu"), 1
    action_space = Box(torch.tensor([-1.0]), torch.tensor([1.0]))

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)

    def reset(self, seed: int | None = None) -> Tensor:  # noqa: ARG002
        return torch.zeros(self.num_envs, 1)

    def step(self, action: Tensor) -> Step:  # noqa: ARG002
        reward, obs = 2.0 + 3.0 * torch.randn(self.num_envs, generator=self.draw), torch.zeros(self.num_envs, 1)
        ended = torch.ones(self.num_envs, dtype=torch.bool)
        return Step(obs, reward, ended, torch.zeros_like(ended), obs, torch.ones_like(ended))

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("twin", [False, True])
def test_an_own_critic_learns_the_distribution_of_the_return(twin: bool) -> None:
    """Rewards from N(2, 3²): its quantiles become those of SciPy's."""
    learner = tg.DistributionalPPO(
        WhiteNoise(), critic="gaussian", twin_critics=twin, memory="none", n_steps=4, learning_rate=0.02, quantiles=16,
        minibatch_size=512, epochs=2, hidden=(4,),
    )  # fmt: skip
    for _ in range(25):
        learner.iterate()
    quantiles = learner.snapshot.quantiles.mean((0, 1))
    expected = torch.tensor(norm.ppf((torch.arange(16) + 0.5) / 16, 2.0, 3.0)).float()
    torch.testing.assert_close(quantiles, expected, atol=0.25, rtol=0.0)


@pytest.mark.usefixtures("home")
def test_an_own_critic_keeps_its_raw_predictions_when_the_scale_moves() -> None:
    critic = CRITICS["gaussian"].from_config(6, NetworkConfig()).double()
    torch.nn.init.normal_(critic.layer.weight)
    features = torch.randn(20, 6, dtype=torch.float64)
    old, new = RunningMoments(), RunningMoments()
    old.update(torch.tensor([1.0, 3.0]))
    new.update(torch.tensor([-4.0, 8.0]))
    nothing = torch.zeros((), dtype=torch.float64)
    before = old.denormalise(critic.quantiles(critic(features), 8))
    wrong = new.denormalise(critic.quantiles(critic(features), 8))
    critic.rescale(MomentsChange(old.mean, old.std, new.mean, new.std, nothing, nothing))
    torch.testing.assert_close(new.denormalise(critic.quantiles(critic(features), 8)), before, rtol=1e-9, atol=0)
    assert float((wrong - before).detach().abs().mean()) > 1.0


@pytest.mark.usefixtures("home")
def test_the_loss_of_an_own_critic_is_the_likelihood_it_says() -> None:
    critic = CRITICS["gaussian"].from_config(2, NetworkConfig())
    output, samples = torch.tensor([[0.3, -0.2], [1.0, 0.5]]), torch.randn(2, 7)
    found = critic.clipped_loss(output, critic.encode(samples), None, LossSettings()).loss
    law = torch.distributions.Normal(output[:, :1], output[:, 1:].exp())
    expected = -law.log_prob(samples).mean(-1) - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ConfigError, match="value clip mean_only: a GaussianCritic has none"):
        critic.clipped_loss(output, critic.encode(samples), output, LossSettings(ValueClip("mean_only")))


@pytest.mark.usefixtures("home")
def test_settings_that_an_own_critic_has_no_use_for_are_refused() -> None:
    network = NetworkConfig(critic="gaussian")
    with pytest.raises(ConfigError, match=r"ppo\.value_clip: a gaussian critic has no mean_only; choose off"):
        PPOConfig(network=network, value_clip="mean_only")
    with pytest.raises(ConfigError, match=r"ppo\.huber_kappa: 0\.1 is for a quantile critic"):
        PPOConfig(network=network, huber_kappa=0.1)
    assert PPOConfig(network=network, baseline="distribution").network.critic == "gaussian"
    with pytest.raises(ConfigError, match=r"network\.critic: 'gausian' is not one of .*Did you mean 'gaussian'\?"):
        NetworkConfig(critic="gausian")


# --- an optimiser ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("learner", ["ppo", "pathwise"])
def test_a_step_of_an_own_optimiser_is_the_learning_rate_for_every_weight(bars: tg.Bars, learner: str) -> None:
    kind = {"ppo": tg.DistributionalPPO, "pathwise": tg.PathwiseLearner}[learner]
    options: dict[str, Any] = {"epochs": 1} if learner == "ppo" else {"critic_epochs": 0}
    agent = kind(make_env(bars), optimizer="sign", learning_rate=RATE, **SMALL, **options)
    trunk = agent.policy.each_trunk()[0]
    before = [weight.detach().clone() for weight in trunk.parameters()]
    assert agent.iterate()["train/n_updates"] == 1
    moved = torch.cat(
        [(new.detach() - old).abs().flatten() for old, new in zip(before, trunk.parameters(), strict=True)]
    )
    reached = moved > 0
    assert float(reached.float().mean()) > 0.9
    torch.testing.assert_close(moved[reached], torch.full_like(moved[reached], RATE), rtol=1e-3, atol=1e-7)


@pytest.mark.usefixtures("home")
def test_the_moments_of_an_own_optimiser_follow_the_scale_by_their_declared_power(bars: tg.Bars) -> None:
    """The squared error of the value is of degree 2, so gradients go by σ/σ'; pinball of degree 1, and they stay."""
    agent = tg.DistributionalPPO(make_env(bars), optimizer="sign", epochs=1, **SMALL)
    agent.iterate()
    (critic,) = agent.policy.each_critic()
    value, distribution = (agent.optimizer.state[head.layer.weight]["average"] for head in critic.heads)
    before = value.clone(), distribution.clone()
    change = agent.return_moments.update(torch.tensor([-5.0, 5.0]).repeat(200))
    ratio = float(change.old_std / change.new_std)
    assert ratio < 0.5
    move_return_scale(agent.policy, agent.optimizer, change)
    torch.testing.assert_close(value, ratio * before[0])
    assert torch.equal(distribution, before[1])
    declared = OPTIMIZERS["sign"]
    assert declared.moments == {"average": GRADIENT}
    register_optimizer(replace(declared, moments={}), replace=True)
    with pytest.raises(ConfigError, match="optimiser state average: its scaling with the return is unknown"):
        move_return_scale(agent.policy, agent.optimizer, change)
    register_optimizer(declared, replace=True)


@pytest.mark.usefixtures("home")
def test_settings_that_an_own_optimiser_does_not_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ppo\.weight_decay: sign has none"):
        PPOConfig(optimizer="sign", weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"ppo\.optimizer: 'sing' is not one of .*Did you mean 'sign'\?"):
        PPOConfig(optimizer="sing")
    with pytest.raises(ConfigError, match="'sign' is registered already"):
        register_optimizer(OPTIMIZERS["sign"])
    with pytest.raises(ConfigError, match="Adam is registered as 'adam' already; derive a class"):
        register_optimizer(OptimizerKind("mine", torch.optim.Adam, OPTIMIZERS["adam"].make))


# --- a term of the loss ----------------------------------------------------------------------------------------------


def gradients(learner: Any, total: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(total, list(learner.policy.parameters()), allow_unused=True)
    return [
        torch.zeros_like(weight) if one is None else one
        for one, weight in zip(found, learner.policy.parameters(), strict=True)
    ]


@pytest.mark.usefixtures("home")
def test_a_term_adds_its_coefficient_times_its_gradient_and_no_more(bars: tg.Bars) -> None:
    agent = tg.DistributionalPPO(make_env(bars), epochs=1, loss_terms={"action_size": COEFFICIENT}, **SMALL)
    agent.iterate()
    rollout, estimates = agent.snapshot.rollout, agent.snapshot.estimates
    batch = make_batch(agent.policy, rollout, estimates, estimates.advantages, agent.return_moments)
    hyper = agent.set_hyper()
    whole = minibatch_loss(agent.policy, batch, hyper, agent.config, agent.terms)
    plain = minibatch_loss(agent.policy, batch, hyper, agent.config)
    output = agent.policy(batch.obs, batch.state, batch.episode_start)
    size = agent.policy.action_head.mode(output.dist_params).square().mean(-1)[rollout.valid].mean()
    torch.testing.assert_close(whole.total - plain.total, COEFFICIENT * size, atol=1e-6, rtol=1e-4)
    with_term, without, alone = (gradients(agent, total) for total in (whole.total, plain.total, COEFFICIENT * size))
    for name, one, other, expected in zip(
        dict(agent.policy.named_parameters()), with_term, without, alone, strict=True
    ):
        torch.testing.assert_close(one - other, expected, atol=1e-6, rtol=1e-3, msg=name)
        assert bool(expected.any()) == name.startswith(("trunks.0", "action_head.linear")), name


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("learner", ["ppo", "pathwise"])
def test_a_heavy_term_makes_actions_small(bars: tg.Bars, learner: str) -> None:
    kind = {"ppo": tg.DistributionalPPO, "pathwise": tg.PathwiseLearner}[learner]
    sizes = {}
    for coefficient in (0.0, 100.0):
        agent = kind(make_env(bars), loss_terms={"action_size": coefficient}, learning_rate=0.02, **SMALL)
        assert len(agent.weighted_terms) == (coefficient > 0)  # off means not there
        for weight in agent.policy.action_head.parameters():
            torch.nn.init.constant_(weight, 0.3)
        for _ in range(8):
            metrics = agent.iterate()
        assert ("train/action_size_loss" in metrics) == (coefficient > 0)
        mode = agent.policy.action_head.mode(agent.snapshot.rollout.dist_params)
        sizes[coefficient] = float(mode.square().mean())
    assert sizes[100.0] < 0.1 * sizes[0.0]


@pytest.mark.usefixtures("home")
def test_a_coefficient_is_a_schedule(bars: tg.Bars) -> None:
    agent = tg.DistributionalPPO(make_env(bars), epochs=1, loss_terms={"action_size": "linear:1:0"}, **SMALL)
    agent.learn(4 * 16 * 6)
    metrics = agent.metrics  # of the last of four iterations, which begins at three quarters
    assert metrics["train/action_size_loss"] == pytest.approx(0.25 * metrics["action/size"], rel=1e-4)


@pytest.mark.usefixtures("home")
def test_a_term_is_refused_where_it_does_not_apply() -> None:
    with pytest.raises(ConfigError, match=r"pathwise\.loss_terms: value_size is a term for ppo, not for pathwise"):
        PathwiseConfig(loss_terms={"value_size": 0.1})
    with pytest.raises(ConfigError, match=r"ppo\.loss_terms: 'acton_size' is not one of .*Did you mean 'action_size'"):
        PPOConfig(loss_terms={"acton_size": 0.1})
    with pytest.raises(ConfigError, match=r"ppo\.loss_terms\.action_size: -1 is out of range"):
        PPOConfig(loss_terms={"action_size": -1.0})
    with pytest.raises(ConfigError, match=r"ppo\.loss_terms: \['action_size'\] is not a table"):
        PPOConfig(loss_terms=["action_size"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ppo\.loss_terms: action_size would have no effect, because the learner is"):
        load_config(overrides=["learner=pathwise", "ppo.loss_terms.action_size=0.1"])
    assert load_config(overrides=["learner=ppo", "ppo.loss_terms.action_size=0.1"]).ppo.loss_terms == {
        "action_size": 0.1
    }
    with pytest.raises(ConfigError, match="loss term 'value': use lower case"):
        register_loss_term("value")
    with pytest.raises(ConfigError, match="learners \\('dqn',\\); choose from ppo, pathwise"):
        register_loss_term("mine", learners=["dqn"])
    term = LOSS_TERMS["action_size"].make()
    with pytest.raises(ConfigError, match="another term has this name"):
        check_names([term, term])


# --- the registries --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("home")
def test_wrong_registrations_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="critic 'quantile' is registered already"):
        register_critic("quantile")(QuantileCritic)
    with pytest.raises(ConfigError, match="critic 'mine': QuantileCritic is registered as 'quantile' already; derive"):
        register_critic("mine")(QuantileCritic)
    with pytest.raises(ConfigError, match="critic 'Mine': use lower case"):
        register_critic("Mine")
    with pytest.raises(ConfigError, match="critic 'mine': ScalarCritic predicts no distribution"):
        register_critic("mine")(CRITICS["scalar"])

    class Half(DistributionalCritic):
        def mean(self, output: Tensor) -> Tensor:
            return output.mean(-1)

    with pytest.raises(ConfigError, match="critic 'mine': Half does not define encode, from_config, loss, quantiles"):
        register_critic("mine")(Half)
    with pytest.raises(ConfigError, match="alarm 'never_trades' is registered already"):
        register_alarm(Rule("never_trades", lambda metrics, past: None, ""))  # noqa: ARG005
    with pytest.raises(ConfigError, match="alarm 'trades_much' is registered already"):
        register_alarm(OWN_RULES["trades_much"])
    assert "mine" not in CRITICS
