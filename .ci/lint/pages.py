"Rules on pages, checked without a renderer: titles, alternative texts, markup, links, navigation"

import base64
import io
import posixpath
import re
import subprocess
import sys
import tempfile
from functools import cache
from html import unescape
from pathlib import Path

import yaml
from PIL import Image, UnidentifiedImageError

from lint.common import (
    ROOT,
    build,
    code_cells,
    default_exp,
    markdown_cells,
    notebook_names,
    read,
    rule,
    shown_code,
    text,
)

CODE_BLOCK = re.compile(r'^(```+|~~~+).*?^\1[ \t]*$', re.M | re.S)
INLINE_CODE = re.compile(r'(`+)(?!`).+?(?<!`)\1(?!`)', re.S)


def without_code(markdown):
    "Markdown without code blocks, inline code and comments"
    markdown = INLINE_CODE.sub('', CODE_BLOCK.sub('', markdown))
    return re.sub(r'<!--.*?-->', '', markdown, flags=re.S)


# ---------------------------------------------------------------- titles


@rule
def pages_have_title_and_description():
    "A page begins with `# Title` and one line `> description`"
    for name in notebook_names():
        title, about = build.head(read(name))
        if not title:
            yield f'nbs/{name}', 'has no title: begin with `# Title`'
        if not about:
            yield f'nbs/{name}', 'has no description: put `> one line` below its title, in the same cell'
        elif len(about) > 300:
            yield f'nbs/{name}', f'its description has {len(about)} characters; search results show 300'


@rule
def titles_and_addresses_differ():
    "No two pages of a section share a title, and no two pages an address"
    titles = [
        (section, build.head(read(page))[0]) for section, page, _ in build.sidebar(ROOT) if page in notebook_names()
    ]
    for entry in {entry for entry in titles if titles.count(entry) > 1}:
        yield entry, 'is the title of two pages'
    addresses = [build.address(name) for name in notebook_names()]
    for address in {a for a in addresses if addresses.count(a) > 1}:
        yield address, 'several notebooks become this page: rename one'


# ---------------------------------------------------------------- options of cells and figures


def cell_options(cell):
    "Options of a cell, and what is wrong with them as YAML"
    try:
        return build.options(text(cell['source']))[0], None
    except yaml.YAMLError as error:
        return {}, str(error).splitlines()[0]


@rule
def options_are_yaml():
    "Options of cells are valid YAML, as Quarto reads them"
    for name in notebook_names():
        for cell in shown_code(read(name)):
            _, error = cell_options(cell)
            if error:
                yield (
                    f'nbs/{name}, cell {cell["id"]}',
                    f'{error}. A value that holds ": " or " #" stands in double quotes',
                )


def folded_options(source):
    "Lines that continue an option; nbdev drops them, so that half of a text is lost"
    return re.findall(r'^#\| {2,}(?=\S)(?!- ).+$', source, re.M)


@rule
def options_stand_on_one_line():
    "An option of a cell is one line, or a list with one line for each entry"
    for name in notebook_names():
        for cell in shown_code(read(name)):
            for line in folded_options(text(cell['source'])):
                yield f'nbs/{name}, cell {cell["id"]}', f'{line[:60]!r} continues an option: write it in one line'


def figure_fault(cell):
    "What is wrong with the alternative texts of a cell's pictures, or None"
    pictures = sum(map(build.is_image, cell['outputs']))
    options, _ = cell_options(cell)
    if not pictures or options.get('output') is False or options.get('include') is False:
        return None
    texts = options.get('fig-alt')
    if not texts:
        return 'has a picture without `#| fig-alt: …`'
    texts = texts if isinstance(texts, list) else [texts]
    if len(texts) != pictures:
        return f'has {pictures} pictures and {len(texts)} alternative texts'
    short = [words for words in texts if len(str(words).split()) < 6]
    if short:
        return f'says {short}: tell what is shown, and what one sees'


@rule
def figures_have_alt_text():
    "Every figure has an alternative text"
    for name in notebook_names():
        for cell in shown_code(read(name)):
            fault = figure_fault(cell)
            if fault:
                yield f'nbs/{name}, cell {cell["id"]}', fault
        for cell_id, markdown in markdown_cells(read(name)):
            for bare in re.findall(r'!\[\s*\]\([^)]*\)|<img(?![^>]*\balt="[^"]+)[^>]*>', without_code(markdown)):
                yield f'nbs/{name}, cell {cell_id}', f'{bare} has no alternative text'


def image_size(data):
    "Width and height in pixels of a PNG or JPEG in base64, or None for other images"
    try:
        return Image.open(io.BytesIO(base64.b64decode(data))).size
    except UnidentifiedImageError:
        return None


def blurred_images(cell):
    "Yield what is wrong with images of a cell that a page shows with less than two pixels for each of its own"
    for output in cell['outputs']:
        for kind in {'image/png', 'image/jpeg'} & set(output.get('data', {})):
            size = image_size(text(output['data'][kind]))
            width = output.get('metadata', {}).get(kind, {}).get('width')
            if size and not width:
                yield f'has a figure of {size[0]} pixels without a width on the page'
            elif size and size[0] < 2 * width:
                yield f'has a figure of {size[0]} pixels that is {width} wide on the page'


# Benchmarks that were last run before figures got twice the resolution, because they want a quiet machine
BLURRED = {'benchmarks/ensemble.ipynb', 'benchmarks/layers.ipynb'}


@rule
def figures_are_sharp():
    "Figures have twice the resolution of the page"
    for name in sorted(set(notebook_names()) - BLURRED):
        for cell in shown_code(read(name)):
            for fault in blurred_images(cell):
                yield f'nbs/{name}, cell {cell["id"]}', f'{fault}: run the page with .ci/execute.py'


# ---------------------------------------------------------------- markup


def tex_faults(tex):
    "Braces, delimiters and environments of a formula that do not match"
    tex = re.sub(r'\\[{}\\]', '', tex)
    shown = f'${tex.strip()[:60]}$'
    faults, depth = [], 0
    for letter in tex:
        depth += {'{': 1, '}': -1}.get(letter, 0)
        if depth < 0:
            break
    if depth:
        faults.append(f'braces do not match in {shown}')
    left = len(re.findall(r'\\left(?!arrow|rightarrow|harpoon)', tex))
    right = len(re.findall(r'\\right(?!arrow|harpoon)', tex))
    if left != right:
        faults.append(rf'\left without \right in {shown}')
    begun, ended = re.findall(r'\\begin\{(\w+\*?)\}', tex), re.findall(r'\\end\{(\w+\*?)\}', tex)
    if sorted(begun) != sorted(ended):
        faults.append(f'environments {begun} and {ended} do not match')
    return faults


def math_faults(markdown):
    "What Pandoc would not read as math, though it looks meant as such"
    markdown = without_code(markdown).replace(r'\$', '')
    faults = []

    def check(match):
        faults.extend(tex_faults(match[1]))
        return ' '

    markdown = re.sub(r'\$\$(.+?)\$\$', check, markdown, flags=re.S)
    if '$$' in markdown:
        return faults + ['$$ is not closed']
    # Pandoc: no space after the first dollar, none before the last, no digit after that
    markdown = re.sub(r'\$(?!\s)((?:[^$\n]|\n(?!\n))+?)(?<!\s)\$(?!\d)', check, markdown)
    if '$' in markdown:
        at = markdown.index('$')
        faults.append(f'a single dollar: …{markdown[max(0, at - 30) : at + 30]!r}…; write \\$ for money')
    if re.search(r'\\\(|\\\[(?!\d)', markdown):
        faults.append(r'\( or \[: write $…$ or $$…$$')
    return faults


def div_faults(markdown):
    "Fenced divs that are not closed, and callouts that Quarto does not have"
    faults, depth = [], 0
    for line in without_code(markdown).splitlines():
        opened = re.match(r'\s*:::+\s*(?:\{(.*)\}|([\w-]+))\s*$', line)
        if re.match(r'\s*:::+\s*$', line):
            depth -= 1
        elif opened:
            depth += 1
            _, classes, _ = build.attributes(opened[1] or '.' + opened[2])
            unknown = [c for c in classes if c.startswith('callout') and c[8:] not in build.CALLOUTS]
            faults += [f'.{name}: Quarto has {build.CALLOUTS}' for name in unknown]
        elif line.lstrip().startswith(':::'):
            faults.append(f'{line.strip()!r} is no fenced div')
        if depth < 0:
            return faults + ['a ::: that closes nothing']
    if depth:
        faults.append('a ::: is not closed in its cell')
    return faults


def fence_faults(markdown):
    "Code blocks that are not closed"
    opened = None
    for line in markdown.splitlines():
        fence = re.match(r'\s*(```+|~~~+)', line)
        if not fence:
            continue
        if opened is None:
            opened = fence[1]
        elif line.strip() == opened:
            opened = None
    return [f'{opened} is not closed'] if opened else []


def code_links(markdown):
    "Links with code as their text: nbdev links the code once more, and the page shows raw markup"
    return re.findall(r'\[`[^`\]]+`\]\([^)]*\)', CODE_BLOCK.sub('', markdown))


@rule
def markup_is_valid():
    "Formulas, callouts, code blocks and links are written as Quarto reads them"
    for name in notebook_names():
        for cell_id, markdown in markdown_cells(read(name)):
            faults = math_faults(markdown) + div_faults(markdown) + fence_faults(markdown)
            faults += [f'{link}: take plain words as link text' for link in code_links(markdown)]
            for fault in faults:
                yield f'nbs/{name}, cell {cell_id}', fault


# ---------------------------------------------------------------- identifiers, links, cross references


def headings(markdown):
    "Headings outside of code as pairs of text and given identifier (or None)"
    for line in re.findall(r'^#{1,6}[ \t]+(.+?)[ \t]*#*$', CODE_BLOCK.sub('', markdown), re.M):
        given = re.fullmatch(r'(.*?)\s*\{([^}]*)\}', line)
        yield (given[1], build.attributes(given[2])[0]) if given else (line, None)


def shown_letters(markdown):
    "The letters of a heading, as Pandoc takes them for its identifier"
    markdown = re.sub(r'!?\[([^]]*)\]\([^)]*\)', r'\1', markdown)
    return unescape(re.sub(r'[*`$]|(?<!\w)_|_(?!\w)', '', markdown))


def documented_names(notebook):
    "Names that nbdev documents with a heading of their own"
    for cell in code_cells(notebook):
        source = text(cell['source'])
        if not re.search(r'^#\s*\|\s*exports?\s*$', source, re.M):
            continue
        patched = re.findall(r'^@patch.*\n(?:@.*\n)*def (\w+)\(\s*\w+\s*:\s*(\w+)', source, re.M)
        yield from (f'{owner}.{method}' for method, owner in patched)
        yield from (owner for _, owner in patched)
        yield from re.findall(r'^(?:class|def) (\w+)', source, re.M)


@cache
def identifiers(name):
    "All anchors of a page"
    notebook, found = read(name), []
    for _, markdown in markdown_cells(notebook):
        found += [given or build.slug(shown_letters(heading)) for heading, given in headings(markdown)]
        prose = without_code(markdown)
        found += re.findall(r'<\w+[^>]*\bid="([^"]+)"', prose) + re.findall(r':::+\s*\{[^}]*#([\w:.-]+)', prose)
        found += re.findall(r'\{#((?:eq|fig|tbl)-[\w-]+)', markdown)
    labels = [cell_options(cell)[0].get('label') for cell in shown_code(notebook)]
    return found + [label for label in labels if label] + [name.lower() for name in documented_names(notebook)]


def given_identifiers(name):
    "Identifiers that authors have chosen"
    notebook = read(name)
    found = []
    for _, markdown in markdown_cells(notebook):
        found += [given for _, given in headings(markdown) if given]
        found += re.findall(r'<\w+[^>]*\bid="([^"]+)"', without_code(markdown))
    return found + [label for cell in shown_code(notebook) if (label := cell_options(cell)[0].get('label'))]


@rule
def identifiers_are_unique():
    "An identifier is given once on a page, and a link to a heading can mean one only"
    linked = {target.partition('#')[2] for _, _, target in all_links() if '#' in target}
    for name in notebook_names():
        given = given_identifiers(name)
        for identifier in {i for i in given if given.count(i) > 1}:
            yield f'nbs/{name}', f'#{identifier} is given twice'
        plain = [
            build.slug(shown_letters(h)) for _, md in markdown_cells(read(name)) for h, own in headings(md) if not own
        ]
        for slug in {s for s in plain if plain.count(s) > 1 and s in linked}:
            yield (
                f'nbs/{name}',
                f'links lead to #{slug}, and several headings have it: give one an identifier, `## Title {{#name}}`',
            )


def cross_references(markdown):
    "What `@fig-x` and the like refer to"
    return set(re.findall(r'(?<![\w@/.])@((?:sec|fig|tbl|eq)-[\w-]+)', without_code(markdown)))


def shown_markdown(notebook):
    "Markdown that cells have shown, as pairs of cell id and text"
    for cell in shown_code(notebook):
        for output in cell['outputs']:
            if 'text/markdown' in output.get('data', {}):
                yield cell['id'], text(output['data']['text/markdown'])


@rule
def cross_references_lead_somewhere():
    "`@fig-x`, `@tbl-x`, `@sec-x` and `@eq-x` name something on their page"
    for name in notebook_names():
        for cell_id, markdown in [*markdown_cells(read(name)), *shown_markdown(read(name))]:
            for lost in cross_references(markdown) - set(identifiers(name)):
                yield f'nbs/{name}, cell {cell_id}', f'nothing on this page is called {lost}'


def link_targets(markdown):
    "Targets of markdown links, images and html attributes, outside of code"
    markdown = CODE_BLOCK.sub('', markdown)
    markdown = re.sub(r'\$\$.+?\$\$|(?<!\])(`+)(?!`).+?(?<!`)\1(?!`)(?!\])', '', markdown, flags=re.S)
    inline = re.findall(r'\]\(\s*<?([^)\s>]+)', markdown)
    reference = re.findall(r'^\[[^\]^]+\]:\s+(\S+)', markdown, re.M)
    return inline + reference + re.findall(r'\b(?:src|href)="([^"]+)"', markdown)


@cache
def all_links():
    "All links inside of the project as (what holds it, its folder, target)"
    found = []
    for name in notebook_names():
        folder = posixpath.dirname(f'nbs/{name}')
        for cell_id, markdown in [*markdown_cells(read(name)), *shown_markdown(read(name))]:
            found += [(f'nbs/{name}, cell {cell_id}', folder, target) for target in link_targets(markdown)]
    for path in sorted(ROOT.glob('*.md')):
        found += [(path.name, '', target) for target in link_targets(path.read_text(encoding='utf-8'))]
    return [link for link in found if not re.match(r'[a-z][a-z0-9+.-]*:', link[2], re.I)]


def anchors(path):
    "Anchors of a notebook or of a markdown file, seen from the top of the project"
    if path.startswith('nbs/') and path.endswith('.ipynb'):
        return set(identifiers(path[4:]))
    markdown = (ROOT / path).read_text(encoding='utf-8')
    return {given or build.slug(shown_letters(heading)) for heading, given in headings(markdown)}


def dead_link(holder, folder, url):
    "Why a link leads nowhere, or None"
    path, _, anchor = url.partition('#')
    target = posixpath.normpath(posixpath.join(folder, path)) if path else holder.split(',')[0]
    if target.startswith('..') or path.startswith('/'):
        return 'leads out of the project'
    if not (ROOT / target).exists():
        return 'is not there'
    if path.endswith('.html'):
        return 'is the address of a page; name its notebook'
    if anchor and target.endswith(('.ipynb', '.md')) and anchor not in anchors(target):
        return f'has no #{anchor}'


@rule
def no_dead_links():
    "Links inside of the project lead to files and anchors that exist"
    for holder, folder, url in all_links():
        why = dead_link(holder, folder, url)
        if why:
            yield holder, f'{url} {why}'


# ---------------------------------------------------------------- spelling

# fastai's word, a class of ours, and what tests write wrongly on purpose
CORRECT_HERE = ('docments', 'labelled', 'aplha', 'metod', 'shfit', 'positon', 'befores')


def misspelled(texts):
    "Yield `(place, advice)` for the words that codespell knows better, American spelling included"
    lines = [(place, line) for place, text in texts for line in text.splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'lines.txt'
        path.write_text('\n'.join(line for _, line in lines), encoding='utf-8')
        command = [sys.executable, '-m', 'codespell_lib', '--builtin', 'clear,rare,en-GB_to_en-US',
                   '-L', ','.join(CORRECT_HERE), path]
        found = subprocess.run(command, capture_output=True, text=True).stdout
    for number, advice in re.findall(r':(\d+): (.+ ==> .+)', found):
        yield lines[int(number) - 1][0], advice


@rule
def words_are_spelled():
    "codespell finds no misspelled and no British word in notebooks, outputs in Markdown, and Markdown files"
    texts = [(path.name, path.read_text(encoding='utf-8')) for path in sorted(ROOT.glob('*.md'))]
    for name in notebook_names():
        cells = read(name)['cells']
        texts += [(f'nbs/{name}, cell {cell["id"]}', text(cell['source'])) for cell in cells]
        texts += [(f'nbs/{name}, cell {cell_id}', markdown) for cell_id, markdown in shown_markdown(read(name))]
    yield from misspelled(texts)


# ---------------------------------------------------------------- the site as a whole


@rule
def site_is_configured():
    "_quarto.yml names files and pages that exist"
    config = yaml.safe_load((ROOT / '_quarto.yml').read_text(encoding='utf-8'))
    pages = [page for _, page, _ in build.sidebar(ROOT)]
    if config['project']['type'] != 'website' or config['execute'] != {'enabled': False}:
        yield '_quarto.yml', 'is no website that executes nothing'
    bars = yaml.safe_load((ROOT / 'nbs/sidebar.yml').read_text(encoding='utf-8'))['website']['sidebar']
    if config['website']['navbar']['left'] != [f'sidebar:{bar["id"]}' for bar in bars]:
        yield '_quarto.yml', 'the navbar does not name the sidebars of nbs/sidebar.yml'
    for name in [*config['metadata-files'], *config['project']['resources'], *config['filters'],
                 config['format']['html']['css'], *config['format']['html']['theme']['light'][1:]]:
        if not (ROOT / 'nbs' / name).exists():
            yield '_quarto.yml', f'names nbs/{name}, which does not exist'
    if pages[0] != 'index.ipynb':
        yield 'nbs/sidebar.yml', 'does not begin with index.ipynb'


@rule
def sidebar_is_complete():
    "nbs/sidebar.yml names every page once"
    pages, names = [page for _, page, _ in build.sidebar(ROOT)], set(notebook_names())
    for page in {page for page in pages if pages.count(page) > 1}:
        yield 'nbs/sidebar.yml', f'{page} is there twice'
    for page in sorted(names - set(pages)):
        kind = 'exports a module and' if default_exp(read(page)) else ''
        yield 'nbs/sidebar.yml', f'{page} {kind} is missing: add it and run `make llms`'
    for page in sorted(set(pages) - names):
        yield 'nbs/sidebar.yml', f'{page} does not exist: remove it'


@rule
def llms_is_in_step():
    "nbs/llms.txt is generated from the pages, in the format of llmstxt.org"
    wanted = build.llms(ROOT)
    if (ROOT / 'nbs/llms.txt').read_text(encoding='utf-8') != wanted:
        yield 'nbs/llms.txt', 'run `make llms`'
    lines = wanted.splitlines()
    if not lines[0].startswith('# ') or not lines[2].startswith('> '):
        yield 'nbs/llms.txt', 'has no title and no quote'
    for line in wanted[wanted.index('\n## ') :].splitlines():
        if not re.fullmatch(r'(## .+|- \[[^]]+\]\(https://\S+\): \S.*|)', line):
            yield 'nbs/llms.txt', f'{line!r} is no heading and no link'
