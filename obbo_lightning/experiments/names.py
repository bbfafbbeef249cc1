"""What parts are called in cells, tables and legends, where several stand side by side."""

from collections.abc import Iterable

from obbo_lightning.config.registry import short_name, source_file


def distinct_names(names: Iterable[str]) -> dict[str, str]:
    """The short name of each part; where two share one, with the module, file or folder that each is from.

    >>> distinct_names(["obbo", "mine.Sparse", "yours.py:Dense"])
    {'obbo': 'obbo', 'mine.Sparse': 'Sparse', 'yours.py:Dense': 'Dense'}
    >>> distinct_names(["lab.mine.Sparse", "a/yours.py:Sparse", "b/yours.py:Sparse"])
    {'lab.mine.Sparse': 'Sparse_mine', 'a/yours.py:Sparse': 'Sparse_yours_a', 'b/yours.py:Sparse': 'Sparse_yours_b'}
    """
    names = list(dict.fromkeys(names))
    found: dict[str, str] = {}
    for name in names:
        for call in (short_name, _with_file, _with_folder):  # the shortest that no other part has
            word = call(name)
            if [call(other) for other in names].count(word) == 1:
                break
        found[name] = unused(word, found.values())
    return found


def unused(word: str, taken: Iterable[str]) -> str:
    """The word, or with the first number from 2 on that makes it another than those that are taken.

    >>> unused("a", ["b"]), unused("a", ["a", "a_2"])
    ('a', 'a_3')
    """
    taken, found, number = set(taken), word, 1
    while found in taken:
        number += 1
        found = f"{word}_{number}"
    return found


def _with_file(name: str) -> str:
    file = source_file(name)
    home = file.stem if file else name.rpartition(".")[0].rpartition(".")[2]
    return f"{short_name(name)}_{home}" if home else name


def _with_folder(name: str) -> str:
    file = source_file(name)
    return f"{_with_file(name)}_{file.parent.name}" if file else name
