"What a reader sees on a page can be pasted into an empty script, and runs"

import json
import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pandas as pd
import pytest

root = Path(__file__).resolve().parents[1]
tutorials = sorted(path.stem for path in (root / 'nbs/tutorials').glob('*.ipynb'))
pages = [f'tutorials/{name}' for name in tutorials]
pages += [f'explanations/{path.stem}' for path in sorted((root / 'nbs/explanations').glob('*.ipynb'))]
colab_pages = sorted(path.relative_to(root / 'nbs').as_posix() for folder in ('tutorials', 'experiments')
                     for path in (root / 'nbs' / folder).glob('*.ipynb'))
unseen = re.compile(r'^#\s*\|\s*(hide|echo: *false|include: *false|export|default_exp)', re.M)


def cells_of(page):
    return json.loads((root / f'nbs/{page}.ipynb').read_text(encoding='utf-8'))['cells']


def visible_code(page):
    "Return the code that a page shows, as one script"
    sources = [''.join(cell['source']) for cell in cells_of(page) if cell['cell_type'] == 'code']
    return '\n\n'.join(source for source in sources if not unseen.search(source)) + '\n'


def ruff(code):
    "Return names that are used and not defined"
    command = [sys.executable, '-m', 'ruff', 'check', '--isolated', '--select', 'F821', '--output-format',
               'concise', '-']
    return subprocess.run(command, input=code, capture_output=True, text=True).stdout


def test_ruff_finds_what_is_missing():
    assert 'Undefined name `learn`' in ruff('learn.fit(1)\n')


@pytest.mark.parametrize('page', pages)
def test_every_name_is_imported_where_it_is_seen(page):
    assert 'Undefined name' not in ruff(visible_code(page)), ruff(visible_code(page))


@pytest.mark.parametrize('page', pages[: len(tutorials)])
def test_no_machinery_of_tests_is_seen(page):
    found = re.findall(r'\b(by_scale|test_eq|test_fail|test_close)\(', visible_code(page))
    assert not found, f'{page} shows {found}'


def shown_fits(page):
    "Yield visible code cells that call fit, and whether a table with accuracies is in the cell or in the next outputs"
    cells = [cell for cell in cells_of(page) if cell['cell_type'] == 'code']
    for i, cell in enumerate(cells):
        source = ''.join(cell['source'])
        if unseen.search(source) or not re.search(r'\b(fit|fit_flat_cos|compare)\(', source):
            continue
        shown = json.dumps([other['outputs'] for other in cells[i : i + 4]])
        yield source, bool(re.search(r'<th[^>]*>[^<]*(accuracy|mean)|validation accuracy', shown))


@pytest.mark.parametrize('page', [p for p in pages[: len(tutorials)] if p != 'tutorials/cluster'])
def test_accuracy_is_shown_after_every_fit(page):
    "As fastai's table or as one of ours; a fit that is meant to fail shows its error"
    fits = list(shown_fits(page))
    assert fits, f'{page} trains nothing'
    silent = [source for source, accuracy in fits if not accuracy and 'ReinitError' not in source]
    assert not silent, silent


def has_figure(cell):
    return any('image/png' in output.get('data', {}) for output in cell.get('outputs', []))


@pytest.mark.parametrize('page', [p.removesuffix('.ipynb') for p in colab_pages if p.startswith('experiments')])
def test_experiments_open_with_outcomes_and_a_figure(page):
    "Before the section on the runs and all details"
    cells = cells_of(page)
    headings = [i for i, cell in enumerate(cells) if re.search(r'^## ', ''.join(cell['source']), re.M)]
    assert re.search(r'^## Outcomes$', ''.join(cells[headings[0]]['source']), re.M)
    second = next(i for i in headings[1:] if '## What this study is not' not in ''.join(cells[i]['source']))
    opening = cells[headings[0] : second]
    shown = json.dumps([cell.get('outputs', []) for cell in opening])
    assert re.search('outcome|verdict', shown), 'no table of outcomes'
    if page != 'experiments/reinit_tables':   # its figures are tables, each with its own section
        assert any(has_figure(cell) for cell in opening), 'no figure'


def test_nothing_is_concluded_from_an_empty_table():
    "Fine-tuning is compared with features where images and weights are; elsewhere the page says so"
    source = next(''.join(cell['source']) for cell in cells_of('experiments/transfer') if cell['id'] == '7137b70d')
    columns = ['standard', 'features']

    def conclusion(rows):
        probed = pd.DataFrame(rows, index=columns, dtype=float).T
        names = dict(rows=rows, probed=probed)
        exec(source.replace('Markdown(text)', ''), names)
        return names['text']

    assert conclusion({}).startswith('Not measured')
    assert 'sound' in conclusion({'a': [60., 61.]})
    assert 'too short' in conclusion({'a': [60., 61.], 'b': [40., 61.]})


@pytest.mark.parametrize('page', colab_pages)
def test_pages_open_in_colab(page):
    "A link below the title, and a first code cell that installs; elsewhere the cell does nothing"
    settings = ConfigParser(delimiters=['='])
    settings.read(root / 'settings.ini', encoding='utf-8')
    settings = settings['DEFAULT']
    cells = cells_of(page.removesuffix('.ipynb'))
    link = f'https://colab.research.google.com/github/{settings["user"]}/{settings["repo"]}'
    assert ''.join(cells[1]['source']) == f'[Open in Colab]({link}/blob/{settings["branch"]}/nbs/{page})'
    install = next(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
    assert install.startswith('#| hide\n#| eval: false\n') and settings['git_url'] in install
    commands = [line for line in install.splitlines() if not line.startswith('#')]
    assert commands and all(line.startswith('! [ -e /content ] && ') for line in commands)
    if page.startswith('experiments'):
        assert 'results' in install, 'a page of an experiment shows recorded results'


def with_mark(name):
    "A tutorial that opens ImageNet weights needs data"
    needs_data = 'resnet18_imagenet' in visible_code(f'tutorials/{name}')
    return pytest.param(name, marks=pytest.mark.data) if needs_data else name


@pytest.mark.slow
@pytest.mark.parametrize('name', [with_mark(name) for name in tutorials])
def test_a_tutorial_runs_as_a_script(name, tmp_path):
    script = tmp_path / f'{name}.py'
    script.write_text(visible_code(f'tutorials/{name}'), encoding='utf-8')
    env = {k: v for k, v in os.environ.items() if not k.startswith('REINIT_') or k == 'REINIT_DATA'}
    env |= dict(OMP_NUM_THREADS='1', MPLBACKEND='agg', REINIT_RUNS=str(tmp_path / 'runs'))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


CARD_ROWS = ['use it', 'do not use it', 'effect, synthetic task', 'effect, CNNs', 'effect, warm start',
             'effect, second task', 'effect, stream of tasks', 'not measured', 'cost', 'code']


def test_method_cards_have_one_order():
    "Each setting is an effect next to the paper's, or is listed as not measured"
    cards = []
    for cell in cells_of('explanations/methods'):
        for output in cell.get('outputs', []):
            text = ''.join(output.get('data', {}).get('text/markdown', ''))
            rows = re.findall(r'^\| \*\*(.+?)\*\* \| (.*) \|$', text, re.M)
            if rows: cards.append(dict(rows))
    assert len(cards) == 14
    for card in cards:
        assert list(card) == [row for row in CARD_ROWS if row in card]
        effects = {row.removeprefix('effect, '): text for row, text in card.items() if row.startswith('effect')}
        assert all('the paper: ' in text for text in effects.values()), effects
        missing = card.get('not measured', '')
        settings = [row.removeprefix('effect, ') for row in CARD_ROWS if row.startswith('effect')]
        assert all((setting in effects) != (setting in missing.split(', ')) for setting in settings), card


def test_gallery_follows_the_sidebar():
    "Pages with figures in the order of the sidebar, each figure with words of its own"
    html = ''.join(''.join(output.get('data', {}).get('text/html', '')) for cell in cells_of('gallery')
                   for output in cell.get('outputs', []))
    shown = list(dict.fromkeys(re.findall(r'<figure><a href="((?:tutorials|experiments)/\w+)\.html"', html)))
    sidebar = (root / 'nbs/sidebar.yml').read_text(encoding='utf-8')
    listed = re.findall(r'- ((?:tutorials|experiments)/\w+)\.ipynb', sidebar)
    assert shown == [page for page in listed if page in shown] and len(shown) >= 8
    captions = re.findall(r'<figcaption>.*?</figcaption>', html)
    assert len(captions) > 60 and len(set(captions)) > .9 * len(captions)
