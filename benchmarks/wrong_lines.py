"""Single wrong lines: planted by rule in a syntax tree, or written down by hand in ``wrong_lines.yaml``."""

import ast
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

BY_HAND = Path(__file__).with_name("wrong_lines.yaml")
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    one: other
    for pair in (
        *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or), (ast.BitAnd, ast.BitOr), (ast.Lt, ast.LtE)),
        *((ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    )
    for one, other in (pair, pair[::-1])
} | dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)
NAMES = {"sum": "mean", "mean": "sum", "min": "max", "max": "min", "amax": "amin", "any": "all", "all": "any"}
SPOKEN = {"warn", "print", "add_argument", "filterwarnings", "getLogger", "setLevel", "TypeVar"}  # words for people
HARMLESS = {"strict", "stacklevel", "help", "description", "retain_graph", "allow_unused", "maintain_order", "encoding"}


@dataclass(frozen=True)
class WrongLine:
    """What stands at one place of a file, and what stands there instead.

    Attributes:
        file: relative to the project.
        start: byte of the file at which ``before`` begins.
        before: the right text.
        after: the wrong one.
        line: number of the line that differs.
        name: what went wrong, in a few words.
    """

    file: str
    start: int
    before: str
    after: str
    line: int
    name: str

    def put_into(self, text: str) -> str:
        """The file's text with the wrong line."""
        data, old = text.encode(), self.before.encode()
        if data[self.start : self.start + len(old)] != old:
            raise ValueError(f"{self.file}:{self.line} is no longer {self.before!r}")
        return (data[: self.start] + self.after.encode() + data[self.start + len(old) :]).decode()

    def __str__(self) -> str:
        said = [" ".join(text.split()) for text in (self.before, self.after)]
        return f"{self.file}:{self.line} {self.name}: {said[0]} → {said[1]}"


def by_hand(root: Path, path: Path = BY_HAND) -> tuple[list[WrongLine], list[str]]:
    """The wrong lines that were written down, and complaints about those whose right text is not there (once)."""
    found, stale = [], []
    for entry in yaml.safe_load(path.read_text()):
        text = (root / entry["file"]).read_text()
        if text.count(entry["before"]) != 1:
            stale.append(
                f"{entry['file']}: {entry['name']}: {entry['before']!r} is there {text.count(entry['before'])}×"
            )
            continue
        place = text.index(entry["before"])
        line = text.count("\n", 0, place) + 1
        start = len(text[:place].encode())
        found.append(WrongLine(entry["file"], start, entry["before"], entry["after"], line, entry["name"]))
    return found, stale


def planted(root: Path, files: Iterable[str]) -> list[WrongLine]:
    """Every wrong line that the rules make of these files, in order."""
    return [wrong for file in files for wrong in _planted_in(file, (root / file).read_text())]


def _planted_in(file: str, text: str) -> Iterator[WrongLine]:
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, name, wrong in _changes(ast.parse(text)):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        # in brackets, because what stands around it binds as it did
        after = ast.unparse(wrong) if isinstance(wrong, (ast.stmt, ast.keyword)) else f"({ast.unparse(wrong)})"
        yield WrongLine(file, first, data[first:last].decode(), after, node.lineno, name)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.AST]]:
    for node in _worth_changing(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node.test, "condition", ast.UnaryOp(ast.Not(), node.test)
        if isinstance(node, (ast.expr, ast.stmt)):
            yield from ((node, name, wrong) for name, wrong in _wrong_forms(node))


def _worth_changing(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes whose change would change a result: no words for people, no types, nothing at the top that only names."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_words(child):
                yield from _worth_changing(child)


def _is_words(node: ast.AST) -> bool:
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
        return True
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__") or any("overload" in ast.unparse(d) for d in node.decorator_list)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_words(node.value)
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in SPOKEN
    if isinstance(node, ast.keyword):
        return node.arg in HARMLESS
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__version__")


def _wrong_forms(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """A node in each of its wrong forms."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPPED and not _is_text(left, right):
            yield "operator", _with(node, op=SWAPPED[type(op)]())
        case ast.BoolOp(op=op):
            yield "and, or", _with(node, op=SWAPPED[type(op)]())
        case ast.Compare(ops=[op, *rest]) if type(op) in SWAPPED:
            yield "comparison", _with(node, ops=[SWAPPED[type(op)](), *rest])
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "sign, not", operand
        case ast.AugAssign(op=op) if type(op) in SWAPPED:
            yield "operator", _with(node, op=SWAPPED[type(op)]())
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "off by one", ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield "constant", ast.Constant(2 * value + (value == 0))
        case ast.Subscript(slice=ast.Constant(value=str() as key)):
            yield "key", _with(node, slice=ast.Constant(f"{key}_"))
        case ast.Subscript(slice=ast.Slice() as part):
            yield from (("slice", _with(node, slice=one)) for one in _wrong_slices(part))
        case ast.Expr(value=ast.Call()):
            yield "removed", ast.Pass()
        case ast.Call():
            yield from _wrong_calls(node)


def _wrong_slices(part: ast.Slice) -> Iterator[ast.AST]:
    for side in ("lower", "upper"):
        bound = getattr(part, side)
        if bound is not None:
            yield _with(part, **{side: None})
            yield _with(part, **{side: ast.BinOp(bound, ast.Add(), ast.Constant(1))})


def _wrong_calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    first = [one for one in node.args[:2] if not isinstance(one, ast.Starred)]
    if len(first) == 2 and ast.unparse(node.func) not in ("isinstance", "getattr", "hasattr"):
        yield "swapped arguments", _with(node, args=[*first[::-1], *node.args[2:]])
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in HARMLESS:
            yield "argument left out", _with(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])
    if isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
        yield "another function", _with(node, func=_with(node.func, attr=NAMES[node.func.attr]))
    if isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield "another function", _with(node, func=ast.Name(NAMES[node.func.id]))


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(getattr(node, "value", None), str) or isinstance(node, ast.JoinedStr) for node in nodes)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
