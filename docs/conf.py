"""Sphinx settings for `make docs`."""

from importlib.metadata import version as installed_version

project = "sgap_jax"
author = "The sgap_jax contributors"
release = version = installed_version("sgap_jax")

extensions = ["myst_parser", "sphinx_design"]
extensions += ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "results"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"

html_theme = "furo"
html_title = f"sgap_jax {release}"
