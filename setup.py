"Everything said here comes from settings.ini"

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
parser = ConfigParser(delimiters=['='])
parser.read(here / 'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
readme = here / 'README.md'
licenses = {'apache2': 'Apache-2.0'}
stages = {'2': '2 - Pre-Alpha', '3': '3 - Alpha', '4': '4 - Beta', '5': '5 - Production/Stable'}

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=readme.read_text(encoding='utf-8') if readme.exists() else cfg['description'],
    long_description_content_type='text/markdown',
    author=cfg['author'],
    url=cfg['git_url'],
    keywords=cfg['keywords'].split(),
    license_expression=licenses[cfg['license']],
    license_files=['LICENSE'],
    classifiers=[
        f'Development Status :: {stages[cfg["status"]]}',
        f'Intended Audience :: {cfg["audience"]}',
        f'Natural Language :: {cfg["language"]}',
        'Programming Language :: Python :: 3',
    ],
    python_requires=f'>={cfg["min_python"]}',
    install_requires=cfg['requirements'].split(),
    extras_require={
        'dev': (cfg['dev_requirements'] + ' ' + cfg['docs_requirements']).split(),  # the tests build the site
        'docs': cfg['docs_requirements'].split(),
        'cluster': cfg['cluster_requirements'].split(),
    },
    packages=find_packages(include=[cfg['lib_path'], f'{cfg["lib_path"]}.*']),
    package_data={cfg['lib_path']: ['data/*.csv', 'report/templates/*', 'py.typed']},
    entry_points={
        'console_scripts': cfg['console_scripts'].split(),
        'nbdev': [f'{cfg["lib_name"]}={cfg["lib_path"]}._modidx:d'],
    },  # lets nbdev link our names in other sites
    zip_safe=False,
)
