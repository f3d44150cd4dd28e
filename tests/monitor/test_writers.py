"""What writers leave behind, read back with the tools that users read it with."""

from __future__ import annotations

import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

import tailguard as tg
from tailguard.errors import ConfigError, MissingExtraError, TailguardError
from tailguard.monitor.callbacks import Callback, EveryIteration
from tailguard.monitor.writers import JsonlWriter, MLflowWriter, TensorBoardWriter, WandbWriter

STEPS = 128
"""Of one iteration."""


class Witness(Callback):
    """Keeps what the learner knew at each iteration."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.actions: dict[int, np.ndarray] = {}
        self.weights: dict[int, dict[str, np.ndarray]] = {}

    def on_iteration_end(self) -> None:
        step, agent = self.model.num_timesteps, self.model.policy
        self.metrics[step] = dict(self.model.metrics)
        self.actions[step] = agent.action_head.to_env(self.model.snapshot.rollout.actions).flatten(0, 1).numpy()
        self.weights[step] = {name: weight.detach().clone().numpy() for name, weight in agent.named_parameters()}


@pytest.fixture(scope="module")
def make_agent() -> Callable[..., tg.DistributionalPPO]:
    bars = tg.make_market(1_500, seed=0).bars

    def build(seed: int = 0, **options: Any) -> tg.DistributionalPPO:
        env = tg.TradingEnv(bars, num_envs=8, episode_length=32, seed=seed)
        settings: dict[str, Any] = {"n_steps": 16, "minibatch_size": 64, "hidden": (8,), "lstm_size": 8, "quantiles": 8}
        return tg.DistributionalPPO(env, seed=seed, **settings | options)

    return build


class Evaluate(Callback):
    """Records a score once the iteration is over, every other iteration, always the same one."""

    def on_iteration_logged(self) -> bool:
        if self.model.state.iteration % 2 == 0:
            self.model.logger.record("eval/mean_reward", np.float32(0.25))
        return True


class Run:
    """Six iterations of a real agent into a folder, the evaluation on this or that side of the writers."""

    def __init__(self, agent: tg.DistributionalPPO, folder: Path, evaluation_first: bool) -> None:
        self.witness, self.folder, self.agent = Witness(), folder, agent
        writers = [JsonlWriter(folder / "metrics.jsonl"), TensorBoardWriter(folder / "tensorboard", histogram_every=3)]
        callbacks = [Evaluate(), *writers] if evaluation_first else [*writers, Evaluate()]
        agent.learn(6 * STEPS, callback=[self.witness, *callbacks])

    @property
    def lines(self) -> list[dict[str, float | None]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def events(self) -> EventAccumulator:
        return read_events(self.folder / "tensorboard")


def read_events(folder: Path) -> EventAccumulator:
    kinds = ("scalars", "tensors", "histograms", "compressedHistograms", "images", "audio")
    return EventAccumulator(str(folder), size_guidance=dict.fromkeys(kinds, 0)).Reload()


@pytest.fixture(scope="module", params=[True, False], ids=["evaluation first", "evaluation last"])
def run(
    make_agent: Callable[..., tg.DistributionalPPO],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Run:
    """So narrow a guard of the log-ratio raises an alarm in the first iteration."""
    agent = make_agent(twin_critics=True, log_ratio_limit=1e-9)
    return Run(agent, tmp_path_factory.mktemp("run"), request.param)


def hyperparameters_in(folder: Path) -> dict[str, Any]:
    """What the HParams page reads, by tag; and how often each tag was written."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag.startswith("_hparams_/"):
                    data = plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
                    found.setdefault(value.tag.removeprefix("_hparams_/"), []).append(data)
    return found


def test_hyperparameters_are_written_once_a_run_beside_the_curves_of_its_final_metrics(
    make_agent: Callable[..., tg.DistributionalPPO], tmp_path: Path
) -> None:
    agent = make_agent(seed=3, gamma=0.93)
    agent.learn(4 * STEPS, callback=TensorBoardWriter(tmp_path))
    events, final = read_events(tmp_path), dict(agent.metrics)
    agent.learn(2 * STEPS, callback=TensorBoardWriter(tmp_path), reset_num_timesteps=False)
    found = hyperparameters_in(tmp_path)
    (experiment,), (start,) = found["experiment"], found["session_start_info"]
    settings = start.session_start_info.hparams
    assert settings["gamma"].number_value == 0.93
    assert settings["network.lstm_size"].number_value == 8
    assert settings["network.hidden"].string_value == "(8,)"
    assert settings["seed"].number_value == 3
    assert settings["network.twin_critics"].bool_value is False
    shown = [metric.name.tag for metric in experiment.experiment.metric_infos]
    for tag in ("rollout/ep_rew_mean", "train/explained_variance"):
        assert tag in shown
        assert events.Scalars(tag)[-1].value == pytest.approx(final[tag], rel=1e-6)
    # One run, no second folder for the same curves.
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert found["session_end_info"][-1].session_end_info.status == 1  # success


def test_a_line_an_iteration_holds_all_figures_and_those_that_come_late(run: Run) -> None:
    assert [line["time/total_timesteps"] for line in run.lines] == [STEPS * (1 + index) for index in range(6)]
    for iteration, (line, truth) in enumerate(zip(run.lines, run.witness.metrics.values(), strict=True), start=1):
        expected: dict[str, float | None] = {
            name: value if math.isfinite(value) else None for name, value in truth.items()
        }
        if iteration % 2 == 0:
            expected["eval/mean_reward"] = 0.25
        assert line == expected
    # No episode has ended in the first iteration, and a mean over none is not a number.
    assert run.lines[0]["rollout/ep_rew_mean"] is None
    assert run.lines[5]["rollout/ep_rew_mean"] is not None


def test_every_figure_is_a_curve_against_steps(run: Run) -> None:
    events = run.events
    truth = run.witness.metrics
    assert set(events.Tags()["scalars"]) == set(truth[STEPS]) | {"eval/mean_reward"}
    for name in truth[STEPS]:
        found = events.Scalars(name)
        assert [point.step for point in found] == list(truth)
        expected = np.float32([metrics[name] for metrics in truth.values()])
        np.testing.assert_array_equal(np.float32([point.value for point in found]), expected)
    scores = [(point.step, point.value) for point in events.Scalars("eval/mean_reward")]
    assert scores == [(2 * STEPS, 0.25), (4 * STEPS, 0.25), (6 * STEPS, 0.25)]


def test_the_return_quantiles_share_one_chart(run: Run) -> None:
    events = run.events
    (found,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout()
    layout.ParseFromString(found.tensor_proto.string_val[0])
    fan, wide, narrow = layout.category[0].chart
    names = [f"critic/return_p{level}" for level in ("05", "25", "50", "75", "95")]
    assert list(fan.multiline.tag) == names
    bands = [
        (chart.margin.series[0].lower, chart.margin.series[0].value, chart.margin.series[0].upper)
        for chart in (wide, narrow)
    ]
    assert bands == [(names[0], names[2], names[4]), (names[1], names[2], names[3])]
    assert set(names) <= set(events.Tags()["scalars"])


def test_a_scalar_critic_has_no_fan(make_agent: Callable[..., tg.DistributionalPPO], tmp_path: Path) -> None:
    make_agent(critic="scalar").learn(STEPS, callback=TensorBoardWriter(tmp_path))
    assert read_events(tmp_path).Tags()["tensors"] == []


def test_histograms_of_actions_and_weights_every_so_many_iterations(run: Run) -> None:
    events, witness = run.events, run.witness
    weights = dict(run.agent.policy.named_parameters())
    assert set(events.Tags()["histograms"]) == {"actions/0", *(f"weights/{name}" for name in weights)}
    for name in events.Tags()["histograms"]:
        found = events.Histograms(name)
        assert [event.step for event in found] == [STEPS, 4 * STEPS]
        for event in found:
            kind, _, rest = name.partition("/")
            values = witness.actions[event.step][:, 0] if kind == "actions" else witness.weights[event.step][rest]
            values = values.astype(float).ravel()
            histogram = event.histogram_value
            assert histogram.num == values.size
            assert (histogram.min, histogram.max) == (values.min(), values.max())
            assert histogram.sum == pytest.approx(values.sum(), rel=1e-12, abs=1e-12)
            assert histogram.sum_squares == pytest.approx((values**2).sum(), rel=1e-12)
            counts, edges = np.histogram(values, bins=64)
            # The reader leaves out empty buckets at both ends.
            assert sum(histogram.bucket) == values.size
            middle = np.interp(histogram.bucket_limit, edges, np.concatenate([[0], counts.cumsum()]))
            assert np.abs(np.cumsum(histogram.bucket) - middle).max() <= 1
    assert len({tuple(event.histogram_value.bucket) for event in events.Histograms("actions/0")}) == 2


def test_an_alarm_is_written_once_as_text(run: Run) -> None:
    """One is raised by the figures of the first iteration, one by the evaluations, after the sixth and last."""
    assert {alarm.name: alarm.step for alarm in run.agent.alarms} == {
        "ratio_clamped": STEPS,
        "constant_evaluation": 6 * STEPS,
    }
    events = run.events
    for alarm in run.agent.alarms:
        (found,) = events.Tensors(f"alarms/{alarm.name}/text_summary")
        assert found.step == alarm.step
        assert found.tensor_proto.string_val[0].decode() == str(alarm)


def test_a_run_that_goes_on_leaves_one_curve(make_agent: Callable[..., tg.DistributionalPPO], tmp_path: Path) -> None:
    """Killed after four iterations, taken up after two: the first two stay, the others are those of the second life."""
    first, second = Witness(), Witness()
    make_agent(seed=0).learn(4 * STEPS, callback=[first, TensorBoardWriter(tmp_path, histogram_every=1)])
    agent = make_agent(seed=1)
    agent.learn(2 * STEPS)
    time.sleep(1)  # event files are read in the order of their names, which tell seconds
    agent.learn(3 * STEPS, callback=[second, TensorBoardWriter(tmp_path, histogram_every=1)], reset_num_timesteps=False)
    events = read_events(tmp_path)
    truth = {step: first.metrics[step] for step in (STEPS, 2 * STEPS)} | second.metrics
    found = {point.step: point.value for point in events.Scalars("train/loss")}
    assert found == {step: np.float32(metrics["train/loss"]) for step, metrics in truth.items()}
    assert list(found) == [STEPS * (1 + index) for index in range(5)]
    assert [event.step for event in events.Histograms("actions/0")] == list(found)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_curves_that_cannot_be_written_stop_the_run_in_the_same_iteration(
    make_agent: Callable[..., tg.DistributionalPPO], tmp_path: Path
) -> None:
    """TensorBoard writes in the background; a checkpoint must not follow curves that are not there."""
    done, threads = [], set(threading.enumerate())

    def pull_the_plug(*_: Any) -> None:
        done.append([point.step for point in read_events(tmp_path / "curves").Scalars("time/fps")])
        shutil.rmtree(tmp_path / "curves")

    with pytest.raises(OSError, match="curves"):
        make_agent().learn(4 * STEPS, callback=[TensorBoardWriter(tmp_path / "curves"), EveryIteration(pull_the_plug)])
    assert done == [[STEPS]]
    for thread in set(threading.enumerate()) - threads:
        thread.join()


def test_discrete_actions_are_counted(tmp_path: Path) -> None:
    agent = tg.DistributionalPPO("CartPole-v1", num_envs=2, n_steps=32, memory="none", hidden=(8,), critic="scalar")
    agent.learn(64, callback=TensorBoardWriter(tmp_path))
    assert agent.snapshot is not None
    rollout = agent.snapshot.rollout
    counts = torch.bincount(rollout.actions[rollout.valid].flatten(), minlength=2).tolist()
    (event,) = read_events(tmp_path).Histograms("actions/0")
    assert [count for count in event.histogram_value.bucket if count] == counts


def test_every_dimension_of_an_action_has_its_histogram(tmp_path: Path) -> None:
    env = tg.TradingEnv(tg.make_market(800, assets=2, seed=0).bars, num_envs=4, episode_length=32)
    agent = tg.DistributionalPPO(env, n_steps=16, hidden=(8,), memory="none")
    agent.learn(64, callback=[witness := Witness(), TensorBoardWriter(tmp_path)])
    events = read_events(tmp_path)
    for index in (0, 1):
        (event,) = events.Histograms(f"actions/{index}")
        assert event.histogram_value.max == witness.actions[64][:, index].max()


def test_lines_are_appended_and_late_figures_go_where_they_belong(
    make_agent: Callable[..., tg.DistributionalPPO], tmp_path: Path
) -> None:
    """Two calls of `learn` into one file; a score recorded between them belongs to neither."""
    agent, writer = make_agent(), JsonlWriter(tmp_path / "metrics.jsonl")
    agent.learn(STEPS, callback=writer)
    agent.logger.record("eval/by_hand", 1.0)
    agent.learn(STEPS, callback=writer, reset_num_timesteps=False)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["time/total_timesteps"] for line in lines] == [STEPS, 2 * STEPS]
    assert not any("eval/by_hand" in line for line in lines)


def test_what_is_not_a_number_is_refused_by_name(
    make_agent: Callable[..., tg.DistributionalPPO], tmp_path: Path
) -> None:
    def record(agent: tg.DistributionalPPO) -> None:
        agent.logger.record("eval/phase", "warm-up")

    with pytest.raises(TailguardError, match="eval/phase: 'warm-up' was recorded as a metric and is not a number"):
        make_agent().learn(2 * STEPS, callback=[JsonlWriter(tmp_path / "metrics.jsonl"), EveryIteration(record)])


def test_histograms_need_a_positive_interval(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="histogram_every"):
        TensorBoardWriter(tmp_path, histogram_every=0)


@pytest.mark.parametrize(("package", "writer"), [("mlflow", MLflowWriter), ("wandb", WandbWriter)])
def test_a_tracker_that_is_not_installed_is_named_before_training(
    package: str, writer: Callable[[], Callback], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'tailguard\[{package}\]'"):
        writer()


def test_mlflow_keeps_settings_figures_and_alarms(
    make_agent: Callable[..., tg.DistributionalPPO], tmp_path: Path
) -> None:
    pytest.importorskip("mlflow")
    agent, witness = make_agent(log_ratio_limit=1e-9, gamma=0.97), Witness()
    writer = MLflowWriter("a run", "tests", tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    agent.learn(2 * STEPS, callback=[witness, writer, Evaluate()])
    again = MLflowWriter(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}", run_id=writer.run_id)
    agent.learn(STEPS, callback=[witness, again], reset_num_timesteps=False)
    run = writer.client.get_run(writer.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["gamma"] == "0.97"
    assert run.data.params["network.lstm_size"] == "8"
    assert run.data.tags["alarm.ratio_clamped"] == str(agent.alarms[0])
    for name in ("train/loss", "rollout/ep_rew_mean", "time/total_timesteps"):
        found = {point.step: point.value for point in writer.client.get_metric_history(writer.run_id, name)}
        assert found == pytest.approx({step: one[name] for step, one in witness.metrics.items()}, nan_ok=True)
    (score,) = writer.client.get_metric_history(writer.run_id, "eval/mean_reward")
    assert (score.step, score.value) == (2 * STEPS, 0.25)


def test_wandb_keeps_figures_offline(make_agent: Callable[..., tg.DistributionalPPO], tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    agent = make_agent(log_ratio_limit=1e-9)
    writer = WandbWriter("tests", mode="offline", dir=tmp_path, settings={"silent": True})

    class Reader(Callback):
        def on_training_end(self) -> None:
            self.summary = dict(writer.run.summary)

    agent.learn(2 * STEPS, callback=[reader := Reader(), writer, Evaluate()])
    assert reader.summary["train/loss"] == pytest.approx(agent.metrics["train/loss"])
    assert reader.summary["time/total_timesteps"] == 2 * STEPS
    writer.wandb.teardown()  # the file is complete a moment after `finish`
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"alarm ratio_clamped" in log.read_bytes()
