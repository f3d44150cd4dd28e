"""The command `bench`: short measurements of speed on this machine."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailguard.cli.application import app
from tailguard.console import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tailguard.bench.timing import Group
    from tailguard.data.prepare import PreparedBars

BARS = 20_000


class Benchmark(StrEnum):
    """What can be measured."""

    SIMULATOR = "simulator"
    TRAINING = "training"
    GPU = "gpu"


@app.command()
def bench(
    parts: Annotated[
        list[Benchmark] | None,
        typer.Argument(metavar="[PART]…", help="simulator, training, gpu. Default: all of them."),
    ] = None,
    turns: Annotated[int, typer.Option(help="Timed iterations of each candidate.")] = 5,
    max_envs: Annotated[
        int, typer.Option(help="Limit every shape to this many environments, for a small machine.")
    ] = 32_768,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads for training. Default: PyTorch's own choice.")
    ] = None,
) -> None:
    """Measure how fast this machine simulates and trains. Takes about a minute, a few with a GPU.

    Candidates alternate and results are medians, but other load still distorts them: run nothing else meanwhile. If
    sb3-contrib is installed, its RecurrentPPO is measured too. The scripts in benchmarks/ take longer and measure more.
    """
    from tailguard.validate import check_count

    check_count("--turns", turns)
    check_count("--max-envs", max_envs)
    if threads is not None:
        check_count("--threads", threads)

    import torch
    from rich.console import Console

    from tailguard.bench.timing import torch_threads
    from tailguard.data.prepare import prepare
    from tailguard.data.synthetic import make_market

    chosen = threads or torch.get_num_threads()
    console = Console()
    wanted = parts or list(Benchmark)
    say(console, f"machine  {_machine(chosen)}")
    with console.status("making a market"):
        prepared = prepare(make_market(BARS, seed=0).bars)
    for part in Benchmark:
        if part not in wanted:
            continue
        if part is Benchmark.SIMULATOR:
            with torch_threads(1):
                console.print(_simulator(prepared, turns, max_envs, console))
        elif part is Benchmark.TRAINING:
            with torch_threads(chosen):
                console.print(_training(prepared, turns, max_envs, console))
        elif torch.cuda.is_available():
            console.print(_gpu(prepared, turns, max_envs, console))
        else:
            say(console, "gpu      no CUDA device found; nothing measured")


def _machine(threads: int) -> str:
    import platform

    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    processor = platform.processor() or platform.machine()
    return f"{processor}, {threads} threads · {name} · Python {platform.python_version()} · torch {torch.__version__}"


def _simulator(prepared: PreparedBars, repeats: int, max_envs: int, console: Console) -> Table:
    """The market alone, and the whole environment."""
    from tailguard.bench.step_rates import BATCHES, environment_rate, market_rate, rate_table
    from tailguard.cli.common import shown_steps
    from tailguard.market import build_market

    market = build_market(prepared.panel)
    sizes = sorted({min(size, max_envs) for size in BATCHES})
    rates = []
    with shown_steps("simulator", 2 * len(sizes), console) as begin:
        for size in sizes:
            begin(f"market, {size:,} environments")
            rates.append(market_rate("market with all costs", market, size, repeats))
        for size in sizes:
            begin(f"TradingEnv, {size:,} environments")
            rates.append(environment_rate(prepared, size, repeats))
    return rate_table(rates)


def _training(prepared: PreparedBars, turns: int, max_envs: int, console: Console) -> Table:
    """Our learner on the CPU, next to sb3-contrib's if it is installed."""
    from tailguard.bench.own_learner import AS_PEOPLE_RUN_IT, DEFAULTS, EPOCHS, EQUAL, EVERYTHING, UNITS, ours

    equal, defaults, few = (shape.at_most(max_envs) for shape in (EQUAL, DEFAULTS, AS_PEOPLE_RUN_IT))
    alike: Group = {
        f"Tailguard plain, {equal}": partial(ours, prepared, equal, critic="scalar"),
        f"Tailguard default, {equal}": partial(ours, prepared, equal),
        f"Tailguard all on, {equal}": partial(ours, prepared, equal, **EVERYTHING),
    }
    own: Group = {f"Tailguard's own shape, {defaults}": partial(ours, prepared, defaults)}
    if find_spec("sb3_contrib") is None:
        say(
            console,
            "peer     sb3-contrib is not installed, so there is no comparison. "
            "To install it: pip install 'tailguard[dev]'",
        )
    else:
        from tailguard.bench.stable_baselines import peer

        alike = {f"sb3-contrib, {equal}": partial(peer, prepared, equal), **alike}
        own = {f"sb3-contrib as people run it, {few}": partial(peer, prepared, few), **own}
    return _speeds(f"training, LSTM {UNITS}, {EPOCHS} epochs", [alike, own], turns, "training", console)


def _gpu(prepared: PreparedBars, turns: int, max_envs: int, console: Console) -> Table:
    """The reference network on the GPU: LSTM 128 shared by actor and twin quantile critics."""
    from tailguard.bench.own_learner import EPOCHS, EVERYTHING, Shape, ours

    network: dict[str, Any] = {"hidden": (128,), "lstm_size": 128, "activation": "silu", "memory": "shared"}
    small, large = Shape(4_096, 64, 65_536).at_most(max_envs), Shape(32_768, 32, 262_144).at_most(max_envs)
    on_gpu = partial(ours, prepared, device="cuda", twin_critics=True, **network)
    group: Group = {
        f"eager, {small}": partial(on_gpu, small, runtime="eager"),
        f"graph, {small}": partial(on_gpu, small, runtime="graph"),
        f"graph, {large}": partial(on_gpu, large, runtime="graph"),
        f"graph, all on, {large}": partial(on_gpu, large, runtime="graph", **EVERYTHING),
    }
    # Two iterations run eagerly, and the next one is captured.
    return _speeds(f"training on the GPU, LSTM 128, {EPOCHS} epochs", [group], turns, "gpu", console, warm_up=4)


def _speeds(title: str, groups: list[Group], turns: int, label: str, console: Console, warm_up: int = 2) -> Table:
    from tailguard.bench.timing import add_speeds, speed_table, take_turns
    from tailguard.cli.common import shown_steps

    table = speed_table(title)
    with shown_steps(label, (turns + warm_up) * sum(map(len, groups)), console) as begin:
        for group in groups:
            add_speeds(table, take_turns(group, turns, begin, warm_up))
    return table
