"""The hook of mkdocs that makes a site of this repository's pages: those outside of docs/ become pages, too, and a link leads
to the page of what it names. A link to another file leads to a copy of it.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import gallery  # noqa: E402

LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
MOVED = {"docs/README.md": "index.md", "README.md": "index.md", "docs/variants/gru-lstm.md": "variants/gru.md"}
ALWAYS = ["CONTRIBUTING.md", "CHANGELOG.md", "extensions/README.md", "checkpoints/README.md", "csrc_common/README.md",
          *gallery.FILES]  # fmt: skip
UNSEARCHED = (
    "lab/",
    "decisions/0",
    "benchmarks/",
    "CHANGELOG",
    "checkpoints/e",
)  # every page loads the index of the search
MODULES = ROOT / ".site/node_modules"
SHIM = "https://unpkg.com/iframe-worker/shim"  # of mkdocs-material, for the search of pages that are opened as files

origin: dict[str, str] = {}  # of each page: the file in the repository that its links start from


def place(file: str) -> str:
    """Where a file of the repository stands in the site."""
    if file in MOVED:
        return MOVED[file]
    if plugin := re.fullmatch(r"plugins/(\w+)/README.md", file):
        return f"variants/{gallery.variants_of(plugin[1])[0]}.md"
    if package := re.fullmatch(r"(extensions|checkpoints)/(?:.*/)?([\w-]+)/README.md", file):
        return f"{package[1]}/{package[2]}.md"
    if file.endswith(".md"):
        return file.removeprefix("docs/")
    return file.removeprefix("docs/") if file.startswith("docs/") else f"source/{file}"


def linked(file: str) -> dict[str, str]:
    """The files of the repository that a page links to, by the link's text."""
    found = {}
    for _, target, _ in LINK.findall((ROOT / file).read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
            found[target] = f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add what stands outside of docs/, what is linked from there, the gallery and KaTeX."""
    old = files.get_file_from_path("variants/gru-lstm.md")
    files.remove(old) if old else None
    todo = [*ALWAYS, *(f"docs/{f.src_uri}" for f in files.documentation_pages())]
    done: set[str] = set()
    while todo:
        file = todo.pop()
        if file in done or not (ROOT / file).is_file():
            continue  # a link that leads nowhere is a failure of the strict build
        done.add(file)
        uri = place(file)
        if file.endswith(".md"):
            origin.setdefault(uri, file)
            todo += linked(file).values()
        if files.get_file_from_path(uri) is None and not uri.startswith("variants/"):
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / file)))
    for uri, (file, text) in gallery.pages().items():
        origin[uri] = file
        if old := files.get_file_from_path(uri):
            files.remove(old)
        files.append(File.generated(config, uri, content=text))
    return files


def on_config(config: Any) -> Any:
    """Add the gallery to the navigation."""
    config.nav.insert(1, {"Gallery": gallery.navigation()})
    return config


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    uri = page.file.src_uri
    if uri.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    if uri not in origin:
        return markdown
    folder = posixpath.dirname(uri)

    def lead(link: re.Match) -> str:
        target = link[2]
        if (
            "://" in target
            or target.startswith("mailto:")
            or files.get_file_from_path(posixpath.normpath(posixpath.join(folder, target)))
        ):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin[uri]), target))
        path = f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path
        return f"{link[1]}{posixpath.relpath(place(path), folder or '.')}{link[3]}"

    return LINK.sub(lead, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load nothing from elsewhere; name the dialog of the search for screen readers."""
    up = "../" * page.url.count("/")
    output = output.replace(SHIM, f"{up}assets/iframe-worker.js")
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def on_post_build(config: Any) -> None:
    """Ship KaTeX without its script, and leave out what no page asks for, and tags in the index of the search."""
    index = Path(config.site_dir) / "search/search_index.json"
    found = json.loads(index.read_text(encoding="utf-8"))
    for section in found["docs"]:
        section["text"] = " ".join(re.sub(r"<[^>]+>", " ", section["text"]).split())
    index.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    target, katex = Path(config.site_dir) / "assets", MODULES / "katex/dist"
    shutil.copytree(katex / "fonts", target / "katex/fonts", ignore=shutil.ignore_patterns("*.ttf", "*.woff"))
    shutil.copy(katex / "katex.min.css", target / "katex")
    shutil.copy(MODULES / "iframe-worker/shim/index.js", target / "iframe-worker.js")
    for unused in (*target.rglob("*.map"), *target.rglob("lunr")):
        shutil.rmtree(unused) if unused.is_dir() else unused.unlink()
