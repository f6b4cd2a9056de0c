# SPDX-License-Identifier: Apache-2.0
"""Formulas as MathML, which browsers show themselves: no script, no fonts, no network.

GitHub shows the same formulas of the same Markdown by a script of its own.
"""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def _mathml(writer: Any, node: nodes.Element, as_block: bool) -> None:
    try:
        writer.body.append(latex2mathml.tex2mathml(node.astext(), as_block=as_block))
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
    raise nodes.SkipNode


def _inline(writer: Any, node: nodes.math) -> None:
    _mathml(writer, node, as_block=False)


def _block(writer: Any, node: nodes.math_block) -> None:
    _mathml(writer, node, as_block=True)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
