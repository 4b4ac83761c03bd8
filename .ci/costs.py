"""Write reinit_nb/data/run_costs.csv: what a run of each results file costs at laptop scale, for dry runs.

Seconds come from the published results: as recorded with each run, or else the time between the first and the last run,
without pauses of more than half an hour, times the cores of the machine, divided by the runs. That is an upper bound:
cores may have waited.
Memory is measured with --memory: the first portion of each file is run in a process of its own, and its peak is taken.
Otherwise the memory that the table has already is kept.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from reinit_nb.store import Store, load_results
from reinit_nb.studies.common import all_studies, flatten_recipes

root = Path(__file__).resolve().parents[1]
table = root / 'reinit_nb' / 'data' / 'run_costs.csv'


def core_seconds(df):
    "Core-seconds of a run, as recorded or by the dates of all"
    for column in ('cpu_seconds', 'seconds'):
        if column in df and df[column].notna().any():
            return df.groupby('recipe')[column].max().mean()
    dates = pd.to_datetime(df.groupby('recipe').date.max()).sort_values()
    gaps = dates.diff().dt.total_seconds().dropna()
    worked = gaps[gaps <= 1800]
    cores = int(df.machine.iloc[0].split(', ')[1].split()[0])
    return cores * worked.sum() / max(1, len(gaps))


def memory_mb(study, file):
    "Peak memory of a process that runs the first portion"
    from reinit_nb.studies.common import get_study
    from reinit_nb.sweep import run_sweep

    source = get_study(study).files[file]
    portion = source.engine.plan(flatten_recipes(source.lists('laptop', None)))[0]
    if source.engine.processes:
        portion = portion[:1]
    with TemporaryDirectory() as folder:
        run_sweep(portion, Store(folder), source.engine, show=False, workers=1)
        return Store(folder).record(portion[-1])['memory_mb']


def measured(study, file):
    "The same, in a process of its own; nothing if its data is not here"
    run = subprocess.run([sys.executable, __file__, study, file], capture_output=True, text=True)
    if run.returncode:
        print(run.stderr.splitlines()[-1])
        return None
    return json.loads(run.stdout.splitlines()[-1])


def known_memory():
    "Memory by file, of the table as it is"
    return pd.read_csv(table, index_col='file').memory_mb.to_dict() if table.exists() else {}


if __name__ == '__main__':
    if len(sys.argv) == 3:
        print(memory_mb(*sys.argv[1:]))
        sys.exit()
    rows, memory = [], known_memory()
    for study in all_studies().values():
        for file, source in study.files.items():
            if not source.engine:
                continue
            if '--memory' in sys.argv:
                memory[file] = measured(study.name, file)
                print(file, memory[file], flush=True)
            path = root / 'results' / f'{file}_laptop.csv'
            if not path.exists():
                continue   # not recorded yet
            df = load_results(path)
            row = dict(file=file, scale='laptop', runs=df.recipe.nunique(), seconds=round(core_seconds(df), 2))
            rows.append(row | dict(memory_mb=memory.get(file), machine=df.machine.iloc[0], date=df.date.max()[:10]))
    pd.DataFrame(rows).to_csv(table, index=False, lineterminator='\n')
