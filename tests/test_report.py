"The page: read by a parser, and opened in a browser"
import json, math, re, shutil, subprocess
from html.parser import HTMLParser
import pandas as pd
import pytest
from reinit_nb.core import ReinitError
from reinit_nb.report import figure_html, page, png, prose, table_html, text_table, write_page

table = pd.DataFrame(dict(method=['LW','BL','<b>FC</b> & "co"','DSD','WELS 10','WELS 9'], accuracy=[72.8312, 9.1, math.nan, 100., -3.25, 9.0999],
                          penalty=[.005, .2, 0, .1, 1e-3, .02], note=['x', None, 'y', 'z', '–', '']))

@pytest.fixture(scope='module')
def html():
    from matplotlib.figure import Figure
    fig = Figure(figsize=(8,3)); fig.subplots().plot([1,3,2])
    return page('Six <methods> & more', prose('What was `measured`, and "how".'), ('Numbers', table_html(table, 'Six "methods"')),
                ('Empty', table_html(table[:0])), ('Picture', figure_html(fig, 'A line that goes "up" & <down>')), ('Long', prose('word '*200)),
                subtitle='An example', footer='The end')

# ---------------------------------------------------------------- read by a parser

VOID = {'meta','link','img','br','hr','input'}

class Reader(HTMLParser):
    "All tags with their attributes, headings with their text, and whether tags are closed in order"
    def __init__(self, text):
        super().__init__(); self.tags,self.headings,self.open,self.bad,self.cells = [],[],[],[],[]
        self.feed(text); self.close()
    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID: self.open.append(tag)
        if re.fullmatch('h[1-6]', tag): self.headings.append([int(tag[1]), ''])
        if tag in ('td','th'): self.cells.append('')
    def handle_endtag(self, tag):
        if not self.open or self.open.pop()!=tag: self.bad.append(tag)
    def handle_data(self, data):
        if self.open and re.fullmatch('h[1-6]', self.open[-1]): self.headings[-1][1] += data
        if self.open and self.open[-1] in ('td','th'): self.cells[-1] += data

def fetches(reader):
    "Attributes that make a browser ask for something (links inside the page do not)"
    wanted = ('src','srcset','href','data','action','poster','background','ping')
    return [(t, k, v) for t,a in reader.tags for k,v in a.items() if k in wanted and not v.startswith(('data:','#'))]

def test_document(html):
    r = Reader(html)
    assert html.startswith('<!doctype html>') and r.bad==[] and r.open==[]
    tags = dict(r.tags)
    assert tags['html']['lang']=='en' and 'title' in tags
    metas = [a for t,a in r.tags if t=='meta']
    assert dict(charset='utf-8') in metas and any(a.get('name')=='viewport' and 'width=device-width' in a['content'] for a in metas)
    assert 'prefers-color-scheme:dark' in html and '@media print' in html

def test_asks_for_nothing(html):
    assert fetches(Reader(html))==[]
    assert not re.search(r'url\(|@import|https?://|fetch\(|XMLHttpRequest|WebSocket', html)
    assert ('link', dict(rel='icon', href='data:,')) in Reader(html).tags        # or the browser asks for /favicon.ico
    assert "default-src 'none'" in html
    assert fetches(Reader('<img src="a.png"><a href="#b"><link href="https://c.d">'))==[('img','src','a.png'), ('link','href','https://c.d')]

def test_headings_and_contents(html):
    r = Reader(html)
    assert r.headings==[[1,'Six <methods> & more'], *([2,o] for o in ('Numbers','Empty','Picture','Long'))]
    ids = [a['id'] for t,a in r.tags if 'id' in a]
    links = [a['href'][1:] for t,a in r.tags if t=='a']
    assert len(set(ids))==len(ids) and links==ids==['numbers','empty','picture','long']
    assert 'nav' not in dict(Reader(page('t', *[('a','b')]*3)).tags)

def test_every_image_has_words(html):
    images = [a for t,a in Reader(html).tags if t=='img']
    assert [a['alt'] for a in images]==['A line that goes "up" & <down>'] and int(images[0]['width'])>300
    from matplotlib.figure import Figure
    for alt in ('', '  ', None):
        with pytest.raises(ReinitError, match='needs alt'): figure_html(Figure(), alt)
    with pytest.raises(ReinitError, match='not a matplotlib figure'): png(3)

def test_table_is_escaped_and_exact():
    h = table_html(table, '<script>alert(1)</script>')
    r = Reader(h)
    assert {t for t,_ in r.tags}=={'div','table','caption','thead','tbody','tr','th','td'}
    assert '<b>FC</b> & "co"' in r.cells and r.cells[:4]==list(table)
    exact = [float(a['data-v']) for t,a in r.tags if 'data-v' in a]
    assert exact==[v for row in table[['accuracy','penalty']].itertuples(index=False) for v in row if not math.isnan(v)]
    assert r.cells.count('–')==3                                                        # NaN, None, and one of its own
    assert all(a.get('scope')=='col' for t,a in r.tags if t=='th')

@pytest.mark.parametrize('df', [pd.DataFrame(dict(a=[])), pd.DataFrame(dict(a=[1,2], b=[[1],[2]])), table.pivot(index='method', columns='note', values='accuracy'),
                                pd.DataFrame([[1,2.5]], columns=pd.MultiIndex.from_tuples([('a','x'),('a','y')])), pd.DataFrame(dict(a=[math.inf, -math.inf, 1])),
                                pd.DataFrame([[1,2]], columns=['a','a']), pd.DataFrame(dict(t=pd.to_datetime(['2020-01-01', None])))], ids=range(7))
def test_odd_tables(df):
    r = Reader(table_html(df)); assert not r.bad and not r.open
    assert isinstance(text_table(df), str)

@pytest.mark.parametrize('df', [pd.DataFrame(), [1], None])
def test_not_tables(df):
    for f in (table_html, text_table):
        with pytest.raises(ReinitError, match='a table needs'): f(df)

def test_text_table():
    lines = text_table(table).splitlines()
    assert len(lines)==7 and lines[0].split()==list(table) and lines[1].split()==['LW','72.8','0.005','x'] and '…' not in text_table(pd.DataFrame(dict(a=['x'*300])))

def test_write_page(tmp_path, html):
    f = write_page(tmp_path/'a'/'index.html', html)
    assert f.read_bytes().decode()==html and [o.name for o in f.parent.iterdir()]==['index.html']
    with pytest.raises(ReinitError, match='cannot be written'): write_page(f/'index.html', html)

@pytest.mark.parametrize('part', [3, table, (), ('head', 3), None])
def test_wrong_parts(part):
    with pytest.raises(ReinitError, match='a part of a page'): page('t', part)

# ---------------------------------------------------------------- opened in a browser

browser = next(filter(None, map(shutil.which, ('chromium','chromium-browser','google-chrome'))), None)
in_browser = pytest.mark.skipif(browser is None, reason='no chromium or google-chrome here: the page was not opened in a browser')
FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update',
         '--disable-sync', '--disable-dev-shm-usage', '--host-resolver-rules=MAP * ~NOTFOUND', '--enable-logging=stderr', '--v=0']

def visit(text, tmp, script='', *flags):
    "Open a page from a file, run `script` in it, and get what it puts into `out`, and the lines of the console"
    tail = f'<script>window.onload = () => {{ const out = {{}}; {script}; out.fetched = performance.getEntriesByType("resource").map(o => o.name);' \
            ' const pre = document.createElement("pre"); pre.id = "out"; pre.textContent = JSON.stringify(out); document.body.append(pre); }</script>'
    f = tmp/'page.html'
    f.write_text(text.replace('</body>', f'{tail}</body>'), encoding='utf-8')
    r = subprocess.run([browser, *FLAGS, f'--user-data-dir={tmp/"profile"}', *flags, '--dump-dom', f.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search('<pre id="out">(.*?)</pre>', r.stdout, re.S)
    assert found, f'the page did not run to its end:\n{r.stderr[-3000:]}'
    from html import unescape
    return json.loads(unescape(found[1])), [l for l in r.stderr.splitlines() if 'CONSOLE' in l]

CLICK = '''
const heads = [...document.querySelectorAll('section:first-of-type th')], column = i => [...document.querySelectorAll('section:first-of-type tbody tr')].map(r => r.cells[i].textContent);
const state = () => heads.map(h => h.getAttribute('aria-sort')), button = i => heads[i].querySelector('button');
out.names = heads.map(h => h.textContent); out.before = [column(0), state()];
button(1).click(); out.up = [column(1), column(0), state()];
button(1).click(); out.down = [column(1), state()];
button(0).focus(); out.focused = document.activeElement === button(0); document.activeElement.click(); out.words = [column(0), state()];
button(3).click(); out.notes = column(3);
out.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth; out.dark = matchMedia('(prefers-color-scheme: dark)').matches;
out.bg = getComputedStyle(document.body).backgroundColor; out.size = [innerWidth, document.querySelector('img').getBoundingClientRect().width, document.querySelector('img').naturalWidth]
'''

@in_browser
def test_browser_sorts_and_asks_for_nothing(tmp_path, html):
    out,console = visit(html, tmp_path, CLICK)
    assert console==[] and out['fetched']==[]
    assert out['names']==list(table) and out['before']==[table.method.tolist(), [None]*4]
    assert out['up']==[['-3.2','9.1','9.1','72.8','100.0','–'], ['WELS 10','WELS 9','BL','LW','DSD','<b>FC</b> & "co"'], [None,'ascending',None,None]]
    assert out['down']==[['100.0','72.8','9.1','9.1','-3.2','–'], [None,'descending',None,None]]     # what is missing stays last
    assert out['focused'] and out['words'][0][-2:]==['WELS 9','WELS 10'] and out['words'][1]==['ascending',None,None,None]
    assert out['notes'][:3]==['x','y','z'] and out['size'][2]>300

@in_browser
def test_browser_phone_and_dark(tmp_path, html):
    out,console = visit(html, tmp_path, CLICK, '--window-size=500,800', '--blink-settings=preferredColorScheme=0')
    assert console==[] and out['dark'] and out['bg']!='rgb(255, 255, 255)'
    assert not out['wide'] and out['size'][0]<=500

@in_browser
def test_browser_check_can_fail(tmp_path, html):
    "A foreign picture is stopped by the page's own policy, and the console tells; a script's error is told too"
    out,console = visit(html.replace('<main>', '<main><img src="https://example.invalid/x.png" alt="x">'), tmp_path)
    assert any('example.invalid' in l for l in console)
    out,console = visit(html.replace('<main>', '<main><script>nonsense()</script>'), tmp_path)
    assert any('nonsense' in l for l in console)
