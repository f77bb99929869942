"""Question `federated`: how many rounds of federated training a second, for 10, 100 and 1,000 clients in one process?

    python3 -m venv build/venv-fed                         # Flower asks for other versions of what Shoal pins
    build/venv-fed/bin/pip install -e . torch==2.13.0 "flwr[simulation]>=1.41,<1.42" scikit-learn
    python -m benchmarks.federated --python build/venv-fed/bin/python [--clients 10,100,1000] [--passes 3] [--quick]

An MLP of 64, 32 and 10 on scikit-learn's digits, dealt evenly; in each round each client makes 10 local steps of SGD
with 16 samples of its own, and the weights are averaged. All contenders compute that; none evaluates. They take turns,
each in a process of one thread, several times over; a figure is the mean of a turn's rounds after two that warm up.

- `numpy`: a plain loop over clients, the forward and backward of the network written out
- `core`: `shoal.federated`
- `flower`: Flower's FedAvg over Shoal's grid in the process and Shoal's clients
- `flower-ray`: Flower's FedAvg over Flower's own simulation with Ray; each client runs the numpy loop's steps
- `flower-idle`, `ray-idle`: Flower's FedAvg over Shoal's grid and over Ray, with one and the same client that sends
  back the weights that it was given: what a round costs without any training

Writes results/federated.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

STEPS, BATCH, RATE, WARM = 10, 16, 0.1, 2
CLIENTS = (10, 100, 1000)
NAMES = ("numpy", "core", "flower", "flower-ray", "flower-idle", "ray-idle")
ROUNDS = {
    "numpy": {10: 100, 100: 20, 1000: 4},
    "core": {10: 100, 100: 20, 1000: 4},
    "flower": {10: 100, 100: 20, 1000: 4},
    "flower-ray": {10: 10, 100: 3, 1000: 1},
    "flower-idle": {10: 100, 100: 20, 1000: 4},
    "ray-idle": {10: 10, 100: 3, 1000: 1},
}
BESIDE_RAY = (("core", "flower-ray"), ("flower", "flower-ray"), ("flower-idle", "ray-idle"))
Weights = list[np.ndarray]


def data_of(clients: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The samples of each client."""
    from shoal.data.digits import digits
    from shoal.federated.partition import iid

    data, shares = digits(), iid(1797, clients, 0)
    return [(data.inputs[shares.of(k)], data.answers[shares.of(k)]) for k in range(clients)]


def local_steps(weights: Weights, inputs: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Weights:
    """The local training of a client, written out."""
    first, bias, last, bias_2 = (each.copy() for each in weights)
    order = np.resize(rng.permutation(len(labels)), STEPS * BATCH)
    for step in range(STEPS):
        rows = order[step * BATCH : (step + 1) * BATCH]
        x, y = inputs[rows], labels[rows]
        hidden = x @ first + bias
        active = np.maximum(hidden, 0)
        logits = active @ last + bias_2
        logits -= logits.max(axis=1, keepdims=True)
        error = np.exp(logits)
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(BATCH), y] -= 1
        error /= BATCH
        back = (error @ last.T) * (hidden > 0)
        last -= RATE * (active.T @ error)
        bias_2 -= RATE * error.sum(axis=0)
        first -= RATE * (x.T @ back)
        bias -= RATE * back.sum(axis=0)
    return [first, bias, last, bias_2]


def initial() -> Weights:
    """The weights that all begin from."""
    rng = np.random.default_rng(0)
    shapes = ((64, 32), (32,), (32, 10), (10,))
    return [(0.1 * rng.standard_normal(shape)).astype(np.float32) for shape in shapes]


def numpy_rounds(clients: int) -> Iterator[None]:
    """The plain loop."""
    parts, weights, rng = data_of(clients), initial(), np.random.default_rng(0)
    whole = sum(len(labels) for _, labels in parts)
    while True:
        total = [np.zeros_like(each) for each in weights]
        for inputs, labels in parts:
            for into, own in zip(total, local_steps(weights, inputs, labels, rng), strict=True):
                into += np.float32(len(labels) / whole) * own
        weights = total
        yield


def _shoal(clients: int) -> tuple[Any, Any, Any]:
    import torch

    from shoal.data.digits import digits
    from shoal.device import CPU
    from shoal.federated.clients import clients_of
    from shoal.federated.partition import iid
    from shoal.federated.recipe import Recipe
    from shoal.federated.settings import Federated
    from shoal.models import MLP, classification

    held = clients_of(digits(), iid(1797, clients, 0), 0.0, 0, CPU)
    recipe = Recipe(partial(MLP, [64, 32, 10]), classification, partial(torch.optim.SGD, lr=RATE), BATCH)
    return recipe, held, Federated(clients=clients, local_steps=STEPS)


def core_rounds(clients: int) -> Iterator[None]:
    """Shoal alone."""
    from shoal.federated.simulation import Simulation

    simulation = Simulation(*_shoal(clients))
    while True:
        simulation.round()
        yield


def flower_seconds(clients: int, rounds: int) -> list[float]:
    """Flower's strategy over Shoal's grid: seconds of each round."""
    from shoal.device import CPU
    from shoal.federated.flower import private

    private.quieten()
    from shoal.federated.flower.clients import SimulatedClients, to_record
    from shoal.federated.flower.grid import LocalGrid
    from shoal.federated.flower.strategies import flower_strategy
    from shoal.federated.local import LocalTraining
    from shoal.federated.schedule import Rounds, crowd_of

    recipe, held, settings = _shoal(clients)
    local = SimulatedClients(lambda mu: LocalTraining(recipe, held, clients, mu, CPU))
    grid = LocalGrid(local.app(), Rounds(settings, crowd_of(settings, held.train.counts, BATCH, 0)), local.many)
    return _of_strategy(flower_strategy(settings, clients), grid, to_record(local.local().start()), rounds)


def _of_strategy(strategy: Any, grid: Any, arrays: Any, rounds: int) -> list[float]:
    times: list[float] = []

    def evaluated(number: int, arrays: Any) -> None:
        times.append(time.perf_counter())

    strategy.start(grid, arrays, num_rounds=rounds + WARM, evaluate_fn=evaluated)
    return [after - before for before, after in pairwise(times)]


def client_app(clients: int, idle: bool) -> Any:
    """Clients of Flower, written for it: each makes the numpy loop's steps, or none."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app, parts = ClientApp(), data_of(clients)

    @app.train()
    def train(message: Any, context: Any) -> Any:
        inputs, labels = parts[int(context.node_config["partition-id"])]
        ended = message.content["arrays"].to_numpy_ndarrays()
        if not idle:
            ended = local_steps(ended, inputs, labels, np.random.default_rng(int(time.time_ns())))
        arrays = ArrayRecord({str(index): Array(each) for index, each in enumerate(ended)})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(labels)})})
        return Message(content, reply_to=message)

    return app


def _averaged(clients: int, grid: Any, rounds: int) -> list[float]:
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_evaluate_nodes=0, min_available_nodes=clients)
    arrays = ArrayRecord({str(index): Array(each) for index, each in enumerate(initial())})
    return _of_strategy(strategy, grid, arrays, rounds)


def ray_seconds(clients: int, rounds: int, idle: bool = False) -> list[float]:
    """Flower's own simulation: seconds of each round."""
    from shoal.federated.flower import private

    private.quieten()
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    found: list[float] = []
    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        found.extend(_averaged(clients, grid, rounds))

    run_simulation(server, client_app(clients, idle), clients, backend_config={"client_resources": {"num_cpus": 1}})
    return found


def idle_seconds(clients: int, rounds: int) -> list[float]:
    """The same idle clients over Shoal's grid: seconds of each round."""
    from shoal.federated.flower import private

    private.quieten()
    from shoal.federated.flower.grid import LocalGrid
    from shoal.federated.schedule import Rounds, crowd_of

    _, held, settings = _shoal(clients)
    rounds_of = Rounds(settings, crowd_of(settings, held.train.counts, BATCH, 0))
    return _averaged(clients, LocalGrid(client_app(clients, True), rounds_of), rounds)


def seconds_of(name: str, clients: int, rounds: int) -> list[float]:
    """Runs a contender in this process; returns the seconds of its rounds after the first two."""
    import torch

    torch.set_num_threads(1)
    loops: dict[str, Callable[[int], Iterator[None]]] = {"numpy": numpy_rounds, "core": core_rounds}
    flowers: dict[str, Callable[[int, int], list[float]]] = {
        "flower": flower_seconds,
        "flower-ray": ray_seconds,
        "flower-idle": idle_seconds,
        "ray-idle": partial(ray_seconds, idle=True),
    }
    if name in flowers:
        return flowers[name](clients, rounds)[WARM:]
    steps, times = loops[name](clients), []
    for _ in range(rounds + WARM + 1):
        times.append(time.perf_counter())
        next(steps)
    return [after - before for before, after in pairwise(times)][WARM:]


def turn(python: str, name: str, clients: int, rounds: int) -> list[float]:
    """Runs a contender in a process of its own. Raises RuntimeError with what it said where it failed."""
    words = [python, "-m", "benchmarks.federated", "--turn", name, str(clients), str(rounds)]
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **one}, timeout=1200)
    if done.returncode:
        raise RuntimeError(f"{name} with {clients} clients failed: {done.stderr[-2000:]}")
    return list(json.loads(done.stdout.splitlines()[-1]))


def measured(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Rounds a second of each contender in each pass, by number of clients."""
    found: dict[str, dict[str, list[float]]] = {}
    for clients in map(int, arguments.clients):
        rates = found.setdefault(str(clients), {name: [] for name in arguments.contenders})
        for _ in range(arguments.passes):
            for name in arguments.contenders:
                rounds = 1 if arguments.quick else ROUNDS[name][clients]
                rates[name].append(1 / statistics.mean(turn(arguments.python, name, clients, rounds)))
                print(f"{clients:5} clients  {name:10} {rates[name][-1]:10.2f} rounds/s", flush=True)
    return found


def ratios(rates: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Medians over the passes of the ratios that the targets are about."""
    found = {}
    for clients, of in rates.items():
        for ours, theirs in (("core", "numpy"), ("flower", "numpy"), *BESIDE_RAY):
            if of.get(ours) and of.get(theirs):
                pairs = zip(of[ours], of[theirs], strict=True)
                found[f"{ours}/{theirs} {clients}"] = statistics.median(own / other for own, other in pairs)
    return found


def main() -> None:
    if sys.argv[1:2] == ["--turn"]:
        print(json.dumps(seconds_of(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
        return
    from benchmarks import harness
    from benchmarks.targets import Target, judge, print_targets

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="of the environment with flwr[simulation]")
    parser.add_argument(
        "--clients", type=harness.several([str(each) for each in CLIENTS]), default=[*map(str, CLIENTS)]
    )
    parser.add_argument("--contenders", type=harness.several(NAMES), default=list(NAMES))
    parser.add_argument("--passes", type=int, default=3)
    arguments = harness.parse(parser, "1 pass of 1 round", passes=1)
    targets = [
        Target(f"{ours}/{theirs} {clients}", f"{clients} clients: rounds/s of {ours} over {theirs}", bound)
        for clients in CLIENTS
        for ours, theirs, bound in (
            ("core", "numpy", 0.5),
            ("flower", "numpy", 0.35),
            ("flower", "flower-ray", 20.0),
            ("flower-idle", "ray-idle", 20.0),
        )
        if clients < 1000 or theirs == "numpy"
    ]
    rates = measured(arguments)
    judged = judge(targets, ratios(rates))
    print_targets(judged)
    if not arguments.quick:
        words = (
            "import json,importlib.metadata as m; print(json.dumps({n: m.version(n) for n in ('flwr','ray','numpy')}))"
        )
        there = subprocess.run([arguments.python, "-c", words], capture_output=True, text=True).stdout
        record = {"rounds_per_second": rates, "ratios": ratios(rates), "targets": judged}
        record["contenders"] = json.loads(there or "{}")
        given = {**vars(arguments), "python": Path(arguments.python).name}
        print(harness.write_record("federated", given, record))


if __name__ == "__main__":
    main()
