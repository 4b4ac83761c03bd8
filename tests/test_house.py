"The rules of the house, checked over all notebooks and modules. Every message says what to do."
import ast
import filecmp
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

root = Path(__file__).resolve().parents[1]
lib = root / 'reinit_nb'

# Modules that define fastai callbacks or patch `Learner` must import fastai, and fastai.imports (all of fastai but
# its empty __init__) imports matplotlib.pyplot. The others import fastai inside the functions that need it.
NEED_FASTAI = {'freezing', 'separability', 'frozen', 'reset', 'spectrum', 'bridge', 'rounds', 'lw', 'wels', 'dsd', 'fc', 'controls', 'checkpoint', 'sequence', 'stuck'}

# ---------------------------------------------------------------- reading

def notebooks(base=root):
    "Notebook paths below nbs/, without those that nbdev skips, in the order of the house"
    nbs = base / 'nbs'
    fs = (f.relative_to(nbs) for f in nbs.rglob('*.ipynb'))
    return sorted(f.as_posix() for f in fs if not any(p[0] in '._' for p in f.parts))

def read(name): return json.loads((root / 'nbs' / name).read_text(encoding='utf-8'))
def text(o): return o if isinstance(o, str) else ''.join(o)
def code_cells(nb): return [c for c in nb['cells'] if c['cell_type'] == 'code']
def directives(c): return set(re.findall(r'^#\s*\|\s*([\w-]+)', text(c['source']), re.M))
def exported(nb): return [c for c in code_cells(nb) if directives(c) & {'export', 'exports', 'exporti'}]

def default_exp(nb):
    "The module that a notebook exports to, or None"
    found = [m[1] for c in code_cells(nb) if (m := re.search(r'^#\s*\|\s*default_exp\s+(\S+)', text(c['source']), re.M))]
    return found[0] if found else None

def tree(src):
    "Syntax tree of a cell, with IPython's own lines left out"
    return ast.parse('\n'.join('' if l.lstrip()[:1] in ('%', '!') else l for l in src.splitlines()))

def modules(): return sorted(f.relative_to(lib).as_posix() for f in lib.rglob('*.py') if f.name not in ('__init__.py', '_modidx.py'))
def dotted(module): return 'reinit_nb.' + module[:-3].replace('/', '.')

names, mods = notebooks(), modules()
each_notebook = pytest.mark.parametrize('name', names)
each_module = pytest.mark.parametrize('module', mods)

def test_there_is_something_to_check(): assert names and mods, 'No notebooks or no modules: run nbdev_export'

# ---------------------------------------------------------------- modules

# One process per module, each forked from an interpreter that has nothing of ours: only the heavy libraries of others,
# loaded once to save time. Records who is the first to import what should not be imported.
_probe = '''
import json, os, sys, traceback
warm,*names = sys.argv[1:]
for o in warm.split(): __import__(o)
first = {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ('fastai.vision', 'spacy', 'matplotlib.pyplot') and name not in first:
            f = sys._getframe(1)
            while f.f_back and 'importlib' in f.f_code.co_filename: f = f.f_back
            first[name] = f.f_globals.get('__name__')
sys.meta_path.insert(0, Watch())
for name in names:
    if pid := os.fork(): os.waitpid(pid, 0); continue
    error = ''
    try: __import__(name)
    except BaseException: error = traceback.format_exc()
    print(json.dumps(dict(module=name, error=error, first=first, own=[o for o in sys.modules if o.startswith('reinit_nb.')])), flush=True)
    os._exit(0)
'''

def fresh_imports(names, cwd=root, warm='torch pandas scipy.stats'):
    "Import each of `names` in a process of its own; module → report"
    r = subprocess.run([sys.executable, '-c', _probe, warm, *names], cwd=cwd, capture_output=True, text=True)
    reports = [json.loads(l) for l in r.stdout.splitlines() if l.startswith('{"module"')]
    return {**{n: dict(error=f'died\n{r.stderr}') for n in names}, **{o['module']: o for o in reports}}

def side_effects(report, need_fastai=NEED_FASTAI):
    "Imports that `report` should not show"
    bad = dict(report['first'])
    excused = any(o.removeprefix('reinit_nb.') in need_fastai for o in report['own'])
    if excused and (bad.get('matplotlib.pyplot') or '').startswith('fastai'): del bad['matplotlib.pyplot']
    return bad

@pytest.fixture(scope='module')
def imports(): return fresh_imports([dotted(o) for o in mods])

@each_module
def test_module_imports_alone(module, imports):
    name, report = dotted(module), imports[dotted(module)]
    assert not report['error'], f'{name} does not import by itself (a cell with #| hide that should be #| export?)\n{report["error"]}'
    bad = side_effects(report)
    assert not bad, f'importing {name} also imports {bad} (what: by whom); move that import into the function that needs it'

def test_import_probe_sees_side_effects(tmp_path):
    (tmp_path / 'loud.py').write_text('import matplotlib.pyplot')
    (tmp_path / 'quiet.py').write_text('print("{}")')
    (tmp_path / 'dead.py').write_text('import os; os.abort()')
    got = fresh_imports(['loud', 'quiet', 'dead', 'missing'], tmp_path, warm='')
    assert side_effects(got['loud']) == {'matplotlib.pyplot': 'loud'}
    assert side_effects(got['quiet']) == {} and not got['quiet']['error']
    assert 'died' in got['dead']['error'] and 'ModuleNotFoundError' in got['missing']['error']
    via = dict(first={'matplotlib.pyplot': 'fastai.imports'}, own=['reinit_nb.core', 'reinit_nb.lw'])
    assert side_effects(via, {'lw'}) == {} and side_effects(via, set()) == via['first']

def eager_plots(src):
    "Plotting libraries imported when the module is"
    res = []
    for o in ast.parse(src).body:
        if isinstance(o, ast.Import): res += [a.name for a in o.names]
        elif isinstance(o, ast.ImportFrom): res += [f'{o.module}.{a.name}' for a in o.names]
    return [o for o in res if re.match(r'(matplotlib\.pyplot|seaborn)\b', o)]

@each_module
def test_plots_are_imported_late(module):
    bad = eager_plots((lib / module).read_text(encoding='utf-8'))
    assert not bad, f'{module} imports {bad} at the top; import it inside the plotting function'

def test_eager_plots_checker():
    assert eager_plots('import seaborn as sns\nfrom matplotlib import pyplot as plt') == ['seaborn', 'matplotlib.pyplot']
    assert eager_plots('import matplotlib\ndef f():\n    import seaborn') == []

def homes():
    "Module → notebooks that export to it"
    res = {}
    for name in names:
        if exp := default_exp(read(name)): res.setdefault(exp.replace('.', '/') + '.py', []).append(name)
    return res

def test_one_live_notebook_per_module():
    found = homes()
    for module, nbs in found.items(): assert len(nbs) == 1, f'{nbs} all export to {module}: give each its own #| default_exp'
    assert not set(mods) - set(found), f'no notebook exports to {set(mods) - set(found)}: delete these files'
    assert not set(found) - set(mods), f'{set(found) - set(mods)} were never exported: run nbdev_export'
    for module, (name,) in found.items():
        head = (lib / module).read_text(encoding='utf-8')[:600]
        assert f'nbs/{name}.' in head, f'the header of {module} does not name nbs/{name}: run nbdev_export'

def own_imports(src, known):
    "Modules out of `known` that `src` imports, at the top or inside a function"
    res = set()
    for o in ast.walk(ast.parse(src)):
        if isinstance(o, ast.Import): paths = [a.name for a in o.names if a.name.startswith('reinit_nb')]
        elif isinstance(o, ast.ImportFrom) and (o.level or (o.module or '').split('.')[0] == 'reinit_nb'):
            base = (o.module or '').removeprefix('reinit_nb').strip('.')
            paths = [base] + [f'{base}.{a.name}'.strip('.') for a in o.names]
        else: continue
        res |= {p.removeprefix('reinit_nb').strip('.').replace('.', '/') + '.py' for p in paths}
    return res & set(known)

@each_module
def test_imports_go_down(module):
    home = {m: nbs[0] for m, nbs in homes().items()}
    if module not in home: pytest.skip('no notebook')
    up = [m for m in own_imports((lib / module).read_text(encoding='utf-8'), home) if home[m] >= home[module]]
    assert not up, f'{module} (nbs/{home[module]}) imports from above: {up}. Move what it needs to a lower notebook'

def test_own_imports_checker():
    known = ['core.py', 'reinit.py', 'cli.py']
    src = 'from .core import a\nimport reinit_nb.reinit\nimport torch\ndef f():\n    from reinit_nb import cli'
    assert own_imports(src, known) == set(known)
    assert own_imports('from torch import core\nimport reinit', known) == set()

def wild_stars(src):
    "Star imports from anything but fastai and fastcore"
    return [o.module for o in ast.walk(ast.parse(src)) if isinstance(o, ast.ImportFrom) and any(a.name == '*' for a in o.names)
            and (o.level or not re.match(r'fast(ai|core)\b', o.module))]

@each_module
def test_no_star_imports(module):
    bad = wild_stars((lib / module).read_text(encoding='utf-8'))
    assert not bad, f'{module} imports * from {bad}: name what it needs'

def test_star_checker():
    assert wild_stars('from .core import *\nfrom torch import *\nfrom fastcore.all import *') == ['core', 'torch']

# ---------------------------------------------------------------- cells

def n_lines(cell): return len([l for l in text(cell['source']).splitlines() if l.strip() and not re.match(r'#\s*\|', l)])

@each_notebook
def test_export_cells_are_small(name):
    for c in exported(read(name)):
        assert n_lines(c) <= 40, f'nbs/{name}, cell {c["id"]}: {n_lines(c)} lines. Split it; each part with a sentence and an example'

def test_median_export_cell():
    n = [n_lines(c) for name in names for c in exported(read(name))]
    assert not n or statistics.median(n) <= 12, f'the median export cell has {statistics.median(n)} lines: write smaller ones'

def mixed(src):
    "Does a cell hold imports and other code? The docs build runs every cell with an import, and then runs the rest too"
    body = tree(src).body
    is_import = [isinstance(o, (ast.Import, ast.ImportFrom)) for o in body]
    quiet = [isinstance(o, ast.Assign) and all(isinstance(t, ast.Name) and re.fullmatch(r'__\w+__', t.id) for t in o.targets) for o in body]
    return any(is_import) and not all(a or b for a, b in zip(is_import, quiet))

@each_notebook
def test_imports_have_their_own_cell(name):
    bad = [c['id'] for c in code_cells(read(name)) if 'nbdev_export()' not in text(c['source']) and mixed(text(c['source']))]
    assert not bad, f'nbs/{name}, cells {bad}: imports share a cell with other code. Split them'

def test_mixed_checker():
    assert mixed('import torch\nx = 1') and mixed('from a import b\ndef f(): pass')
    assert not mixed('#| export\nimport torch\n# why\nfrom a import b\n__all__ = ["b"]')
    assert not mixed('%matplotlib inline\nx = 1') and not mixed('def f():\n    import torch')

def has_test(nb):
    "Is there an `assert` or a call of a `test_…` function?"
    for c in code_cells(nb):
        for o in ast.walk(tree(text(c['source']))):
            if isinstance(o, ast.Assert): return True
            if isinstance(o, ast.Call) and re.match(r'(test_|is_close)', getattr(o.func, 'id', getattr(o.func, 'attr', ''))): return True
    return False

@each_notebook
def test_exporting_notebooks_test(name):
    nb = read(name)
    assert not exported(nb) or has_test(nb), f'nbs/{name} exports and tests nothing: show a test_eq or test_close after each export cell'

def test_has_test_checker():
    def nb(*src): return dict(cells=[dict(cell_type='code', source=[s]) for s in src])
    assert has_test(nb('x = 1', 'test_eq(x, 1)')) and has_test(nb('assert x'))
    assert not has_test(nb('# test_eq(x, 1)', 'from fastcore.test import test_eq'))

# ---------------------------------------------------------------- files

@each_notebook
def test_notebook_file(name):
    path, nb = root / 'nbs' / name, read(name)
    assert path.stat().st_size < 300_000, f'nbs/{name} has {path.stat().st_size/1e3:.0f} KB: make its figures smaller or show fewer'
    assert (nb['nbformat'], nb['nbformat_minor']) >= (4, 5), f'nbs/{name} is not nbformat 4.5: open and save it, or run nbdev_clean'
    ids = [c.get('id') for c in nb['cells']]
    assert all(ids) and len(set(ids)) == len(ids), f'nbs/{name}: every cell needs an id of its own'
    bad = [c['id'] for c in nb['cells'] if not isinstance(c['source'], list)]
    assert not bad, f'nbs/{name}, cells {bad}: source is one string, store a list of lines (nbdev_clean does)'
    bad = [c['id'] for c in nb['cells'] if re.search(r'^\W*skip_exec:\s*true', text(c['source']), re.M | re.I)]
    assert not bad, f'nbs/{name}: skip_exec silences its tests. Mark single cells with #| slow, cuda or data'

@each_notebook
def test_outputs_are_committed(name):
    cells = code_cells(read(name))
    bad = [c['id'] for c in cells if any(o['output_type'] == 'error' for o in c['outputs'])]
    assert not bad, f'nbs/{name}, cells {bad} end in an error: repair and run the notebook (an expected error goes into test_fail)'
    shown = [c for c in cells if not directives(c) & {'hide', 'default_exp', 'export', 'exports', 'exporti'}]
    assert not shown or any(c['outputs'] for c in shown), f'nbs/{name} shows no output: run it from top to bottom and save it'

def has_figure(nb):
    "Is there a picture among the outputs?"
    data = [o.get('data', {}) for c in code_cells(nb) for o in c['outputs']]
    return any(k.startswith('image/') for d in data for k in d) or any(re.search(r'<(img|svg)\b', text(d.get('text/html', ''))) for d in data)

@each_notebook
def test_exporting_notebooks_show_something(name):
    nb = read(name)
    assert not exported(nb) or has_figure(nb), f'nbs/{name} exports and has no figure: show one that a reader wants to see'

def test_has_figure_checker():
    def nb(**data): return dict(cells=[dict(cell_type='code', source=['x'], outputs=[dict(output_type='display_data', data=data)])])
    assert has_figure(nb(**{'image/png': 'aGk='})) and has_figure(nb(**{'text/html': ['<figure><img alt="a">']})) and not has_figure(nb(**{'text/html': 'images', 'text/plain': 'img'}))

# Written in parts, so that this file passes its own test
HOSTS = ['.'.join(o) for o in (('pypi', 'org'), ('pythonhosted', 'org'), ('anaconda', 'org'), ('npmjs', 'com'))]

def foreign(s):
    "Paths of one machine, and hosts of package registries"
    return re.findall(r'(?<![\w.])/(?:work|root|home|opt/dev)/[\w.]*', s) + [o for o in HOSTS if o in s.lower()]

def words(nb):
    "All text of a notebook, without pictures"
    for c in nb['cells']:
        yield text(c['source'])
        for o in c.get('outputs', []):
            yield text(o.get('text', ''))
            yield from (text(v) for k, v in o.get('data', {}).items() if k.startswith('text/'))

@each_notebook
def test_notebooks_are_at_home_everywhere(name):
    bad = foreign('\n'.join(words(read(name))))
    assert not bad, f'nbs/{name} names {bad}: use a relative path or leave it out'

def test_other_files_are_at_home_everywhere():
    files = [f for g in ('*.*', 'Makefile', '.ci/**/*', '.github/**/*.yml', 'tests/*.py', 'nbs/*.yml', 'reinit_nb/**/*.py') for f in root.glob(g)]
    for f in filter(Path.is_file, files):
        bad = [o for o in HOSTS if o in f.read_text(encoding='utf-8', errors='ignore').lower()]
        assert not bad, f'{f.relative_to(root)} names {bad}: leave the choice of a registry to pip'

def test_foreign_checker():
    assert foreign('saved in /ro' 'ot/x.csv') == ['/ro' 'ot/x.csv'] and foreign('see ' + HOSTS[0]) == [HOSTS[0]]
    assert foreign('../work/x, nbs/home/y, a/root/b') == []

# ---------------------------------------------------------------- in step

def differences(a, b):
    "Files that differ between two folders, or are in one only"
    fs = {f.relative_to(d) for d in (a, b) for f in d.rglob('*') if f.is_file() and '__pycache__' not in f.parts}
    return sorted(str(f) for f in fs if not ((a / f).exists() and (b / f).exists() and filecmp.cmp(a / f, b / f, shallow=False)))

def clean_export(base):
    "Run nbdev_clean and nbdev_export in the project `base`"
    code = ('import nbdev.clean, nbdev.doclinks as d; nbdev.clean.nbdev_clean.__wrapped__(); d.nbdev_export.__wrapped__()')
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}   # nbdev exports nothing where this is set
    subprocess.run([sys.executable, '-c', code], cwd=base, check=True, env=env, capture_output=True)

def test_export_leaves_no_diff(tmp_path):
    pytest.importorskip('nbdev', reason='nbdev is not installed: export is not checked')
    shutil.copy(root / 'settings.ini', tmp_path)
    shutil.copy(root / '_quarto.yml', tmp_path)
    for d in ('nbs', 'reinit_nb'):
        shutil.copytree(root / d, tmp_path / d, ignore=shutil.ignore_patterns('__pycache__', 'runs', '.*'))
    before = tmp_path / 'before'
    for d in ('nbs', 'reinit_nb'): shutil.copytree(tmp_path / d, before / d)
    clean_export(tmp_path)
    bad = [f'{d}/{f}' for d in ('nbs', 'reinit_nb') for f in differences(before / d, tmp_path / d)]
    assert not bad, f'nbdev_clean and nbdev_export change {bad}: run both and commit the result'
    # the check can fail: a stray comment in an exported module is noticed
    stray = tmp_path / 'reinit_nb' / mods[0]
    stray.write_text(stray.read_text(encoding='utf-8') + '# stray\n', encoding='utf-8')
    assert differences(before / 'reinit_nb', tmp_path / 'reinit_nb') == [mods[0]]

def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod

def test_readme_in_step():
    diff = load(root / '.ci/readme.py').check(root)
    assert not diff, f'README.md is out of step with nbs/index.ipynb: run `make readme`\n{diff[:2000]}'

def test_readme_converter():
    rm = load(root / '.ci/readme.py')
    def code(src, *outs): return dict(cell_type='code', source=src.splitlines(True), outputs=list(outs))
    html = '<table><tr><th></th><th>a|b</th></tr><tr><th>0</th><td>1</td></tr></table>'
    png = dict(output_type='display_data', data={'image/png': 'aGk=', 'text/plain': ['<Figure>']})
    md, images = rm.convert(dict(cells=[
        dict(cell_type='raw', source=['---\n', 'x: 1\n', '---']),
        code('#| hide\nsecret()'),
        dict(cell_type='markdown', source=['# T\n', '[s](experiments/s.ipynb#a) [w](https://a.b) ![i](images/i.png) `[c](d)` [up](../LICENSE)']),
        code('#| eval: false\nx = 1', dict(output_type='stream', name='stdout', text=['hi\n']), dict(output_type='stream', name='stderr', text=['warn\n'])),
        code('#| echo: false\n#| fig-alt: A curve\nplot()', png),
        code('df', dict(output_type='execute_result', data={'text/html': html, 'text/plain': 'df'})),
        code('wide', dict(output_type='execute_result', data={'text/html': html.replace('<th>', '<th colspan="2">', 1), 'text/plain': 'plain'}))]))
    assert images == {'index_1.png': b'hi'}
    assert md == rm.HEADER + '\n\n'.join([
        '# T\n[s](nbs/experiments/s.ipynb#a) [w](https://a.b) ![i](nbs/images/i.png) `[c](d)` [up](LICENSE)',
        '```python\nx = 1\n```', '```\nhi\n```', '![A curve](nbs/images/index_1.png)',
        '```python\ndf\n```', '|  | a\\|b |\n| --- | --- |\n| 0 | 1 |', '```python\nwide\n```', '```\nplain\n```']) + '\n'

def test_quarto_link():
    link = root / 'nbs/_quarto.yml'
    assert link.is_symlink() and not os.path.isabs(os.readlink(link)), 'nbs/_quarto.yml must be a relative link: ln -sf ../_quarto.yml nbs/'
    assert link.resolve() == root / '_quarto.yml', 'nbs/_quarto.yml must lead to the file at the top: ln -sf ../_quarto.yml nbs/'

def sidebar_pages(o):
    "All pages named in a sidebar, however deep"
    if isinstance(o, str): return [o]
    if isinstance(o, list): return [p for x in o for p in sidebar_pages(x)]
    return [o[k] for k in ('href',) if k in o] + sidebar_pages(o.get('contents', []))

def test_sidebar_is_complete():
    yaml = pytest.importorskip('yaml')
    pages = sidebar_pages(yaml.safe_load((root / 'nbs/sidebar.yml').read_text(encoding='utf-8'))['website']['sidebar']['contents'])
    assert len(set(pages)) == len(pages), 'a page is twice in nbs/sidebar.yml'
    assert not set(names) - set(pages), f'add {set(names) - set(pages)} to nbs/sidebar.yml'
    assert not set(pages) - set(names), f'nbs/sidebar.yml names {set(pages) - set(names)}, which do not exist: remove them'
