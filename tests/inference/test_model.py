"""Learned models: adaptation to new classes as in the run, for any number of classes, inductive or transductive."""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_runs import fit_vectors, save_few_shot_checkpoint, striped_images
from torch import nn

from obbo_lightning import OnlineBilevelModule, load_model
from obbo_lightning.inference.inputs import Inputs
from obbo_lightning.inference.model import AdaptedClassifier, resize_classifier
from obbo_lightning.networks import MLP
from obbo_lightning.runs.provenance import newest_checkpoint
from obbo_lightning.solvers import ExactSolution
from obbo_lightning.streams.few_shot.stored import ImageFolderStream


def images_of(*stripes, each=3, seed=5):
    rng = np.random.default_rng(seed)
    return [image for number in stripes for image in striped_images(each, number, rng)]


def require_evaluated(model, module, task):
    """Transductive predictions for a task, which holds what the network takes, have the loss of the evaluation."""
    model.inputs = Inputs()
    probabilities = model.adapt(task["support"], task["support_labels"]).probabilities(task["query"], transductive=True)
    loss = nn.functional.nll_loss(probabilities.log(), task["query_labels"])
    assert float(loss) == pytest.approx(float(module.evaluate(task)["loss"]), abs=1e-5)


def adapt_by_hand(network, x, y, proximity, lr=0.2, steps=3):
    """Gradient descent on cross-entropy + γ/2 ‖β − λ‖² with plain torch."""
    first = [p.detach().clone() for p in network.parameters()]
    for _ in range(steps):
        loss = nn.functional.cross_entropy(network(x), y)
        distance = sum((p - q).square().sum() for p, q in zip(network.parameters(), first, strict=True))
        gradients = torch.autograd.grad(loss + 0.5 * proximity * distance, list(network.parameters()))
        with torch.no_grad():
            for p, g in zip(network.parameters(), gradients, strict=True):
                p -= lr * g
    return network


@pytest.mark.parametrize(
    ("batch_size", "options", "proximity", "asked"),
    [(None, {}, 0.3, {}), (4, {}, 0.3, {}), (None, {"learn_proximity": True}, 0.7, {"lr": 0.5, "steps": 5})],
)
def test_adaptation_runs_the_inner_solver_on_all_examples_from_lambda(tmp_path, batch_size, options, proximity, asked):
    problem, outer = save_few_shot_checkpoint(tmp_path / "run.ckpt", batch_size=batch_size, **options)
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    model = load_model(tmp_path / "run.ckpt")
    adapted = model.adapt(x.numpy(), ["b", "a", "b", "a", "b", "b"], **asked)
    assert adapted.classes == ["b", "a"]  # in the order in which they come
    network = adapt_by_hand(problem.loaded_network(outer), x, torch.tensor([0, 1, 0, 1, 0, 0]), proximity, **asked)
    with torch.no_grad():
        expected = network(x).softmax(-1)
    assert torch.allclose(adapted.probabilities(x.numpy()), expected, atol=1e-6)
    assert adapted.predict(x.numpy()) == [["b", "a"][i] for i in expected.argmax(-1)]
    assert (model.metadata["seed"], model.metadata["round"], model.title) == (5, 7, "MLP after 7 rounds")
    assert model.metadata["init_args"]["proximity"] == pytest.approx(proximity)


def test_transductive_predictions_are_those_of_the_runs_evaluation(image_run, image_data):
    stream = ImageFolderStream(str(image_data), image_size=16, ways=2, shots=3, queries=3)
    module = OnlineBilevelModule.load_from_checkpoint(newest_checkpoint(image_run / "checkpoints"))
    for task in stream.test[:3]:
        require_evaluated(load_model(image_run), module, task)


def test_inductive_predictions_do_not_depend_on_the_other_queries(image_run):
    adapted = load_model(image_run).adapt(images_of(11, 13), [11] * 3 + [13] * 3)
    queries = images_of(11, 13, each=9, seed=6)
    together = adapted.probabilities(queries)
    alone = torch.cat([adapted.probabilities([query]) for query in queries])
    assert torch.allclose(alone, together, atol=1e-6, rtol=0)
    mixed = adapted.probabilities(queries, transductive=True)
    assert not torch.allclose(adapted.probabilities(queries[:9], transductive=True), mixed[:9], atol=1e-4)


@pytest.mark.parametrize(("transductive", "sizes"), [(False, [256, 256, 88]), (True, [600])])
def test_only_inductive_queries_are_split_into_batches(transductive, sizes):
    seen = []

    class Recorder(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x

    learned = SimpleNamespace(prepare=lambda queries: queries)
    adapted = AdaptedClassifier(learned, [0, 1], Recorder(), torch.zeros(1, 2))
    assert isinstance(adapted.network, Recorder)
    seen.clear()
    queries = torch.randn(600, 2)
    assert torch.equal(adapted.probabilities(queries, transductive), queries.softmax(-1))
    assert seen == sizes


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_any_number_of_classes_and_of_examples_of_each(image_run, classes):
    stripes = range(11, 11 + classes)
    support = [image for i, number in enumerate(stripes) for image in images_of(number, each=1 + i)]
    labels = [(number, "stripes") for i, number in enumerate(stripes) for _ in range(1 + i)]  # anything hashable
    adapted = load_model(image_run).adapt(support, labels, steps=3)
    assert adapted.classes == [(number, "stripes") for number in stripes]
    probabilities = adapted.probabilities(images_of(*stripes))
    assert probabilities.shape == (3 * classes, classes)
    assert torch.allclose(probabilities.sum(-1), torch.ones(3 * classes))
    assert set(adapted.predict(images_of(*stripes))) <= set(adapted.classes)


OWN_NETWORK = """
from torch import nn

class PartlyFrozen(nn.Module):
    '''Two outputs for any task; batch norm with running statistics, dropout, and a layer that is not trained.'''
    def __init__(self, shape: list[int]):
        super().__init__()
        self.frozen = nn.Linear(shape[0], 6).requires_grad_(False)
        self.body = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2))
    def forward(self, x):
        return self.body(self.frozen(x))
"""


def test_own_network_needs_trust_and_predicts_as_evaluated(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN_NETWORK)
    run = fit_vectors(tmp_path, "--problem.network", f"{own}:PartlyFrozen")
    own.write_text(OWN_NETWORK + "# so that it is not loaded yet\n")
    with pytest.raises(ValueError, match=r"own\.py:PartlyFrozen.*load_model\(.*, trust=True\)"):
        load_model(run)
    model = load_model(run, trust=True)
    module = OnlineBilevelModule.load_from_checkpoint(newest_checkpoint(run / "checkpoints"), trust=True)
    task = {"support": torch.randn(6, 2), "support_labels": torch.arange(2).repeat(3)}
    task |= {"query": torch.randn(8, 2), "query_labels": torch.arange(2).repeat(4)}
    require_evaluated(model, module, task)
    with pytest.raises(ValueError, match="labels must be of 2 classes for a network whose class has no argument ways"):
        model.adapt(task["support"], [0, 1, 2, 0, 1, 2])


def test_unusable_labels_and_settings_are_refused(tmp_path):
    save_few_shot_checkpoint(tmp_path / "x.ckpt")
    model = load_model(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="labels must have 2 classes or more, got 1"):
        model.adapt(np.zeros((3, 2)), ["a"] * 3)
    with pytest.raises(ValueError, match="labels must be one for each example, got 4 and 3 examples"):
        model.adapt(np.zeros((3, 2)), list("abab"))
    model.solver = ExactSolution()
    for name, value in (("steps", 3), ("lr", 0.1)):
        with pytest.raises(ValueError, match=f"{name} cannot be chosen for the inner solver ExactSolution"):
            model.adapt(np.zeros((2, 2)), [0, 1], **{name: value})


def test_loading_needs_no_lightning(image_run):
    script = (
        "import sys, numpy, obbo_lightning as obbo\n"
        f"model = obbo.load_model({str(image_run)!r})\n"
        "images = numpy.random.default_rng(0).integers(0, 256, (4, 20, 20), dtype=numpy.uint8)\n"
        "model.adapt(images, [0, 1, 0, 1]).predict(images)\n"
        "print(sorted({'lightning', 'pytorch_lightning', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_classes_take_the_learned_rows_in_turn(dtype, classes):
    make = partial(MLP, ways=3, shape=[2], widths=[4])
    network = make().to(dtype)
    before = torch.get_rng_state()
    resized = resize_classifier(network, make, 3, classes).state_dict()
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is unchanged
    rows = torch.arange(classes) % 3
    for name, learned in network.state_dict().items():
        assert resized[name].dtype == dtype
        assert torch.equal(resized[name], learned[rows] if len(learned) == 3 else learned), name


class Square(nn.Module):
    def __init__(self, ways=2):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ways, ways))


def test_networks_that_cannot_be_resized_are_refused():
    make = partial(Square, ways=2)
    with pytest.raises(ValueError, match=r"weight of the network is \[2, 2\], and with .* \[3, 3\]"):
        resize_classifier(make(), make, 2, 3)
    for other in (None, Square):
        with pytest.raises(ValueError, match="labels must be of 2 classes for a network whose class has no"):
            resize_classifier(make(), other, 2, 3)
