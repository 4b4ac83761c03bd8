#!/usr/bin/env python
"""Run notebooks several times, each time with other global random seeds, and name those that fail.

python .ci/flaky.py                       all notebooks, five seeds each, at smoke scale
python .ci/flaky.py --seeds 20 '47_*'     some of them, twenty seeds
"""
import argparse
import fnmatch
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

os.environ.setdefault('REINIT_SCALE', 'smoke')
os.environ.setdefault('OMP_NUM_THREADS', '1')

import fastai.vision.all  # noqa: F401  (once, before the processes are forked)
import numpy as np
import torch
from nbdev.config import get_config
from nbdev.test import test_nb

ROOT = Path(__file__).resolve().parents[1]


def run_seeded(job: tuple[Path, int]) -> tuple[str, int, bool, float]:
    "Seed the global generators and test one notebook; return its name, the seed, whether it passed, and seconds"
    path, seed = job
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    passed, seconds = test_nb(path, skip_flags=get_config().tst_flags.split(), basepath=ROOT)
    return str(path.relative_to(ROOT / 'nbs')), seed, passed, seconds


def run_apart(job: tuple[Path, int]) -> tuple[str, int, bool, float]:
    "Do so in a process of its own: what one notebook leaves behind must not reach the next; it may start others"
    context = multiprocessing.get_context('fork')
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(run_seeded(job)))
    process.start()
    sender.close()
    try: return receiver.recv()
    except EOFError: return str(job[0].relative_to(ROOT / 'nbs')), job[1], False, 0.   # the process died
    finally: process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', default=['*'], help='patterns of names; default: all notebooks')
    parser.add_argument('--seeds', type=int, default=5, help='how many')
    parser.add_argument('--first', type=int, default=1000, help='the first seed')
    parser.add_argument('--workers', type=int, default=1, help='notebooks at a time')
    args = parser.parse_args()
    pages = [path for path in sorted((ROOT / 'nbs').rglob('*.ipynb')) if not path.parts[-2].startswith(('.', '_'))]
    notebooks = [path for path in pages if any(fnmatch.fnmatch(path.name, name) for name in args.names)]
    jobs = [(path, seed) for seed in range(args.first, args.first + args.seeds) for path in notebooks]
    start, failed = time.time(), []
    with ThreadPool(args.workers) as pool:
        for name, seed, passed, seconds in pool.imap_unordered(run_apart, jobs):
            print(f'{name} seed {seed}: {"passed" if passed else "FAILED"} in {seconds:.0f} s', flush=True)
            if not passed: failed.append((name, seed))
    print(f'{len(notebooks)} notebooks, {args.seeds} seeds, {len(jobs)} runs: {len(failed)} failed '
          f'({time.time() - start:.0f} s)')
    for name, seed in sorted(failed): print(f'    {name} with seed {seed}')
    sys.exit(bool(failed))


if __name__ == '__main__': main()
