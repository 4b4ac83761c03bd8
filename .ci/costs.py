"""Write reinit_nb/data/run_costs.csv: what a run of each results file costs at laptop scale, for dry runs.

Seconds come from the published results: as recorded with each run, or else the time between the first and the last run,
without pauses of more than half an hour, times the cores of the machine, divided by the runs. That is an upper bound:
cores may have waited.
Memory is measured with --memory: the first portion of each file is run with few steps in a process of its own, and its
peak is taken; `--memory FILE…` measures these files only. With `--store DIR…` it is the largest that the records of
stores have. Otherwise the memory that the table has already is kept.
Files without published results have a row if their memory was measured.
"""

import json
import subprocess
import sys
from dataclasses import fields
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


def shortened(recipe, epochs):
    "The same run with few steps: memory is that of one step and of the measurements"
    few = dict(epochs=epochs, steps=10, start_steps=10, settle=0, tasks=2, looks=(), separate=(0,))
    names = {f.name for f in fields(recipe)}
    changes = {k: v for k, v in few.items() if k in names and getattr(recipe, k)}
    if 'learn' in names:
        changes['learn'] = recipe.learn.replace(epochs=epochs)
    if 'path' in names:
        changes['path'] = tuple((task, how.replace(epochs=epochs, patience=None)) for task, how in recipe.path)
    return recipe.replace(**changes)


def memory_mb(study, file):
    "Peak memory of a process that runs the first portion, with few steps"
    from reinit_nb.core import ReinitError
    from reinit_nb.studies.common import get_study
    from reinit_nb.sweep import run_sweep

    source = get_study(study).files[file]
    portion = source.engine.plan(flatten_recipes(source.lists('laptop', None)))[0]
    if source.engine.processes:
        portion = portion[:1]
    for epochs in (1, 2, 5, 10, 20, 40):   # methods need an epoch for each of their rounds
        with TemporaryDirectory() as folder:
            try:
                few = [shortened(recipe, epochs) for recipe in portion]
                run_sweep(few, Store(folder), source.engine, show=False, workers=1)
            except ReinitError as error:
                print(error, file=sys.stderr)
                continue
            return Store(folder).record(few[-1])['memory_mb']
    sys.exit(1)


def measured(study, file):
    "The same, in a process of its own; nothing if its data is not here"
    run = subprocess.run([sys.executable, __file__, 'measure', study, file], capture_output=True, text=True)
    if run.returncode:
        print(run.stderr.splitlines()[-1])
        return None
    return json.loads(run.stdout.splitlines()[-1])


def known_memory():
    "Memory by file, of the table as it is"
    return pd.read_csv(table, index_col='file').memory_mb.to_dict() if table.exists() else {}


def stored_mb(source, stores):
    "Largest memory of a process that the records of stores have for a file"
    recipes = flatten_recipes(source.lists('laptop', None))
    records = [store.record(recipe) for store in stores for recipe in recipes]
    return max((o['memory_mb'] for o in records if o and o.get('memory_mb')), default=None)


def row_of(file, memory):
    "What the table says of a results file; `None`: nothing is known"
    path = root / 'results' / f'{file}_laptop.csv'
    row = dict(file=file, scale='laptop', runs=None, seconds=None, memory_mb=memory, machine=None, date=None)
    if path.exists():
        df = load_results(path)
        row |= dict(runs=df.recipe.nunique(), seconds=round(core_seconds(df), 2), machine=df.machine.iloc[0],
                    date=df.date.max()[:10])
    return row if path.exists() or memory == memory and memory is not None else None


if __name__ == '__main__':
    if sys.argv[1:2] == ['measure']:
        print(memory_mb(*sys.argv[2:]))
        sys.exit()
    wanted = sys.argv[2:] if sys.argv[1:2] == ['--memory'] else ()
    everything = sys.argv[1:] == ['--memory']
    stores = [Store(folder) for folder in sys.argv[2:]] if sys.argv[1:2] == ['--store'] else ()
    memory = known_memory()
    rows = []
    for study in all_studies().values():
        for file, source in study.files.items():
            if not source.engine:
                continue
            if everything or file in wanted:
                memory[file] = measured(study.name, file)
                print(file, memory[file], flush=True)
            memory[file] = stored_mb(source, stores) or memory.get(file)
            rows.append(row_of(file, memory.get(file)))
    df = pd.DataFrame([row for row in rows if row])
    whole = dict(runs='Int64', memory_mb='Int64')
    df.astype(whole).to_csv(table, index=False, lineterminator='\n')
