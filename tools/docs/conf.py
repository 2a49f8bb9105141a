"""Settings of Sphinx for the site (`bash tools/docs.sh`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpigossip import __version__ as version  # noqa: E402, F401

project = "mpigossip"
author = copyright = "The mpigossip authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"mpigossip {version}"
html_static_path = ["static"]
html_css_files = ["dark.css"]
html_show_sphinx = False
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
default_role = "code"
highlight_language = "none"
