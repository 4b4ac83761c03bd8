#!/usr/bin/env python
"""Run notebooks from top to bottom and keep their outputs, with figures at twice the resolution of the page.

python .ci/execute.py nbs/22_lw.ipynb nbs/tutorials/lw.ipynb
"""
import argparse
import base64
import io
import os
import time
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')

import nbformat
from nbclient import NotebookClient
from nbdev.clean import nbdev_clean
from PIL import Image

# The one place where figures are configured; a page that calls `small_figures` itself chooses another size
SETUP = '''
import logging
import warnings
logging.getLogger('matplotlib.font_manager').setLevel(logging.ERROR)  # fonts that are not installed
warnings.filterwarnings('ignore', message='`torch.jit.script` is deprecated', category=FutureWarning)  # by fastai
from reinit_nb.report.html import small_figures
small_figures(None)
'''


def with_palette(png: str):
    "The same figure with 256 colors when that makes a smaller file; base64 in and out"
    data = base64.b64decode(png)
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).convert('RGB').quantize(256, dither=Image.Dither.NONE).save(out, 'PNG', optimize=True)
    return base64.b64encode(min(data, out.getvalue(), key=len)).decode()


def compress_figures(notebook):
    "Store the figures of a notebook with a palette: pages stay small at twice the resolution"
    for cell in notebook.cells:
        for output in cell.get('outputs', []):
            data = output.get('data', {})
            if 'image/png' in data: data['image/png'] = with_palette(data['image/png'])


def execute(path: Path):
    "Run one notebook in its folder and write it back; nothing is written if a cell fails"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    resources = {'metadata': {'path': str(path.parent)}}
    client = NotebookClient(notebook, kernel_name='python3', timeout=None, resources=resources, coalesce_streams=True)
    client.execute()
    del notebook.cells[0]
    compress_figures(notebook)
    nbformat.write(notebook, path)
    nbdev_clean(str(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('notebooks', nargs='+', type=Path)
    for path in parser.parse_args().notebooks:
        start = time.perf_counter()
        execute(path.resolve())
        print(f'{path}: {time.perf_counter() - start:.0f} s', flush=True)


if __name__ == '__main__': main()
