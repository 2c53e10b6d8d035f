# SPDX-License-Identifier: Apache-2.0
"""What mkdocs needs beyond mkdocs.yml. Links of a page that leave docs/ (to an example, a header, a
record) lead to a page with that file, so that every link is checked; CONTRIBUTING.md and
CHANGELOG.md are pages of the site. A public name without a docstring is a warning, which fails a
strict build."""

import logging
import os
import pathlib
import re

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")  # of the top directory, with a place in the navigation
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".h": "cpp", ".hpp": "cpp", ".cpp": "cpp", ".c": "c", ".sh": "bash"}

log = logging.getLogger("mkdocs.hooks.sagebwd")


def _target(page, link):
    """The file that a link names, relative to the top directory; None for addresses."""
    if "://" in link or link.startswith("mailto:"):
        return None
    return os.path.relpath((page.parent / link).resolve(), ROOT)


def _address(path):
    """Where the site has a file of the repository."""
    if path in PAGES:
        return path
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def _source_page(path):
    place = ROOT / path
    if place.is_dir():
        names = [f"- `{entry.name}`" for entry in sorted(place.iterdir())]
        return f"# {path}\n\n" + "\n".join(names)
    if place.suffix == ".md":
        return place.read_text()
    return f"# {path}\n\n````{LANGUAGES.get(place.suffix, '')}\n{place.read_text()}\n````\n"


def _rewritten(markdown, page, own):
    def link(match):
        path = _target(page, match[2])
        if path is None or not (ROOT / path).exists():
            return match[0]  # mkdocs complains of the latter
        return match[1] + os.path.relpath(_address(path), os.path.dirname(own) or ".") + match[3]

    return LINK.sub(link, markdown)


def on_files(files, config):
    wanted = set(PAGES)
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES)]
    for page in pages:
        for _, link, _ in LINK.findall(page.read_text()):
            path = _target(page, link)
            if path and (ROOT / path).exists() and not _address(path).startswith(".."):
                if not path.startswith("docs/") and path != "README.md":
                    wanted.add(path)
    for path in sorted(wanted):
        address = _address(path)
        files.append(File.generated(config, address, content=_source_page(path)))
        if address.startswith("source/"):
            files.get_file_from_path(address).inclusion = _not_in_nav()
    return files


def _not_in_nav():
    from mkdocs.structure.files import InclusionLevel

    return InclusionLevel.NOT_IN_NAV


def on_page_markdown(markdown, page, config, files):
    own = page.file.src_uri
    if own.startswith("source/"):
        return markdown
    return _rewritten(markdown, (ROOT if own in PAGES else DOCS) / own, own)


def on_post_build(config):
    """Every name that an API page documents has a docstring, and so have its public members."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "python"])
    package = loader.load("sagebwd")
    loader.resolve_aliases()
    for page in sorted((DOCS / "api").glob("*.md")):
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.M):
            for thing in _with_members(package[name.removeprefix("sagebwd.")]):
                if not thing.has_docstring:
                    log.warning(f"{page.name}: {thing.path} has no docstring")


def _with_members(thing):
    thing = thing.final_target if thing.is_alias else thing
    yield thing
    if thing.is_class:
        for name, member in thing.members.items():
            if member.is_function and not name.startswith("_") and name != "extra_repr":
                yield member
