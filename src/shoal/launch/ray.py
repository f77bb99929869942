"""Ranks as actors of Ray, in a placement group with a bundle for each.

    shoal.launch.ray.run(["script.py", "--lr", "3"], ranks=4)
    python -m shoal.launch.ray --ranks 4 --gpus 1 -- -m shoal.jobs job.toml    # what `ray job submit` is given

    driver (this process) --+-- actor: rank 0, serves the store on its node
                            +-- actor: rank 1 ...       a lost actor is a lost rank: the run ends, or starts again

Needs the package ray (`pip install 'shoal[ray]'`) here and on the nodes.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.comm.secret import VARIABLE, new_secret
from shoal.errors import LaunchError, UserError
from shoal.launch.failure import Failure, failure_of, first_line
from shoal.launch.rank import run_program
from shoal.launch.verdict import Ending, verdict

GRACE = 8.0
"""Seconds for the other ranks to end by themselves once one has failed, so that it is known who failed first."""

FORWARDED = 1.0
"""Seconds after which Ray has brought the output of an actor here."""

TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where ~/.ray/auth_token is not that of the cluster"
"""What to do for a cluster that asks for a token. `ray start` has it ask for that file's where its host has one."""


def run(
    program: list[str],
    ranks: int,
    *,
    resources: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    restarts: int = 0,
    patience: float = 60.0,
) -> int:
    """Runs `program` on ranks that are actors of the Ray cluster; prints failures to stderr and returns the exit code.

    program: the arguments for `python`: ["script.py", ...] or ["-m", "module", ...].
    resources: of a rank, e.g. {"CPU": 4, "GPU": 1}; by default one CPU.
    env: variables of the ranks.
    restarts: how often all ranks start again after an actor was lost. A job goes on from its newest checkpoint.
    patience: seconds to wait until the cluster has the resources.

    The exit code is that of `shoal.launch.launch`. Raises UserError without the package, or where the cluster has no
    room for the ranks.
    """
    machines()
    code = 0
    for attempt in range(restarts + 1):
        endings, lost = _attempt(program, ranks, dict(resources or {"CPU": 1}), dict(env or {}), patience)
        report, code = verdict(endings)
        if report:
            print(report, file=sys.stderr, flush=True)
        if not lost or attempt == restarts:
            break
        print(f"the ranks start again ({attempt + 1} of {restarts})", file=sys.stderr, flush=True)
    return code


class Rank:
    """The actor of one rank."""

    def place(self) -> Place:
        """Returns where it runs, with a port that is free there now."""
        ray = ray_package()
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port)

    def run(self, program: list[str], variables: Mapping[str, str], folder: str) -> Failure | int:
        """Runs the program, in `folder` where this node has it; returns its Failure, or its exit code."""
        os.environ.update(variables)
        if os.path.isdir(folder):
            os.chdir(folder)
        try:
            run_program(list(program))
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except Exception as error:
            return failure_of(error, int(variables["RANK"]))
        return 0


@dataclass(frozen=True)
class Place:
    """A node of the cluster, its address, and a free port of it."""

    node: str
    address: str
    port: int


def variables_of(places: Sequence[Place]) -> list[dict[str, str]]:
    """Returns the variables of each rank; `places`: by rank, those of a node one after the other."""
    one_node = len({place.node for place in places}) == 1
    secret = new_secret()
    found = []
    for rank, place in enumerate(places):
        here = [other for other, its in enumerate(places) if its.node == place.node]
        found.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(here.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(here)),
                "MASTER_ADDR": "127.0.0.1" if one_node else places[0].address,
                "MASTER_PORT": str(places[0].port),
                "SHOAL_RAY": "1",
                VARIABLE: secret,
            }
        )
    return found


def ray_package() -> Any:
    """Returns the module ray. Raises UserError where it is not installed."""
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise UserError("the package ray is not installed: pip install 'shoal[ray]'") from error
    return ray


def _attempt(
    program: list[str], ranks: int, resources: dict[str, float], env: dict[str, str], patience: float
) -> tuple[list[Ending], bool]:
    """Starts all ranks and waits for them; returns how each ended, and whether an actor was lost."""
    ray = ray_package()
    group = ray.util.placement_group([resources] * ranks, strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(patience):
            raise UserError(
                f"Ray has no room for {ranks} ranks with {resources} each within {patience:.0f} s; all nodes together "
                f"have {ray.cluster_resources()}. Give fewer ranks or resources, or add nodes."
            )
        actors += [start_actor(Rank, group, index, resources) for index in range(ranks)]
        found = ray.get([actor.place.remote() for actor in actors])
        nodes = [place.node for place in found]
        by_node = sorted(range(ranks), key=lambda index: nodes.index(nodes[index]))  # ranks of a node follow each other
        places = [found[index] for index in by_node]
        started = [
            actors[index].run.remote(program, {**env, **variables}, os.getcwd())
            for index, variables in zip(by_node, variables_of(places), strict=True)
        ]
        return _watch(started, places)
    except ray.exceptions.RayActorError as error:
        raise LaunchError(f"an actor of Ray was lost before the ranks began: {first_line(error)}") from error
    finally:
        time.sleep(FORWARDED)
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def names_cluster(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether RAY_ADDRESS names a cluster, as it does in what `ray job submit` starts, and not just its job server."""
    address = environ.get("RAY_ADDRESS", "")
    return address != "" and not address.startswith(("http:", "https:"))


def machines() -> list[dict[str, float]]:
    """Returns the resources of each Ray node of the cluster, to which this process is connected then. Raises UserError
    where there is none."""
    ray = ray_package()
    if not ray.is_initialized():
        os.environ.setdefault("RAY_COLOR_PREFIX", str(int(sys.stdout.isatty())))
        try:
            ray.init()
        except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
            raise UserError(
                f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')} leads to no cluster of Ray: {first_line(error)}. "
                "Give the address that `ray start --head` prints, HOST:6379; where the cluster asks for a token "
                f"{TOKEN}; or unset RAY_ADDRESS, to do without a cluster"
            ) from error
    return [each["Resources"] for each in ray.nodes() if each["Alive"]]


def start_actor(kind: type, group: Any, index: int, resources: Mapping[str, float], threads: int = 1) -> Any:
    """Starts an actor of the class `kind` on a bundle of a placement group, of which it has all `resources`. threads:
    how many of its methods run at once."""
    ray = ray_package()
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
    return (
        ray.remote(kind)
        .options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources=others,
            memory=resources.get("memory"),
            max_concurrency=threads,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
    )


def _watch(started: list[Any], places: Sequence[Place]) -> tuple[list[Ending], bool]:
    """Waits until all ranks have ended, or until GRACE after the first failure."""
    ray = ray_package()
    running = {each: rank for rank, each in enumerate(started)}
    endings: dict[int, Ending] = {}
    deadline, lost = float("inf"), False
    while running and time.monotonic() < deadline:
        done, _ = ray.wait(list(running), timeout=0.2)
        for each in done:
            rank = running.pop(each)
            try:
                result = ray.get(each)
            except ray.exceptions.RayError as error:
                lost = True
                result = _lost(rank, places[rank], error)
            failure = result if isinstance(result, Failure) else None
            code = 0 if isinstance(result, Failure) else result
            endings[rank] = Ending(rank, places[rank].address, code, time.time(), False, failure, None)
            if endings[rank].failed:
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in running.values():
        endings[rank] = Ending(rank, places[rank].address, 0, time.time(), True, None, None)
    return [endings[rank] for rank in sorted(endings)], lost


def _lost(rank: int, place: Place, error: Exception) -> Failure:
    message = (
        f"its actor is lost, on node {place.node[:8]} at {place.address} ({first_line(error)}). The process was "
        "killed, often for its memory, or the node is gone. Start the run again: a job goes on from its newest "
        "checkpoint; with restarts it does so by itself"
    )
    return Failure(rank, place.address, time.time(), message, "", LaunchError.exit_code, lost_peer=False)


def main() -> None:
    """Runs the program in `sys.argv` on the ranks; exits with its code."""
    parser = argparse.ArgumentParser(prog="python -m shoal.launch.ray", description="Runs a program on actors of Ray.")
    parser.add_argument("--ranks", type=int, required=True, help="number of actors")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of each")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each")
    parser.add_argument("--memory", type=float, default=0, help="bytes of memory of each")
    parser.add_argument("--restarts", type=int, default=0, help="how often to start again after an actor was lost")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script.py ARGS..., or -m module ARGS...")
    given = parser.parse_args()
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    asked = {"CPU": given.cpus, "GPU": given.gpus, "memory": given.memory}
    resources = {name: amount for name, amount in asked.items() if amount}
    sys.exit(run(program, given.ranks, resources=resources, restarts=given.restarts))


if __name__ == "__main__":
    main()
