"""One report on notebooks, modules and pages: `python .ci/lint` from the top folder.

A rule is a generator of findings, each a place and what to do about it. `ruff check` looks after the code itself.
"""
