"""Saved under one cut, read under another; and read by torch's own loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import FileStore, HashStore, Store, TCPStore

from shoal.checkpoint import Piece, Want, Writer, load, read_manifest, tensor_names
from shoal.errors import CheckpointError
from shoal.parallel import Box
from tests.checkpoint.fake_ranks import FakeWorld, flat_wants, on_ranks, pieces_of, save_alone

State = dict[str, torch.Tensor]


def save_on(size: int, directory: Path, state: State, store: Store | None = None) -> None:
    def body(world: FakeWorld) -> None:
        writer = Writer(directory, world)
        writer.save(100, pieces_of(state, world.rank, size), {"cursor": {"step": 100}, "by": world.rank}, wait=True)
        writer.close()

    on_ranks(size, body, store)


def load_on(size: int, path: Path, like: State) -> State:
    """Each rank reads its flat cut; the cuts put together."""
    whole = {name: torch.full((tensor.numel(),), -2, dtype=tensor.dtype) for name, tensor in like.items()}
    for rank in range(size):
        wants, filled = flat_wants(like, rank, size)
        load(path, wants)
        for name, start, flat in filled:
            whole[name][start : start + flat.numel()] = flat
    return {name: flat.view(like[name].shape) for name, flat in whole.items()}


@pytest.mark.fast
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("writers", [1, 2, 3])
def test_any_cut_reads_any_cut(tmp_path: Path, state: State, writers: int, readers: int) -> None:
    save_on(writers, tmp_path, state)
    path = tmp_path / "step-00000100"
    back = load_on(readers, path, state)
    assert all(torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype for name in state)
    manifest = read_manifest(path)
    assert (manifest.step, manifest.world_size, manifest.extra) == (100, writers, {"cursor": {"step": 100}, "by": 0})
    assert set(manifest.files) == {".metadata", *(f"__{rank}_0.distcp" for rank in range(writers))}
    assert tensor_names(path) == sorted(state)


def test_torch_reads_it_into_a_plain_state_dict(tmp_path: Path, state: State) -> None:
    save_on(2, tmp_path, state)
    plain = {name: torch.full_like(tensor, -1) for name, tensor in state.items()}
    dcp.load(plain, storage_reader=dcp.FileSystemReader(tmp_path / "step-00000100"), no_dist=True)
    assert all(torch.equal(plain[name], state[name]) for name in state)


def test_values_are_cast_into_strided_views(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, {"w": torch.arange(12.0).reshape(3, 4)})
    base = torch.zeros(4, 8, dtype=torch.bfloat16)
    into = base.t()[2:5, 1:3]
    load(tmp_path / "step-00000001", [Want("w", (3, 4), Box((0, 1), (3, 2)), into)])
    assert into.tolist() == [[1, 2], [5, 6], [9, 10]]
    assert float(base.abs().sum()) == 33


def test_a_sliced_tensor_is_saved_in_several_boxes(tmp_path: Path) -> None:
    """As tensor parallel does: two ranks hold column halves of one tensor, neither a flat range."""
    whole = torch.arange(24.0).reshape(4, 6)

    def body(world: FakeWorld) -> None:
        box = Box((0, 3 * world.rank), (4, 3))
        writer = Writer(tmp_path, world)
        writer.save(1, [Piece("w", (4, 6), box, whole[box.slices])], {}, wait=True)

    on_ranks(2, body)
    assert torch.equal(load_on(3, tmp_path / "step-00000001", {"w": whole})["w"], whole)


def test_boxes_larger_than_the_limit_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.checkpoint.writer.BOX_BYTES", 1000)
    state = {"w": torch.randn(30, 50)}
    save_alone(tmp_path, 1, state)
    chunks = dcp.FileSystemReader(tmp_path / "step-00000001").read_metadata().state_dict_metadata["w"].chunks
    assert len(chunks) >= 6
    assert all(chunk.sizes.numel() * 4 <= 1000 for chunk in chunks)
    assert torch.equal(load_on(2, tmp_path / "step-00000001", state)["w"], state["w"])


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_keys_are_gone_after_the_save(tmp_path: Path, state: State, kind: str) -> None:
    store = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), 2),
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }[kind]()
    before = store.num_keys()
    save_on(2, tmp_path / "checkpoints", state, store=store)
    assert (tmp_path / "checkpoints" / "step-00000100").is_dir()
    assert store.num_keys() - before == 2  # one counter a rank


@pytest.mark.fast
@pytest.mark.parametrize(
    ("want", "message"),
    [
        (
            Want("model.wieght", (2,), Box((0,), (2,)), torch.empty(2)),
            r"does not hold model\.wieght.*holds.*model\.weight",
        ),
        (Want("model.weight", (3,), Box((0,), (3,)), torch.empty(3)), r"model\.weight has shape \(2,\).*wants \(3,\)"),
        (Want("model.weight", (2,), Box((1,), (2,)), torch.empty(2)), r"model\.weight has 1 of the 2 elements"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, want: Want, message: str) -> None:
    save_alone(tmp_path, 1, {"model.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "step-00000001", [want])


@pytest.mark.parametrize(
    "boxes",
    [[Box((0,), (3,)), Box((2,), (2,))], [Box((0,), (3,))], [Box((0,), (2,)), Box((3,), (2,))]],
    ids=["overlap", "hole", "beyond"],
)
def test_pieces_that_do_not_tile_the_tensor_are_refused(tmp_path: Path, boxes: list[Box]) -> None:
    writer = Writer(tmp_path, FakeWorld())
    with pytest.raises(CheckpointError, match=r"w .*(overlapping|invalid fill|out of bounds)"):
        writer.save(1, [Piece("w", (4,), box, torch.zeros(box.sizes)) for box in boxes], {}, wait=True)
    assert list(tmp_path.iterdir()) == []
