"""How does Sphinx build the site? `make docs` calls it, by tools/build_docs.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

# Sphinx reads a copy of docs/ beside links to the other folders: tools/build_docs.py makes both.
ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import cuflash  # noqa: E402

project = "cuflash"
author = "The cuflash developers"
project_copyright = author
version = release = cuflash.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_templates"]
templates_path = ["_templates"]
nitpicky = True  # a name that no page and no inventory has is an error
default_role = "code"
myst_heading_anchors = 4

intersphinx_mapping = {
    name: (address, f"_inventories/{name}.inv")
    for name, address in {
        "numpy": "https://numpy.org/doc/stable/",
        "scipy": "https://docs.scipy.org/doc/scipy/",
        "cupy": "https://docs.cupy.dev/en/stable/",
    }.items()
}

autodoc_typehints = "none"  # docstrings have shapes and dtypes
autodoc_preserve_defaults = True  # sys.executable, not the path that it has here
autodoc_member_order = "bysource"
autosummary_generate = True
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_",
    "ignore_pattern": r"(^|[\\/])(?!plot_)\w+\.py$",
    "backreferences_dir": "gallery/backreferences",
    "doc_module": ("cuflash",),
    "reference_url": {"cuflash": None},
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "capture_repr": (),  # what an example prints, not what its last line returns
    "show_signature": False,
    "min_reported_time": 1e9,  # the machine that builds is no benchmark
    "matplotlib_animations": False,
}

html_theme = "pydata_sphinx_theme"
html_title = f"cuflash {release}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars = {"index": [], "tutorial": []}  # these have no pages below them
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 7,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def adapt_markdown(_app: Any, page: str, source: list[str]) -> None:
    """Link names of this library and of others, and offer documents outside docs/ as files.

    The pages are plain Markdown, which reads as well where no Sphinx has been.
    """
    others = {
        line.split()[0]
        for file in (ROOT / "docs" / "_inventories").glob("*.txt")
        for line in file.read_text(encoding="utf-8").splitlines()[4:]
    }

    def linked(match: re.Match[str]) -> str:
        ours = match[1].startswith("cuflash")
        return f"{{py:obj}}`{match[1]}`" if ours or match[1] in others else match[0]

    outside = r"\]\(((?:\.\./)+(?:benchmarks|examples|kernels_cu|tests)/[^)\s]+\.md)"
    text = re.sub(outside, r"](path:\1", source[0])
    if not page.startswith(("api/", "gallery/")):
        text = re.sub(r"(?<![`}\w])`([a-z]+(?:\.[A-Za-z]\w*)+)`", linked, text)
    source[0] = text


def skip_field(_app: Any, _what: str, _name: str, found: object, *_: Any) -> bool | None:
    """Leave out fields of named tuples, which docstrings describe; None leaves it to Sphinx."""
    return True if str(found.__doc__).startswith("Alias for field number") else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", skip_field)
    app.connect("source-read", adapt_markdown)
