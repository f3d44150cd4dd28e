"""Checks of connections between the parts of a run: settings, exploit, the evaluation's metric, the saved agent."""

from __future__ import annotations

import hashlib
import io
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tailguard.algorithm.saving import PARTS, capture
from tailguard.audit.registry import Measurement, at_most, none_of, register_check, within, worst
from tailguard.audit.subject import Subject
from tailguard.config import RunConfig, flat_settings, load_config, to_dict
from tailguard.errors import CheckpointError, ConfigError
from tailguard.sealed import flat_tensors, read_sealed

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner
    from tailguard.population.workshop import Workshop

SMALL_RUN = (
    "data.synthetic_bars=2500", "data.synthetic_signal=30", "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d", "env.num_envs=8", "env.episode_length=32", "pathwise.n_steps=16", "pathwise.network.hidden=[8]",
    "pathwise.network.lstm_size=8", "pathwise.critic_epochs=0", "ppo.n_steps=16", "ppo.minibatch_size=128",
    "ppo.epochs=1", "ppo.network.hidden=[8]", "ppo.network.lstm_size=8", "training.total_timesteps=1024",
)  # fmt: skip
"""Settings of runs that train in milliseconds: eight iterations of 128 steps."""


def small_run(subject: Subject, *changes: str) -> RunConfig:
    """The settings of a small run."""
    return load_config(overrides=[*SMALL_RUN, f"training.seed={subject.seed}", *changes])


# --- exploit ---------------------------------------------------------------------------------------------------------

RATE = "pathwise.learning_rate"
OLD_RATE, NEW_RATE = 1e-3, 4e-3


def _exploited(workshop: Workshop, members: Path, rate: float, optimizer: str) -> Learner:
    """Member 1 as it goes on from member 0's state of step 256."""
    from tailguard.population.executor import Job

    job = Job(1, {RATE: rate}, 0, 256, 512, streams=7, optimizer="reset" if optimizer == "reset" else "copy")
    learner = workshop.build(1, job.hyper)
    workshop.restore(learner, job, members)
    return learner


def _step_of(learner: Learner) -> Tensor:
    """What one iteration adds to the policy's weights."""
    names = [name for name, _ in learner.policy.named_parameters() if "critic" not in name]
    before = {name: value.detach().clone() for name, value in learner.policy.named_parameters()}
    learner.iterate()
    after = dict(learner.policy.named_parameters())
    return torch.cat([(after[name] - before[name]).detach().flatten() for name in names])


@register_check(
    "C6",
    "Does an exploiting member of a population get a copy of its parent, and its own learning rate?",
    why="A copy that shares storage trains its parent; a learning rate that stays in the settings and never reaches "
    "the optimiser makes the whole search a search of nothing.",
    remedy="See Workshop.take_over and put_in_force in population/: the optimiser must hold the rate's own tensor.",
)
def exploit_is_in_force(subject: Subject) -> Measurement:
    from tailguard.experiment.build import build
    from tailguard.population.executor import Job
    from tailguard.population.options import PopulationSettings
    from tailguard.population.space import SearchSpace
    from tailguard.population.workshop import Workshop

    config = small_run(subject, f"{RATE}={OLD_RATE}")
    workshop = Workshop.of(build(config), PopulationSettings(), SearchSpace.parse({RATE: {"log": [1e-4, 1e-1]}}))
    with TemporaryDirectory() as name:
        members = Path(name)
        workshop.perform(Job(0, {RATE: OLD_RATE}, 0, 0, 256), members)
        parent = workshop.build(0, {RATE: OLD_RATE})
        workshop.store(members, 0).restore(parent, 256)
        slow, fast = (_exploited(workshop, members, rate, "copy") for rate in (OLD_RATE, NEW_RATE))
        fresh = _exploited(workshop, members, NEW_RATE, "reset")
    theirs = {name: value.clone() for name, value in flat_tensors(capture(parent))}
    ours = dict(flat_tensors(capture(fast)))
    differing = [
        f"{name} differs from the parent's"
        for name, value in theirs.items()
        if "generator" not in name and not torch.equal(ours[name].nan_to_num(), value.nan_to_num())
    ]
    small, large, first = (_step_of(learner) for learner in (slow, fast, fresh))
    changed = [
        f"{name} of the parent changes while the child learns"
        for name, value in flat_tensors(capture(parent))
        if not torch.equal(value.nan_to_num(), theirs[name].nan_to_num())
    ]
    largest = float(first.abs().quantile(0.9)) / NEW_RATE
    ratio = float((large - NEW_RATE / OLD_RATE * small).norm() / large.norm())
    return worst(
        [
            none_of("parts of an exploiter's state that are not its parent's, or are shared with it",
                    differing + changed),
            # Adam's step is proportional to its rate, up to the rounding of the weights.
            at_most("relative gap of its next step to the new learning rate over the old one", ratio, 1e-3),
            # Adam's first step is the rate where the gradient is far above its ε: 0.96 to 0.99 over 12 seeds here, and
            # 0.73 to 0.81 with the parent's moments.
            within("step that a tenth of the weights exceed after a reset, in learning rates", largest, 0.9, 1.0),
        ]
    )  # fmt: skip


# --- settings --------------------------------------------------------------------------------------------------------

BUDGET = ("risk.limit=-0.02", "risk.alpha=0.5", "risk.window=64")
EVERYTHING = (
    *("learner=ppo", "ppo.optimizer=upgdw", "ppo.vgs.enabled=true", "ppo.entropy_coef=0.01", "ppo.target_kl=0.02"),
    *(
        "ppo.kl_penalty=0.1",
        "ppo.network.twin_critics=true",
        "ppo.network.critic=categorical",
        "robust.coef=0.1",
        "robust.adversary=alternate",
    ),
    *("robust.adversary_every=1", "env.randomisation.costs=0.2", "env.shield_shock=0.2"),
)
"""Settings that switch on what is off by default, for PPO."""
ELSEWHERE = ("MarketConfig.preset", "MarketConfig.extra_costs")
"""Settings with no effect here: a preset is replaced by its settings when they are read, and there is no cost of one's
own."""


def misspelt_and_accepted() -> list[str]:
    """Settings that may be misspelt, or whose error does not name them."""
    wrong = []
    for name in (key for key, _ in flat_settings(to_dict(RunConfig()))):
        misspelt = name + name[-1]
        try:
            load_config(overrides=[f"{misspelt}=1"])
        except ConfigError as error:
            if f"Did you mean {name}?" not in str(error):
                wrong.append(f"the error on {misspelt} does not suggest {name}")
        else:
            wrong.append(f"{misspelt} is accepted")
    return wrong


def _kinds(config: object) -> Iterator[type]:
    """The classes of a config and of its sections."""
    yield type(config)
    for item in fields(config):  # type: ignore[arg-type]
        if is_dataclass(value := getattr(config, item.name)):
            yield from _kinds(value)


@contextmanager
def counted_reads(config: RunConfig) -> Iterator[dict[str, int]]:
    """How often each setting is read from now on, as `PPOConfig.gamma`.

    Checks of a value in its own class, copies, comparisons and listings of whole sections do not count.
    """
    reads = {f"{kind.__name__}.{item.name}": 0 for kind in _kinds(config) for item in fields(kind)}

    def watched(kind: type, plain: Any) -> Any:
        names = {item.name for item in fields(kind)}

        def read(self: object, name: str) -> Any:
            if name in names:
                frame = sys._getframe(1)
                code, module = frame.f_code, frame.f_globals.get("__name__")
                # Code that goes through all fields, as for a copy or for config.yaml, does not name them.
                named = name in code.co_names or module not in ("dataclasses", "copy", "tailguard.config")
                if named and code.co_name != "__post_init__" and code.co_filename != "<string>":
                    reads[f"{kind.__name__}.{name}"] += 1
            return plain(self, name)

        return read

    with ExitStack() as undo:
        for kind in set(_kinds(config)):
            plain: Any = kind.__getattribute__
            kind.__getattribute__ = watched(kind, plain)  # type: ignore[method-assign]
            undo.callback(delattr, kind, "__getattribute__")
        yield reads


@register_check(
    "C7",
    "Is every setting read, and is every unknown one refused?",
    why="A setting that nobody reads, or a misspelt one that is taken in silence, is an experiment that was never "
    "made.",
    remedy="Read the setting where its part is built, or remove it; unknown keys are refused by _merge in config.py. "
    "One that acts only beside another must be set in a run of this check, too.",
)
def settings_are_consumed(subject: Subject) -> Measurement:
    from rich.console import Console

    from tailguard.data.synthetic import make_market
    from tailguard.experiment.build import build
    from tailguard.runs.runner import train

    wrong = misspelt_and_accepted()
    quiet = io.StringIO()
    with TemporaryDirectory() as name, redirect_stdout(quiet), redirect_stderr(quiet):
        bars = Path(name) / "bars.parquet"
        make_market(2_500, seed=subject.seed).bars.frame.drop("segment").write_parquet(bars)
        news = Path(name) / "news.csv"
        news.write_text("published,news\n2021-01-01,1.0\n", encoding="utf-8")
        whole = ("training.total_timesteps=256", "training.members=2", f"data.path={bars}", "pathwise.critic_epochs=1")
        later = (f"data.published={news}", "data.published_delay=1d", "data.published_before=0")
        with counted_reads(RunConfig()) as reads:
            train(small_run(subject, *BUDGET, *whole, *later), Path(name) / "whole", Console(file=quiet))
            for changes in (EVERYTHING, ("learner=ppo", *BUDGET, "robust.feed=['drift']")):
                learner = build(small_run(subject, *changes)).learner
                learner.iterate()
                learner.iterate()
    wrong += [f"nobody reads {name}" for name, count in reads.items() if count == 0 and name not in ELSEWHERE]
    return none_of(f"of {len(reads)} settings, those that nobody reads, or that may be misspelt", wrong)


# --- the evaluation's metric -----------------------------------------------------------------------------------------


@register_check(
    "C8",
    "Does the evaluation's metric see the agent that is evaluated, and its costs?",
    why="A metric that is the same for every agent chooses a checkpoint by chance; one without costs chooses the agent "
    "that trades most.",
    remedy="See runs/validation.py and evaluate/backtest.py: the agent's own spec, its market's costs, equity net of "
    "everything.",
    fast=True,
)
def evaluation_sees_agent_and_costs(subject: Subject) -> Measurement:
    from tailguard.envs.trading import TradingEnv
    from tailguard.evaluate.backtest import backtest
    from tailguard.market import MarketConfig
    from tailguard.runs.validation import BestScore, Validation

    free = MarketConfig(fee=0.0, half_spread=0.0, impact=0.0, participation=math.inf, funding_rate=0.0)
    fee = 0.003
    # Buy and hold: one order of the whole equity, sized before its fee, so that the fee is what is missing at the end.
    orders = np.full((len(subject.bars), 1), np.nan)
    orders[0] = 1.0
    costs = [MarketConfig(**{**vars(free), "fee": rate}) for rate in (0.0, fee)]
    held = [backtest(orders, subject.bars, config, progress_bar=False) for config in costs]
    missing = float(held[0].equity[-1] - held[1].equity[-1])
    scores = []
    for config in costs:
        env = TradingEnv(subject.bars, config, num_envs=4, episode_length=48, seed=subject.seed)
        learner = subject.learner(env)
        validation = Validation(learner, subject.bars)
        for shift in (0.0, 2.0):
            with torch.no_grad():  # another policy: the same network, with its mean moved to one side
                learner.policy.action_head.linear.bias.add_(shift)
            found = validation.evaluate(learner)
            scores.append(math.nan if found is None else found.score)
    pairs = zip(scores[:2], scores[2:], strict=True)
    wrong = [f"{plain:.4g} without the fee, {net:.4g} with it" for plain, net in pairs if not plain > net]
    if scores[2] == scores[3]:
        wrong.append(f"two policies have one score, {scores[2]:.6g}")
    best = BestScore()
    for score in (0.1, 0.3, 0.3, -0.2):
        best = best.after(score)
    if (best.score, best.since) != (0.3, 2):
        wrong.append(f"the best of 0.1, 0.3, 0.3, −0.2 is {best.score:g}, {best.since} evaluations ago")
    return worst(
        [
            at_most("|equity that a fee of 0.3 % takes from buy and hold − 0.003|", abs(missing - fee), 1e-9),
            none_of("validation scores that do not see the policy or its costs", wrong),
        ]
    )


# --- the saved agent -------------------------------------------------------------------------------------------------


def digest_of(weights: object) -> str:
    """SHA-256 of all tensors of a state, with their names."""
    digest = hashlib.sha256()
    for name, value in sorted(flat_tensors(weights)):  # type: ignore[arg-type]
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _strangers(subject: Subject) -> list[str]:
    """Agents of the run whose weights are in none of its checkpoints."""
    from tailguard.algorithm.ensemble import Ensemble
    from tailguard.experiment.layout import RunLayout
    from tailguard.runs.checkpoint import CheckpointStore

    run = subject.trained
    agents = run.agent.members if isinstance(run.agent, Ensemble) else (run.agent,)
    known = set()
    for layout in run.layout.training_folders():
        for step in CheckpointStore(layout.path, {}).steps():
            try:
                known.add(digest_of(read_sealed(RunLayout(layout.path).checkpoint_path(step), PARTS)[1]["weights"]))
            except CheckpointError:
                continue
    if not known:
        return []
    return [
        f"agent {number + 1} is in no checkpoint of {run.folder}"
        for number, agent in enumerate(agents)
        if digest_of(agent.policy.state_dict()) not in known
    ]


def _wrong_ensemble(members: list[Learner], obs: Tensor) -> Iterator[str]:
    """How an ensemble's action differs from the mean of its members' times the exposure."""
    from tailguard.algorithm.ensemble import Ensemble

    with torch.no_grad():
        members[1].policy.action_head.linear.bias.add_(0.7)
    actions = [member.predict(obs.numpy(), deterministic=True)[0] for member in members]
    together = Ensemble(members, 0.37)
    wanted = 0.37 * np.mean(actions, axis=0)
    for name, action in (
        ("predict", together.predict(obs.numpy(), deterministic=True)[0]),
        ("inference", together.inference_policy()(obs, True).detach().numpy()),
    ):
        if not np.allclose(action, wanted, atol=1e-6):
            yield f"an ensemble's {name} is not the exposure times the mean of its members"
    if np.allclose(actions[0], actions[1], atol=1e-3):
        yield "the members of the ensemble act alike: nothing was compared"


@register_check(
    "C9",
    "Is the trained agent the one that backtests and inference load?",
    why="A backtest of an untrained copy, or of one without its observation statistics, says nothing about the agent "
    "that will trade.",
    remedy="See algorithm/saving.py; in a run, compare agent/ with checkpoints/ and train again if they differ.",
    fast=True,
    reads_run=True,
)
def saved_agent_is_the_trained_one(subject: Subject) -> Measurement:
    from tailguard.algorithm.saving import load_agent
    from tailguard.envs.trading import TradingEnv
    from tailguard.evaluate.backtest import backtest

    env = TradingEnv(subject.bars, num_envs=6, episode_length=24, stagger=8, seed=subject.seed)
    learner = subject.learner(env)
    untrained = digest_of(learner.policy.state_dict())
    learner.iterate()
    learner.iterate()
    with TemporaryDirectory() as name:
        learner.save(f"{name}/saved")
        loaded: Learner = load_agent(Path(f"{name}/saved"))
    bars = subject.bars
    results = [backtest(agent, bars, progress_bar=False, warn_in_sample=False) for agent in (learner, loaded)]
    wrong = []
    if digest_of(loaded.policy.state_dict()) != digest_of(learner.policy.state_dict()):
        wrong.append("the loaded weights are not those that were saved")
    if digest_of(loaded.policy.state_dict()) == untrained:
        wrong.append("the loaded weights are those from before the training")
    if not np.array_equal(results[0].targets, results[1].targets):
        wrong.append("the loaded agent trades otherwise in a backtest")
    # The backtest asks the faster policy of inference; `predict` must say the same.
    obs = env.reset(seed=subject.seed)[:1]
    step = loaded.inference_policy()(obs, True)
    if not torch.allclose(step, torch.as_tensor(learner.predict(obs.numpy(), deterministic=True)[0]), atol=1e-6):
        wrong.append("inference acts otherwise than predict")
    wrong += _wrong_ensemble([learner, loaded], obs)
    if subject.run is not None:
        wrong += _strangers(subject)
    return none_of("differences between the agent that was trained and the one that is loaded", wrong)
