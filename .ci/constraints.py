"Write constraints.txt: the installed version of everything the package and its `dev` extra need"

from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

root = Path(__file__).resolve().parents[1]
header = """\
# A set of versions that was tested together; `make` installs with these.
# Made by .ci/constraints.py from an environment in which all tests passed. CONTRIBUTING.md says how to refresh it.
# Older Pythons than the one named below cannot install all of these; there pip chooses by settings.ini alone.
"""


def needed(reqs):
    "Installed distributions behind `reqs`, by name, with all that they need in turn"
    found, todo, seen = {}, [(Requirement(o), '') for o in reqs], set()
    while todo:
        req, extra = todo.pop()
        if req.marker and not req.marker.evaluate({'extra': extra}):
            continue
        name = canonicalize_name(req.name)
        for extra in {'', *req.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                dist = found.setdefault(name, distribution(req.name))
            except PackageNotFoundError as error:
                raise SystemExit(f'{req.name} is needed and not installed: run `make env` first') from error
            todo += [(Requirement(o), extra) for o in dist.requires or []]
    return found


def oldest(dist):
    "The oldest Python that `dist` runs on, as (3, minor)"
    return 3, next(m for m in range(100) if f'3.{m}.99' in SpecifierSet(dist.metadata['Requires-Python'] or ''))


if __name__ == '__main__':
    parser = ConfigParser(delimiters=['='])
    parser.read(root / 'settings.ini', encoding='utf-8')
    cfg = parser['DEFAULT']
    dists = needed(' '.join(cfg[f'{o}requirements'] for o in ('', 'dev_', 'docs_')).split())
    # One marker for all: an older torch, say, wants other versions of all that it needs
    python = '.'.join(map(str, max(map(oldest, dists.values()))))
    marker = '' if python == cfg['min_python'] else f'; python_version >= "{python}"'
    # without local build tags (+cpu), which no index knows
    lines = [
        f'{n}=={d.version.split("+")[0]}{marker}'
        for n, d in sorted(dists.items())
        if n not in ('pip', 'setuptools', 'wheel')
    ]
    (root / 'constraints.txt').write_text(header + '\n'.join(lines) + '\n', encoding='utf-8')
    print(f'constraints.txt: {len(lines)} pins')
