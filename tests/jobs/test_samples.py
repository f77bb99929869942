"""Jobs whose model reads no text: arrays, images, generated sets; what follows from the data, and what does not go
together."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from shoal.comm import World
from shoal.data import open_arrays
from shoal.errors import UserError
from shoal.jobs.config import Data, Job
from shoal.jobs.export import evaluate_run, generate_text
from shoal.jobs.read import load_job
from shoal.jobs.train import train
from shoal.plan import Plan
from tests.jobs.conftest import in_cache, losses_of, records_of
from tests.pool import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
MLP = {"name": "mlp", "sizes": [4, 16, 3]}


@pytest.fixture
def of(make_job, tmp_path):
    """A job of a model on data at `source`."""

    def make(model, source, **options) -> Job:
        data = {key: options.pop(key) for key in ("size", "validation") if key in options}
        job = make_job(**{"steps": 20, "global_batch": 32, "microbatch": 8, "lr": 2e-2, "weight_decay": 0.0, **options})
        return replace(job, model=model, data=Data(**{"source": str(source), "validation": 0.2, **data}))

    return make


def points(count: int = 200) -> dict[str, np.ndarray]:
    """Of three classes, by which of the first three numbers is the largest."""
    inputs = np.random.default_rng(0).normal(size=(count, 4))
    return {"inputs": inputs, "labels": inputs[:, :3].argmax(1)}


def stored(directory: Path, kind: str, arrays: dict[str, np.ndarray]) -> Path:
    if kind == "npz":
        np.savez(directory / "a.npz", **arrays)
    elif kind == "safetensors":
        save_file({name: np.ascontiguousarray(each) for name, each in arrays.items()}, directory / "a.safetensors")
    else:
        for name, each in arrays.items():
            np.save(directory / f"{name}.npy", each)
        return directory / "inputs.npy"
    return directory / f"a.{kind}"


@pytest.fixture
def images(tmp_path) -> Path:
    """Reddish and bluish ones, of 12 x 12 pixels."""
    rng = np.random.default_rng(0)
    for name, channel in (("red", 0), ("blue", 2)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 60, (12, 12, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["npz", "npy", "safetensors"])
def test_arrays_train_and_the_validation_part_tells_loss_and_accuracy(quick, of, alone, tmp_path, kind, capsys):
    job = of(MLP, stored(tmp_path, kind, points()), run={"eval_every": 10})
    train(job, {}, alone)
    first, *_, last = records_of(job).evals
    assert last.loss < first.loss - 0.2 and last.accuracy > 0.8 > first.accuracy + 0.1
    assert f"validation loss {last.loss:.4f}, accuracy {last.accuracy:.1%}" in capsys.readouterr().out
    assert 20 < first.tokens < 60, "a fifth of 200 is held out"
    own, accuracy = evaluate_run(Path(job.run.dir))
    assert (own.loss, accuracy) == (pytest.approx(last.loss, rel=1e-6), last.accuracy)
    evaluation, _ = evaluate_run(Path(job.run.dir), job.data.source)
    assert evaluation.tokens == 200
    with pytest.raises(UserError, match="does not predict the next token"):
        generate_text(Path(job.run.dir), "a")


@pytest.mark.fast
def test_numbers_are_predicted_from_arrays(quick, of, alone, tmp_path):
    arrays = points()
    path = stored(tmp_path, "npz", {"x": arrays["inputs"], "y": arrays["inputs"].sum(1)})
    job = of({"name": "mlp", "sizes": [4, 16, 1], "task": "regression"}, path)
    train(job, {}, alone)
    first, last = records_of(job).evals
    assert last.loss < first.loss and last.accuracy is None


@pytest.mark.fast
def test_a_folder_of_images_trains_a_resnet_that_follows_from_it(quick, of, alone, images):
    job = of({"name": "resnet", "depth": 20}, images, steps=4, global_batch=16, microbatch=8, lr=3e-3)
    train(job, {}, alone)
    run = records_of(job).run
    assert run is not None and run.config["model.classes"] == {"value": 2, "origin": "planner"}
    assert run.config["model.channels"]["value"] == 3
    grey = open_arrays(str(images), validation=0.0, seed=0, channels=1, size=8)
    assert grey.train[0]["inputs"].shape == (1, 8, 8) and 0 < grey.train[0]["inputs"].max() < 1
    assert [grey.train[index]["labels"].item() for index in (0, 39)] == [0, 1], "classes by the order of their names"
    for part in ("train", "val"):
        (images.parent / "parted" / part).mkdir(parents=True)
        for name in ("red", "blue"):
            (images.parent / "parted" / part / name).symlink_to(images / name)
    parted = open_arrays(str(images.parent / "parted"), validation=0.5, seed=0)
    assert (len(parted.train), len(parted.validation), parted.classes) == (40, 40, 2)
    (images.parent / "parted" / "val" / "green").symlink_to(images / "red")
    with pytest.raises(UserError, match=r"has images of green, and .*train has no such class"):
        open_arrays(str(images.parent / "parted"), validation=0.5, seed=0)
    few, run_dir = images.parent / "few", Path(job.run.dir)
    shutil.copytree(images / "red", few / "red")  # would be class 0 here, and is 1
    with pytest.raises(UserError, match="few has folders of red, and the model's classes are blue, red, numbered in"):
        evaluate_run(run_dir, str(few))
    (few / "blue").mkdir()
    assert evaluate_run(run_dir, str(few))[0].tokens == 20
    (images / "blue").rename(images / "violet")
    train(replace(job, train=replace(job.train, steps=5)), {}, World.single("cpu"))
    assert [each.message for each in records_of(job).warnings] == [
        "the order of classes = red, violet is used from here on; the checkpoint was trained with blue, red"
    ]
    Image.new("RGB", (9, 8)).save(images / "red" / "3.png")
    other = replace(job, run=replace(job.run, dir=str(images.parent / "other")))
    with pytest.raises(UserError, match=r"different shapes in one batch: .*Resize images to one size \(data.size of"):
        train(other, {}, World.single("cpu"))
    sized = replace(job, data=replace(job.data, size=8), run=replace(job.run, dir=str(images.parent / "sized")))
    assert train(sized, {}, World.single("cpu")).step == 4  # what the message says
    (images / "red" / "3.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"the image .*3.png cannot be read"):
        [open_arrays(str(images), validation=0.0, seed=0).train[index] for index in range(40)]


@pytest.mark.fast
def test_images_of_16_bits_keep_their_levels(tmp_path):
    (tmp_path / "one").mkdir()
    levels = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4369
    Image.fromarray(levels).save(tmp_path / "one" / "0.png")
    for channels, size in ((1, None), (3, None), (1, 4)):
        inputs = open_arrays(str(tmp_path), validation=0.0, seed=0, channels=channels, size=size).train[0]["inputs"]
        expected = torch.arange(16).reshape(1, 4, 4).expand(channels, 4, 4) / 15
        torch.testing.assert_close(inputs, expected, rtol=1e-6, atol=1e-6)
    Image.fromarray(levels.astype(np.float32)).save(tmp_path / "one" / "0.tiff")
    with pytest.raises(UserError, match=r"0.tiff has numbers of 32 bits.*convert it to 8 or 16 bits, or give arrays"):
        open_arrays(str(tmp_path), validation=0.0, seed=0).train[1]


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(40, 8, 8, 3), (40, 3, 8, 8), (40, 8, 8)])
def test_arrays_of_bytes_are_images(quick, of, alone, tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    path = stored(tmp_path, "npz", {"images": pixels, "labels": np.arange(40) % 5})
    job = of({"name": "resnet", "depth": 20}, path, steps=1, sync_bn=True, microbatch=None)
    train(job, {}, alone)
    run = records_of(job).run
    assert run is not None and run.config["model.channels"]["value"] == (3 if len(shape) == 4 else 1)
    assert run.config["model.classes"]["value"] == 5


@pytest.mark.fast
@pytest.mark.parametrize(
    ("model", "arrays", "message"),
    [
        ({"name": "mlp", "sizes": [5, 3]}, {}, r"has inputs of shape \(4,\), model.name = 'mlp' takes 5 numbers"),
        ({"name": "mlp", "sizes": [4, 2]}, {}, "has 3 classes, the last of model.sizes is 2: give 3"),
        (
            {"name": "mlp", "sizes": [4, 1], "task": "regression"},
            {},
            "has labels, and model.name = 'mlp' is trained on targets",
        ),
        (MLP, {"labels": None, "targets": np.zeros(200)}, 'give model.task = "regression"'),
        ({"name": "resnet", "depth": 20}, {}, r"shape \(4,\), model.name = 'resnet' takes images of 3 channels"),
        ({"name": "chess"}, {"labels": None, "targets": np.zeros(200)}, "takes 773 numbers"),
        (MLP, {"labels": np.zeros(3, int)}, "200 inputs with 3 labels: give one of each"),
        (MLP, {"labels": np.zeros(200)}, "classes are whole numbers from 0 up"),
        (MLP, {"labels": None}, "holds inputs: samples are arrays `inputs` with `labels` or `targets`"),
        (MLP, {"labels": np.array(["cat"] * 200)}, r"`labels` is <U3 of shape \(200,\): give an array of numbers"),
        (MLP, {"inputs": np.array(["cat"] * 200)}, r"`inputs` is <U3 of shape \(200,\): give an array of numbers"),
        (MLP, {"inputs": np.array(5)}, r"`inputs` is int64 of shape \(\): give an array of numbers"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(quick, of, alone, tmp_path, model, arrays, message):
    given = {name: each for name, each in {**points(), **arrays}.items() if each is not None}
    with pytest.raises(UserError, match=message):
        train(of(model, stored(tmp_path, "npz", given)), {}, alone)


@pytest.mark.fast
def test_keys_of_the_other_kind_and_sources_that_are_none_are_refused(quick, of, make_job, alone, tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    (tmp_path / "empty").mkdir()
    for job, message in (
        (
            replace(of(MLP, "spirals"), data=Data(source="spirals", tokenizer="bpe:300")),
            "data.tokenizer = 'bpe:300' is of text",
        ),
        (make_job(data={"size": 32}), "data.size = 32 is of images"),
        (
            of({**MLP, "sizes": [2, 3]}, "spirals", run={"sample": "a"}),
            'run.sample = .a.: model.name = "mlp" .* writes no text: remove it',
        ),
        (of(MLP, "/nowhere.npz"), "no such file or folder"),
        (of(MLP, "spirals", size=8), "data.size = 8 is of a folder of images, which data.source = 'spirals' is not"),
        (of(MLP, tmp_path / "broken.npz", size=8), r"which data.source = '.*broken.npz' is not: remove it"),
        (of(MLP, tmp_path / "broken.npz"), "broken.npz cannot be read"),
        (of(MLP, tmp_path / "empty"), "has no folders of images by class"),
        (of(MLP, __file__), "samples are read from .npz, .npy and .safetensors"),
        *(
            (replace(of(MLP, "spirals"), data=Data(source=source)), "give the path of a file or a folder, or the name")
            for source in (5, [], ["a.npz"], {}, {0: 1}, [{"x": 1}])
        ),
    ):
        with pytest.raises(UserError, match=message):
            train(job, {}, alone)


@pytest.mark.fast
def test_text_that_is_asked_for_by_name_is_no_other_set(quick, of, alone):
    job = of({"name": "mlp", "sizes": [2, 4, 3]}, "stdlib", steps=1)
    train(job, {}, alone)
    with pytest.raises(UserError, match=r"data\.source = 'stdlib': no such file or folder"):
        train(job, {"data.source": "file"}, World.single("cpu"))
    with pytest.raises(UserError, match=r"data\.source = 'stdlib': no such file or folder"):
        evaluate_run(Path(job.run.dir), "stdlib")


@pytest.mark.parametrize("plan", [Plan(dp=2, zero=3), Plan(dp=2, memory={}), Plan(pp=2)], ids=["zero3", "memory", "pp"])
def test_ranks_train_and_tell_what_one_process_does(quick, of, tmp_path, plan):
    path = stored(tmp_path, "npz", points())
    model = {"name": "mlp", "sizes": [4, 16, 16, 3], "activation": "tanh"}
    whole = of(model, path, steps=4, run={"dir": str(tmp_path / "whole")})
    train(whole, {}, World.single("cpu"))
    cut = replace(of(model, path, steps=4), plan=plan)
    assert run_ranks(in_cache, 2, os.environ["XDG_CACHE_HOME"], cut) == [4, 4]
    assert losses_of(cut) == pytest.approx(losses_of(whole), rel=1e-5)
    assert records_of(cut).evals[-1].accuracy == records_of(whole).evals[-1].accuracy


@pytest.mark.parametrize(
    ("example", "options", "most"),
    [
        ("mlp_spirals", ["train.steps=300", "train.epochs=100"], 0.3),
        ("resnet_shapes", ["train.steps=12", "run.eval_samples=64"], 1.0),
        ("chess", ["train.steps=100"], 0.1),
    ],
)
def test_the_examples_learn(quick, alone, tmp_path, example, options, most):
    torch.manual_seed(0)
    job, origins = load_job(EXAMPLES / f"{example}.toml", [*options, f"run.dir={tmp_path / 'run'}", "run.trackers=[]"])
    train(job, origins, alone)
    evals = records_of(job).evals
    assert evals[-1].loss < min(most, evals[0].loss)
    assert (evals[-1].accuracy is None) == (example == "chess")
    again, _ = load_job(tmp_path / "run" / "resolved.toml")
    assert again.model == {**job.model, **({"classes": 3, "channels": 3} if example == "resnet_shapes" else {})}
