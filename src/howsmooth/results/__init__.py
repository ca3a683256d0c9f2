"""Show and write results: as tables, figures, pages, LaTeX with a line to cite, and files.

``result`` holds the base class of all results. ``drawing`` has the style, axes and files of figures; pictures
are of two kinds, ``curves`` and ``heatmaps``. ``page`` writes HTML pages from one template and one style
sheet.
"""
