"Notebooks that are run again: figures at twice the resolution of the page, no warning of others"
import base64
import sys
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / '.ci'))
from execute import execute

FIGURE = '''import fastai.torch_basics
import matplotlib.pyplot as plt
ax = plt.subplots(figsize=(3, 2))[1]'''


@pytest.mark.slow
def test_figures_are_sharp(tmp_path, monkeypatch):
    monkeypatch.delenv('MPLBACKEND')   # of conftest.py: the kernel would show no figures
    path = tmp_path / 'page.ipynb'
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FIGURE)]), path)
    execute(path)
    cell, = nbformat.read(path, as_version=4).cells
    assert cell.source == FIGURE
    output, = cell.outputs   # and no stream of warnings
    data = base64.b64decode(output['data']['image/png'])
    shown = output['metadata']['image/png']
    for name, at in dict(width=16, height=20).items():
        assert int.from_bytes(data[at:at + 4], 'big') // 2 == shown[name]
    assert 150 < shown['width'] < 330   # three inches, without empty margins
