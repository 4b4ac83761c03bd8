"Settings that must stand before torch, matplotlib and the library are imported, and the markers of tests"
import os

import pytest
from browser import browser  # noqa: F401  (a fixture)
from published import published_results, report_file, report_messages, scorecard  # noqa: F401  (fixtures)

os.environ.setdefault('REINIT_SCALE', 'smoke')
os.environ.setdefault('MPLBACKEND', 'Agg')      # no test opens a window
os.environ.setdefault('OMP_NUM_THREADS', '1')   # small tensors: more threads only wait for each other

MARKERS = {
    'slow': 'a browser, kills, several processes, commands or a memory limit; `make test-fast` leaves it out',
    'data': 'needs the images and weights in the folder that REINIT_DATA names',
}


def pytest_configure(config):
    for name, about in MARKERS.items(): config.addinivalue_line('markers', f'{name}: {about}')


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason='REINIT_DATA is not set: tests on real images and ImageNet weights are skipped')
    for item in items:
        if 'browser' in item.fixturenames: item.add_marker(pytest.mark.slow)
        if item.get_closest_marker('data') and not os.environ.get('REINIT_DATA'): item.add_marker(skip)
