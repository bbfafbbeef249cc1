"""A hook of mkdocs: files of the repository that a page links to become pages of the site.

The documents are read in the repository, where ``../examples/my_ridge.py`` is a file, and on the site, which has
the folder ``docs`` only. So the file becomes a page with its text, and the link leads there.
"""

import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")
# Documents of the repository that have a place of their own on the site.
PLACES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".html": "html", ".csv": "text"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside of ``docs`` that a page links to."""
    root = Path(config.config_file_path).parent
    sources = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()}
    sources |= {place: name for name, place in PLACES.items() if place != "index.md"}
    for place in ("changelog.md", "contributing.md"):
        files.append(File.generated(config, place, content=(root / sources[place]).read_text()))
    linked = {path for source in sources.values() for path in _linked(root, source)}
    for path in sorted(linked - set(PLACES)):
        if not path.startswith("docs/"):
            files.append(File.generated(config, f"files/{path}.md", content=_shown(root / path, path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where their files are on the site."""
    root, place = Path(config.config_file_path).parent, page.file.src_uri
    source = {v: k for k, v in PLACES.items() if v != "index.md"}.get(place, f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        path = _path(root, source, match[1])
        if path is None or (path.startswith("docs/") and source.startswith("docs/")):
            return match[1]
        target = PLACES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}.md")
        return posixpath.relpath(target, PurePosixPath(place).parent)

    return LINK.sub(moved, markdown)


def _linked(root: Path, source: str) -> set[str]:
    """What the document links to, as paths of the repository."""
    found = (_path(root, source, target) for target in LINK.findall((root / source).read_text()))
    return {path for path in found if path}


def _path(root: Path, source: str, target: str) -> str | None:
    """Where a link of the document leads, None where that is no file of the repository."""
    path = posixpath.normpath(PurePosixPath(source).parent / target)
    return path if not path.startswith("..") and (root / path).exists() else None


def _shown(file: Path, path: str) -> str:
    """A file as a page: its text, or what a folder holds."""
    if file.is_dir():
        names = sorted(f"{one.name}{'/' if one.is_dir() else ''}" for one in file.iterdir() if one.name[0] not in "._")
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````\n"
