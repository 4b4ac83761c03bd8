"Sphinx's settings for the site that `make docs` builds where there is no Quarto (see build.py)"

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here))
import build  # noqa: E402  (its folder must be on the path first)

root = Path(os.environ.get('REINIT_SITE', here.parents[1]))
cfg = build.settings(root)
project, author, version = cfg['title'], cfg['author'], cfg['version']
copyright = cfg['copyright']
language = 'en'
extensions = ['myst_nb', 'sphinx.ext.mathjax']
templates_path = [str(here)]
exclude_patterns = []

# Nothing runs: the notebooks carry their outputs
nb_execution_mode = 'off'
nb_render_markdown_format = 'myst'
nb_ipywidgets_js = {}
nb_merge_streams = True
myst_enable_extensions = [
    'dollarmath',
    'amsmath',
    'colon_fence',
    'attrs_inline',
    'attrs_block',
    'deflist',
    'strikethrough',
    'tasklist',
]
# Math begins and ends where it does for Pandoc, and headings have Pandoc's names
myst_dmath_allow_space = myst_dmath_allow_digits = False
myst_dmath_double_inline = True
myst_heading_anchors = 6
myst_heading_slug_func = build.slug
suppress_warnings = ['myst.header', 'myst.strikethrough', 'mystnb.unknown_mime_type', 'config.cache']

html_theme = 'furo'
html_title = cfg['title']
html_baseurl = build.site_url(cfg) + '/'
html_static_path = [str(root / 'nbs/styles.css')]
html_favicon = str(root / 'nbs/images/favicon.svg')
html_css_files = ['styles.css']
html_extra_path = [str(root / 'nbs/llms.txt')]
html_theme_options = dict(navigation_with_keys=True, top_of_page_buttons=[])
html_copy_source = html_show_sourcelink = False
html_use_index = False
html_domain_indices = False
pygments_style, pygments_dark_style = 'default', 'github-dark'

# MathJax from a package: a page asks nobody else for anything
mathjax_path = 'mathjax/tex-chtml.js'


def copy_mathjax(app, error):
    if error:
        return
    package = Path(next(iter(find_spec('sphinx-mathjax-offline').submodule_search_locations))) / 'static/mathjax'
    for f in (package / 'tex-chtml.js', *(package / 'output/chtml/fonts').rglob('*.woff')):
        to = Path(app.outdir) / '_static/mathjax' / f.relative_to(package)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(f, to)


def name_sections(app, doctree):
    "Sections are found under the names that links use, here and on the Quarto site"
    from docutils import nodes

    for o in doctree.findall(nodes.section):
        if (name := o.get('slug')) and name not in o['ids']:
            o['ids'].insert(0, name)


def setup(app):
    app.connect('build-finished', copy_mathjax)
    app.connect('doctree-read', name_sections, priority=1)  # before the contents are collected
