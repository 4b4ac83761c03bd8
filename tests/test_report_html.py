"The page: read by a parser, and opened in a browser"

import math
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from browser import needs_browser
from IPython import get_ipython

from reinit_nb.core import ReinitError
from reinit_nb.report.html import (
    figure_html,
    figure_png,
    paragraphs,
    render_page,
    small_figures,
    table_html,
    text_table,
    write_page,
)

table = pd.DataFrame(
    dict(
        method=['LW', 'BL', '<b>FC</b> & "co"', 'DSD', 'WELS 10', 'WELS 9'],
        accuracy=[72.8312, 9.1, math.nan, 100.0, -3.25, 9.0999],
        penalty=[0.005, 0.2, 0, 0.1, 1e-3, 0.02],
        note=['x', None, 'y', 'z', '–', ''],
    )
)


@pytest.fixture(scope='module')
def html():
    from matplotlib.figure import Figure

    fig = Figure(figsize=(8, 3))
    fig.subplots().plot([1, 3, 2])
    return render_page(
        'Six <methods> & more',
        paragraphs('What was `measured`, and "how".'),
        ('Numbers', table_html(table, 'Six "methods"')),
        ('Empty', table_html(table[:0])),
        ('Picture', figure_html(fig, 'A line that goes "up" & <down>')),
        ('Long', paragraphs('word ' * 200)),
        subtitle='An example',
        footer='The end',
    )


# ---------------------------------------------------------------- read by a parser

VOID = {'meta', 'link', 'img', 'br', 'hr', 'input'}


class Reader(HTMLParser):
    "All tags with their attributes, headings with their text, and whether tags are closed in order"

    def __init__(self, text):
        super().__init__()
        self.tags, self.headings, self.open, self.bad, self.cells = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch('h[1-6]', tag):
            self.headings.append([int(tag[1]), ''])
        if tag in ('td', 'th'):
            self.cells.append('')

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.bad.append(tag)

    def handle_data(self, data):
        if self.open and re.fullmatch('h[1-6]', self.open[-1]):
            self.headings[-1][1] += data
        if self.open and self.open[-1] in ('td', 'th'):
            self.cells[-1] += data


def fetches(reader):
    "Attributes that make a browser ask for something (links inside the page do not)"
    wanted = ('src', 'srcset', 'href', 'data', 'action', 'poster', 'background', 'ping')
    return [(t, k, v) for t, a in reader.tags for k, v in a.items() if k in wanted and not v.startswith(('data:', '#'))]


def test_document(html):
    r = Reader(html)
    assert html.startswith('<!doctype html>') and r.bad == [] and r.open == []
    tags = dict(r.tags)
    assert tags['html']['lang'] == 'en' and 'title' in tags
    metas = [a for t, a in r.tags if t == 'meta']
    assert dict(charset='utf-8') in metas and any(
        a.get('name') == 'viewport' and 'width=device-width' in a['content'] for a in metas
    )
    assert 'prefers-color-scheme:dark' in html and '@media print' in html


def test_asks_for_nothing(html):
    assert fetches(Reader(html)) == []
    assert not re.search(r'url\(|@import|https?://|fetch\(|XMLHttpRequest|WebSocket', html)
    assert ('link', dict(rel='icon', href='data:,')) in Reader(html).tags  # or the browser asks for /favicon.ico
    assert "default-src 'none'" in html
    assert fetches(Reader('<img src="a.png"><a href="#b"><link href="https://c.d">')) == [
        ('img', 'src', 'a.png'),
        ('link', 'href', 'https://c.d'),
    ]


def test_headings_and_contents(html):
    r = Reader(html)
    assert r.headings == [[1, 'Six <methods> & more'], *([2, o] for o in ('Numbers', 'Empty', 'Picture', 'Long'))]
    ids = [a['id'] for t, a in r.tags if 'id' in a]
    links = [a['href'][1:] for t, a in r.tags if t == 'a']
    assert len(set(ids)) == len(ids) and links == ['numbers', 'empty', 'picture', 'long'] == [
        o for o in ids if o != 'theme'
    ]
    assert 'nav' not in dict(Reader(render_page('t', *[('a', 'b')] * 3)).tags)


def test_every_image_has_words(html):
    images = [a for t, a in Reader(html).tags if t == 'img']
    assert [a['alt'] for a in images] == ['A line that goes "up" & <down>'] and int(images[0]['width']) > 300
    from matplotlib.figure import Figure

    for alt in ('', '  ', None):
        with pytest.raises(ReinitError, match='needs alt'):
            figure_html(Figure(), alt)
    with pytest.raises(ReinitError, match='not a matplotlib figure'):
        figure_png(3)


def test_table_is_escaped_and_exact():
    h = table_html(table, '<script>alert(1)</script>')
    r = Reader(h)
    assert {t for t, _ in r.tags} == {'div', 'table', 'caption', 'thead', 'tbody', 'tr', 'th', 'td'}
    assert '<b>FC</b> & "co"' in r.cells and r.cells[:4] == list(table)
    exact = [float(a['data-v']) for t, a in r.tags if 'data-v' in a]
    assert exact == [
        v for row in table[['accuracy', 'penalty']].itertuples(index=False) for v in row if not math.isnan(v)
    ]
    assert r.cells.count('–') == 3  # NaN, None, and one of its own
    assert all(a.get('scope') == 'col' for t, a in r.tags if t == 'th')


@pytest.mark.parametrize(
    'df',
    [
        pd.DataFrame(dict(a=[])),
        pd.DataFrame(dict(a=[1, 2], b=[[1], [2]])),
        table.pivot(index='method', columns='note', values='accuracy'),
        pd.DataFrame([[1, 2.5]], columns=pd.MultiIndex.from_tuples([('a', 'x'), ('a', 'y')])),
        pd.DataFrame(dict(a=[math.inf, -math.inf, 1])),
        pd.DataFrame([[1, 2]], columns=['a', 'a']),
        pd.DataFrame(dict(t=pd.to_datetime(['2020-01-01', None]))),
    ],
    ids=range(7),
)
def test_odd_tables(df):
    r = Reader(table_html(df))
    assert not r.bad and not r.open
    assert isinstance(text_table(df), str)


@pytest.mark.parametrize('df', [pd.DataFrame(), [1], None])
def test_not_tables(df):
    for f in (table_html, text_table):
        with pytest.raises(ReinitError, match='a table needs'):
            f(df)


def test_text_table():
    lines = text_table(table).splitlines()
    assert (
        len(lines) == 7
        and lines[0].split() == list(table)
        and lines[1].split() == ['LW', '72.8', '0.005', 'x']
        and '…' not in text_table(pd.DataFrame(dict(a=['x' * 300])))
    )


def test_small_figures_do_nothing_outside_of_a_notebook():
    "Tutorials run as scripts"
    assert get_ipython() is None
    small_figures()

def test_write_page(tmp_path, html):
    f = write_page(tmp_path / 'a' / 'index.html', html)
    assert f.read_bytes().decode() == html and [o.name for o in f.parent.iterdir()] == ['index.html']
    with pytest.raises(ReinitError, match='cannot be written'):
        write_page(f / 'index.html', html)


@pytest.mark.parametrize('part', [3, table, (), ('head', 3), None])
def test_wrong_parts(part):
    with pytest.raises(ReinitError, match='a part of a page'):
        render_page('t', part)


# ---------------------------------------------------------------- opened in a browser


@pytest.fixture(scope='module')
def file(tmp_path_factory, html):
    return write_page(tmp_path_factory.mktemp('page') / 'page.html', html)


def column(page, i, table=0):
    return [r[i] for r in page.table('table', table)[1:]]


def sorts(page, table=0):
    return page.js(
        f"[...document.querySelectorAll('table')[{table}].tHead.rows[0].cells].map(h => h.getAttribute('aria-sort'))"
    )


@needs_browser
def test_browser_sorts_and_asks_for_nothing(browser, file):
    with browser.open(file) as p:
        assert p.table('table')[0] == list(table) and column(p, 0) == table.method.tolist() and sorts(p) == [None] * 4
        p.click('th button', 1)
        assert (
            column(p, 1) == ['-3.2', '9.1', '9.1', '72.8', '100.0', '–']
            and column(p, 0) == ['WELS 10', 'WELS 9', 'BL', 'LW', 'DSD', '<b>FC</b> & "co"']
            and sorts(p) == [None, 'ascending', None, None]
        )
        p.click('th button', 1)
        assert column(p, 1) == ['100.0', '72.8', '9.1', '9.1', '-3.2', '–'] and sorts(p) == [
            None,
            'descending',
            None,
            None,
        ]  # what is missing stays last
        p.click('th button', 3)
        assert column(p, 3)[:3] == ['x', 'y', 'z']
        assert p.problems() == [] and [u for _, u in p.requests if not u.startswith('data:')] == [file.as_uri()]


@needs_browser
def test_browser_sorts_by_keyboard(browser, file):
    with browser.open(file) as p:
        p.focus('th button', 0).press('Enter')
        assert column(p, 0)[-2:] == ['WELS 9', 'WELS 10'] and sorts(p) == ['ascending', None, None, None]
        p.press('Space')
        assert column(p, 0)[:2] == ['WELS 10', 'WELS 9'] and sorts(p)[0] == 'descending'
        p.press('Tab', 'Enter')  # the next header
        assert column(p, 1)[0] == '-3.2' and sorts(p) == [None, 'ascending', None, None]


@needs_browser
def test_browser_phone(browser, file):
    for size in ((390, 844), (320, 600), (800, 600), (1600, 900)):
        with browser.open(file, size=size) as p:
            assert p.overflow() <= 0 and p.js('innerWidth') == size[0], size


@needs_browser
@pytest.mark.parametrize('dark', [False, True])
def test_browser_light_and_dark(browser, file, dark):
    with browser.open(file, dark=dark) as p:

        def ground():
            return sum(map(int, re.findall(r'\d+', p.js('getComputedStyle(document.body).backgroundColor')))) > 600

        assert ground() != dark and p.contrasts() == []
        p.click('#theme')  # the other one
        assert ground() == dark and p.contrasts() == [] and p.texts('#theme') == ['Light' if not dark else 'Dark']
        p.click('#theme')
        assert ground() != dark
        p.media(dark=dark, print=True)
        assert p.js("getComputedStyle(document.getElementById('theme')).display") == 'none'
        assert p.js("getComputedStyle(document.documentElement).getPropertyValue('--bg')") == '#fff'  # paper is white


@needs_browser
def test_browser_filter(browser, tmp_path):
    t = pd.DataFrame(
        dict(
            id=['R1', 'R2', 'R10'],
            verdict=['✅ holds', '❌ fails', '✅ holds'],
            value=['5.0 [1, 9] points', '−3 points', '12%'],
            claim=['Alpha one', 'beta <two>', 'gamma ONE'],
        )
    )
    f = write_page(tmp_path / 'p.html', render_page('t', table_html(t, ids=t.id, filters=['verdict'])))
    with browser.open(f) as p:
        assert p.texts('output') == ['3 rows']
        p.focus('input').type('one')
        assert column(p, 0) == ['R1', 'R10'] and p.texts('output') == ['2 of 3 rows']
        p.type(' gam')
        assert column(p, 0) == ['R10']
        p.goto(f'{f}#R2')  # hidden, and asked for
        assert column(p, 0) == ['R1', 'R2', 'R10'] and p.js("document.querySelector('tr:target').id") == 'R2'
        p.js(
            "(() => { const s = document.querySelector('select'); s.value = '❌ fails'; "
            "s.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
        assert column(p, 0) == ['R2']
        p.js(
            "(() => { const s = document.querySelector('select'); s.value = ''; "
            "s.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
        for i, want in ((0, ['R1', 'R2', 'R10']), (1, ['R1', 'R10', 'R2']), (2, ['R2', 'R1', 'R10'])):
            p.click('th button', i)
            assert column(p, 0) == want, i
        p.focus('input').type('x').press('Enter')  # nothing is sent anywhere
        assert p.problems() == [] and len(p.requests) == 1 and column(p, 0) == []


@needs_browser
def test_browser_check_can_fail(browser, tmp_path, html):
    "A foreign picture is stopped by the page's own policy; a script's error and pale text are found"
    for more, said in (
        ('<img src="https://example.invalid/x.png" alt="x">', 'example.invalid'),
        ('<script>nonsense()</script>', 'nonsense'),
    ):
        with browser.open(write_page(tmp_path / 'bad.html', html.replace('<main>', f'<main>{more}'))) as p:
            assert any(said in o for o in p.problems())
    with browser.open(
        write_page(
            tmp_path / 'pale.html', html.replace('<main>', '<main><p style="color:#aaa;min-width:2000px">pale</p>')
        )
    ) as p:
        assert [o[3] for o in p.contrasts()] == ['pale'] and p.overflow() > 0


@needs_browser
def test_browser_prints(browser, file):
    with browser.open(file) as p:
        assert p.pdf().startswith(b'%PDF')
