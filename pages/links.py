"""Hook of mkdocs: add a page to the site for each file or folder of the repository that a document links to.

The documents are read in the repository, where ``../examples/my_ridge.py`` is a file, and on the site, which has only
the pages of the folder ``docs``. So the hook adds a page with the text of each linked file, a page with the contents of
each linked folder, and points the links to these pages.
"""

import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")
# Documents outside of docs/ that have a page of their own.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".html": "html", ".csv": "text"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every linked file or folder that mkdocs does not copy."""
    root = Path(config.config_file_path).parent
    sources = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()}
    sources |= {page: name for name, page in PAGES.items() if page != "index.md"}
    for page in ("changelog.md", "contributing.md"):
        files.append(File.generated(config, page, content=(root / sources[page]).read_text()))
    linked = {path for source in sources.values() for path in _linked_paths(root, source)}
    for path in sorted(linked - set(PAGES)):
        if not _is_shown(root, path):
            files.append(File.generated(config, f"files/{path}.md", content=_as_page(root / path, path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to the pages that `on_files` has added."""
    root, uri = Path(config.config_file_path).parent, page.file.src_uri
    source = {v: k for k, v in PAGES.items() if v != "index.md"}.get(uri, f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        path = _path(root, source, match[1])
        if path is None or (_is_shown(root, path) and source.startswith("docs/")):
            return match[1]
        target = PAGES.get(path) or (path.removeprefix("docs/") if _is_shown(root, path) else f"files/{path}.md")
        return posixpath.relpath(target, PurePosixPath(uri).parent)

    return LINK.sub(moved, markdown)


def _is_shown(root: Path, path: str) -> bool:
    """Return whether mkdocs copies a path: the files of docs/, but not its folders."""
    return path.startswith("docs/") and not (root / path).is_dir()


def _linked_paths(root: Path, source: str) -> set[str]:
    """Return the paths in the repository that a document links to."""
    found = (_path(root, source, target) for target in LINK.findall((root / source).read_text()))
    return {path for path in found if path}


def _path(root: Path, source: str, target: str) -> str | None:
    """Return the path that a link of a document points to; None where that is not a file of the repository."""
    path = posixpath.normpath(PurePosixPath(source).parent / target)
    return path if not path.startswith("..") and (root / path).exists() else None


def _as_page(file: Path, path: str) -> str:
    """Return the text of a file, or the contents of a folder, as Markdown."""
    if file.is_dir():
        names = sorted(f"{one.name}{'/' if one.is_dir() else ''}" for one in file.iterdir() if one.name[0] not in "._")
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````\n"
