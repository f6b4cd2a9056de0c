# SPDX-License-Identifier: Apache-2.0
"""The documentation site. `make docs` builds it: docs/*.md, and the references from the sources."""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

project = "Backfold"
copyright = "the authors of Backfold, Apache-2.0"
release = re.search(r"project\(backfold VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]

extensions = [
    "breathe",
    "mathml",
    "myst_parser",
    "repository",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["evidence", "site"]

# As GitHub reads Markdown: formulas between dollars and in blocks, headings that can be linked to.
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

toc_object_entries_show_parents = "hide"

# Docstrings write code and names of arguments between single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

breathe_projects = {"backfold": str(ROOT / "build" / "docs-headers" / "xml")}
breathe_default_project = "backfold"
cpp_maximum_signature_line_length = 88
# Each header opens the namespace again.
suppress_warnings = ["duplicate_declaration.cpp"]

# Blocks of Markdown that name no language are output, and layouts of bytes.
highlight_language = "none"

html_theme = "furo"
html_title = "Backfold"
html_math_renderer = "mathml"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"
