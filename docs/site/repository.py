# SPDX-License-Identifier: Apache-2.0
"""Links from a page to files and folders of the repository lead to pages of the site.

The same Markdown is read on a code host, where such links show the file. Here a source that some
page links to gets a page of its own, under source/, and a folder gets a list of its files.
"""

import html
import pathlib
import posixpath
import subprocess
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Documents outside of docs/ that a page of the site includes.
INCLUDED = {"CONTRIBUTING.md": "project/contributing", "CHANGELOG.md": "project/changelog"}


def _linked(env: BuildEnvironment) -> dict[str, set[str]]:
    """What each document links to, as paths from the root of the repository."""
    if not hasattr(env, "linked_sources"):
        env.linked_sources = {}
    return env.linked_sources


class LinkSources(SphinxTransform):
    """Replaces what MyST makes of links to files that are no pages."""

    default_priority = 5

    def apply(self, **_: Any) -> None:
        kinds = (addnodes.download_reference, addnodes.pending_xref)
        for node in list(self.document.findall(lambda node: isinstance(node, kinds))):
            if node.get("reftype") == "myst":
                self._replace(node)

    def _replace(self, node: nodes.Element) -> None:
        target, _, anchor = node["reftarget"].partition("#")
        if isinstance(node, addnodes.pending_xref) and node.get("refdomain") == "doc":
            # MyST takes any Markdown for a page, and gives its path without the suffix.
            path, anchor = pathlib.Path(f"{target}.md"), node.get("reftargetid")
        else:
            path = pathlib.Path(self.env.relfn2path(target, self.env.docname)[1])
        if not path.is_absolute() or not target or not path.exists():
            return
        name = path.resolve().relative_to(ROOT).as_posix()
        if name in INCLUDED:
            replacement = addnodes.pending_xref(
                refdomain="doc",
                reftype="myst",
                reftarget=INCLUDED[name],
                reftargetid=anchor or None,
                refdoc=self.env.docname,
                refexplicit=True,
            )
            replacement += node.children
        else:
            _linked(self.env).setdefault(self.env.docname, set()).add(name)
            page = posixpath.relpath(f"source/{name}.html", posixpath.dirname(self.env.docname))
            replacement = nodes.reference("", "", *node.children, refuri=page, internal=True)
        replacement.source, replacement.line = node.source, node.line
        node.replace_self(replacement)


def _listed(folder: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in found.splitlines() if posixpath.dirname(name) == folder)


def _source(app: Sphinx, name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(name, text).aliases[0]
    except ClassNotFound:
        first = text.partition("\n")[0]
        lexer = "python" if "python" in first else "bash" if "bash" in first else "text"
    return app.builder.highlighter.highlight_block(text, lexer, linenos=False)


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    names = set().union(*_linked(app.env).values())
    folders = {name for name in names if (ROOT / name).is_dir()}
    for folder in sorted(folders):
        files = _listed(folder)
        names.update(files)
        base = posixpath.basename(folder)
        links = (
            f'<li><a href="{base}/{posixpath.basename(name)}.html">{posixpath.basename(name)}</a>'
            for name in files
        )
        body = f"<h1>{html.escape(folder)}</h1><ul>{''.join(links)}</ul>"
        yield f"source/{folder}", {"title": folder, "body": body}, "page.html"
    for name in sorted(names - folders):
        body = f"<h1>{html.escape(name)}</h1>{_source(app, name)}"
        yield f"source/{name}", {"title": name, "body": body}, "page.html"


def _forget(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    _linked(env).pop(docname, None)


def _merge(app: Sphinx, env: BuildEnvironment, docnames: list[str], other: Any) -> None:
    _linked(env).update({name: _linked(other).get(name, set()) for name in docnames})


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(LinkSources)
    app.connect("html-collect-pages", _pages)
    app.connect("env-purge-doc", _forget)
    app.connect("env-merge-info", _merge)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
