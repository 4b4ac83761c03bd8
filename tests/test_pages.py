"What the site needs of every page: title, description, alternative texts, valid markup, links that lead somewhere. No renderer is needed"
import importlib.util
import posixpath
import re
from functools import cache
from html import unescape
from pathlib import Path

import pytest

yaml = pytest.importorskip('yaml', reason='no yaml here: the pages are not checked')
root = Path(__file__).resolve().parents[1]

def load(path):
    spec = importlib.util.spec_from_file_location('docs_build', path)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod

build = load(root / '.ci/docs/build.py')
text = build.text

def pages():
    nbs = root / 'nbs'
    return sorted(f.relative_to(nbs).as_posix() for f in nbs.rglob('*.ipynb') if not any(p[0] in '._' for p in f.relative_to(nbs).parts))

names = pages()
each_page = pytest.mark.parametrize('name', names)
@cache
def read(name): return build.read(root / 'nbs' / name)   # nobody changes it

def is_hidden(cell): return bool(re.search(r'^#\s*\|\s*hide\s*$', text(cell['source']), re.M))
def markdowns(nb): return [(c['id'], text(c['source'])) for c in nb['cells'] if c['cell_type'] == 'markdown']
def shown_code(nb): return [c for c in nb['cells'] if c['cell_type'] == 'code' and not is_hidden(c)]

def without_code(md):
    "Markdown without code blocks, code in a line, and comments"
    md = re.sub(r'^(```+|~~~+).*?^\1[ \t]*$', '', md, flags=re.M | re.S)
    return re.sub(r'<!--.*?-->', '', re.sub(r'(`+)(?!`).+?(?<!`)\1(?!`)', '', md, flags=re.S), flags=re.S)

# ---------------------------------------------------------------- titles

@each_page
def test_title_and_description(name):
    title, about = build.head(read(name))
    assert title, f'nbs/{name} has no title: begin with `# Title`'
    assert about, f'nbs/{name} has no description: put `> one line` below its title, in the same cell'
    assert len(about) <= 300, f'nbs/{name}: the description has {len(about)} characters; it stands in search results, so say it shorter'

def test_titles_are_told_apart():
    titles = [(section, build.head(read(page))[0]) for section, page, _ in build.sidebar(root) if page in names]
    twice = {o for o in titles if titles.count(o) > 1}
    assert not twice, f'{twice}: two pages of a section have the same title'

def test_addresses_are_told_apart():
    where = [build.address(o) for o in names]
    twice = {o for o in where if where.count(o) > 1}
    assert not twice, f'several notebooks become the page {twice}: digits in front vanish, so rename one'

# ---------------------------------------------------------------- options of cells and figures

def cell_options(cell):
    "Options of a cell; an error when they are not YAML, as Quarto reads them"
    try: return build.options(text(cell['source']))[0], None
    except yaml.YAMLError as e: return {}, str(e).splitlines()[0]

@each_page
def test_options_are_yaml(name):
    for c in shown_code(read(name)):
        _, error = cell_options(c)
        assert not error, f'nbs/{name}, cell {c["id"]}: {error}. A value that holds ": " or " #" stands in double quotes'

def alternatives(cell):
    "Complaints about the pictures of a cell, or None"
    n = sum(map(build.is_image, cell['outputs']))
    opts, _ = cell_options(cell)
    if not n or opts.get('output') is False or opts.get('include') is False: return None
    alts = opts.get('fig-alt')
    if not alts: return 'has a picture without `#| fig-alt: …`'
    alts = alts if isinstance(alts, list) else [alts]
    if len(alts) != n: return f'has {n} pictures and {len(alts)} alternative texts: write `#| fig-alt:` and then one line `#|   - …` for each'
    short = [o for o in alts if len(str(o).split()) < 6]
    if short: return f'says {short}: tell what is shown, and what one sees'

@each_page
def test_pictures_have_words(name):
    for c in shown_code(read(name)): assert not (bad := alternatives(c)), f'nbs/{name}, cell {c["id"]} {bad}'

def test_alternatives_checker():
    def cell(src, n=1): return dict(id='x', source=src, outputs=[dict(data={'image/png': ''})] * n)
    words = 'Two curves that rise and then fall'
    assert alternatives(cell('plot()')) and alternatives(cell('#| fig-alt: A plot\nplot()')) and alternatives(cell(f'#| fig-alt: {words}\nplot()', 2))
    assert not alternatives(cell(f'#| fig-alt: {words}\nplot()')) and not alternatives(cell('x', 0)) and not alternatives(cell('#| output: false\nx'))
    assert not alternatives(cell(f'#| fig-alt:\n#|   - {words}\n#|   - "{words}: b"\nplot()', 2))
    assert cell_options(cell('#| fig-alt: a: b: c\nx'))[1] and not cell_options(cell('#| export\n#| eval: false\nx'))[1]

@each_page
def test_pictures_in_text_have_words(name):
    for cid, md in markdowns(read(name)):
        bare = re.findall(r'!\[\s*\]\([^)]*\)|<img(?![^>]*\balt="[^"]+)[^>]*>', without_code(md))
        assert not bare, f'nbs/{name}, cell {cid}: {bare} have no alternative text'

# ---------------------------------------------------------------- markup

def math_faults(md):
    "What Pandoc would not read as math, though it looks meant as such"
    md, bad = without_code(md).replace(r'\$', ''), []
    def display(m):
        bad.extend(tex_faults(m[1]))
        return ' '
    md = re.sub(r'\$\$(.+?)\$\$', display, md, flags=re.S)
    if '$$' in md: return bad + ['$$ is not closed']
    # Pandoc: no space after the first dollar, none before the last, no digit after that
    def inline(m):
        bad.extend(tex_faults(m[1]))
        return ' '
    md = re.sub(r'\$(?!\s)((?:[^$\n]|\n(?!\n))+?)(?<!\s)\$(?!\d)', inline, md)
    if '$' in md: bad.append(f'a single dollar: …{md[max(0, md.index("$")-30):md.index("$")+30]!r}…; write \\$ for money')
    if re.search(r'\\\(|\\\[(?!\d)', md): bad.append(r'\( or \[: write $…$ or $$…$$')
    return bad

def tex_faults(tex):
    tex = re.sub(r'\\[{}\\]', '', tex)
    bad, depth = [], 0
    for c in tex:
        depth += {'{': 1, '}': -1}.get(c, 0)
        if depth < 0: break
    if depth: bad.append(f'braces do not match in ${tex.strip()[:60]}$')
    if tex.count(r'\left') - tex.count(r'\leftarrow') - tex.count(r'\leftrightarrow') - tex.count(r'\leftharpoon') != \
       tex.count(r'\right') - tex.count(r'\rightarrow') - tex.count(r'\rightharpoon'): bad.append(rf'\left without \right in ${tex.strip()[:60]}$')
    begun, ended = re.findall(r'\\begin\{(\w+\*?)\}', tex), re.findall(r'\\end\{(\w+\*?)\}', tex)
    if sorted(begun) != sorted(ended): bad.append(f'environments {begun} and {ended} do not match')
    return bad

def div_faults(md):
    "Fenced divs that are not closed, and callouts that Quarto does not have"
    bad, depth = [], 0
    for line in without_code(md).splitlines():
        if re.match(r'\s*:::+\s*$', line): depth -= 1
        elif m := re.match(r'\s*:::+\s*(?:\{(.*)\}|([\w-]+))\s*$', line):
            depth += 1
            _, classes, _ = build.attributes(m[1] or '.' + m[2])
            bad += [f'.{o}: Quarto has {build.CALLOUTS}' for o in classes if o.startswith('callout') and o[8:] not in build.CALLOUTS]
        elif line.lstrip().startswith(':::'): bad.append(f'{line.strip()!r} is no fenced div')
        if depth < 0: return bad + ['a ::: that closes nothing']
    return bad + (['a ::: is not closed in its cell'] if depth else [])

def fence_faults(md):
    "Code blocks that are not closed"
    opened = None
    for line in md.splitlines():
        if (m := re.match(r'\s*(```+|~~~+)', line)) and (opened is None or line.strip() == opened): opened = m[1] if opened is None else None
    return [f'{opened} is not closed'] if opened else []

@each_page
def test_markup(name):
    for cid, md in markdowns(read(name)):
        bad = math_faults(md) + div_faults(md) + fence_faults(md)
        assert not bad, f'nbs/{name}, cell {cid}: {bad}'

def test_markup_checkers():
    for good in ('$a$ and $b_{1}$', '$$\n\\left(x\\right) \\rightarrow \\{a\\}\n$$', 'costs \\$5', '`$x`', '```sh\necho $x\n```', r'$W \leftarrow \frac{a}{b}$', '$\\begin{pmatrix}1\\end{pmatrix}$'):
        assert not math_faults(good), good
    for bad in ('$a and b', '$$x', '$ a $', '$a$5', '$\\frac{a}{b$', r'\(a\)', r'$\left(a$', r'$\begin{pmatrix}1$', '$a\n\nb$'): assert math_faults(bad), bad
    assert not div_faults('::: {.callout-note title="a: b"}\nx\n:::') and not div_faults('```\n::: x\n```') and not div_faults('::: {.a}\n::: {.callout-tip}\nx\n:::\n:::')
    assert div_faults('::: {.callout-note}\nx') and div_faults(':::') and div_faults('::: {.callout-info}\nx\n:::') and div_faults('::: {.callout-note\nx\n:::')
    assert fence_faults('```python\nx') and not fence_faults('````\n```\n````')

# ---------------------------------------------------------------- identifiers, links, cross references

def headings(md):
    "Headings outside of code as (text, identifier that is given or None)"
    md = re.sub(r'^(```+|~~~+).*?^\1[ \t]*$', '', md, flags=re.M | re.S)
    for line in re.findall(r'^#{1,6}[ \t]+(.+?)[ \t]*#*$', md, re.M):
        m = re.fullmatch(r'(.*?)\s*\{([^}]*)\}', line)
        yield (m[1], build.attributes(m[2])[0]) if m else (line, None)

def shown(md):
    "The letters of a heading, as Pandoc takes them for its identifier"
    md = re.sub(r'!?\[([^]]*)\]\([^)]*\)', r'\1', md)
    return unescape(re.sub(r'[*`$]|(?<!\w)_|_(?!\w)', '', md))

def exported_names(nb):
    "Names that nbdev documents with a heading of their own"
    for c in nb['cells']:
        if c['cell_type'] != 'code' or not re.search(r'^#\s*\|\s*exports?\s*$', text(c['source']), re.M): continue
        for cls, name in re.findall(r'^@patch.*\n(?:@.*\n)*def \w+\(\s*self:\s*(\w+)|^(?:class|def) (\w+)', text(c['source']), re.M): yield name or cls
        for fn, cls in re.findall(r'^@patch.*\n(?:@.*\n)*def (\w+)\(\s*\w+:\s*(\w+)', text(c['source']), re.M): yield f'{cls}.{fn}'

@cache
def identifiers(name):
    "All anchors of a page, those that are given twice once more"
    nb, res = read(name), []
    for _, md in markdowns(nb):
        for h, given in headings(md): res.append(given or build.slug(shown(h)))
        res += re.findall(r'<\w+[^>]*\bid="([^"]+)"', without_code(md)) + re.findall(r':::+\s*\{[^}]*#([\w:.-]+)', without_code(md))
    for c in shown_code(nb):
        if label := cell_options(c)[0].get('label'): res.append(label)
    return res, [o.lower() for o in exported_names(nb)]

def given_identifiers(name):
    nb = read(name)
    ids = [given for _, md in markdowns(nb) for _, given in headings(md) if given]
    ids += [o for _, md in markdowns(nb) for o in re.findall(r'<\w+[^>]*\bid="([^"]+)"', without_code(md))]
    return ids + [l for c in shown_code(nb) if (l := cell_options(c)[0].get('label'))]

@each_page
def test_identifiers_are_unique(name):
    ids = given_identifiers(name)
    assert len(set(ids)) == len(ids), f'nbs/{name}: the same identifier is given twice in {ids}'
    heads = [build.slug(shown(h)) for _, md in markdowns(read(name)) for h, given in headings(md) if not given]
    linked = {o.partition('#')[2] for _, _, o in all_links() if '#' in o}
    twice = {o for o in heads if heads.count(o) > 1 and o in linked}
    assert not twice, f'nbs/{name}: links lead to {twice}, and several headings have that name: give one an identifier, `## Title {{#name}}`'

@each_page
def test_cross_references_lead_somewhere(name):
    ids = identifiers(name)[0] + [o for _, md in markdowns(read(name)) for o in re.findall(r'\{#((?:eq|fig|tbl)-[\w-]+)', md)]
    for cid, md in [*markdowns(read(name)), *shown_markdowns(read(name))]:
        lost = referred(md) - set(ids)
        assert not lost, f'nbs/{name}, cell {cid}: nothing on this page is called {lost}'

def referred(md):
    "What `@fig-x` and the like refer to"
    return set(re.findall(r'(?<![\w@/.])@((?:sec|fig|tbl|eq)-[\w-]+)', without_code(md)))

def shown_markdowns(nb):
    "Markdown that cells have shown"
    return [(c['id'], text(o['data']['text/markdown'])) for c in shown_code(nb) for o in c['outputs'] if 'text/markdown' in o.get('data', {})]

def test_reference_checker():
    assert referred('see @fig-a, (@sec-b-c) and [@tbl-d]') == {'fig-a', 'sec-b-c', 'tbl-d'}
    assert not referred('`@fig-a` a@fig-b.org @figure https://x/@fig-c')

def links(md):
    "Targets of markdown links, images and html attributes, outside of code"
    md = re.sub(r'^(```+|~~~+).*?^\1[ \t]*$', '', md, flags=re.M | re.S)
    md = re.sub(r'\$\$.+?\$\$|(?<!\])(`+)(?!`).+?(?<!`)\1(?!`)(?!\])', '', md, flags=re.S)
    return re.findall(r'\]\(\s*<?([^)\s>]+)', md) + re.findall(r'^\[[^\]^]+\]:\s+(\S+)', md, re.M) + re.findall(r'\b(?:src|href)="([^"]+)"', md)

def is_external(url): return bool(re.match(r'[a-z][a-z0-9+.-]*:', url, re.I))

@cache
def all_links():
    "All links inside of the project as (what holds it, its folder, target)"
    res = []
    for name in names:
        nb = read(name)
        for cid, md in markdowns(nb): res += [(f'nbs/{name}, cell {cid}', posixpath.dirname(f'nbs/{name}'), o) for o in links(md)]
        for c in shown_code(nb):
            for o in c['outputs']:
                md = text(o.get('data', {}).get('text/markdown', ''))
                res += [(f'nbs/{name}, output of {c["id"]}', posixpath.dirname(f'nbs/{name}'), l) for l in links(md)]
    for f in sorted(root.glob('*.md')): res += [(f.name, '', o) for o in links(f.read_text(encoding='utf-8'))]
    return [o for o in res if not is_external(o[2])]

def anchors(path):
    "Anchors of a notebook or of a markdown file, seen from the top of the project"
    if path.endswith('.ipynb') and path.startswith('nbs/'):
        ids, doc = identifiers(path[4:])
        return {*ids, *doc}
    return {given or build.slug(shown(h)) for h, given in headings((root / path).read_text(encoding='utf-8'))}

def dead(holder, folder, url):
    "Why a link leads nowhere, or None"
    path, _, anchor = url.partition('#')
    target = posixpath.normpath(posixpath.join(folder, path)) if path else holder.split(',')[0]
    if target.startswith('..') or path.startswith('/'): return 'leads out of the project'
    if not (root / target).exists(): return 'is not there'
    if path.endswith('.html'): return 'is the address of a page; name its notebook'
    if anchor and target.endswith(('.ipynb', '.md')) and anchor not in anchors(target): return f'has no #{anchor}'

def test_no_dead_links():
    bad = [f'{h}: {u} {why}' for h, f, u in all_links() if (why := dead(h, f, u))]
    assert not bad, 'dead links:\n' + '\n'.join(bad)

def test_link_checkers():
    assert links('[a](x.ipynb#b "t") ![i](i.png) `[c](d)` <a href="e.md">e</a>\n\n[r]: f.md\n\n[`k`](l.ipynb)\n```\n[g](h)\n```') == ['x.ipynb#b', 'i.png', 'l.ipynb', 'f.md', 'e.md']
    assert dead('README.md', '', 'nbs/index.ipynb') is None and dead('README.md', '', 'nbs/none.ipynb') and dead('README.md', '', '../x')
    first = next(build.slug(shown(h)) for _, md in markdowns(read('32_lw.ipynb')) for h, _ in headings(md))
    assert dead('README.md', '', f'nbs/32_lw.ipynb#{first}') is None and dead('README.md', '', 'nbs/32_lw.ipynb#nothing-of-that-name')
    assert dead('nbs/x.ipynb', 'nbs', '32_lw.ipynb#layerwisecallback') is None
    assert build.slug('One rule: $w$ & _all_!') == 'one-rule-w-_all_' and build.slug('2.1 What is `core`?') == 'what-is-core' and build.slug('LayerwiseCallback.plan') == 'layerwisecallback.plan'

# ---------------------------------------------------------------- the site as a whole

def test_site_configuration():
    yml = yaml.safe_load((root / '_quarto.yml').read_text(encoding='utf-8'))
    assert yml['project']['type'] == 'website' and yml['execute'] == {'enabled': False}
    side = [page for _, page, _ in build.sidebar(root)]
    for o in yml['website']['navbar']['left']: assert o['href'] in side, f'the navbar of _quarto.yml leads to {o["href"]}, which nbs/sidebar.yml does not have'
    for o in [*yml['metadata-files'], *yml['project']['resources'], yml['format']['html']['css']]: assert (root / 'nbs' / o).exists(), f'_quarto.yml names nbs/{o}, which does not exist'
    assert side[0] == 'index.ipynb' and len(side) == len(set(side))

def exports(nb): return any(c['cell_type'] == 'code' and re.search(r'^#\s*\|\s*(default_exp|exports?)\b', text(c['source']), re.M) for c in nb['cells'])

def test_sidebar_has_every_page():
    "A page that is not there can be found by nobody: those that export first of all, and all others, too"
    side = {page for _, page, _ in build.sidebar(root)}
    lost = [o for o in names if exports(read(o)) and o not in side]
    assert not lost, f'{lost} export a module and are missing in nbs/sidebar.yml: add them, and run `make llms`'
    assert sum(exports(read(o)) for o in names) > 30
    assert not set(names) - side, f'{sorted(set(names) - side)} are missing in nbs/sidebar.yml'
    assert not side - set(names), f'nbs/sidebar.yml names {sorted(side - set(names))}, which do not exist'

@pytest.mark.parametrize('folder', ['tutorials', 'explanations'])
def test_pages_for_people_say_what_they_are(folder):
    "Title and description stand on the landing page, in search results and in llms.txt; so no two are the same, and none is a word or two"
    heads = {o: build.head(read(o)) for o in names if o.startswith(f'{folder}/')}
    assert len(heads) >= 4 and len(set(heads.values())) == len(heads)
    for o, (title, about) in heads.items(): assert title and about and len(about.split()) >= 6 and about != title, f'nbs/{o}: {title!r}, {about!r}'

def test_llms_in_step():
    want = build.llms(root)
    assert (root / 'nbs/llms.txt').read_text(encoding='utf-8') == want, 'nbs/llms.txt is out of step with the pages: run `make llms`'
    # the form that llmstxt.org asks for: one title, a quote, and then sections that hold nothing but links
    lines = want.splitlines()
    assert lines[0].startswith('# ') and lines[2].startswith('> ') and len(re.findall(r'^# ', want, re.M)) == 1
    body = want[want.index('\n## '):].split()
    assert all(re.fullmatch(r'(## .+|- \[[^]]+\]\(https://\S+\): \S.*|)', l) for l in want[want.index('\n## '):].splitlines()) and body
    here = {page for _, page, _ in build.sidebar(root) if (root / 'nbs' / page).exists()}
    assert len(re.findall(r'^- \[', want, re.M)) == len(here)

# ---------------------------------------------------------------- from Quarto's markdown to that of Sphinx

def translated(md, page='experiments/a.ipynb'):
    cfg = dict(doc_host='https://h.io', doc_baseurl='/r', git_url='https://git/r', branch='main')
    return build.markdown(md, build.Links(page, {'index.ipynb', '32_lw.ipynb', 'experiments/a.ipynb', 'experiments/b.ipynb'}, cfg))

def test_links_are_translated():
    assert translated('[x](../32_lw.ipynb#a) [y](b.ipynb)') == '[x](../lw.ipynb#a) [y](b.ipynb)'
    assert translated('[`L`](https://h.io/r/lw.html#l.m)') == '[`L`](../lw.ipynb#l.m)' and translated('[`L`](https://h.io/r/lw.html#l)', 'index.ipynb') == '[`L`](lw.ipynb#l)'
    assert translated('[`_l`](https://h.io/r/lw.html#_l)') == '`_l`'
    assert translated('[l](../../LICENSE)') == '[l](https://git/r/blob/main/LICENSE)' and translated('[o](https://h.io/other)') == '[o](https://h.io/other)'
    assert translated('```\n[x](../32_lw.ipynb)\n```') == '```\n[x](../32_lw.ipynb)\n```'
    assert translated('[s](https://a.b){target="_blank" style="x:y"}') == '[s](https://a.b)' and translated('![i](i.png){width=50%}') == '![i](i.png){width=50%}'

def test_callouts_are_translated():
    assert translated('::: {.callout-note}\nx\n:::') == ':::::::::{note}\nx\n:::::::::'
    assert translated('::: {.callout-tip title="Mind this"}\nx\n:::') == ':::::::::{admonition} Mind this\n:class: tip\nx\n:::::::::'
    assert translated('::: {.callout-warning}\n\n## Mind this\n\nx\n:::') == ':::::::::{admonition} Mind this\n:class: warning\n\n\nx\n:::::::::'
    assert translated('::: {.box}\n::: {.callout-note}\nx\n:::\n:::') == ':::::::::{container} box\n::::::::{note}\nx\n::::::::\n:::::::::'
    assert translated('```\n::: {.callout-note}\n```') == '```\n::: {.callout-note}\n```'
    assert translated('## A thing {#sec-a .x}\n\ntext') == '(sec-a)=\n## A thing\n\ntext'

def test_cells_are_translated():
    def cell(src, *outs): return dict(cell_type='code', id='c', source=src, outputs=list(outs), metadata={}, execution_count=1)
    png, same = dict(output_type='display_data', data={'image/png': ''}, metadata={}), lambda md: md
    c, = build.code_cell(cell('#| echo: false\n#| fig-alt: "A: b"\nplot()', png), same)
    assert c['source'] == 'plot()' and c['metadata'] == {'tags': ['remove-input'], 'mystnb': {'image': {'alt': 'A: b'}}}
    a, b = build.code_cell(cell('#| fig-alt:\n#|   - one\n#|   - two\nplot()', png, png), same)
    assert [o['metadata']['mystnb']['image']['alt'] for o in (a, b)] == ['one', 'two'] and b['metadata']['tags'] == ['remove-input'] and a['metadata']['tags'] == []
    assert build.code_cell(cell('#| include: false\nx'), same) == [] and build.code_cell(cell('#| output: false\nx', png), same)[0]['outputs'] == []
    doc = '---\n\n[source](https://a.b#L1){target="_blank" style="float:right"}\n\n### f\n\n```python\ndef f(\n    a, # see [`g`](https://h.io/r/g.html#g)\n):\n```\n\n*What*'
    c, = build.code_cell(cell('#| echo: false\n#| output: asis\nshow_doc(f)', dict(output_type='execute_result', data={'text/markdown': doc})), same)
    assert c['cell_type'] == 'markdown' and c['source'].startswith('### f\n\n[source](https://a.b#L1){.source-link}\n') and 'see `g`\n' in c['source']

def test_sidebar_is_translated():
    side = list(build.entries(['index.ipynb', dict(section='T', contents=['t/a.ipynb']), dict(text='S', href='62_s.ipynb'),
                               dict(section='API', contents=[dict(section='F', contents=['00_core.ipynb', '01_blocks.ipynb'])])]))
    assert side == [((), 'index.ipynb', None), (('T',), 't/a.ipynb', None), ((), '62_s.ipynb', 'S'), (('API', 'F'), '00_core.ipynb', None), (('API', 'F'), '01_blocks.ipynb', None)]
    trees = build.toctrees(side)
    assert trees.count('{toctree}') == 3 and ':caption: API · F\n\ncore\nblocks\n' in trees and '\nS <s>\n' in trees and 'index' not in trees
