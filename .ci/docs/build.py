"""Build the site where Quarto is not at hand: nbdev's processed notebooks, rendered by Sphinx, MyST-NB and Furo.

    python .ci/docs/build.py          the site, into _docs
    python .ci/docs/build.py --llms   nbs/llms.txt

The notebooks are written for Quarto. What Sphinx says differently is translated here, and nothing else:
options of cells, callouts, links between pages, identifiers of headings. Pages and their order are those of
nbs/sidebar.yml, addresses and anchors those of the Quarto site.
"""

import argparse
import itertools
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import warnings
from configparser import ConfigParser
from pathlib import Path

import yaml

here = Path(__file__).resolve().parent
CALLOUTS = ('note', 'tip', 'important', 'warning', 'caution')  # Quarto's, and Sphinx has the same


def settings(root):
    parser = ConfigParser(delimiters=['='])
    parser.read(root / 'settings.ini', encoding='utf-8')
    return parser['DEFAULT']


def site_url(cfg):
    return cfg['doc_host'] + cfg['doc_baseurl']


def text(o):
    return o if isinstance(o, str) else ''.join(o)


def read(path):
    return json.loads(path.read_text(encoding='utf-8'))


# ---------------------------------------------------------------- pages


def entries(contents, section=()):
    "Pages of a Quarto sidebar as (titles of the sections around it, file, text or None), in order"
    for o in contents:
        if isinstance(o, str):
            yield section, o, None
        elif 'section' in o:
            yield from entries(o['contents'], (*section, o['section']))
        else:
            yield section, o['href'], o.get('text')


def sidebar(root):
    yml = yaml.safe_load((root / 'nbs/sidebar.yml').read_text(encoding='utf-8'))
    return [o for bar in yml['website']['sidebar'] for o in entries(bar['contents'])]


def address(page):
    "Where a page is on the site, without suffix: digits in front vanish, as in nbdev"
    folder, name = posixpath.split(page)
    return posixpath.join(folder, re.sub(r'^\d+[a-zA-Z0-9]*_', '', posixpath.splitext(name)[0].lower()))


def head(nb):
    "Title and description of a notebook: `# title` and `> description`, as nbdev takes them"
    for c in nb['cells']:
        if c['cell_type'] != 'markdown' or not (t := re.search(r'^#\s+(\S.*?)\s*$', text(c['source']), re.M)):
            continue
        d = re.search(r'^>\s+(\S.*?)\s*$', text(c['source']), re.M)
        return t[1], d[1] if d else None
    return None, None


def plain(md):
    "Markdown of one line without links"
    return re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', md)


def llms(root):
    "The text of llms.txt (see llmstxt.org): what is where, in one line a page"
    cfg, groups = settings(root), {}
    for section, page, name in sidebar(root):
        if not (root / 'nbs' / page).exists():
            continue
        title, about = head(read(root / 'nbs' / page))
        line = f'- [{name or plain(title)}]({site_url(cfg)}/{address(page)}.html): {plain(about or title)}'
        groups.setdefault(': '.join(section) or 'Overview', []).append(line)
    top = (
        f'# {cfg["title"]}\n\n> {cfg["description"]}\n\n'
        'Every page is a notebook that defines, explains, shows or tests a part of the library; '
        f'the source is at {cfg["git_url"]}.'
    )
    return '\n\n'.join([top, *(f'## {k}\n\n' + '\n'.join(v) for k, v in groups.items())]) + '\n'


# ---------------------------------------------------------------- markdown


def slug(title):
    "The identifier that Pandoc, and so Quarto, gives a heading"
    s = '-'.join(re.sub(r'[^\w\s.-]', '', title).lower().split())
    return re.sub(r'^[\W\d_]+', '', s) or 'section'


def attributes(s):
    '`#id .class key="value"` as (id, classes, dict)'
    kw = {k: a or b for k, a, b in re.findall(r'([\w-]+)=(?:"([^"]*)"|(\S+))', s)}
    rest = re.sub(r'[\w-]+=(?:"[^"]*"|\S+)', ' ', s)
    return next(iter(re.findall(r'#([\w:.-]+)', rest)), None), re.findall(r'(?<!\w)\.([\w-]+)', rest), kw


def callouts(md):
    "Fenced divs of Pandoc as directives of MyST"
    res, depth, code, want = [], 0, None, False
    for line in md.splitlines():
        fence = re.match(r'(```+|~~~+)', line)
        if fence and (code is None or line.strip() == code):
            code = fence[1] if code is None else None
        opened = None if code else re.match(r':{3,}\s*(?:\{(.+)\}|([\w-]+))\s*$', line)
        if opened:
            _, classes, kw = attributes(opened[1] or '.' + opened[2])
            kind = next((o[8:] for o in classes if o.startswith('callout-')), None)
            mark = ':' * (9 - depth)
            depth += 1
            if kind is None:
                res.append(f'{mark}{{container}} {" ".join(classes)}')
            elif 'title' in kw:
                res += [f'{mark}{{admonition}} {kw["title"]}', f':class: {kind}']
            else:
                want = len(res)
                res.append(f'{mark}{{{kind}}}')
        elif code is None and depth and re.match(r':{3,}\s*$', line):
            depth -= 1
            want = False
            res.append(':' * (9 - depth))
        # a heading that comes first in a callout is its title
        elif want is not False and (m := re.match(r'#+\s+(.*)', line)):
            mark, kind = re.fullmatch(r'(:+)\{(\w+)\}', res[want]).groups()
            res[want] = f'{mark}{{admonition}} {m[1]}\n:class: {kind}'
            want = False
        else:
            if line.strip():
                want = False
            res.append(line)
    return '\n'.join(res)


def headings(md):
    "Identifiers and classes of headings: `## T {#a}` gets the target `a`"

    def sub(m):
        ident, *_ = attributes(m[2])
        return (f'({ident})=\n' if ident else '') + m[1]

    return re.sub(r'^(#+ .*?)[ \t]*\{([^}\n]*)\}[ \t]*$', sub, md, flags=re.M)


class Links:
    "Rewrite the links of one page: other pages by their new names, files outside nbs by their address"

    def __init__(self, page, pages, cfg):
        self.page, self.pages, self.cfg = page, pages, cfg

    def target(self, url):
        path, _, anchor = url.partition('#')
        if url.startswith(site_url(self.cfg) + '/'):
            new = {address(o): o for o in self.pages}.get(path[len(site_url(self.cfg)) + 1 :].removesuffix('.html'))
            if new is None:
                return url
        elif re.match(r'[a-z][a-z0-9+.-]*:|[#/]', url, re.I):
            return url
        else:
            new = posixpath.normpath(posixpath.join(posixpath.dirname(self.page), path))
        if new in self.pages:
            new = posixpath.relpath(address(new), posixpath.dirname(address(self.page)) or '.') + '.ipynb'
            return f'{new}#{anchor}' if anchor else new
        if new.startswith('../'):
            return f'{self.cfg["git_url"]}/blob/{self.cfg["branch"]}/{new[3:]}'
        return url

    def __call__(self, md):
        def sub(m):
            return m[1] + self.target(m[2]) + m[3]

        # nbdev links names that begin with _, too, and documents none of them
        md = re.sub(r'\[(`_\w+`)\]\(' + re.escape(site_url(self.cfg)) + r'/[^)\s]*\)', r'\1', md)
        md = re.sub(r'(\]\()([^)\s]+)([^)]*\))', sub, md)
        # attributes that MyST does not know would be shown
        return re.sub(r'(\]\([^)\n]*\))\{(?![^}\n]*(?:width|height|\.|#))[^}\n]*\}', r'\1', md)


_source = re.compile(r'^---\n+(\[source\]\([^)]*\))\{[^}]*\}\n+(#+ .*)\n', re.M)


def signature(md):
    "What show_doc writes, with the heading first, and without links and names of the running notebook inside of code"
    md = _source.sub(r'\2\n\n\1{.source-link}\n', md)

    def plain_code(m):
        return re.sub(r'\[(`[^`\n]+`)\]\([^)\s]+\)', r'\1', m[0]).replace('__main__.', '')

    return re.sub(r'^```.*?^```', plain_code, md, flags=re.M | re.S)


def markdown(md, links):
    # split at code in a line only for links: a link's text may be code
    blocks = re.split(r'(^```+.*?^```+[ \t]*$)', callouts(md), flags=re.M | re.S)
    return ''.join(o if i % 2 else links(headings(o)) for i, o in enumerate(blocks))


# ---------------------------------------------------------------- notebooks


def options(src):
    "Quarto's options of a cell, and its source without them"
    lines = src.splitlines()
    n = next((i for i, line in enumerate(lines) if not re.match(r'#\s*\|', line)), len(lines))
    opts = [re.sub(r'^#\s*\| ?', '', line) for line in lines[:n]]
    opts = yaml.safe_load('\n'.join(line for line in opts if re.match(r'[\w-]+:|\s|-', line)))
    return opts or {}, '\n'.join(lines[n:]).strip('\n')


def is_image(out):
    return any(k.startswith('image/') for k in out.get('data', {}))


# What a plotting call returns, and progress bars with their style sheet; nbs/unlink_code.lua has the same for Quarto
_noise = re.compile(r'\s*(<Axes|array\(\[+<Axes|<matplotlib\.|\[.*\bText\()|(?s:.*)(<progress max|progress::-webkit)')


def is_noise(out):
    "Whether an output says nothing to a reader: the repr of a plot, or a progress bar that has reached its end"
    data = out.get('data', {})
    return not is_image(out) and any(_noise.match(text(data.get(k, ''))) for k in ('text/plain', 'text/html'))


def is_printed_table(out):
    "Whether an output is text with columns, which must not be broken"
    data = out.get('data', {})
    if len(set(data) - {'text/plain'}):
        return False
    lines = [line for line in text(out.get('text') or data.get('text/plain', '')).splitlines() if line]
    columns = [bool(re.search(r'\S  +\S', line)) for line in lines]
    in_a_row = max((len(list(group)) for has, group in itertools.groupby(columns) if has), default=0)
    return sum(columns) >= 3 and (sum(columns) >= len(lines) / 2 or in_a_row >= 4)


def code_cell(cell, links):
    "What Sphinx shall show of a code cell: a list of cells"
    try:
        opts, src = options(text(cell['source']))
    except yaml.YAMLError as e:
        raise SystemExit(
            f'nbs/{links.page}, cell {cell["id"]}: its options are not YAML; '
            f'a value that holds ": " stands in double quotes\n{e}'
        ) from e
    if opts.get('include') is False:
        return []
    outs = [] if opts.get('output') is False else [o for o in cell['outputs'] if not is_noise(o)]
    if opts.get('output') == 'asis':
        md = '\n\n'.join(text(o.get('data', {}).get('text/markdown') or o.get('text', '')) for o in outs)
        return [dict(cell_type='markdown', id=cell['id'], metadata={}, source=markdown(signature(md), links))]
    for o in outs:
        if 'text/markdown' in o.get('data', {}):
            o['data']['text/markdown'] = markdown(text(o['data']['text/markdown']), links)
    shown = opts.get('echo') is not False and bool(src)
    alts, caps = (o if isinstance(o, list) else [o] for o in (opts.get('fig-alt'), opts.get('fig-cap')))
    # one picture a cell, as MyST-NB knows one alternative text a cell
    parts, res = [[]], []
    for o in outs:
        if is_image(o) and any(map(is_image, parts[-1])):
            parts.append([])
        parts[-1].append(o)
    for i, part in enumerate(parts):
        mystnb = {}
        if alt := (alts[i] if i < len(alts) else alts[-1]):
            mystnb['image'] = dict(alt=' '.join(alt.split()))
        if cap := (caps[i] if i < len(caps) else None):
            mystnb['figure'] = dict(caption=cap)
        tags = [] if shown and not i else ['remove-input']
        if any(map(is_printed_table, part)):
            tags.append('printed-table')
        if opts.get('code-fold') is True:
            tags.append('hide-input')
            mystnb |= dict.fromkeys(('code_prompt_show', 'code_prompt_hide'), opts.get('code-summary', 'Code'))
        res.append(
            {
                **cell,
                'id': cell['id'] + (f'-{i}' if i else ''),
                'source': src,
                'outputs': part,
                'execution_count': None,
                'metadata': dict(tags=tags, **({'mystnb': mystnb} if mystnb else {})),
            }
        )
    return res


def translate(nb, links):
    "A notebook as nbdev has processed it, for MyST-NB"
    front, cells = {}, []
    for c in nb['cells']:
        if c['cell_type'] == 'raw':
            if m := re.match(r'---\s*\n(.*?)\n---', text(c['source']).strip(), re.S):
                front = yaml.safe_load(m[1])
        elif c['cell_type'] == 'code':
            cells += code_cell(c, links)
        elif not (md := text(c['source'])).startswith('<!-- WARNING: THIS FILE WAS AUTOGENERATED'):
            cells.append({**c, 'source': markdown(md, links)})
    title, about = front.get('title') or address(links.page), front.get('description')
    top = f'# {title}\n' + (f'\n{{.lead}}\n{about}\n' if about else '')
    cells.insert(0, dict(cell_type='markdown', id='title', metadata={}, source=top))
    meta = dict(
        file=f'nbs/{links.page}',
        kernelspec=nb['metadata'].get('kernelspec', dict(name='python3', display_name='python3', language='python')),
    )
    if about:
        meta['myst'] = dict(html_meta=dict(description=plain(about)))
    return dict(cells=cells, metadata=meta, nbformat=4, nbformat_minor=5)


def toctrees(side):
    "The sidebar as toctrees of the first page: one for each section, and for each page that has none"
    groups = []
    for section, page, name in side:
        if page == 'index.ipynb':
            continue
        if not groups or not section or groups[-1][0] != section:
            groups.append((section, []))
        groups[-1][1].append(f'{name} <{address(page)}>' if name else address(page))

    def tree(section, rows):
        return '\n'.join(
            ['```{toctree}', ':hidden:', *([f':caption: {" · ".join(section)}'] if section else []), '', *rows, '```']
        )

    return '\n\n'.join(tree(*o) for o in groups)


# ---------------------------------------------------------------- building


def write(path, s):
    "Write what has changed: Sphinx reads again what is newer"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding='utf-8') != s:
        path.write_text(s, encoding='utf-8')


def sources(root, proc, src):
    "Translate the processed notebooks of `proc` into Sphinx sources in `src`"
    cfg, side = settings(root), sidebar(root)
    if missing := [o[1] for o in side if not (root / 'nbs' / o[1]).exists()]:
        print(f'WARNING: nbs/sidebar.yml names {missing}, which do not exist', file=sys.stderr)
    side = [o for o in side if o[1] not in missing]
    pages, made = {o[1] for o in side}, set()
    for page in sorted(pages):
        nb = translate(read(proc / page), Links(page, pages, cfg))
        if page == 'index.ipynb':
            nb['cells'].append(dict(cell_type='markdown', id='toctrees', metadata={}, source=toctrees(side)))
        made.add(path := src / (address(page) + '.ipynb'))
        write(path, json.dumps(nb, indent=1, ensure_ascii=False))
    for f in (root / 'nbs').rglob('*'):
        if f.suffix in ('.png', '.svg', '.jpg', '.gif', '.sh') and not any(
            p[0] in '._' or p == 'runs' for p in f.relative_to(root).parts
        ):
            made.add(to := src / f.relative_to(root / 'nbs'))
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(f, to)
    for f in src.rglob('*'):
        if f.is_file() and f not in made:
            f.unlink()  # of a page that is gone
    return len(pages)


def build(root, out, n_workers=2):
    "Process, translate, render"
    from nbdev.serve import proc_nbs

    os.chdir(root)  # nbdev looks for settings.ini from here
    os.environ['PYTHONWARNINGS'] = 'ignore::FutureWarning'  # what imports warn about would be shown on the pages
    warnings.simplefilter('ignore', FutureWarning)
    proc = proc_nbs(n_workers=n_workers)
    work = proc / '_sphinx'
    n = sources(root, proc, work / 'src')
    shutil.rmtree(out, ignore_errors=True)
    env = {**os.environ, 'REINIT_SITE': str(root)}
    subprocess.run(
        [
            sys.executable,
            '-m',
            'sphinx',
            '-q',
            '-j',
            str(n_workers),
            '-b',
            'html',
            '-c',
            str(here),
            '-d',
            str(work / 'doctrees'),
            str(work / 'src'),
            str(out),
        ],
        check=True,
        env=env,
    )
    for o in ('.buildinfo', 'objects.inv'):
        (out / o).unlink(missing_ok=True)
    return n


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--llms', action='store_true', help='write nbs/llms.txt, and build nothing')
    parser.add_argument('--n_workers', type=int, default=2, help='processes')
    args = parser.parse_args()
    root = here.parents[1]
    if args.llms:
        (root / 'nbs/llms.txt').write_text(llms(root), encoding='utf-8')
    else:
        print(f'_docs: {build(root, root / "_docs", args.n_workers)} pages, rendered by Sphinx. Open _docs/index.html')
