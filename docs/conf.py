"""Sphinx configuration. Build with ``python3 dev.py docs``; warnings are errors."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "howsmooth"
author = "The howsmooth developers"
project_copyright = "The howsmooth developers"
release = version = metadata.version("howsmooth")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "cli_options",
    "docstrings",
    "links",
    "native_math",
]
exclude_patterns = ["_build", "_ext", "gallery"]
smartquotes = False  # or the dashes of options become one
html_math_renderer = "native"
html_theme = "furo"
html_title = f"howsmooth {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_search_scorer = str(Path(__file__).parent / "_ext" / "scorer.js")
html_show_sourcelink = False

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

# Of a block with prompts the button copies the commands, without prompts and without output.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"

# The examples in gallery/ are run, and become pages in examples/, which is not kept.
sphinx_gallery_conf = {
    "examples_dirs": ["gallery"],
    "gallery_dirs": ["examples"],
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "reset_modules": ("matplotlib", "gallery_style.reset"),
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,  # a page that would fetch scripts
    "min_reported_time": 1,
    "image_srcset": ["2x"],
}
suppress_warnings = ["config.cache"]  # the dictionary above is none that Sphinx could compare with the last

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False
napoleon_custom_sections = [("Attributes", "params_style")]  # keeps "lower, upper" as one entry

# Nothing is fetched while building, so names of other packages have no page to point to.
_OTHERS = (
    "torch numpy np pandas pd scipy matplotlib jaxtyping transformers pathlib collections abc typing sqlite3 "
    "filelock Tensor ndarray Axes Dtype DataFrame Path Callable Sequence Mapping Iterator Any Self "
    "concurrent contextlib distributed os dict PIL random"
)
nitpick_ignore_regex = [
    (r"py:.*", rf"({'|'.join(_OTHERS.split())})\b.*"),
    (r"py:class", r"(howsmooth\..*\.)?(_T|_Plan|K|T|R)"),  # type variables
    # Types in signatures that users meet, and never name.
    (
        r"py:class",
        r"(howsmooth\..*\.)?(AbstractMeasure|BoundsTable|CoreShape|Domain|Figure|Inputs|Layers?|Model|Picture|Placement"
        r"|ProductError|Result|SoftmaxCore|Visibility|Weighting)",
    ),
    (r"py:attr", r"[A-Z]\w+\.\w+"),  # attributes stand in lists, which have no anchors
]
