# SPDX-License-Identifier: Apache-2.0
"""What the page is made with: a template engine, and a chart library that goes into the page."""

from __future__ import annotations

import base64
import functools
import gzip
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2


def _needs(package: str) -> ImportError:
    return ImportError(
        f"a report's page needs {package}, which is not installed: pip install 'backfold[page]'"
    )


def templates(filters: Mapping[str, Callable]) -> jinja2.Environment:
    """The package's templates, in which names from a program cannot become markup."""
    try:
        import jinja2
    except ImportError as error:
        raise _needs("jinja2") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("backfold._page", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(filters)
    return environment


@functools.cache
def compressed_charts() -> str:
    """Plotly's script, gzipped, in base64: 2 MB of a page instead of 5."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise _needs("plotly") from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
