"""The settings of the documentation: `make docs` builds it into `docs/_build`, with warnings as errors."""

project = "Baton"
author = "The authors of Baton"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_title = "Baton"
html_show_copyright = False
html_show_sphinx = False
smartquotes = False
highlight_language = "none"
