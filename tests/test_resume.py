"""Killed and resumed equals never killed: the cases of resume_cases.py.

They run in a process of their own, since torch does not let a process fork that has trained before."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

cases = Path(__file__).with_name('resume_cases.py')

@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
def test_killed_and_resumed_equals_never_killed():
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(cases)]
    r = subprocess.run(command, cwd=cases.parent, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout[-6000:] + r.stderr[-2000:]
    assert int(re.search(r'(\d+) passed', r.stdout)[1]) >= 20 and 'skipped' not in r.stdout, r.stdout[-1000:]
