"""ValidationBatches: disjoint folds, the same batches after a resume, and no trace in the random numbers."""

import random
import warnings
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from obbo_lightning.training.validation_batches import ValidationBatches, can_be_split, loader_of, split_into_folds

TEN = torch.arange(10)


class RandomExamples(Dataset):
    """Draws from all three generators, as transforms do."""

    def __len__(self):
        return 10

    def __getitem__(self, place):
        return place, random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002


class RandomWalk:
    """Each batch depends on all that were drawn before it in its pass."""

    def __iter__(self):
        place = (0, 0.0, 0.0, 0.0)
        for n in range(4):
            place = (n, *(a + b for a, b in zip(place[1:], RandomExamples()[n][1:], strict=True)))
            yield place


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Endless(DataLoader):
    """Loader with an iteration of its own."""

    def __iter__(self):
        while True:
            yield from super().__iter__()


def make_list(batch):
    return list(batch)


def random_loader(workers):
    return DataLoader(RandomExamples(), batch_size=2, collate_fn=make_list, shuffle=True, num_workers=workers)


def seed_globally(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def take(batches, steps, first=0):
    return [batches.take(step) for step in range(first, first + steps)]


@pytest.mark.parametrize("folds", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("shuffle", [False, True])
def test_folds_are_disjoint_and_every_pass_has_all_examples(folds, shuffle):
    batches = ValidationBatches(DataLoader(TEN, batch_size=3, shuffle=shuffle), folds=folds, seed=5)
    passes = {fold: [] for fold in range(folds)}
    for fold, batch in take(batches, folds * 4 * 5):
        passes[fold].append(batch.tolist())
    examples = {fold: set(chain(*taken)) for fold, taken in passes.items()}
    assert sorted(chain(*examples.values())) == list(range(10))
    for fold, taken in passes.items():  # every fold is cycled on its own
        length = -(-len(examples[fold]) // 3)
        for i in range(0, 3 * length, length):
            assert sorted(chain(*taken[i : i + length])) == sorted(examples[fold])
        if len(examples[fold]) > 4:
            assert (taken[:length] != taken[length : 2 * length]) == shuffle


def test_folds_are_a_function_of_seed_count_and_number_and_differ_by_at_most_one_example():
    with torch.random.fork_rng():
        folds = split_into_folds(103, 4, seed=1)
        torch.manual_seed(7)
        assert split_into_folds(103, 4, seed=1) == folds
    assert sorted(map(len, folds)) == [25, 26, 26, 26]
    for count, number, seed in ((104, 4, 1), (103, 3, 1), (103, 4, 2)):
        assert split_into_folds(count, number, seed)[0][:5] != folds[0][:5]


def test_labels_alone_divide_classes_equally():
    labels = torch.tensor([0] * 90 + [1] * 10)
    shares = [Counter(labels[rows].tolist())[1] for rows in split_into_folds(100, 4, 0, labels)]
    assert sorted(shares) == [2, 2, 3, 3]
    assert split_into_folds(100, 4, 0, labels.tolist()) == split_into_folds(100, 4, 0, labels)
    without = [sorted(Counter(labels[r].tolist())[1] for r in split_into_folds(100, 4, seed)) for seed in range(5)]
    assert any(shares != [2, 2, 3, 3] for shares in without)
    data = TensorDataset(torch.arange(100), labels)  # labels inside of the examples are not looked at
    for given, expected in ((labels, [2, 2, 3, 3]), (None, None)):
        batches = ValidationBatches(DataLoader(data, batch_size=25), labels=given)
        found = sorted(int(batch[1].sum()) for _, batch in take(batches, 4))
        plain = sorted(Counter(labels[r].tolist())[1] for r in split_into_folds(100, 4))
        assert found == (expected or plain)
    for wrong, source in ((labels[:50], DataLoader(data)), (labels, [1, 2])):
        with pytest.raises(ValueError, match="labels must be given for each example of a loader that is split, got"):
            ValidationBatches(source, folds=2, labels=wrong)


@pytest.mark.parametrize(("count", "folds"), [(2, 2), (3, 2), (19, 2), (20, 4), (1000, 4)])
def test_a_loader_has_four_folds_or_two_of_few_examples(count, folds):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = ValidationBatches(DataLoader(torch.arange(count), batch_size=count))
    assert (batches.folds, batches.held_out) == (folds, True)


def test_fold_loaders_have_the_settings_of_the_loader():
    given = DataLoader(
        TEN,
        batch_size=3,
        shuffle=True,
        num_workers=1,
        collate_fn=make_list,
        worker_init_fn=make_list,
        timeout=9,
        prefetch_factor=5,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    found = loader_of(given, [1, 2, 3])
    for name in ("batch_size", "num_workers", "collate_fn", "worker_init_fn", "timeout", "prefetch_factor"):
        assert getattr(found, name) == getattr(given, name), name
    assert found.multiprocessing_context.get_start_method() == "fork"
    assert not found.persistent_workers  # their random numbers would depend on all passes before
    assert type(found.sampler) is RandomSampler
    assert type(loader_of(DataLoader(TEN), [1]).sampler) is SequentialSampler


def test_incomplete_batches_are_dropped_where_the_loader_does_unless_nothing_is_left():
    for size, lengths in ((2, [2, 2]), (3, [3, 3]), (4, [4, 4]), (5, [5, 5]), (6, [5, 5])):
        batches = ValidationBatches(DataLoader(TEN, batch_size=size, drop_last=True, shuffle=True), folds=2)
        assert [len(batch) for _, batch in take(batches, 2)] == lengths
    batches = ValidationBatches(DataLoader(TEN, batch_size=2, drop_last=True, shuffle=True), folds=2)
    seen = [batch for step, batch in enumerate(take(batches, 40)) if not step % 2]
    assert {len(batch) for _, batch in seen} == {2}
    assert len(set(torch.cat([batch for _, batch in seen]).tolist())) == 5


def test_a_loader_without_batches_of_its_own_divides_what_its_dataset_returns():
    dataset = [[1, 2], [3], [4, 5], [6]]
    batches = ValidationBatches(DataLoader(dataset, batch_size=None, shuffle=True))
    assert batches.folds == 2
    taken = [batch for _, batch in take(batches, 4)]
    assert sorted(taken) == dataset
    assert sorted(taken[::2]) in [[dataset[i] for i in sorted(rows)] for rows in split_into_folds(4, 2)]


NOT_SPLIT = {
    "iterable": lambda: DataLoader(Numbers(), batch_size=3),
    "weighted": lambda: DataLoader(TEN, 3, sampler=WeightedRandomSampler([1.0] * 10, 10)),
    "subset": lambda: DataLoader(TEN, 3, sampler=SubsetRandomSampler(range(5))),
    "distributed": lambda: DataLoader(TEN, 3, sampler=DistributedSampler(TEN, 2, 0)),
    "replacement": lambda: DataLoader(TEN, 3, sampler=RandomSampler(TEN, replacement=True)),
    "some examples": lambda: DataLoader(TEN, 3, sampler=RandomSampler(TEN, num_samples=6)),
    "first examples": lambda: DataLoader(TEN, 3, sampler=SequentialSampler(range(5))),
    "batch sampler": lambda: DataLoader(TEN, batch_sampler=BatchSampler(SequentialSampler(TEN), 3, False)),
    "own iteration": lambda: Endless(TEN, 3),
    "list": lambda: [TEN[:3], TEN[3:]],
    "function": lambda: lambda n: TEN[n : n + 2],
    "none": lambda: None,
}


@pytest.mark.parametrize("source", NOT_SPLIT)
def test_what_cannot_be_split_has_one_fold_with_one_warning_unless_its_folds_are_named(source):
    with pytest.warns(UserWarning, match="not divided into folds, so an outer step is tested on the examples") as seen:
        batches = ValidationBatches(NOT_SPLIT[source]())
    assert len(seen) == 1
    folds = [fold for fold, _ in take(batches, 3)]
    assert (folds, batches.folds, batches.held_out) == ([0, 0, 0], 1, False)
    for folds, number, held_out in ((2, 2, True), ("new", 1, True), (1, 1, False)):
        named = ValidationBatches(NOT_SPLIT[source](), folds=folds)
        assert (named.folds, named.held_out) == (number, held_out)
        assert [fold for fold, _ in take(named, 2)] == [0, 1 % number]


def test_a_loader_whose_batches_are_new_is_not_split():
    batches = ValidationBatches(DataLoader(TEN, batch_size=5), folds="new")
    assert torch.equal(torch.cat([batch for _, batch in take(batches, 2)]), TEN)


def test_a_batch_of_a_pass_always_has_the_same_fold():
    folds = {n: set() for n in range(3)}
    for fold, batch in take(ValidationBatches([0, 1, 2], folds=2), 12):
        folds[batch].add(fold)
    assert folds == {0: {0}, 1: {1}, 2: {0}}
    assert take(ValidationBatches(lambda n: n, folds=3), 4) == [(0, 0), (1, 1), (2, 2), (0, 3)]
    assert take(ValidationBatches(None, folds=3), 4, first=2) == [(2, None), (0, None), (1, None), (2, None)]


@pytest.mark.parametrize("count", [0, 1])
def test_less_than_two_examples_are_one_fold(count):
    loader = DataLoader(list(range(count)), batch_size=2)
    with pytest.warns(UserWarning, match=rf"use at least 2 examples, got {count}"):
        batches = ValidationBatches(loader)
    assert batches.folds == 1
    if count:
        assert take(batches, 1)[0][1].tolist() == [0]
    else:
        with pytest.raises(ValueError, match=r"validation must have at least one batch, got none$"):
            batches.take(0)


def test_impossible_sources_and_folds_are_refused():
    loader = DataLoader(TEN, batch_size=2)
    with pytest.raises(ValueError, match="folds must be at most the number of examples, 10, got 11"):
        ValidationBatches(loader, folds=11)
    for wrong in (0, -1, 2.5, "old"):
        with pytest.raises(ValueError, match="folds must be an integer of at least 1, got"):
            ValidationBatches(loader, folds=wrong)
    with pytest.raises(ValueError, match="validation must be a loader or a function that returns a batch, got 3"):
        ValidationBatches(3)
    with pytest.raises(ValueError, match=r"validation must have at least one batch, got none$"):
        ValidationBatches([], folds=1).take(0)
    once = ValidationBatches(iter([1]), folds=1)
    once.take(0)
    with pytest.raises(ValueError, match="got none in pass 2: an iterator has only one"):
        once.take(1)
    state = ValidationBatches(loader, folds=2).state_dict()
    for other in (ValidationBatches(loader, folds=3), ValidationBatches([1, 2], folds=2)):
        with pytest.raises(ValueError, match="validation must have 2 folds of 2 sources to continue from this state"):
            other.load_state_dict(state)


SOURCES = {
    "loader": lambda: ValidationBatches(random_loader(0), seed=5),
    "loader in one fold": lambda: ValidationBatches(random_loader(0), folds=1, seed=5),
    "worker": lambda: ValidationBatches(random_loader(1), seed=5),
    "iterable": lambda: ValidationBatches(RandomWalk(), folds=3, seed=5),
    "function": lambda: ValidationBatches(lambda n: RandomExamples()[n], folds="new", seed=5),
}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("source", SOURCES)
def test_batches_resume_where_they_were_and_neither_depend_on_the_global_generators_nor_change_them(source):
    first, steps = SOURCES[source](), 9  # in the second pass
    seed_globally(1)
    seen, states = [], []
    for step in range(steps):
        states.append(first.state_dict())
        seen.append(first.take(step))
    after = RandomExamples()[0]
    seed_globally(1)
    assert after == RandomExamples()[0]
    for step in range(steps) if source != "worker" else (0, 3, 8):
        again = SOURCES[source]()
        again.load_state_dict(states[step])
        seed_globally(2)
        assert take(again, steps - step, first=step) == seen[step:]
    numbers = [
        one[k] for _, batch in seen for one in (batch if isinstance(batch, list) else [batch]) for k in (1, 2, 3)
    ]
    assert len(set(numbers)) == len(numbers)  # every batch of every pass has numbers of its own


def test_batches_have_a_seed():
    loader = DataLoader(TEN, batch_size=2, shuffle=True)
    first, same, other = ([b.tolist() for _, b in take(ValidationBatches(loader, seed=s), 5)] for s in (5, 5, 6))
    assert first == same != other


class Counting(Dataset):
    def __init__(self):
        self.requests = []

    def __len__(self):
        return 12

    def __getitem__(self, place):
        self.requests.append(place)
        return place


def test_folds_load_no_more_examples_than_their_batches_have():
    dataset = Counting()
    batches = ValidationBatches(DataLoader(dataset, batch_size=3, shuffle=True), folds=2)
    assert dataset.requests == []
    taken = take(batches, 5)
    assert dataset.requests == torch.cat([batch for _, batch in taken]).tolist()


def test_a_dataset_without_length_is_not_split():
    class Unsized(Dataset):
        def __getitem__(self, place):
            return place

    assert not can_be_split(DataLoader(Unsized(), sampler=SequentialSampler(TEN)))
    assert can_be_split(DataLoader(TEN, batch_size=None))
