"""Every engine and every measurement on a pretend accelerator, against the CPU.

The cases run in a process of their own, because a device is registered for a whole process. There the device also
refuses float64, as Apple's MPS does.
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import device_cases
import numpy as np
import pretend_device
import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parent / 'reinit_nb'
pytestmark = [pytest.mark.slow, pytest.mark.skipif(pretend_device.missing() is not None,
                                                   reason=str(pretend_device.missing()))]

def run_cases(folder, names=(), package=PACKAGE):
    "Run cases with a copy of the package, and return what they found"
    file = folder / 'found.json'
    env = os.environ | dict(PYTHONPATH=f'{package.parent}{os.pathsep}{HERE}', REINIT_SCALE='smoke')
    env.pop('REINIT_DEVICE', None)
    done = subprocess.run([sys.executable, HERE / 'device_cases.py', file, *names], env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(file.read_text())

@pytest.fixture(scope='module')
def found(tmp_path_factory): return run_cases(tmp_path_factory.mktemp('devices'))

# Sums are rounded in another order, and Adam is not fused: single answers may flip, and networks drift apart
LOOSE = dict(mlps=1e-3, reservoirs=1e-3, path_bf16=.03, path_fp16=.03)

def largest_difference(a, b):
    "Largest difference of two lists, relative to the largest number"
    a, b = np.array(a, float), np.array(b, float)
    assert a.shape == b.shape and (np.isfinite(a) == np.isfinite(b)).all()
    a, b = a[np.isfinite(a)], b[np.isfinite(b)]
    return np.abs(a - b).max(initial=0) / max(1e-6, np.abs(a).max(initial=0))

def is_count(column): return any(k in column for k in ('acc', 'sep_', 'converged'))

@pytest.mark.parametrize('name', device_cases.CASES)
def test_the_device_computes_what_the_cpu_computes(name, found):
    cpu, device = found[name]['cpu'], found[name]['device']
    assert 'error' not in cpu, cpu['error']
    assert 'error' not in device, device['error']
    assert cpu['numbers'].keys() == device['numbers'].keys() and cpu['numbers']
    for k, want in cpu['numbers'].items():
        if name in LOOSE and is_count(k): continue
        assert largest_difference(want, device['numbers'][k]) < LOOSE.get(name, 1e-4), k

# Public names of measurements that need no case, because they compute with tables, numbers or symbols, or only draw
NO_DEVICE = {
    'init': 'reset_rule fill_constant register_values',   # registration of rules
    'baselines': 'label_colors method_options',           # tables and names
    'blocks': 'nearest_module_hint',                      # texts
    'checkpoint': 'first_words',
    'synthetic': 'synthetic_dls',                         # loaders on the CPU
    'vision': 'draw_augmentation as_images',              # draws and files are on the CPU
    'models': 'Skip',                                     # only for networks with residual connections
    'rounds': 'plan_table plot_round_plan plot_log plot_losses',
    'freezing': 'plot_freezing_plan',
    'separability': 'plot_separability plot_separability_training',
    'wiring': 'plot_wiring',
    'frozen': 'plot_frozen plot_filters',
    'between': 'paper_reset',                             # a table of numbers
    'stability': 'product_model symbolic_loss symbolic_flow linearization symbolic_eigenvalues coupling '
                 'stability_condition descent_condition balance_rate size_equation double_equilibria critical_decay '
                 'triple_threshold equivalent_point escape_thresholds safe_size random_problems plot_rates '
                 'escape_times plot_escape_times plot_portrait basins plot_basins half_mse step_multiplier '
                 'growth_rates eigenvalue_evidence escape_evidence',
    'flatness': 'plot_margins size_ratios plot_size_ratios plot_noise plot_spectral_density plot_slice plot_surface',
    'spectrum': 'plot_spectra plot_plane_spectrum plot_gradient_histogram plot_amplitudes plot_convergence '
                'plot_spectrogram',
    'coordinate_nets': 'plot_spectral_law',
    'path': 'imagenet_start path_status plot_path training_fit',   # files and tables
    'compare': 'differences_to summarize_comparison plot_comparison comparison_power comparison_runs',
    'health': 'plot_health trainability_summary trainability_ratio plot_trainability'}

def test_every_measurement_is_called(found):
    "A new function needs a case, or a reason why not"
    without = {f'{module}.{name}' for module, names in NO_DEVICE.items() for name in names.split()}
    assert set(found['not_called']) == without

def counted(lines, module): return sum(n for line, n in lines.items() if line.startswith(module + ':'))

PASSES = 6   # three epochs of a loader for training and one for validation
ONCE = 6 + 2   # mean and deviation of three loaders, labels of two

def test_batches_are_made_on_the_device(found):
    "Copied are the images of two loaders, and then the order of every pass and the draws of every epoch"
    device = found['loaders']['device']
    assert counted(device['waits'], 'vision.py') == 0
    assert counted(device['to_device'], 'vision.py') <= ONCE + 2 + PASSES + 3 < len(device['numbers']) / 2

def test_images_that_do_not_fit_are_copied_once_per_batch(found):
    device = found['loaders_of_many_images']['device']
    batches = len(device['numbers']) / 2
    assert counted(device['waits'], 'vision.py') == 0
    assert batches <= counted(device['to_device'], 'vision.py') <= batches + ONCE + PASSES + 3

def test_evaluation_waits_once_for_each_part(found):
    "Training, validation and test images, not every batch of them"
    assert counted(found['path_BL']['device']['waits'], 'core.py') == 3

BUGS = {'vision': ('images[rows]', '_read_rows(ds, rows.cpu()).to(device)', 'loaders'),
        'core': ('t.detach().cpu().double()', 't.detach().double().cpu()', 'fits_on_features'),
        'path': ('net(to_device(x, device))', 'net(x.as_subclass(Tensor))', 'penultimate')}

def test_planted_bugs_are_noticed(tmp_path):
    "A copy for every batch, float64 on the device, an input that stays on the CPU"
    package = Path(shutil.copytree(PACKAGE, tmp_path / 'reinit_nb'))
    for module, (right, wrong, _) in BUGS.items():
        file = package / f'{module}.py'
        assert file.read_text().count(right) == 1
        file.write_text(file.read_text().replace(right, wrong))
    found = run_cases(tmp_path, [name for *_, name in BUGS.values()], package)
    with pytest.raises(AssertionError): test_batches_are_made_on_the_device(found)
    for name, why in dict(fits_on_features='it has no float64', penultimate='Input type').items():
        assert why in found[name]['device']['error']
        with pytest.raises(AssertionError): test_the_device_computes_what_the_cpu_computes(name, found)
    test_the_device_computes_what_the_cpu_computes('loaders', found)   # slow, not wrong
