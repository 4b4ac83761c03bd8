"The site without Quarto: what Sphinx says differently is translated, and nothing else"

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip('yaml', reason='no yaml here: the builder of the site is not checked')
root = Path(__file__).resolve().parents[1]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load(root / '.ci/docs/build.py')


def translated(md, page='experiments/a.ipynb'):
    cfg = dict(doc_host='https://h.io', doc_baseurl='/r', git_url='https://git/r', branch='main')
    return build.markdown(
        md, build.Links(page, {'index.ipynb', '22_lw.ipynb', 'experiments/a.ipynb', 'experiments/b.ipynb'}, cfg)
    )


def test_links_are_translated():
    assert translated('[x](../22_lw.ipynb#a) [y](b.ipynb)') == '[x](../lw.ipynb#a) [y](b.ipynb)'
    assert (
        translated('[`L`](https://h.io/r/lw.html#l.m)') == '[`L`](../lw.ipynb#l.m)'
        and translated('[`L`](https://h.io/r/lw.html#l)', 'index.ipynb') == '[`L`](lw.ipynb#l)'
    )
    assert translated('[`_l`](https://h.io/r/lw.html#_l)') == '`_l`'
    assert (
        translated('[l](../../LICENSE)') == '[l](https://git/r/blob/main/LICENSE)'
        and translated('[o](https://h.io/other)') == '[o](https://h.io/other)'
    )
    assert translated('```\n[x](../22_lw.ipynb)\n```') == '```\n[x](../22_lw.ipynb)\n```'
    assert (
        translated('[s](https://a.b){target="_blank" style="x:y"}') == '[s](https://a.b)'
        and translated('![i](i.png){width=50%}') == '![i](i.png){width=50%}'
    )


def test_callouts_are_translated():
    assert translated('::: {.callout-note}\nx\n:::') == ':::::::::{note}\nx\n:::::::::'
    assert (
        translated('::: {.callout-tip title="Mind this"}\nx\n:::')
        == ':::::::::{admonition} Mind this\n:class: tip\nx\n:::::::::'
    )
    assert (
        translated('::: {.callout-warning}\n\n## Mind this\n\nx\n:::')
        == ':::::::::{admonition} Mind this\n:class: warning\n\n\nx\n:::::::::'
    )
    assert (
        translated('::: {.box}\n::: {.callout-note}\nx\n:::\n:::')
        == ':::::::::{container} box\n::::::::{note}\nx\n::::::::\n:::::::::'
    )
    assert translated('```\n::: {.callout-note}\n```') == '```\n::: {.callout-note}\n```'
    assert translated('## A thing {#sec-a .x}\n\ntext') == '(sec-a)=\n## A thing\n\ntext'


def test_cells_are_translated():
    def cell(src, *outs):
        return dict(cell_type='code', id='c', source=src, outputs=list(outs), metadata={}, execution_count=1)

    png, same = dict(output_type='display_data', data={'image/png': ''}, metadata={}), lambda md: md
    (c,) = build.code_cell(cell('#| echo: false\n#| fig-alt: "A: b"\nplot()', png), same)
    assert c['source'] == 'plot()' and c['metadata'] == {'tags': ['remove-input'], 'mystnb': {'image': {'alt': 'A: b'}}}
    a, b = build.code_cell(cell('#| fig-alt:\n#|   - one\n#|   - two\nplot()', png, png), same)
    assert (
        [o['metadata']['mystnb']['image']['alt'] for o in (a, b)] == ['one', 'two']
        and b['metadata']['tags'] == ['remove-input']
        and a['metadata']['tags'] == []
    )
    assert (
        build.code_cell(cell('#| include: false\nx'), same) == []
        and build.code_cell(cell('#| output: false\nx', png), same)[0]['outputs'] == []
    )
    (c,) = build.code_cell(cell('#| code-fold: true\n#| code-summary: Imports\nimport re'), same)
    assert c['metadata']['tags'] == ['hide-input'] and c['metadata']['mystnb']['code_prompt_show'] == 'Imports'
    doc = '---\n\n[source](https://a.b#L1){target="_blank" style="float:right"}\n\n### f\n\n'
    doc += '```python\ndef f(\n    a, # see [`g`](https://h.io/r/g.html#g)\n):\n```\n\n*What*'
    (c,) = build.code_cell(
        cell(
            '#| echo: false\n#| output: asis\nshow_doc(f)',
            dict(output_type='execute_result', data={'text/markdown': doc}),
        ),
        same,
    )
    assert (
        c['cell_type'] == 'markdown'
        and c['source'].startswith('### f\n\n[source](https://a.b#L1){.source-link}\n')
        and 'see `g`\n' in c['source']
    )


def test_sidebar_is_translated():
    side = list(
        build.entries(
            [
                'index.ipynb',
                dict(section='T', contents=['t/a.ipynb']),
                dict(text='S', href='62_s.ipynb'),
                dict(section='API', contents=[dict(section='F', contents=['00_core.ipynb', '03_blocks.ipynb'])]),
            ]
        )
    )
    assert side == [
        ((), 'index.ipynb', None),
        (('T',), 't/a.ipynb', None),
        ((), '62_s.ipynb', 'S'),
        (('API', 'F'), '00_core.ipynb', None),
        (('API', 'F'), '03_blocks.ipynb', None),
    ]
    trees = build.toctrees(side)
    assert (
        trees.count('{toctree}') == 3
        and ':caption: API · F\n\ncore\nblocks\n' in trees
        and '\nS <s>\n' in trees
        and 'index' not in trees
    )


def test_readme_converter():
    rm = load(root / '.ci/readme.py')

    def code(src, *outs):
        return dict(cell_type='code', source=src.splitlines(True), outputs=list(outs))

    html = '<table><tr><th></th><th>a|b</th></tr><tr><th>0</th><td>1</td></tr></table>'
    png = dict(output_type='display_data', data={'image/png': 'aGk=', 'text/plain': ['<Figure>']})
    md, images = rm.convert(
        dict(
            cells=[
                dict(cell_type='raw', source=['---\n', 'x: 1\n', '---']),
                code('#| hide\nsecret()'),
                dict(
                    cell_type='markdown',
                    source=[
                        '# T\n',
                        '[s](experiments/s.ipynb#a) [w](https://a.b) ![i](images/i.png) `[c](d)` [up](../LICENSE)',
                    ],
                ),
                code(
                    '#| eval: false\nx = 1',
                    dict(output_type='stream', name='stdout', text=['hi\n']),
                    dict(output_type='stream', name='stderr', text=['warn\n']),
                ),
                code('#| echo: false\n#| fig-alt: A curve\nplot()', png),
                code('df', dict(output_type='execute_result', data={'text/html': html, 'text/plain': 'df'})),
                code(
                    'wide',
                    dict(
                        output_type='execute_result',
                        data={'text/html': html.replace('<th>', '<th colspan="2">', 1), 'text/plain': 'plain'},
                    ),
                ),
            ]
        )
    )
    assert images == {'index_1.png': b'hi'}
    assert (
        md
        == rm.HEADER
        + '\n\n'.join(
            [
                '# T\n[s](nbs/experiments/s.ipynb#a) [w](https://a.b) ![i](nbs/images/i.png) `[c](d)` [up](LICENSE)',
                '```python\nx = 1\n```',
                '```\nhi\n```',
                '![A curve](nbs/images/index_1.png)',
                '```python\ndf\n```',
                '|  | a\\|b |\n| --- | --- |\n| 0 | 1 |',
                '```python\nwide\n```',
                '```\nplain\n```',
            ]
        )
        + '\n'
    )


def test_noise_and_printed_tables():
    "The repr of a plot and finished progress bars are left out; a printed table is recognized, and prose is not"
    repr_of_set = "[(1e-12, 2), Text(0, 0.5, 'share')]"
    for plain in (repr_of_set, "<Axes: xlabel='round'>",
                  'array([<Axes: >,\n       <Axes: >])', '<matplotlib.legend.Legend>'):
        assert build.is_noise(dict(output_type='execute_result', data={'text/plain': plain}))
    assert build.is_noise(dict(data={'text/html': '<div><progress max="2" value="2"></progress> 100%</div>'}))
    assert not build.is_noise(dict(data={'text/html': '<table class="fastprogress"></table>'}))
    assert not build.is_noise(dict(data={'image/png': '', 'text/plain': '<Axes: >'}))
    table = 'name   runs  time\nfirst     3   0.1\nsecond   12   2.5\n'
    assert build.is_printed_table(dict(output_type='stream', text=table))
    assert not build.is_printed_table(dict(output_type='stream', text='one line\nand another\n'))
    assert not build.is_printed_table(dict(data={'text/plain': table, 'text/html': '<table></table>'}))
    among_prose = 'Table 1 has its rows below.\n' * 9 + table + 'third     9   0.2\n'
    assert build.is_printed_table(dict(output_type='stream', text=among_prose))


def test_signatures_name_classes_as_a_reader_does():
    "While nbdev runs a page, its classes are those of __main__"
    md = '```python\ndef f(\n    r:__main__.Recipe, # As in [`g`](https://a.b/c.html#g)\n):\n```\n__main__.x'
    assert build.signature(md) == '```python\ndef f(\n    r:Recipe, # As in `g`\n):\n```\n__main__.x'
