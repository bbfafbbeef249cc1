"""Small runs whose training data are gone."""

import shutil

import pytest
from served import played, write_classes, write_table


@pytest.fixture(scope="session")
def image_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    data = write_classes(folder / "data", range(1, 11), 6)
    flags = ["--data", "images", "--data.path", str(data), "--data.image_size", "16", "--data.ways", "2"]
    path = played(folder, *flags, "--data.shots", "3", "--data.queries", "3", "--problem.network.filters", "4")
    shutil.move(data, folder / "moved")  # the tests that compare with it know where it is
    return path


@pytest.fixture(scope="session")
def table_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    write_table(folder / "train.csv", classes=range(10), each=8)
    flags = ["--data", "examples", "--data.path", str(folder / "train.csv"), "--data.ways", "2", "--data.shots", "3"]
    path = played(folder, *flags, "--problem.learn_proximity", "true", "--problem.network.widths", "[8]")
    (folder / "train.csv").unlink()
    return path
