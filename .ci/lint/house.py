"Rules on modules and notebooks: layout, imports, names, cells, files"

import ast
import json
import os
import re
import subprocess
import sys

from lint.common import (
    ROOT,
    code_cells,
    default_exp,
    directives,
    exported_cells,
    load_script,
    notebook_names,
    parse_cell,
    read,
    rule,
    shown_code,
    text,
)

LIBRARY = ROOT / 'reinit_nb'
# Modules that define fastai callbacks or add verbs to `Learner` import fastai, and fastai imports matplotlib.pyplot.
# All others import fastai inside the functions that need it.
NEED_FASTAI = {
    'rounds',
    'lw',
    'wels',
    'dsd',
    'fc',
    'baselines',
    'checkpoint',
    'freezing',
    'prefix_cache',
    'separability',
    'frozen',
    'between',
    'spectrum',
    'path',
    'studies.interventions',
    'studies.frozen_weights',
    'studies.transfer',
}
UNWANTED = ('fastai.vision', 'spacy', 'matplotlib.pyplot')


def module_files():
    return sorted(path for path in LIBRARY.rglob('*.py') if path.name not in ('__init__.py', '_modidx.py'))


def module_name(path):
    return '.'.join(path.relative_to(LIBRARY).with_suffix('').parts)


def module_sources():
    return {module_name(path): path.read_text(encoding='utf-8') for path in module_files()}


def module_homes():
    "Module → notebooks that export to it"
    homes = {}
    for name in notebook_names():
        module = default_exp(read(name))
        if module:
            homes.setdefault(module, []).append(name)
    return homes


# ---------------------------------------------------------------- modules


@rule
def one_live_notebook_per_module():
    "Every module has one notebook, and every exporting notebook its module"
    homes, modules = module_homes(), module_sources()
    for module, notebooks in homes.items():
        if len(notebooks) > 1:
            yield module, f'{notebooks} all export to it: give each its own #| default_exp'
        if module not in modules:
            yield notebooks[0], 'was never exported: run nbdev_export'
        elif f'nbs/{notebooks[0]}.' not in modules[module][:600]:
            yield module, f'its header does not name nbs/{notebooks[0]}: run nbdev_export'
    for module in set(modules) - set(homes):
        yield module, 'no notebook exports to it: delete it'


def own_imports(source, module=''):
    "Modules of this package that `source` imports, at the top or inside a function, as pairs of module and name"
    package = module.split('.')[:-1]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [
                (alias.name.removeprefix('reinit_nb.'), None)
                for alias in node.names
                if alias.name.startswith('reinit_nb.')
            ]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] + (node.module or '').split('.')
            elif (node.module or '').split('.')[0] == 'reinit_nb':
                base = node.module.split('.')[1:]
            else:
                continue
            base = '.'.join(part for part in base if part)
            found += [(base, alias.name) for alias in node.names]
    return found


def imported_modules(source, module, known):
    "The modules out of `known` that `source` imports"
    found = own_imports(source, module)
    return {m for m, _ in found if m in known} | {
        f'{m}.{n}'.strip('.') for m, n in found if f'{m}.{n}'.strip('.') in known
    }


@rule
def imports_go_down():
    "A module imports only from notebooks with lower numbers"
    home = {module: notebooks[0] for module, notebooks in module_homes().items()}
    for module, source in module_sources().items():
        for other in sorted(imported_modules(source, module, home)):
            if module in home and home[other] >= home[module]:
                yield f'nbs/{home[module]}', f'imports {other} from above: move what it needs to a lower notebook'


def private_names_of_others(source, module=''):
    "Names with a leading underscore that `source` takes from another module, imported or as attributes of it"
    modules = set()
    for other, name in own_imports(source, module):
        if name and re.match(r'_(?!_)', name):
            yield other, name
        modules.add(name or other.split('.')[-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules and re.match(r'_(?!_)', node.attr):
                yield node.value.id, node.attr


@rule
def no_private_imports():
    "No module takes a name with a leading underscore from another one"
    for module, source in module_sources().items():
        for other, name in private_names_of_others(source, module):
            yield module, f'takes {name} from {other}: make it public in the right place'


def public_names(source):
    "Names that a module defines at its top level, without methods added by @patch"
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            patched = any('patch' in ast.dump(decorator) for decorator in node.decorator_list)
            if not patched and not node.name.startswith('_'):
                yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name) and not t.id.startswith('_'))


@rule
def public_names_are_unique():
    "A public name exists in one module only, so that search, links and imports find the right one"
    places = {}
    for module, source in module_sources().items():
        for name in public_names(source):
            if name not in ('STUDY', 'CLAIMS'):
                places.setdefault(name, set()).add(module)  # the records of a study and of a paper
    for name, modules in places.items():
        if len(modules) > 1:
            yield name, f'is defined in {", ".join(sorted(modules))}: give each a specific name'


def eager_plots(source):
    "Plotting libraries that are imported with the module"
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f'{node.module}.{alias.name}' for alias in node.names]
    return [name for name in found if re.match(r'(matplotlib\.pyplot|seaborn)\b', name)]


@rule
def plots_are_imported_late():
    "Plotting libraries are imported inside the functions that draw"
    for module, source in module_sources().items():
        for name in eager_plots(source):
            yield module, f'imports {name} at the top: import it inside the plotting function'


# One process per module, each forked from an interpreter that has loaded only the heavy libraries of others.
# It records who is the first to import what should not be imported.
PROBE = """
import json, os, sys, traceback
warm, unwanted, *names = sys.argv[1:]
for name in warm.split(): __import__(name)
first = {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in unwanted.split() and name not in first:
            frame = sys._getframe(1)
            while frame.f_back and 'importlib' in frame.f_code.co_filename: frame = frame.f_back
            first[name] = frame.f_globals.get('__name__')
sys.meta_path.insert(0, Watch())
for name in names:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        continue
    error = ''
    try: __import__(name)
    except BaseException: error = traceback.format_exc()
    own = [module for module in sys.modules if module.startswith('reinit_nb.')]
    print(json.dumps(dict(module=name, error=error, first=first, own=own)), flush=True)
    os._exit(0)
"""


def fresh_imports(names, folder=ROOT, warm='torch pandas scipy.stats'):
    "Import each of `names` in a process of its own; name → report"
    command = [sys.executable, '-c', PROBE, warm, ' '.join(UNWANTED), *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    reports = {name: dict(error=f'died\n{done.stderr}', first={}, own=[]) for name in names}
    for line in done.stdout.splitlines():
        if line.startswith('{"module"'):
            report = json.loads(line)
            reports[report['module']] = report
    return reports


def side_effects(report, need_fastai=NEED_FASTAI):
    "Imports that a report should not show: what → by whom"
    bad = dict(report['first'])
    excused = any(module.removeprefix('reinit_nb.') in need_fastai for module in report['own'])
    if excused and (bad.get('matplotlib.pyplot') or '').startswith('fastai'):
        del bad['matplotlib.pyplot']
    return bad


@rule
def modules_import_alone():
    "Every module imports by itself in a fresh interpreter, without pyplot and without all of fastai"
    for name, report in fresh_imports([f'reinit_nb.{module_name(path)}' for path in module_files()]).items():
        if report['error']:
            yield name, f'does not import (a cell with #| hide that should be #| export?)\n{report["error"]}'
        for what, who in side_effects(report).items():
            yield name, f'also imports {what}, by {who}: move that import into the function that needs it'


# ---------------------------------------------------------------- cells


def mixes_imports(source):
    "Does a cell hold imports and other code?"
    body = parse_cell(source).body
    imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in body]

    def is_dunder(node):
        return isinstance(node, ast.Assign) and all(
            re.fullmatch(r'__\w+__', getattr(t, 'id', '')) for t in node.targets
        )

    return any(imports) and not all(yes or is_dunder(node) for yes, node in zip(imports, body))


@rule
def imports_have_their_own_cell():
    "Imports share no cell with other code: building the site runs every cell that imports something"
    for name in notebook_names():
        for cell in code_cells(read(name)):
            source = text(cell['source'])
            if 'nbdev_export()' not in source and mixes_imports(source):
                yield f'nbs/{name}, cell {cell["id"]}', 'split it'


def only_imports(source):
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in parse_cell(source).body)


def opens_with_an_example(notebook):
    "Does code that a reader can run, and that shows something, come before the first definition?"
    for cell in shown_code(notebook):
        source = text(cell['source'])
        if 'default_exp' in directives(cell) or only_imports(source):
            continue
        return cell not in exported_cells(notebook)
    return False


@rule
def library_pages_open_with_an_example():
    "A page of the library opens with a few lines that run; definitions follow"
    for name in notebook_names():
        notebook = read(name)
        if exported_cells(notebook) and not opens_with_an_example(notebook):
            yield f'nbs/{name}', 'opens with a definition: begin with the lines that use the module'


def has_test(notebook):
    "Is there an `assert` or a call of a `test_…` function?"
    for cell in code_cells(notebook):
        for node in ast.walk(parse_cell(text(cell['source']))):
            if isinstance(node, ast.Assert):
                return True
            if isinstance(node, ast.Call):
                called = getattr(node.func, 'id', getattr(node.func, 'attr', ''))
                if re.match(r'(test_|is_close)', called):
                    return True
    return False


def has_figure(notebook):
    "Is there a picture among the outputs?"
    for cell in code_cells(notebook):
        for output in cell['outputs']:
            data = output.get('data', {})
            if any(kind.startswith('image/') for kind in data):
                return True
            if re.search(r'<(img|svg)\b', text(data.get('text/html', ''))):
                return True
    return False


@rule
def exporting_notebooks_test_and_show():
    "A notebook that exports code tests it and shows a figure or a table"
    for name in notebook_names():
        notebook = read(name)
        if not exported_cells(notebook):
            continue
        if not has_test(notebook):
            yield f'nbs/{name}', 'tests nothing: show a test_eq or test_close after each definition'
        if not has_figure(notebook) and not has_table(notebook):
            yield f'nbs/{name}', 'shows no figure and no table'


def has_table(notebook):
    "Is there a DataFrame or a markdown table among the outputs?"
    outputs = [output.get('data', {}) for cell in code_cells(notebook) for output in cell['outputs']]
    return any(
        '<table' in text(data.get('text/html', '')) or '|---' in text(data.get('text/markdown', '')).replace(' ', '')
        for data in outputs
    )


# ---------------------------------------------------------------- files


@rule
def notebook_files_are_sound():
    "Small files in nbformat 4.5, ids, sources as lists of lines, no page that is silently skipped"
    for name in notebook_names():
        path, notebook = ROOT / 'nbs' / name, read(name)
        size = path.stat().st_size / 1000
        if size > 600:
            yield f'nbs/{name}', f'has {size:.0f} KB: make its figures smaller or show fewer'
        if (notebook['nbformat'], notebook['nbformat_minor']) < (4, 5):
            yield f'nbs/{name}', 'is not nbformat 4.5: run nbdev_clean'
        ids = [cell.get('id') for cell in notebook['cells']]
        if not all(ids) or len(set(ids)) < len(ids):
            yield f'nbs/{name}', 'every cell needs an id of its own'
        for cell in notebook['cells']:
            place = f'nbs/{name}, cell {cell["id"]}'
            if not isinstance(cell['source'], list):
                yield place, 'its source is one string: run nbdev_clean'
            if re.search(r'^\W*skip_exec:\s*true', text(cell['source']), re.M | re.I):
                yield place, 'skip_exec silences the tests of the page: mark single cells with #| slow, cuda or data'


@rule
def outputs_are_committed():
    "Pages carry the outputs of one run: no errors, no warnings, something to see"
    for name in notebook_names():
        cells = code_cells(read(name))
        for cell in cells:
            for output in cell['outputs']:
                place = f'nbs/{name}, cell {cell["id"]}'
                if output['output_type'] == 'error':
                    yield place, 'ends in an error: an expected one goes into test_fail'
                if output.get('name') == 'stderr' and re.search('Warning|findfont', text(output['text'])):
                    yield place, 'shows a warning'
        shown = [c for c in cells if not directives(c) & {'hide', 'default_exp', 'export', 'exports', 'exporti'}]
        if shown and not any(cell['outputs'] for cell in shown):
            yield f'nbs/{name}', 'shows no output: run it from top to bottom'


# Written in parts, so that this file passes its own rule
HOSTS = ['.'.join(parts) for parts in (('pypi', 'org'), ('pythonhosted', 'org'), ('anaconda', 'org'), ('npmjs', 'com'))]


def foreign_words(words):
    "Paths of one machine, hosts of package registries, addresses in memory"
    paths = re.findall(r'(?<![\w.])/(?:work|root|home|opt/dev)/[\w.]*', words)
    hosts = [host for host in HOSTS if host in words.lower()]
    return paths + hosts + re.findall(r' at 0x[0-9a-f]{8,}', words)


def notebook_words(notebook):
    "All text of a notebook, without pictures"
    for cell in notebook['cells']:
        yield text(cell['source'])
        for output in cell.get('outputs', []):
            yield text(output.get('text', ''))
            yield from (text(value) for kind, value in output.get('data', {}).items() if kind.startswith('text/'))


@rule
def no_machine_paths():
    "No path, address or registry of one machine in notebooks and files"
    for name in notebook_names():
        for word in foreign_words('\n'.join(notebook_words(read(name)))):
            yield f'nbs/{name}', f'names {word!r}: leave it out'
    patterns = ('*.*', 'Makefile', '.ci/**/*', '.github/**/*.yml', 'tests/*.py', 'nbs/*.yml', 'reinit_nb/**/*.py')
    for path in (path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()):
        words = path.read_text(encoding='utf-8', errors='ignore').lower()
        for host in HOSTS:
            if host in words:
                yield path.relative_to(ROOT), f'names {host}: leave the choice of a registry to pip'


@rule
def readme_is_in_step():
    "README.md is generated from nbs/index.ipynb and current"
    difference = load_script(ROOT / '.ci/readme.py').check(ROOT)
    if difference:
        yield 'README.md', f'run `make readme`\n{difference[:2000]}'


@rule
def quarto_link():
    "nbs/_quarto.yml is a relative link to the file at the top"
    link = ROOT / 'nbs/_quarto.yml'
    if not link.is_symlink() or os.path.isabs(os.readlink(link)) or link.resolve() != ROOT / '_quarto.yml':
        yield 'nbs/_quarto.yml', 'ln -sf ../_quarto.yml nbs/'
