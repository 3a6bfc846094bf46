"""How Sphinx builds the site: python -m sphinx -ETW --keep-going docs build/docs."""

import os
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import jax_flash

project = "jax_flash"
author = "the jax_flash authors"
version = release = jax_flash.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"jax_flash {version}"
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Everywhere but in cells and blocks that name their language.
highlight_language = "text"

# Pages are read on GitHub, too: pictures in tables are HTML there, and links go to headings.
myst_enable_extensions = ["amsmath", "dollarmath", "html_image"]
myst_heading_anchors = 3
# Formulas are set by MathJax in the browser. Without a network they stay TeX, unless the build names a copy at hand:
# -D mathjax_path=URL.
mathjax4_config = {"output": {"displayOverflow": "linebreak", "matchFontHeight": False}}

# Pages come out alike on machines with and without a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Notebooks are text without results: a page shows what its cells gave in this build, and a cell that fails ends it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 240  # seconds a cell
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables that cells make

# Docstrings are written for help(): what is in single backquotes is code.
default_role = "code"
napoleon_numpy_docstring = False
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    "ArrayLike": "ArrayLike",
    "jax.lax.PrecisionLike": "jax.lax.PrecisionLike",
}
maximum_signature_line_length = 100  # longer signatures get a line for each parameter


def shorten_signature(_app: Sphinx, *args: Any) -> tuple[str, str]:
    """Names type aliases in unions, too, where Sphinx writes how it holds them."""
    *_, signature, returns = args
    return re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", signature or ""), returns


def link_pictures(_app: Sphinx, page: nodes.document, _name: str) -> None:
    """Gives each picture a size: Sphinx links those that have one to their file."""
    for picture in page.findall(nodes.image):
        if not {"width", "height"} & picture.attributes.keys():
            picture["scale"] = 100


def setup(app: Sphinx) -> None:
    """Connects the handlers above."""
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("doctree-resolved", link_pictures)
