"""Render the processed notebooks roughly as Quarto does: Pandoc with our filter, the Bootstrap themes and styles.css.

The published site is made by Quarto, which cannot be installed from a package registry. What decides how a page
looks can be: Pandoc (`pypandoc_binary`), the themes (`bootstrap-flask`), our Lua filter and our style sheet. Tests
open these pages in a browser.

    python .ci/docs/preview.py _proc OUT
"""

import argparse
import html
import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import build

FENCE = '~' * 12
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{theme}</style>
<style>{layout}</style>
<style>{styles}</style>
</head><body class="{mode} nav-sidebar docked">
<main class="content" id="quarto-document-content"><header><h1 class="title">{title}</h1></header>
{body}
</main></body></html>
"""
# What Quarto adds to Bootstrap and matters for widths and colors
LAYOUT = """
main.content { max-width: 880px; margin: 0 auto; padding: 0 1rem; }
.img-fluid, img { max-width: 100%; height: auto; }
div.sourceCode, pre.sourceCode { overflow-x: auto; margin: .5rem 0; }
.table { width: 100%; }
.cell-output-display { overflow-x: auto; }
:not(pre) > code:not(.sourceCode) { background-color: #f8f9fa; color: #7d12ba; padding: .125rem .25rem; }
.quarto-dark :not(pre) > code:not(.sourceCode) { background-color: rgba(27,27,27,.65); color: #e685b5; }
pre > code { color: inherit; background: none; }
"""


def theme(dark=False):
    "Return the style sheet of the theme, without what it would load from elsewhere"
    folder = Path(find_spec('flask_bootstrap').origin).parent / 'static/bootstrap5/css/bootswatch'
    css = (folder / ('darkly' if dark else 'cosmo') / 'bootstrap.min.css').read_text(encoding='utf-8')
    return re.sub(r'@import url\([^)]*\);?', '', css)


def output(out, opts):
    "Return one output of a cell as Markdown of Pandoc"
    data = out.get('data', {})
    if opts.get('output') == 'asis':
        return build.text(data.get('text/markdown') or out.get('text', ''))
    if out['output_type'] == 'stream':
        body = f'{FENCE}\n{build.text(out["text"])}\n{FENCE}'
        return f'::: {{.cell-output .cell-output-{out["name"]}}}\n\n{body}\n\n:::'
    if picture := next((k for k in data if k.startswith('image/')), None):
        if picture == 'image/svg+xml':
            body = f'```{{=html}}\n{build.text(data[picture])}\n```'
        else:
            alt = html.escape(str(opts.get('fig-alt', '')), quote=True)
            source = f'data:{picture};base64,{build.text(data[picture]).strip()}'
            size = out.get('metadata', {}).get(picture, {}).get('width')
            width = f' width="{size}"' if size else ''
            body = f'```{{=html}}\n<p><img class="img-fluid" alt="{alt}"{width} src="{source}"></p>\n```'
    elif 'text/html' in data:
        body = f'```{{=html}}\n{build.text(data["text/html"])}\n```'
    elif 'text/markdown' in data:
        body = build.text(data['text/markdown'])
    else:
        body = f'{FENCE}\n{build.text(data.get("text/plain", ""))}\n{FENCE}'
    return f'::: {{.cell-output .cell-output-display}}\n\n{body}\n\n:::'


def cell_markdown(cell):
    "Return a cell as Markdown of Pandoc"
    source = build.text(cell['source'])
    if cell['cell_type'] == 'raw':
        return ''
    if cell['cell_type'] == 'markdown':
        return source
    opts, code = build.options(source)
    if opts.get('include') is False:
        return ''
    parts = []
    if opts.get('echo') is not False and code:
        shown = f'{FENCE} {{.python .cell-code}}\n{code}\n{FENCE}'
        if opts.get('code-fold') is True:
            summary = html.escape(opts.get('code-summary', 'Code'))
            shown = f'<details class="code-fold"><summary>{summary}</summary>\n\n{shown}\n\n</details>'
        parts.append(shown)
    if opts.get('output') is not False:
        parts += [output(o, opts) for o in cell['outputs']]
    if opts.get('output') == 'asis':
        return '\n\n'.join(parts)
    return '::: {.cell}\n\n' + '\n\n'.join(parts) + '\n\n:::'


def front_matter(nb):
    "Return title and description of a processed notebook"
    for cell in nb['cells']:
        if cell['cell_type'] == 'raw' and (m := re.search(r'^title:\s*(.*)$', build.text(cell['source']), re.M)):
            return m[1].strip('"\' ')
    return ''


def bootstrap_table(tag):
    "Return the tag of a table with the classes that Quarto adds; those of a table in HTML make it small and striped"
    old = tag[0]
    attributes = old.removeprefix('<table').removesuffix('>')
    if 'data-quarto-disable-processing' in attributes:
        return old
    own = re.search(r' class="([^"]*)"', attributes)
    classes = 'caption-top table'
    if 'border=' in attributes or own or ' id=' in attributes:
        classes += ' table-sm table-striped small'
    if own:
        classes = f'{own[1]} {classes}'
        attributes = attributes.replace(own[0], '')
    attributes = attributes.replace(' border=', ' data-border=')
    return f'<table class="{classes}"{attributes}>'


def body(nb, lua):
    "Return the HTML of a processed notebook, and what Pandoc warned about"
    import pypandoc

    text = '\n\n'.join(map(cell_markdown, nb['cells']))
    command = [pypandoc.get_pandoc_path(), '-f', 'markdown', '-t', 'html5', '--mathml', '--lua-filter', lua]
    done = subprocess.run(command, input=text, capture_output=True, text=True, encoding='utf-8', check=True)
    return re.sub(r'<table\b[^>]*>', bootstrap_table, done.stdout), done.stderr.strip()


def render(root, proc, out):
    "Write every page of the sidebar in two versions, `page.html` and `page.dark.html`; return the warnings by page"
    styles = (root / 'nbs/styles.css').read_text(encoding='utf-8')
    warned = {}
    themes = {dark: theme(dark) for dark in (False, True)}
    for _, page, _ in build.sidebar(root):
        nb = json.loads((proc / page).read_text(encoding='utf-8'))
        content, warnings = body(nb, root / 'nbs/unlink_code.lua')
        if warnings:
            warned[page] = warnings
        for dark in (False, True):
            path = out / (build.address(page) + ('.dark.html' if dark else '.html'))
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = 'quarto-dark' if dark else 'quarto-light'
            path.write_text(PAGE.format(title=html.escape(front_matter(nb)), theme=themes[dark], layout=LAYOUT,
                                        styles=styles, mode=mode, body=content), encoding='utf-8')
    return warned


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('proc', type=Path, help='folder of processed notebooks')
    parser.add_argument('out', type=Path, help='folder for the pages')
    args = parser.parse_args()
    for page, warnings in render(build.here.parents[1], args.proc, args.out).items():
        print(page, warnings)
