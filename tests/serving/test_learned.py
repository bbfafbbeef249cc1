"""What was learned, adapted to new classes: as in the run, alone or together, for any number of classes."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from served import bars, played, write_table
from torch import nn

from obbo_lightning import CNN4, OnlineBilevelModule, load
from obbo_lightning.networks.settled import settled
from obbo_lightning.runs.checkpoints import newest_checkpoint
from obbo_lightning.serving.inputs import Inputs, inputs_from
from obbo_lightning.streams.images import ImageFolderStream


def images_of(*stripes, each=3, seed=5):
    rng = np.random.default_rng(seed)
    return [image for number in stripes for image in bars(each, number, rng)]


def names_of(*stripes, each=3):
    return [f"stripes{number}" for number in stripes for _ in range(each)]


@pytest.fixture(scope="module")
def stream(image_run):
    data = image_run.parents[2] / "moved"
    return ImageFolderStream(str(data), image_size=16, ways=2, shots=3, queries=3)


def test_all_queries_together_are_what_the_run_evaluated(image_run, stream):
    module = OnlineBilevelModule.load_from_checkpoint(newest_checkpoint(image_run / "checkpoints"))
    model = load(image_run)
    model.inputs = Inputs()  # tasks hold what the network takes
    for task in stream.test[:3]:
        adapted = model.adapt(task["support"], task["support_labels"])
        chances = adapted.probabilities(task["query"], transductive=True)
        loss = nn.functional.nll_loss(chances.log(), task["query_labels"])
        assert float(loss) == pytest.approx(float(module.evaluate(task)["loss"]), abs=1e-5)


def test_examples_become_what_the_run_was_trained_on(image_run, stream):
    root = image_run.parents[2] / "moved"
    drawn = stream.train.source.examples.clone()
    files = [root / name / f"{i}.png" for name in stream.names for i in range(6)]
    opened = [Image.open(file) for file in files]
    made = load(image_run).inputs(opened)
    assert torch.equal(made, stream.pixels(drawn))
    arrays = [np.asarray(image) for image in opened]
    stacked = torch.from_numpy(np.stack(arrays)).unsqueeze(1)
    for same in (arrays, np.stack(arrays), stacked, stacked / 255, [a[..., None].repeat(3, -1) for a in arrays]):
        assert torch.equal(load(image_run).inputs(same), made)


def test_one_query_at_a_time_gives_what_all_at_once_give(image_run):
    adapted = load(image_run).adapt(images_of(11, 13), names_of(11, 13))
    queries = images_of(11, 13, each=9, seed=6)
    together = adapted.probabilities(queries)
    alone = torch.cat([adapted.probabilities([query]) for query in queries])
    assert torch.allclose(alone, together, atol=1e-6, rtol=0)
    mixed = adapted.probabilities(queries, transductive=True)
    assert not torch.allclose(adapted.probabilities(queries[:9], transductive=True), mixed[:9], atol=1e-4)


def test_the_norms_of_an_adapted_network_are_those_of_its_support():
    torch.manual_seed(0)
    network, support = CNN4(ways=3, filters=4, image_size=16), torch.randn(9, 3, 16, 16)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        assert torch.allclose(settled(network, support)(support), network(support), atol=1e-5)
    assert set(network.state_dict()) == set(before)  # not changed


def test_a_norm_that_is_used_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.norm(x))

    with pytest.raises(ValueError, match="uses a batch norm twice: predict all queries together"):
        settled(Twice(), torch.randn(5, 4))


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_any_number_of_classes_and_of_examples_of_each(image_run, classes):
    stripes = range(11, 11 + classes)
    support = [image for i, number in enumerate(stripes) for image in images_of(number, each=1 + i)]
    labels = [(number, "stripes") for i, number in enumerate(stripes) for _ in range(1 + i)]  # anything hashable
    adapted = load(image_run).adapt(support, labels, steps=3)
    assert adapted.classes == [(number, "stripes") for number in stripes]
    chances = adapted.probabilities(images_of(*stripes))
    assert chances.shape == (3 * classes, classes)
    assert torch.allclose(chances.sum(-1), torch.ones(3 * classes))
    assert set(adapted.predict(images_of(*stripes))) <= set(adapted.classes)


def test_more_classes_than_in_training_share_the_learned_rows(image_run):
    model = load(image_run)
    wider = model._problem(model.inputs(images_of(11)), 5).network.template
    learned = model.outer["linear.weight"]
    assert torch.equal(wider.linear.weight, learned[[0, 1, 0, 1, 0]])
    assert torch.equal(wider.blocks[0][0].weight, model.outer["blocks.0.0.weight"])


def test_steps_and_lr_are_those_of_the_run_unless_others_are_asked_for(image_run):
    model, support, labels = load(image_run), images_of(11, 13), names_of(11, 13)
    weights = [
        model.adapt(support, labels, **settings).network.linear.weight
        for settings in ({}, {"steps": 2, "lr": 0.1}, {"steps": 3}, {"lr": 0.2})
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


def test_vectors_are_standardised_as_in_training_and_the_learned_proximity_is_used(table_run):
    model = load(table_run)
    module = OnlineBilevelModule.load_from_checkpoint(newest_checkpoint(table_run / "checkpoints"))
    proximity = float(module.outer.detach()[0, -1].exp())
    assert model.about["with"] == {"proximity": pytest.approx(proximity), "learn_proximity": False}
    assert proximity != 0.5  # it was learned
    mean, deviation = (np.array(model.about["inputs"][name]) for name in ("mean", "deviation"))
    given = np.array([[150.0, -5.0], [120.0, -2.0], [151.0, -5.5]])
    assert torch.allclose(model.inputs(given), torch.tensor((given - mean) / deviation).float())
    adapted = model.adapt(given, ["five", "two", "five"], steps=20)
    assert adapted.predict([[152.0, -5.1], [119.0, -1.0]]) == ["five", "two"]


OWN = """
import torch
from torch import nn

class Frozen(nn.Module):
    '''Two outputs, whatever the tasks are; norms that keep statistics, dropout, and a layer that does not learn.'''
    def __init__(self, shape: list[int]):
        super().__init__()
        self.still = nn.Linear(shape[0], 6).requires_grad_(False)
        self.body = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2))
    def forward(self, x):
        return self.body(self.still(x))
"""


def test_an_own_network_behaves_as_evaluated_and_says_what_it_cannot_do(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    write_table(tmp_path / "train.csv", classes=range(10), each=8)
    flags = ["--data", "examples", "--data.path", str(tmp_path / "train.csv"), "--data.ways", "2", "--data.shots", "3"]
    run = played(tmp_path, *flags, "--problem.network", f"{tmp_path / 'own.py'}:Frozen")
    model = load(run)
    module = OnlineBilevelModule.load_from_checkpoint(newest_checkpoint(run / "checkpoints"))
    task = {"support": torch.randn(6, 2), "support_labels": torch.arange(2).repeat(3)}
    task |= {"query": torch.randn(8, 2), "query_labels": torch.arange(2).repeat(4)}
    model.inputs = Inputs()
    chances = model.adapt(task["support"], task["support_labels"]).probabilities(task["query"], transductive=True)
    loss = nn.functional.nll_loss(chances.log(), task["query_labels"])
    assert float(loss) == pytest.approx(float(module.evaluate(task)["loss"]), abs=1e-5)
    with pytest.raises(ValueError, match="labels must be of 2 classes for a network whose class has no argument ways"):
        model.adapt(task["support"], [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([np.zeros((8, 8), np.int64)], "an image must be of uint8, or of floats between 0 and 1, got int64"),
        (torch.full((2, 1, 8, 8), 3.0), "an image of floats must lie between 0 and 1"),
        (np.zeros((2, 8, 8, 4), np.uint8), "got ndarray of uint8 [8, 8, 4]"),
        (np.zeros((8, 8), np.uint8), "images must have 3 or 4 axes"),
        ([], "images must not be empty"),
    ],
)
def test_images_that_cannot_be_taken_are_refused(image_run, given, message):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the message is compared as it is
        load(image_run).inputs(given)
    assert message in str(refusal.value)


def test_labels_that_cannot_be_adapted_to_are_refused(image_run):
    with pytest.raises(ValueError, match="labels must be of 2 classes or more, got 1"):
        load(image_run).adapt(images_of(11), ["a"] * 3)
    with pytest.raises(ValueError, match="labels must be one for each example, got 4 and 3 examples"):
        load(image_run).adapt(images_of(11), list("abab"))


def test_inputs_that_a_stream_does_not_name_are_refused():
    with pytest.raises(ValueError, match=r"inputs.kind must be one of images, examples, got 'sounds'"):
        inputs_from({"kind": "sounds"})
    with pytest.raises(ValueError, match="inputs of kind images must have deviation, and have not"):
        inputs_from({"kind": "images", "shape": [1, 16, 16], "mean": [0.5]})
    with pytest.raises(ValueError, match="does not say how anything else becomes one"):
        inputs_from(None)([[1, 2]])


def test_loading_needs_no_lightning(image_run):
    script = (
        "import sys, numpy, obbo_lightning as obbo\n"
        f"model = obbo.load({str(image_run)!r})\n"
        "images = numpy.random.default_rng(0).integers(0, 256, (4, 20, 20), dtype=numpy.uint8)\n"
        "model.adapt(images, [0, 1, 0, 1]).predict(images)\n"
        "print(sorted({'lightning', 'pytorch_lightning', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
