"Every rule of .ci/lint notices the fault that it is there for, and `make lint` is clean"

import base64
import filecmp
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip('yaml', reason='no yaml here: notebooks and pages are not checked')
root = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(root / '.ci'))

from lint import common, house, pages  # noqa: E402  (the folder must be on the path first)


def notebook(*sources, outputs=()):
    "A notebook of code cells"
    return dict(cells=[dict(cell_type='code', id='x', source=[source], outputs=list(outputs)) for source in sources])


def shown(**data):
    return dict(output_type='display_data', data=data)


# ---------------------------------------------------------------- modules


def test_there_is_something_to_check():
    assert len(common.notebook_names()) > 40 and len(house.module_files()) > 30


def test_own_imports():
    source = 'from .core import a\nimport reinit_nb.reinit\nimport torch\ndef f():\n    from reinit_nb import cli'
    known = {'core', 'reinit', 'cli', 'studies.common'}
    assert house.imported_modules(source, 'lw', known) == {'core', 'reinit', 'cli'}
    assert house.imported_modules('from torch import core\nimport reinit', 'lw', known) == set()
    assert house.imported_modules('from ..core import a\nfrom .common import b', 'studies.spectra', known) == {
        'core',
        'studies.common',
    }


def test_private_names_of_others():
    source = 'from .core import _a, b\nfrom . import store\nstore._c\nstore.d\nb._e\nself._f\nstore.__doc__'
    assert list(house.private_names_of_others(source, 'lw')) == [('core', '_a'), ('store', '_c'), ('b', '_e')]


def test_public_names():
    source = 'A = 1\n_b = 2\ndef f(): pass\ndef _g(): pass\n@patch\ndef h(self:A): pass\nclass K: pass'
    assert list(house.public_names(source)) == ['A', 'f', 'K']


def test_pages_open_with_an_example():
    start, definition, example = '#| default_exp x', '#| export\ndef f(): pass', 'f()'
    imports = '#| export\nimport torch'
    assert house.opens_with_an_example(notebook(start, 'from x import f', example, imports, definition))
    assert house.opens_with_an_example(notebook(start, imports, example, definition))
    assert not house.opens_with_an_example(notebook(start, imports, definition, example))
    assert not house.opens_with_an_example(notebook(start, '#| hide\nf()', definition))


def test_eager_plots():
    assert house.eager_plots('import seaborn as sns\nfrom matplotlib import pyplot as plt') == [
        'seaborn',
        'matplotlib.pyplot',
    ]
    assert house.eager_plots('import matplotlib\ndef f():\n    import seaborn') == []


def test_fresh_imports_see_side_effects(tmp_path):
    (tmp_path / 'loud.py').write_text('import matplotlib.pyplot')
    (tmp_path / 'quiet.py').write_text('print("{}")')
    (tmp_path / 'dead.py').write_text('import os; os.abort()')
    reports = house.fresh_imports(['loud', 'quiet', 'dead', 'missing'], tmp_path, warm='')
    assert house.side_effects(reports['loud']) == {'matplotlib.pyplot': 'loud'}
    assert house.side_effects(reports['quiet']) == {} and not reports['quiet']['error']
    assert 'died' in reports['dead']['error'] and 'ModuleNotFoundError' in reports['missing']['error']
    through_fastai = dict(first={'matplotlib.pyplot': 'fastai.imports'}, own=['reinit_nb.core', 'reinit_nb.lw'])
    assert house.side_effects(through_fastai, {'lw'}) == {}
    assert house.side_effects(through_fastai, set()) == through_fastai['first']


# ---------------------------------------------------------------- cells and files


def test_mixes_imports():
    assert house.mixes_imports('import torch\nx = 1') and house.mixes_imports('from a import b\ndef f(): pass')
    assert not house.mixes_imports('#| export\nimport torch\n# why\nfrom a import b\n__all__ = ["b"]')
    assert not house.mixes_imports('%matplotlib inline\nx = 1')
    assert not house.mixes_imports('def f():\n    import torch')


def test_has_test():
    assert house.has_test(notebook('x = 1', 'test_eq(x, 1)')) and house.has_test(notebook('assert x'))
    assert not house.has_test(notebook('# test_eq(x, 1)', 'from fastcore.test import test_eq'))


def test_has_figure_and_table():
    assert house.has_figure(notebook('x', outputs=[shown(**{'image/png': 'aGk='})]))
    assert house.has_figure(notebook('x', outputs=[shown(**{'text/html': ['<figure><img alt="a">']})]))
    assert not house.has_figure(notebook('x', outputs=[shown(**{'text/html': 'images', 'text/plain': 'img'})]))
    assert house.has_table(notebook('x', outputs=[shown(**{'text/html': '<table border="1">'})]))
    assert not house.has_table(notebook('x', outputs=[shown(**{'text/html': 'table'})]))


def test_foreign_words():
    path = '/root/x.csv'
    assert house.foreign_words(f'saved in {path}') == [path]
    assert house.foreign_words('see ' + house.HOSTS[0]) == [house.HOSTS[0]]
    assert house.foreign_words('<function f at 0x7f1234567890>') == [' at 0x7f1234567890']
    assert house.foreign_words('../work/x, nbs/home/y, a/root/b') == []


# ---------------------------------------------------------------- pages


def test_blurred_images():
    data = io.BytesIO()
    Image.new('RGB', (80, 40)).save(data, 'PNG')
    png = base64.b64encode(data.getvalue()).decode()

    def cell(**metadata):
        return dict(outputs=[dict(data={'image/png': png}, metadata={'image/png': metadata} if metadata else {})])

    assert list(pages.blurred_images(cell())) == ['has a figure of 80 pixels without a width on the page']
    assert list(pages.blurred_images(cell(width=60))) == ['has a figure of 80 pixels that is 60 wide on the page']
    assert not list(pages.blurred_images(cell(width=40)))


def test_figure_faults():
    words = 'Two curves that rise and then fall'

    def cell(source, n=1):
        return dict(id='x', source=source, outputs=[dict(data={'image/png': ''})] * n)

    assert pages.figure_fault(cell('plot()'))
    assert pages.figure_fault(cell('#| fig-alt: A plot\nplot()'))
    assert pages.figure_fault(cell(f'#| fig-alt: {words}\nplot()', 2))
    assert not pages.figure_fault(cell(f'#| fig-alt: {words}\nplot()'))
    assert not pages.figure_fault(cell('x', 0)) and not pages.figure_fault(cell('#| output: false\nx'))
    assert not pages.figure_fault(cell(f'#| fig-alt:\n#|   - {words}\n#|   - "{words}: b"\nplot()', 2))
    assert pages.cell_options(cell('#| fig-alt: a: b: c\nx'))[1]
    assert not pages.cell_options(cell('#| export\n#| eval: false\nx'))[1]


def test_folded_options():
    assert pages.folded_options('#| fig-alt: >-\n#|   Two curves\nplot()') == ['#|   Two curves']
    assert not pages.folded_options('#| fig-alt:\n#|   - one\n#|   - two\nplot()')


GOOD_MATH = [
    '$a$ and $b_{1}$',
    '$$\n\\left(x\\right) \\rightarrow \\{a\\}\n$$',
    'costs \\$5',
    '`$x`',
    '```sh\necho $x\n```',
    r'$W \leftarrow \frac{a}{b}$',
    '$\\begin{pmatrix}1\\end{pmatrix}$',
]
BAD_MATH = [
    '$a and b',
    '$$x',
    '$ a $',
    '$a$5',
    '$\\frac{a}{b$',
    r'\(a\)',
    r'$\left(a$',
    r'$\begin{pmatrix}1$',
    '$a\n\nb$',
]


def test_math_faults():
    for good in GOOD_MATH:
        assert not pages.math_faults(good), good
    for bad in BAD_MATH:
        assert pages.math_faults(bad), bad


def test_div_and_fence_faults():
    assert not pages.div_faults('::: {.callout-note title="a: b"}\nx\n:::')
    assert not pages.div_faults('```\n::: x\n```')
    assert not pages.div_faults('::: {.a}\n::: {.callout-tip}\nx\n:::\n:::')
    for bad in ('::: {.callout-note}\nx', ':::', '::: {.callout-info}\nx\n:::', '::: {.callout-note\nx\n:::'):
        assert pages.div_faults(bad), bad
    assert pages.fence_faults('```python\nx') and not pages.fence_faults('````\n```\n````')


def test_code_as_link_text():
    assert pages.code_links('see [`X`](a.ipynb)') and not pages.code_links('see [X](a.ipynb) and `[x](y)`')


def test_misspelled():
    texts = [('a', 'It recieves\nnothing.'), ('b', 'A nice colour, with docments')]
    assert list(pages.misspelled(texts)) == [('a', 'recieves ==> receives'), ('b', 'colour ==> color')]


def test_cross_references():
    assert pages.cross_references('see @fig-a, (@sec-b-c) and [@tbl-d]') == {'fig-a', 'sec-b-c', 'tbl-d'}
    assert not pages.cross_references('`@fig-a` a@fig-b.org @figure https://x/@fig-c')


def test_internal_methods_are_not_on_the_pages_of_callbacks():
    "What a method overrides, and what only the base class calls, has no heading of its own"
    shown = set(pages.documented_names(common.read('21_rounds.ipynb')))
    assert {name for name in shown if '.' in name} == {'RoundCallback.log', 'RoundCallback.plot', 'Learner.fit_rounds'}
    assert set(pages.documented_names(common.read('22_lw.ipynb'))) == {'LayerwiseCallback'}


def test_links():
    markdown = (
        '[a](x.ipynb#b "t") ![i](i.png) `[c](d)` <a href="e.md">e</a>\n\n[r]: f.md\n\n[k](l.ipynb)\n```\n[g](h)\n```'
    )
    assert pages.link_targets(markdown) == ['x.ipynb#b', 'i.png', 'l.ipynb', 'f.md', 'e.md']
    page = next(name for name in common.notebook_names() if name.endswith('_lw.ipynb'))
    assert pages.dead_link('README.md', '', 'nbs/index.ipynb') is None
    assert pages.dead_link('README.md', '', 'nbs/none.ipynb') and pages.dead_link('README.md', '', '../x')
    assert pages.dead_link('nbs/x.ipynb', 'nbs', f'{page}#layerwisecallback') is None
    assert pages.dead_link('README.md', '', f'nbs/{page}#nothing-of-that-name')


def test_slugs_are_those_of_pandoc():
    assert common.build.slug('One rule: $w$ & _all_!') == 'one-rule-w-_all_'
    assert common.build.slug('2.1 What is `core`?') == 'what-is-core'
    assert common.build.slug('LayerwiseCallback.plan') == 'layerwisecallback.plan'


# ---------------------------------------------------------------- in step


def differences(a, b):
    "Files that differ between two folders, or are in one only"
    files = {path.relative_to(folder) for folder in (a, b) for path in folder.rglob('*') if path.is_file()}
    files = {path for path in files if '__pycache__' not in path.parts}

    def same(path):
        return (a / path).exists() and (b / path).exists() and filecmp.cmp(a / path, b / path, shallow=False)

    return sorted(str(path) for path in files if not same(path))


def clean_export(project):
    "Run nbdev_clean and nbdev_export in a project"
    code = (
        'import nbdev.clean, nbdev.doclinks as d; nbdev.clean.nbdev_clean.__wrapped__(); d.nbdev_export.__wrapped__()'
    )
    env = {
        key: value for key, value in os.environ.items() if key != 'IN_TEST'
    }  # nbdev exports nothing where this is set
    subprocess.run([sys.executable, '-c', code], cwd=project, check=True, env=env, capture_output=True)


def test_export_leaves_no_diff(tmp_path):
    pytest.importorskip('nbdev', reason='nbdev is not installed: export is not checked')
    for name in ('settings.ini', '_quarto.yml'):
        shutil.copy(root / name, tmp_path)
    before = tmp_path / 'before'
    for folder in ('nbs', 'reinit_nb'):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns('__pycache__', 'runs', '.*'))
        shutil.copytree(tmp_path / folder, before / folder)
    clean_export(tmp_path)
    changed = [
        f'{folder}/{name}'
        for folder in ('nbs', 'reinit_nb')
        for name in differences(before / folder, tmp_path / folder)
    ]
    assert not changed, f'nbdev_clean and nbdev_export change {changed}: run both and commit the result'
    # the check can fail: a stray comment in an exported module is noticed
    stray = tmp_path / 'reinit_nb/core.py'
    stray.write_text(stray.read_text(encoding='utf-8') + '# stray\n', encoding='utf-8')
    assert differences(before / 'reinit_nb', tmp_path / 'reinit_nb') == ['core.py']
