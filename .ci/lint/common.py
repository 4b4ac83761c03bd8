"What all rules need: the notebooks, their cells, and the registry of rules"

import ast
import importlib.util
import json
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RULES = []


def rule(check):
    "Register a generator of `(place, advice)`; its docstring is the title in the report"
    RULES.append(check)
    return check


def load_script(path):
    "A Python file outside of any package, as a module"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_script(ROOT / '.ci/docs/build.py')
text = build.text


@cache
def notebook_names():
    "Notebooks below nbs/ without those that nbdev skips, bottom first"
    nbs = ROOT / 'nbs'
    found = (path.relative_to(nbs) for path in nbs.rglob('*.ipynb'))
    return sorted(path.as_posix() for path in found if not any(part[0] in '._' for part in path.parts))


@cache
def read(name):
    "A notebook as a dict; nobody changes it"
    return json.loads((ROOT / 'nbs' / name).read_text(encoding='utf-8'))


def code_cells(notebook):
    return [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']


def directives(cell):
    return set(re.findall(r'^#\s*\|\s*([\w-]+)', text(cell['source']), re.M))


def is_hidden(cell):
    return 'hide' in directives(cell)


def shown_code(notebook):
    return [cell for cell in code_cells(notebook) if not is_hidden(cell)]


def exported_cells(notebook):
    return [c for c in code_cells(notebook) if directives(c) & {'export', 'exports', 'exporti'}]


def markdown_cells(notebook):
    "Pairs of cell id and source"
    return [(cell['id'], text(cell['source'])) for cell in notebook['cells'] if cell['cell_type'] == 'markdown']


def default_exp(notebook):
    "The module that a notebook exports to, or None"
    for cell in code_cells(notebook):
        found = re.search(r'^#\s*\|\s*default_exp\s+(\S+)', text(cell['source']), re.M)
        if found:
            return found[1]


def parse_cell(source):
    "Syntax tree of a cell without IPython's own lines"
    lines = ['' if line.lstrip()[:1] in ('%', '!') else line for line in source.splitlines()]
    return ast.parse('\n'.join(lines))
