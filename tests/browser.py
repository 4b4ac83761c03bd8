"""A headless Chromium for tests: opens pages, listens, clicks, types, measures.

It speaks the DevTools protocol over a pipe: no port, no driver, no package to install,
and the browser ends with the pipe.

    from browser import needs_browser     # skips where there is none; the fixture `browser` comes from conftest.py
    @needs_browser
    def test_page(browser):
        page = browser.open('site/index.html', size=(390,844), dark=True)
        assert page.problems()==[] and page.js('document.title')=='Home'
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'))), None
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason='no chromium or google-chrome here: no page was opened in a browser (apt-get install chromium)',
)
FLAGS = [
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--disable-quic',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
    '--disable-dev-shm-usage',
    '--disable-extensions',
    '--force-color-profile=srgb',
    '--hide-scrollbars',
    '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1',
    '--remote-debugging-pipe',
]
# Chromium reads commands from file 3 and answers on file 4
_START = (
    'import fcntl,os,sys; r,w = [fcntl.fcntl(int(o), fcntl.F_DUPFD_CLOEXEC, 10) for o in sys.argv[1:3]]; '
    'os.dup2(r, 3); os.dup2(w, 4); '
    'os.execvp(sys.argv[3], sys.argv[3:])'
)
KEYS = dict(
    Enter=('\r', 'Enter', 13),
    Space=(' ', 'Space', 32),
    Tab=('', 'Tab', 9),
    Escape=('', 'Escape', 27),
    ArrowDown=('', 'ArrowDown', 40),
    ArrowUp=('', 'ArrowUp', 38),
    Backspace=('', 'Backspace', 8),
)


class PageError(AssertionError):
    "A script in the page failed, or something is not there"


class Browser:
    "A browser process; every page that it opens has a fresh profile, with nothing remembered"

    def __init__(self, *flags, timeout=60):
        if CHROMIUM is None:
            pytest.skip('no chromium or google-chrome here')
        self.timeout, self.buffer, self.n, self.pages = timeout, b'', 0, {}
        self.tmp = tempfile.TemporaryDirectory(prefix='browser_', ignore_cleanup_errors=True)
        r, self.out = os.pipe()
        self.inp, w = os.pipe()
        self.log = open(Path(self.tmp.name) / 'log', 'w+b')
        cmd = [
            sys.executable,
            '-c',
            _START,
            str(r),
            str(w),
            CHROMIUM,
            *FLAGS,
            *flags,
            f'--user-data-dir={self.tmp.name}/profile',
            'about:blank',
        ]
        self.process = subprocess.Popen(
            cmd, pass_fds=(r, w), stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True
        )
        os.close(r)
        os.close(w)
        try:
            self.version = self.send('Browser.getVersion')['product']
        except BaseException:
            self.close()
            raise

    def send(self, method, session=None, **params):
        "One command, and what it answers; what happens meanwhile goes to the pages"
        self.n += 1
        n, end = self.n, time.monotonic() + self.timeout
        data = (
            json.dumps(dict(id=n, method=method, params=params) | (dict(sessionId=session) if session else {})).encode()
            + b'\0'
        )
        while data:
            data = data[os.write(self.out, data) :]
        while True:
            o = self.read(end, method)
            if o.get('id') != n:
                continue
            if 'error' in o:
                raise PageError(f'{method}: {o["error"]["message"]}')
            return o['result']

    def read(self, end, what='an event'):
        "The next message; events are handed to their page"
        while b'\0' not in self.buffer:
            if not select.select([self.inp], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError(f'no answer from the browser to {what} within {self.timeout} s')
            got = os.read(self.inp, 1 << 20)
            if not got:
                raise PageError(f'the browser has ended:\n{self.tail()}')
            self.buffer += got
        text, self.buffer = self.buffer.split(b'\0', 1)
        o = json.loads(text)
        if o.get('sessionId') in self.pages and 'method' in o:
            self.pages[o['sessionId']]._event(o['method'], o['params'])
        return o

    def tail(self):
        self.log.flush()
        return Path(self.log.name).read_text(errors='replace')[-3000:]

    def open(self, url=None, size=(1200, 900), dark=False, mobile=False, **kw):
        "A new page on a url, or on a file given by its path"
        context = self.send('Target.createBrowserContext')['browserContextId']
        target = self.send('Target.createTarget', url='about:blank', browserContextId=context)['targetId']
        session = self.send('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        page = self.pages[session] = Page(self, session, target, context)
        for o in ('Page', 'Runtime', 'Log', 'Network'):
            page.send(f'{o}.enable')
        page.resize(*size, mobile=mobile)
        page.media(dark=dark, **kw)
        return page.goto(url) if url is not None else page

    def close(self):
        "End the browser, and leave nothing behind"
        for o in (self.out, self.inp):
            try:
                os.close(o)
            except OSError:
                pass
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session: nobody else's processes are in it
            except ProcessLookupError:
                pass
            self.process.wait(10)
        self.log.close()
        self.tmp.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.close()


class Page:
    """A page, and what has happened in it since it was opened.

    `console` (level, text), `errors` (uncaught exceptions), `requests` (method, url), `failed` (urls)
    """

    def __init__(self, browser, session, target, context):
        self.browser, self.session, self.target, self.context = browser, session, target, context
        self.console, self.errors, self.requests, self.failed, self.loads = [], [], [], [], 0
        self.urls = {}

    def send(self, method, **params):
        return self.browser.send(method, self.session, **params)

    def _event(self, name, p):
        if name == 'Runtime.consoleAPICalled':
            self.console.append((p['type'], ' '.join(str(o.get('value', o.get('description', ''))) for o in p['args'])))
        elif name == 'Log.entryAdded':
            self.console.append(
                (p['entry']['level'], ' '.join([p['entry']['text'], p['entry'].get('url', '')]).strip())
            )
        elif name == 'Runtime.exceptionThrown':
            self.errors.append(_said(p['exceptionDetails']))
        elif name == 'Network.requestWillBeSent':
            self.requests.append((p['request']['method'], p['request']['url']))
            self.urls[p['requestId']] = p['request']['url']
        elif name == 'Network.loadingFailed':
            self.failed.append(self.urls.get(p['requestId'], '?'))
        elif name == 'Network.responseReceived' and p['response']['status'] >= 400:
            self.failed.append(p['response']['url'])
        elif name == 'Page.loadEventFired':
            self.loads += 1

    def goto(self, url):
        "Go to a url, or to a file given by its path, and wait until it is loaded"
        url = str(url)
        if '://' not in url and not url.startswith(('data:', 'about:')):
            path, _, anchor = url.partition('#')
            if not Path(path).exists():
                raise FileNotFoundError(path)
            url = Path(path).resolve().as_uri() + (f'#{anchor}' if anchor else '')
        before, end = self.loads, time.monotonic() + self.browser.timeout
        o = self.send('Page.navigate', url=url)
        if 'errorText' in o:
            raise PageError(f'{url}: {o["errorText"]}')
        if 'loaderId' in o:  # else: an anchor in the same page
            while self.loads == before:
                self.browser.read(end, f'loading {url}')
        return self.settle()

    def settle(self):
        "Wait for two frames, so that styles and layout are those of now"
        drawn = 'new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))'
        try:
            self.js(drawn)
        except PageError as error:
            if 'navigated' not in str(error):
                raise
            self.js(drawn)  # a click on a link: the page that was left cannot answer any more
        return self

    def js(self, expression):
        "The value of an expression, or of the promise that it is"
        o = self.send(
            'Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if 'exceptionDetails' in o:
            raise PageError(_said(o['exceptionDetails']))
        return o['result'].get('value')

    def wait(self, expression, seconds=10):
        "Wait until an expression is true"
        end = time.monotonic() + seconds
        while not self.js(f'Boolean({expression})'):
            if time.monotonic() > end:
                raise PageError(f'not within {seconds} s: {expression}')
            time.sleep(0.05)
        return self

    def resize(self, width, height, mobile=False, scale=1):
        self.send(
            'Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        return self

    def media(self, dark=False, print=False, reduced_motion=False):
        features = [
            dict(name='prefers-color-scheme', value='dark' if dark else 'light'),
            dict(name='prefers-reduced-motion', value='reduce' if reduced_motion else 'no-preference'),
        ]
        self.send('Emulation.setEmulatedMedia', media='print' if print else '', features=features)
        return self

    def click(self, selector, i=0):
        "Click with the mouse on the middle of an element, where it can be seen"
        at = self.js(f"""(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{i}];
            if (!e) return null;
            e.scrollIntoView({{block:'center', inline:'center', behavior:'instant'}});
            const b = e.getBoundingClientRect();
            return b.width && b.height ? [b.x+b.width/2, b.y+b.height/2] : null; }})()""")
        if at is None:
            raise PageError(f'{selector} is not there, or cannot be seen')
        for o in ('mousePressed', 'mouseReleased'):
            self.send('Input.dispatchMouseEvent', type=o, x=at[0], y=at[1], button='left', clickCount=1)
        return self.settle()

    def focus(self, selector, i=0):
        if not self.js(
            f'(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{i}]; e?.focus(); '
            'return !!e && document.activeElement === e; })()'
        ):
            raise PageError(f'{selector} is not there, or takes no focus')
        return self

    def press(self, *keys):
        "Press keys by name, one after the other: Enter, Space, Tab, …"
        for k in keys:
            text, code, n = KEYS[k]
            more = dict(key=' ' if k == 'Space' else k, code=code, windowsVirtualKeyCode=n)
            self.send(
                'Input.dispatchKeyEvent',
                type='keyDown' if text else 'rawKeyDown',
                **more,
                **(dict(text=text) if text else {}),
            )
            self.send('Input.dispatchKeyEvent', type='keyUp', **more)
        return self.settle()

    def type(self, text):
        "Type into what has the focus"
        self.send('Input.insertText', text=text)
        return self.settle()

    def texts(self, selector):
        return self.js(f'[...document.querySelectorAll({json.dumps(selector)})].map(o => o.textContent.trim())')

    def table(self, selector, i=0):
        "The texts of a table, header first, hidden rows left out"
        return self.js(
            f'[...document.querySelectorAll({json.dumps(selector)})[{i}].rows].filter(r => r.offsetParent !== null)'
            '.map(r => [...r.cells].map(c => c.textContent.trim()))'
        )

    def overflow(self):
        return self.js('document.documentElement.scrollWidth - document.documentElement.clientWidth')

    def contrasts(self, below=4.5, within='body'):
        return self.js(f'({_CONTRAST})({below}, {json.dumps(within)})')

    def problems(self, allow=('file:', 'data:', 'about:', 'blob:')):
        "Errors and warnings of the console, exceptions, failed requests, and requests for anything not allowed"
        self.js('0')  # what is on its way arrives first
        return (
            [f'console {k}: {t}' for k, t in self.console if k in ('error', 'warning', 'assert')]
            + [f'exception: {o}' for o in self.errors]
            + [f'failed: {o[:200]}' for o in self.failed]
            + [f'request: {m} {u[:200]}' for m, u in self.requests if not u.startswith(tuple(allow))]
        )

    def screenshot(self, path, full=False):
        "Write what is seen, or the whole page, as PNG"
        more = {}
        if full:
            s = self.send('Page.getLayoutMetrics')['cssContentSize']
            more = dict(
                captureBeyondViewport=True,
                clip=dict(x=0, y=0, width=s['width'], height=min(s['height'], 16000), scale=1),
            )
        Path(path).write_bytes(base64.b64decode(self.send('Page.captureScreenshot', format='png', **more)['data']))
        return Path(path)

    def pdf(self):
        return base64.b64decode(self.send('Page.printToPDF', printBackground=True)['data'])

    def close(self):
        self.browser.send('Target.disposeBrowserContext', browserContextId=self.context)
        self.browser.pages.pop(self.session, None)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.close()


def _said(details):
    e = details.get('exception', {})
    return e.get('description') or str(e.get('value', '')) or details.get('text', '')


# Visible text with less contrast than WCAG 2 asks: [ratio, color, background, text], worst first
_CONTRAST = """(below, within) => {
  const rgba = c => { const m = c.match(/[\\d.]+/g).map(Number); return [...m.slice(0, 3), m.length > 3 ? m[3] : 1]; };
  const over = (a, b) => [0,1,2].map(i => a[i]*a[3] + b[i]*(1-a[3])).concat(1);
  const linear = v => { v /= 255; return v <= .04045 ? v/12.92 : ((v+.055)/1.055)**2.4; };
  const lum = c => { const [r, g, b] = c.map(linear); return .2126*r + .7152*g + .0722*b; };
  const ground = e => {
    const all = [];
    for (; e; e = e.parentElement) all.push(rgba(getComputedStyle(e).backgroundColor));
    return all.reverse().reduce((b, a) => over(a, b), [255, 255, 255, 1]);
  };
  const opacity = e => { let o = 1; for (; e; e = e.parentElement) o *= +getComputedStyle(e).opacity; return o; };
  const found = [], seen = new Set();
  const walk = document.createTreeWalker(document.querySelector(within), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
    if (!text || seen.has(e) || !e.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
    seen.add(e);
    const b = ground(e), c = rgba(getComputedStyle(e).color), f = over([...c.slice(0, 3), c[3]*opacity(e)], b);
    const l = [lum(f), lum(b)].sort((x, y) => y-x), ratio = (l[0]+.05)/(l[1]+.05);
    const behind = 'rgb('+b.slice(0, 3).map(Math.round)+')';
    if (ratio < below) found.push([+ratio.toFixed(2), getComputedStyle(e).color, behind, text.slice(0, 60)]);
  }
  return found.sort((a, b) => a[0]-b[0]);
}"""


@pytest.fixture(scope='module')
def browser():
    "A browser for the tests of a module"
    with Browser() as b:
        yield b
