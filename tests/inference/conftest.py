"""Small few-shot runs whose training data are gone, and an export."""

import shutil

import pytest
from small_runs import fit_images, fit_vectors, write_image_classes

from obbo_lightning.inference.model import export_model


@pytest.fixture(scope="session")
def image_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    data = write_image_classes(folder / "data", range(1, 11), 6)
    path = fit_images(folder, data)
    shutil.move(data, folder / "moved")
    return path


@pytest.fixture(scope="session")
def image_data(image_run):
    """Where the training data of the run are now."""
    return image_run.parents[2] / "moved"


@pytest.fixture(scope="session")
def vector_run(tmp_path_factory):
    flags = ["--problem.learn_proximity", "true", "--problem.network.widths", "[8]"]
    return fit_vectors(tmp_path_factory.mktemp("vectors"), *flags)


@pytest.fixture
def exported(image_run, tmp_path):
    export_model(image_run, tmp_path / "export")
    return tmp_path / "export"
