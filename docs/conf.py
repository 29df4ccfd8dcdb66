"""The build of the documentation: `make docs`. It needs no network, and a warning is an error.

Why it is made like this: `internals/adr/0029-the-documentation-site.md`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent / "src")]

import gradwire  # noqa: E402

project = "gradwire"
author = "the gradwire authors"
copyright = author
release = version = gradwire.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "example_pages",
    "references",
    "root_files",
    "signatures",
]
exclude_patterns = ["_build", "_ext", "scripts", "examples/programs/index.rst"]
nitpicky = True

# Markdown
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

# Docstrings: Google style. Names in single backticks become links where there is something to link to.
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", r".*")]
autoclass_content = "both"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
add_module_names = False
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False

# Other projects. The inventories in this folder list what the pages link to, so that the result is the same with and
# without a network. `make docs-links` reads those of the projects instead.
_ONLINE = bool(os.environ.get("GRADWIRE_DOCS_ONLINE"))
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", None if _ONLINE else "_inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable/", None if _ONLINE else "_inventories/torch.txt"),
}
intersphinx_disabled_reftypes = ["std:*"]

# Examples are shown, not run: `docs/scripts/run_examples.py` runs them and stores what they print.
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "examples/programs",
    "plot_gallery": False,
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"__init__\.py",
    "copyfile_regex": r"",
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "min_reported_time": 10**9,
    "write_computation_times": False,
    "backreferences_dir": None,
    "remove_config_comments": True,
}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .go"

html_theme = "furo"
html_title = f"gradwire {release}"
html_static_path = ["_static"]
html_css_files = ["gradwire.css"]
html_favicon = "_static/mark.svg"
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {
    "light_logo": "wordmark-light.svg",
    "dark_logo": "wordmark-dark.svg",
    "sidebar_hide_name": True,
    "navigation_with_keys": True,
    "light_css_variables": {
        "color-brand-primary": "#b3401a",
        "color-brand-content": "#b3401a",
        "color-brand-visited": "#8a3a6e",
    },
    "dark_css_variables": {
        "color-brand-primary": "#ff9166",
        "color-brand-content": "#ff9166",
        "color-brand-visited": "#d59ac3",
    },
}

linkcheck_timeout = 20
linkcheck_retries = 2
