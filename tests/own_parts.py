"""A plugin with one part of every kind, as a user would write it; `test_additions.py` runs it from another folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import polars as pl
import torch
import typer
from torch import Tensor, nn
from torch.optim import Optimizer

import tailguard as tg
from tailguard.algorithm.iteration_metrics import Snapshot, metric
from tailguard.algorithm.loss_terms import TermLoss, register_loss_term
from tailguard.algorithm.update import Batch
from tailguard.audit import Measurement, at_least, register_check
from tailguard.audit.subject import Subject
from tailguard.cli import app
from tailguard.evaluate.baselines import BuyAndHold, baseline
from tailguard.market.costs import Cost, Fill, register_cost
from tailguard.models.critics import DistributionalCritic, LossSettings, midpoints, register_critic
from tailguard.models.policy import ActorCritic, NetworkConfig, PolicyOutput
from tailguard.monitor.health import Rule, register_alarm
from tailguard.optim import OptimizerKind, OptimizerSettings, Parameters, register_optimizer
from tailguard.returns import GRADIENT, MomentsChange, popart_rescale


@tg.feature("momentum_12", warmup=12)
def momentum_12() -> pl.Expr:
    return pl.col("close").log().diff(12)


def stamp_duty(rate: Tensor, fill: Fill[Tensor, Tensor]) -> Tensor:
    return rate * fill.order.clamp(min=0)


register_cost(Cost("stamp_duty", stamp_duty, charged="order", rate=0.001))


@register_critic("gaussian")
class GaussianCritic(DistributionalCritic):
    """Mean and log standard deviation of the return, by maximum likelihood. Output [..., 2]."""

    @classmethod
    def from_config(cls, feature_size: int, network: NetworkConfig) -> GaussianCritic:  # noqa: ARG003
        return cls(feature_size, 2)

    def mean(self, output: Tensor) -> Tensor:
        return output[..., 0]

    def encode(self, samples: Tensor) -> Tensor:
        """Mean and mean square, all that the likelihood needs of the samples."""
        return torch.stack((samples.mean(-1), samples.square().mean(-1)), -1)

    def loss(self, output: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:  # noqa: ARG002
        mean, log_sd = output.unbind(-1)
        first, second = targets.unbind(-1)
        return 0.5 * (second - 2 * mean * first + mean.square()) * (-2 * log_sd).exp() + log_sd

    def quantiles(self, output: Tensor, count: int) -> Tensor:
        levels = midpoints(count, dtype=output.dtype, device=output.device)
        normal = math.sqrt(2) * torch.erfinv(2 * levels - 1)
        return output[..., :1] + output[..., 1:].exp() * normal

    def return_layers(self) -> list[nn.Linear]:
        return []  # only its first output is in return units

    @torch.no_grad()
    def rescale(self, change: MomentsChange) -> None:
        weight, bias = self.layer.weight, self.layer.bias
        popart_rescale(weight[:1], bias[:1], change.old_mean, change.old_std, change.new_mean, change.new_std)
        bias[1:].add_((change.old_std / change.new_std).log())

    def metrics(self, outputs: Any, mean: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {"critic/log_sd": mean(torch.stack([output[..., 1] for output in outputs]).mean(0))}


class SignDescent(Optimizer):
    """Moves every weight by the learning rate, against the sign of its averaged gradient."""

    def __init__(self, params: Parameters, lr: Tensor, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 - group["decay"])
                    parameter.sub_(group["lr"] * average.sign())


def make_sign_descent(parameters: Parameters, given: OptimizerSettings) -> Optimizer:
    return SignDescent(parameters, given.learning_rate)


def largest_average(optimizer: Optimizer) -> dict[str, Tensor]:
    averages = [state["average"].abs().max() for state in optimizer.state.values()]
    return {"sign/largest_average": torch.stack(averages).max()} if averages else {}


register_optimizer(
    OptimizerKind(
        "sign", SignDescent, make_sign_descent, moments={"average": GRADIENT}, scale_free=True, metrics=largest_average
    )
)


@register_loss_term("action_size", learners=("ppo", "pathwise"))
def action_size(policy: ActorCritic, output: PolicyOutput, batch: Batch) -> TermLoss:  # noqa: ARG001
    size = policy.action_head.mode(output.dist_params).square().mean(-1)
    return TermLoss(size, {"action/size": size})


@register_loss_term("value_size")
def value_size(policy: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor:  # noqa: ARG001
    return output.critics[0].value.square().squeeze(-1)


@metric("own/largest_weight")
def largest_weight(snapshot: Snapshot) -> Tensor:
    weights = snapshot.rollout.outcome.get("weights")
    return torch.zeros(()) if weights is None else snapshot.highest(weights.abs().sum(-1))


def trades_much(metrics: Any, past: Any) -> str | None:
    seen = len(past.get("data/turnover", ()))
    turnover = metrics.get("data/turnover", 0.0)
    return f"turnover is {turnover:.3f} after {seen} iterations." if turnover > 0 else None


register_alarm(Rule("trades_much", trades_much, "an untrained agent.", patience=2, remembers=("data/turnover",)))


@baseline("half invested")
def half_invested(exposure: float, allow_short: bool) -> BuyAndHold:  # noqa: ARG001
    return BuyAndHold(0.5 * exposure)


@register_check(
    "own.duty", "Does the agent pay its duty?", why="It buys.", remedy="Register the cost before training.", of_run=True
)
def duty_is_paid(subject: Subject) -> Measurement:
    paid = tg.backtest(subject.trained.agent, subject.trained.split.test).costs_per_year
    return at_least("stamp duty a year in the test", paid["stamp_duty"], 1e-6)


@app.command("weights")
def count_weights(folder: str) -> None:
    """Print the number of an agent's weights."""
    agent = tg.load_agent(folder)
    typer.echo(f"{sum(weight.numel() for weight in agent.policy.parameters())} weights")
