"The site as Sphinx builds it, and the pages as Quarto shows them (.ci/docs/preview.py), opened in a browser"

import functools
import http.server
import importlib.util
import os
import posixpath
import re
import shutil
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import PageError, needs_browser

pytestmark = pytest.mark.slow

root = Path(__file__).resolve().parents[1]
for o in ('nbdev', 'sphinx', 'myst_nb', 'furo', 'sphinx-mathjax-offline', 'pypandoc', 'flask_bootstrap'):
    if importlib.util.find_spec(o) is None:
        pytest.skip(f"{o} is not installed: the site is not built (pip install '.[dev]')", allow_module_level=True)

sys.path.insert(0, str(root / '.ci/docs'))
import build  # noqa: E402  (its folder must be on the path first)
import preview  # noqa: E402

side = [o for o in build.sidebar(root) if (root / 'nbs' / o[1]).exists()]


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "The site, built from a copy; what the build said"
    copy = tmp_path_factory.mktemp('project')
    for d in ('nbs', 'reinit_nb', '.ci'):
        shutil.copytree(
            root / d,
            copy / d,
            symlinks=True,
            ignore=shutil.ignore_patterns('__pycache__', 'runs', '.ipynb_checkpoints'),
        )
    for f in ('settings.ini', '_quarto.yml'):
        shutil.copy(root / f, copy)
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}
    r = subprocess.run(
        [sys.executable, '.ci/docs/build.py'],
        cwd=copy,
        env={**env, 'PYTHONPATH': str(copy)},
        capture_output=True,
        text=True,
    )
    assert r.returncode == 0, r.stderr[-3000:]
    return copy / '_docs', r.stdout + r.stderr


@pytest.fixture(scope='module')
def docs(built):
    return built[0]


@pytest.fixture(scope='module')
def base(docs):
    "The address at which a plain web server shows the site"

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=str(docs)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()
    server.server_close()
    thread.join(10)


# ---------------------------------------------------------------- without a browser


def test_nothing_is_amiss_while_building(built):
    warnings = [line for line in built[1].splitlines() if re.search('warning|error', line, re.I)]
    assert not warnings, '\n'.join(warnings)


class Html(HTMLParser):
    "Identifiers, links and what a page loads"

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads, self.output = [], [], [], 0
        self.feed(path.read_text(encoding='utf-8'))

    def handle_endtag(self, tag):
        if tag == 'div' and self.output:
            self.output -= 1

    def handle_starttag(self, tag, attrs):
        d = dict(attrs)
        if tag == 'div' and (self.output or 'text_html' in (d.get('class') or '').split()):
            self.output += 1
        # html that a cell shows may be a piece of another page, and lead to other pieces of it
        if self.output and (d.get('href') or '').startswith('#'):
            return
        if d.get('id'):
            self.ids.append(d['id'])
        if tag == 'a' and d.get('href'):
            self.links.append(d['href'])
        if tag in ('script', 'img', 'source', 'iframe') and d.get('src'):
            self.loads.append(d['src'])
        if tag == 'link' and d.get('rel') in ('stylesheet', 'icon', 'preload') and d.get('href'):
            self.loads.append(d['href'])


@pytest.fixture(scope='module')
def html(docs):
    return {f.relative_to(docs).as_posix(): Html(f) for f in sorted(docs.rglob('*.html'))}


def test_every_page_is_there(html):
    missing = {build.address(o[1]) + '.html' for o in side} - set(html)
    assert not missing, f'{missing} are in nbs/sidebar.yml and not on the site'


def test_links_of_the_site(html, docs):
    bad = []
    for page, h in html.items():
        for url in h.links + h.loads:
            u = urlsplit(url)
            if u.scheme or u.netloc:
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(u.path))) if u.path else page
            if not (docs / target).exists():
                bad.append(f'{page}: {url} is not there')
            elif u.fragment and target in html and unquote(u.fragment) not in html[target].ids:
                bad.append(f'{page}: {url} has no such anchor')
    assert not bad, '\n'.join(sorted(set(bad)))


def test_pages_need_nobody_else(html):
    bad = [f'{page}: {o}' for page, h in html.items() for o in h.loads if re.match(r'(https?:)?//', o)]
    assert not bad, f'pages load from elsewhere: {bad[:5]}'


def test_anchors_are_those_of_quarto(html):
    "nbdev links to `lw.html#layerwisecallback.plan`, from here and from other projects"
    assert {'layerwisecallback'} <= set(html['lw.html'].ids)


def test_llms_is_served(docs):
    assert (docs / 'llms.txt').read_text(encoding='utf-8') == (root / 'nbs/llms.txt').read_text(encoding='utf-8')


# ---------------------------------------------------------------- in the browser

FACTS = r"""(async () => {
  if (window.MathJax) await MathJax.startup.promise;
  const article = document.querySelector('article'), all = s => [...article.querySelectorAll(s)], raw = [];
  const walk = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  all('img').forEach(o => o.loading = 'eager');
  await Promise.all(all('img').map(o => o.complete ? 1 : new Promise(r => { o.onload = o.onerror = r; })));
  while (walk.nextNode()) {
    const t = walk.currentNode.textContent, e = walk.currentNode.parentElement;
    const markup = /\$[^$\s][^$]*\$|\\\(|\\\[|^\s*:::/;
    const exempt = e.closest('pre, code, script, style, mjx-container, table.dataframe, .output');
    if (!exempt && markup.test(t)) raw.push(t.trim().slice(0, 80));
  }
  return {
    h1: article.querySelector('h1')?.firstChild?.textContent ?? null, title: document.title, raw,
    about: document.querySelector('meta[name=description]')?.content ?? null,
    math: all('.math').length,
    drawn: all('.math mjx-container').filter(o => o.getBoundingClientRect().width > 0).length,
    failed: all('mjx-merror, [data-mjx-error]').map(o => o.textContent),
    images: all('img').length, blank: all('img').filter(o => !o.naturalWidth).map(o => o.src),
    silent: all('img').filter(o => !(o.alt || '').trim()).map(o => o.src),
    renderer: document.querySelector('.renderer')?.textContent ?? '',
    errors: all('.system-message, .problematic').map(o => o.textContent.slice(0, 80))};
})()"""

# Name of the current entry of the sidebar if it can be seen
ENTRY = r"""(() => {
  const entry = document.querySelector('.sidebar-tree .current-page');
  const at = entry?.getBoundingClientRect();
  return at && at.top >= 0 && at.bottom <= innerHeight ? entry.textContent.trim() : null;
})()"""

# What stands beside each other at the top of a phone's screen: the smallest gap in pixels
BAR = r"""(() => {
  const at = [...document.querySelectorAll('.mobile-header :is(label, a, button, svg)')]
    .filter(o => o.checkVisibility() && !o.querySelector('label, a, button')).filter(o => o.tagName !== 'svg')
    .map(o => o.getBoundingClientRect()).filter(o => o.width).sort((a, b) => a.left - b.left);
  return at.slice(1).map((o, i) => Math.round(o.left - at[i].right));
})()"""

# Printed text that is wider than its column, or that is cut off: pixels too wide, and how it begins
WIDE = r"""(() => {
  const column = document.querySelector('article').getBoundingClientRect().right + 1;
  const scrolls = o => o.closest('.tag_printed-table') && getComputedStyle(o).overflowX == 'auto';
  return [...document.querySelectorAll('article .cell_output .output:is(.stream, .stderr, .text_plain) pre')]
    .filter(o => !scrolls(o))
    .map(o => [Math.max(o.scrollWidth - o.clientWidth, o.getBoundingClientRect().right - column), o.textContent])
    .map(o => [Math.round(o[0]), o[1].slice(0, 60)]).filter(o => o[0] > 1);
})()"""


@pytest.fixture(scope='module')
def visits(browser, base):
    "What the browser finds on every page: on a desk, and then on a phone"
    res = {}
    for _, page, _ in side:
        where = build.address(page) + '.html'
        with browser.open(base + where, size=(1400, 900)) as p:
            res[page] = p.js(FACTS)
            res[page]['problems'] = p.problems(allow=(base, 'data:'))
            res[page]['printed'] = p.js('document.querySelectorAll("article .cell_output .output pre").length')
            res[page]['wide'] = p.js(WIDE)
            res[page]['desk'] = p.overflow()
            res[page]['entry'] = p.js(ENTRY)
            res[page]['light'] = p.contrasts(4.5, 'article')
            p.media(dark=True)
            res[page]['dark'] = p.contrasts(4.5, 'article')
            p.media(dark=False)
            p.resize(390, 844, mobile=True).settle()
            res[page]['overflow'] = p.overflow()
            res[page]['wide'] += p.js(WIDE)
            res[page]['bar'] = p.js(BAR)
            res[page]['overview'] = p.js(
                'document.querySelector("img[alt*=\\"claims in five panels\\"]")?.getBoundingClientRect().width'
            )
    return res


def letters(md):
    return re.sub(r'\W+', '', re.sub(r'\$.*?\$', '', build.plain(md))).lower()


@needs_browser
def test_pages_open(visits):
    for page, v in visits.items():
        title, about = build.head(build.read(root / 'nbs' / page))
        assert (
            v['h1'] and letters(title)[:12] == letters(v['h1'])[:12] and letters(v['h1'])[:12] in letters(v['title'])
        ), f'{page}: {v["h1"]!r}, {v["title"]!r}'
        assert v['about'] and letters(about)[:20] == letters(v['about'])[:20], f'{page}: {v["about"]!r}'
        assert 'Rendered by Sphinx' in v['renderer'] and f'nbs/{page}' in v['renderer'], (
            f'{page} does not say what rendered it'
        )
        assert not v['errors'], f'{page}: {v["errors"]}'


@needs_browser
def test_sidebar_shows_where_a_reader_is(visits):
    "The current entry is on the screen, however long the sidebar is"
    lost = [page for page, v in visits.items() if page != 'index.ipynb' and not v['entry']]
    assert not lost, lost


@needs_browser
def test_pages_are_quiet_and_need_nobody_else(visits):
    bad = {k: v['problems'] for k, v in visits.items() if v['problems']}
    assert not bad, bad


@needs_browser
def test_math_is_drawn(visits):
    for page, v in visits.items():
        assert v['drawn'] == v['math'] and not v['failed'], (
            f'{page}: {v["drawn"]} of {v["math"]} formulas are drawn; {v["failed"]}'
        )
        assert not v['raw'], f'{page} shows markup: {v["raw"]}'
    assert sum(v['math'] for v in visits.values()) > 300


@needs_browser
def test_figures_are_loaded_and_have_words(visits):
    for page, v in visits.items():
        assert not v['blank'] and not v['silent'], f'{page}: not loaded {v["blank"]}; without words {v["silent"]}'
    assert sum(v['images'] for v in visits.values()) > 80


@needs_browser
@pytest.mark.parametrize('screen', ['overflow', 'desk'])
def test_pages_fit_the_screen(visits, screen):
    "390 pixels (overflow) and 1400 (desk)"
    wide = {k: v[screen] for k, v in visits.items() if v[screen] > 0}
    assert not wide, f'pixels by which pages are too wide: {wide}'


@needs_browser
@pytest.mark.parametrize('mode', ['light', 'dark'])
def test_pages_can_be_read(visits, mode):
    low = {k: v[mode][:3] for k, v in visits.items() if v[mode]}
    assert not low, low


@needs_browser
def test_printed_text_fits_its_column(visits):
    wide = {k: v['wide'][:3] for k, v in visits.items() if v['wide']}
    assert not wide, f'printed text is cut off, on a desk or on a phone: {wide}'
    for o in (
        'experiments/synthetic.ipynb',
        'tutorials/cluster.ipynb',
        '76_claims.scorecard.ipynb',
        '90_cli.ipynb',
    ):
        assert visits[o]['printed'], f'{o} prints nothing any more'


@needs_browser
def test_a_phones_header_and_overview(visits):
    "Icons stand apart, and the overview of all claims is not shrunk until nobody can read it"
    close = {k: v['bar'] for k, v in visits.items() if v['bar'] and min(v['bar']) < 8}
    assert not close, f'pixels between what stands in the header: {close}'
    wide = {k: v['overview'] for k, v in visits.items() if v['overview']}
    assert wide and min(wide.values()) >= 600, wide


def search(page, what):
    "Type into the search field as a reader does; where the results lead"
    page.focus('input.sidebar-search').type(what)
    found, end = 'document.querySelectorAll("ul.search li a").length', time.monotonic() + 30
    try:
        page.press('Enter')
    except PageError:
        pass  # the page has gone, to that of the results
    counts = []  # results arrive one by one: wait until there are no more
    while time.monotonic() < end and not (len(counts) > 10 and counts[-1] and len(set(counts[-10:])) == 1):
        try:
            counts.append(page.js(found))
        except PageError:
            pass
        time.sleep(0.1)
    return page.js('[...document.querySelectorAll("ul.search li a")].map(o => o.getAttribute("href"))')


# What readers look for, and a page that must be among the first results
SOUGHT = {
    'LayerwiseCallback': 'lw.html',
    'early stopping': 'rounds.html',
    'dead filters': 'tutorials/stuck.html',
}


@needs_browser
@pytest.mark.parametrize('words', SOUGHT)
def test_search_finds(browser, base, words):
    with browser.open(base) as p:
        pages = list(dict.fromkeys(hit.split('#')[0].split('?')[0] for hit in search(p, words)))
        assert SOUGHT[words] in pages[:8], pages


@needs_browser
def test_search(browser, base):
    with browser.open(base) as p:
        hits = search(p, 'LayerwiseCallback')
        assert hits and hits[0].split('#')[0] == 'lw.html', hits
        p.click('ul.search li a')
        p.wait('document.querySelector("article h1")?.textContent.startsWith("LW")')
        assert not p.problems(allow=(base, 'data:'))


@needs_browser
def test_without_a_server(browser, docs):
    "The site can be read from a folder"
    with browser.open(docs / 'lw.html') as p:
        v = p.js(FACTS)
        assert v['math'] == v['drawn'] > 0 and not v['blank'] and not p.problems()
        assert 'lw.html' in [o.split('#')[0] for o in search(p, 'LayerwiseCallback')]


@needs_browser
@pytest.mark.parametrize('dark', [False, True], ids=['light', 'dark'])
def test_the_system_chooses_light_or_dark(browser, base, dark):
    with browser.open(f'{base}index.html', dark=dark) as p:
        ground = p.js('getComputedStyle(document.body).backgroundColor')
        assert (sum(map(int, re.findall(r'\d+', ground)[:3])) < 200) == dark, ground


# ---------------------------------------------------------------- as Quarto shows them


@pytest.fixture(scope='module')
def previews(built, tmp_path_factory):
    "Folder of the pages in light and dark, and what Pandoc warned about"
    copy, out = built[0].parent, tmp_path_factory.mktemp('preview')
    return out, preview.render(copy, copy / '_proc', out)


def test_pandoc_understands_every_page(previews):
    "A formula that it cannot convert is a warning"
    assert not previews[1]


def test_links_of_the_previewed_pages(previews):
    "Pages and anchors exist, in links between notebooks and in those that nbdev makes from names in backticks"
    out, site = previews[0], build.site_url(build.settings(root)) + '/'
    by_name = {page: build.address(page) + '.html' for _, page, _ in side}
    pages = {where: Html(out / where) for where in by_name.values()}
    bad = []
    for page, where in by_name.items():
        for url in pages[where].links:
            path, _, anchor = unquote(url).partition('#')
            if path.startswith(site):
                target = path.removeprefix(site)
            elif urlsplit(url).scheme:
                continue
            elif path.endswith('.ipynb'):
                target = by_name.get(posixpath.normpath(posixpath.join(posixpath.dirname(page), path)))
            else:
                target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else where
            if target in pages:
                if anchor and anchor not in pages[target].ids:
                    bad.append(f'{where}: {url} has no such anchor')
            elif target is None or not (root / 'nbs' / target).exists():
                bad.append(f'{where}: {url} is not there')
    assert not bad, '\n'.join(sorted(set(bad)))


def test_pages_show_no_repr_of_plots(previews, docs):
    "What a plotting call returns is no result, and a progress bar is none after the run"
    for folder in (previews[0], docs):
        for path in folder.rglob('*.html'):
            page = path.read_text(encoding='utf-8')
            found = re.findall(r'&lt;Axes:|array\(\[&lt;Axes|&lt;matplotlib\.|<progress max', page)
            assert not found, f'{path.relative_to(folder)}: {found[:3]}'


def test_pages_name_no_machine(previews, built):
    "No folder of the machine that built the site, neither in signatures nor in warnings of imports"
    for folder in (previews[0], built[0]):
        for path in folder.rglob('*.html'):
            page = re.sub('<[^<>]+>', '', path.read_text(encoding='utf-8'))  # code is colored word by word
            ours = r'PosixPath\(|__main__\.|site-packages|FutureWarning|findfont: | at 0x[0-9a-f]{8}'
            found = re.findall(rf'.{{,40}}(?:{ours}).{{,40}}', page)
            assert not found and str(built[0].parent) not in page, f'{path.relative_to(folder)}: {found[:2]}'


def test_nothing_is_asked_of_other_hosts():
    settings = (root / '_quarto.yml').read_text(encoding='utf-8')
    assert 'html-math-method: mathml' in settings and '[cosmo, theme.scss]' in settings
    assert '$web-font-path: false;' in (root / 'nbs/theme.scss').read_text(encoding='utf-8')
    for path in ('nbs/theme.scss', 'nbs/styles.css', 'nbs/unlink_code.lua'):
        assert '//fonts' not in (root / path).read_text(encoding='utf-8')


# Links that are shown as text, identifiers of claims that break, tables that are stretched
SHOWN = r"""(() => {
  const main = document.querySelector('main'), all = s => [...main.querySelectorAll(s)];
  const lines = o => o.getBoundingClientRect().height / parseFloat(getComputedStyle(o).lineHeight);
  return {
    raw: main.textContent.match(/\[`?[\w.]+`?\]\(http[^)]*\)|^:::.*$/gm) || [],
    broken: all('td:first-child > a').filter(o => /^[A-Z]\d+$/.test(o.textContent) && lines(o) > 1.5)
      .map(o => o.textContent),
    code: all('pre').length};
})()"""


@pytest.fixture(scope='module')
def previewed(browser, previews):
    "What the browser finds on every page: 390 and 1400 pixels wide, light and dark"
    res = {}
    for _, page, _ in side:
        where = previews[0] / build.address(page)
        with browser.open(where.with_name(where.name + '.html'), size=(390, 844)) as p:
            res[page] = p.js(SHOWN) | dict(phone=p.overflow(), light=p.contrasts(4.5, 'main'))
            p.resize(1400, 900)
            res[page]['desk'] = p.overflow()
        with browser.open(where.with_name(where.name + '.dark.html'), size=(1400, 900)) as p:
            res[page]['dark'] = p.contrasts(4.5, 'main')
            res[page]['desk'] = max(res[page]['desk'], p.overflow())
    return res


@needs_browser
def test_previewed_pages_show_no_markup(previewed):
    for page, v in previewed.items():
        assert not v['raw'] and not v['broken'], f'{page}: {v["raw"][:3]} {v["broken"][:3]}'
    assert sum(v['code'] for v in previewed.values()) > 500


@needs_browser
@pytest.mark.parametrize('screen', ['phone', 'desk'])
def test_previewed_pages_fit_the_screen(previewed, screen):
    wide = {k: v[screen] for k, v in previewed.items() if v[screen] > 0}
    assert not wide, f'pixels by which pages are too wide: {wide}'


@needs_browser
@pytest.mark.parametrize('mode', ['light', 'dark'])
def test_previewed_pages_can_be_read(previewed, mode):
    low = {k: v[mode][:3] for k, v in previewed.items() if v[mode]}
    assert not low, low
