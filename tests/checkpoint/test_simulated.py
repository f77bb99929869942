"""Ranks that are threads of one process save together, and a save does not wait for one that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.checkpoint.writer import Writer
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.errors import LaunchError
from tests.exchange import teacher

pytestmark = pytest.mark.fast


def trained(world: World, first: int, steps: int, directory: Path, wait: bool = True) -> list[float]:
    running = teacher.engine(world, "allreduce", zero=1)
    if first:
        running.load(directory)
    assert running.step_index == first
    losses = [float(running.step(batch).loss) for batch in running.batches(teacher.data(), steps=steps - first)]
    if steps == 3:
        running.save(directory, wait=wait)
    running.close()
    return losses


@pytest.mark.parametrize("wait", [True, False])
def test_threads_save_one_checkpoint_and_go_on_from_it(tmp_path, wait):
    through = simulate_world(2, trained, 0, 6, tmp_path)
    simulate_world(2, trained, 0, 3, tmp_path, wait)
    assert [each[3:] for each in through] == simulate_world(2, trained, 3, 6, tmp_path)
    (found,) = simulate_world(1, trained, 3, 6, tmp_path)  # under another plan
    assert found == pytest.approx(through[0][3:], rel=1e-5)


def ends_before_a_save(world: World, directory: Path) -> None:
    if world.rank == 1:
        raise KeyError("lost")
    try:
        Writer(directory, world).save(1, [], {}, wait=True)
    except LaunchError as error:
        said.append(str(error))


said: list[str] = []


def test_a_save_names_the_thread_that_has_ended(tmp_path):
    said.clear()
    with pytest.raises(KeyError, match="lost"):
        simulate_world(2, ends_before_a_save, tmp_path)
    assert said == ["rank 0: a save cannot be completed: rank 1 has ended: KeyError: 'lost'"]
