"Make README.md from nbs/index.ipynb, without Quarto; `--check` only compares"

import argparse
import base64
import difflib
import json
import posixpath
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

HEADER = '<!-- Made from nbs/index.ipynb by `make readme`: edit the notebook, not this file. -->\n\n'


def text(o):
    return o if isinstance(o, str) else ''.join(o)


def fence(s, lang=''):
    return f'```{lang}\n{s.rstrip()}\n```'


def directives(src):
    "Quarto and nbdev directives at the top of a cell, as a dict: `#| fig-alt: x` is {'fig-alt': 'x'}"
    found = {}
    for line in src.splitlines():
        m = re.match(r'#\s*\|\s*([\w-]+):?\s*(.*)', line)
        if m:
            found[m[1]] = m[2].strip().strip('"\'')
        elif line.strip():
            break
    return found


def off(d, *names):
    return any(d.get(o, '').lower() == 'false' for o in names)


def relink(md, folder='nbs'):
    "Relative links of a notebook in `folder`, as seen from the top; code stays as it is"

    def target(url):
        if re.match(r'[a-z][a-z0-9+.-]*:|[#/]', url, re.I):
            return url
        return posixpath.normpath(posixpath.join(folder, url))

    def sub(part):
        part = re.sub(r'(\]\()([^)\s]+)', lambda m: m[1] + target(m[2]), part)
        return re.sub(r'((?:src|href)=")([^"]+)', lambda m: m[1] + target(m[2]), part)

    parts = re.split(r'(```.*?```|`[^`\n]*`)', md, flags=re.S)
    return ''.join(o if i % 2 else sub(o) for i, o in enumerate(parts))


class _Table(HTMLParser):
    "Rows of cells; `plain` turns False when a cell spans several"

    def __init__(self):
        super().__init__()
        self.rows, self.cell, self.plain = [], None, True

    def handle_starttag(self, tag, attrs):
        if tag == 'tr':
            self.rows.append([])
        if tag in ('td', 'th'):
            self.cell = ''
            self.plain &= not any(k in ('colspan', 'rowspan') and v != '1' for k, v in attrs)

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag):
        if tag in ('td', 'th') and self.cell is not None:
            self.rows[-1].append(' '.join(self.cell.split()).replace('|', r'\|').replace('<', '&lt;'))  # <NA> is no tag
            self.cell = None


def table(html):
    "A simple html table as markdown, or None"
    if html.count('<table') != 1:
        return None
    t = _Table()
    t.feed(html)
    rows = [r for r in t.rows if r]
    if not t.plain or len(rows) < 2 or len({len(r) for r in rows}) > 1:
        return None
    # pandas gives the index's name a row of its own
    if len(rows) > 2 and not rows[0][0] and not any(rows[1][1:]):
        rows[:2] = [[rows[1][0], *rows[0][1:]]]
    rows.insert(1, ['---'] * len(rows[0]))
    return '\n'.join('| ' + ' | '.join(r) + ' |' for r in rows)


def output(out, alt, images):
    "Markdown for one output; a picture is added to `images` (name → bytes)"
    if out['output_type'] == 'stream':
        return fence(text(out['text'])) if out['name'] == 'stdout' else ''
    data = out.get('data', {})
    for mime, ext in (('image/png', 'png'), ('image/svg+xml', 'svg')):
        if mime not in data:
            continue
        name, raw = f'index_{len(images) + 1}.{ext}', text(data[mime])
        images[name] = base64.b64decode(raw) if ext == 'png' else raw.encode()
        return f'![{alt}](nbs/images/{name})'
    shown = text(data.get('text/html', '')) + text(data.get('text/markdown', ''))
    if '<progress' in shown or 'progress::-webkit' in shown:
        return ''   # a bar that has come to its end, and its style sheet
    if 'text/markdown' in data:
        return relink(text(data['text/markdown']))
    return table(text(data.get('text/html', ''))) or (fence(text(data['text/plain'])) if 'text/plain' in data else '')


def cell_md(cell, images):
    "The markdown pieces of one cell, none for what is hidden"
    src = text(cell['source']).strip()
    if cell['cell_type'] == 'raw' or src.startswith('---\n'):
        return []
    if cell['cell_type'] == 'markdown':
        return [relink(src)]
    d = directives(src)
    if d.keys() & {'hide', 'default_exp'} or off(d, 'include'):
        return []
    code = '\n'.join(line for line in src.splitlines() if not re.match(r'#\s*\|', line)).strip()
    res = [] if 'hide_input' in d or off(d, 'echo') or not code else [fence(code, 'python')]
    if 'hide_output' in d or off(d, 'output'):
        return res
    return res + [output(o, d.get('fig-alt') or d.get('fig-cap') or 'figure', images) for o in cell.get('outputs', [])]


def convert(nb):
    "README text and images (name → bytes) of a notebook"
    images = {}
    parts = [o for c in nb['cells'] for o in cell_md(c, images) if o.strip()]
    return HEADER + '\n\n'.join(parts) + '\n', images


def files(root):
    "All files that belong to the README, as path → bytes"
    md, images = convert(json.loads((root / 'nbs/index.ipynb').read_text(encoding='utf-8')))
    return {root / 'README.md': md.encode(), **{root / 'nbs/images' / k: v for k, v in images.items()}}


def stale(root, want):
    return [o for o in sorted((root / 'nbs/images').glob('index_*')) if o not in want]


def check(root):
    "What is out of step, as text; empty when nothing is"
    want = files(root)
    res = [f'{o.relative_to(root)} is left over\n' for o in stale(root, want)]
    for f, new in want.items():
        old = f.read_bytes() if f.exists() else b''
        if old == new:
            continue
        if f.suffix != '.md':
            res.append(f'{f.relative_to(root)} differs\n')
        else:
            res += difflib.unified_diff(
                old.decode().splitlines(True), new.decode().splitlines(True), f.name, 'nbs/index.ipynb'
            )
    return ''.join(res)


def write(root):
    want = files(root)
    for o in stale(root, want):
        o.unlink()
    for f, new in want.items():
        f.parent.mkdir(exist_ok=True)
        f.write_bytes(new)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--check', action='store_true', help='change nothing; show the difference and fail if there is one'
    )
    args = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    if not args.check:
        write(root)
    elif diff := check(root):
        sys.exit(f'{diff}README.md is out of step with nbs/index.ipynb: run `make readme`')
