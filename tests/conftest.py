"Settings that must stand before torch, matplotlib and the library are imported"
import os

os.environ.setdefault('REINIT_SCALE', 'smoke')
os.environ.setdefault('MPLBACKEND', 'Agg')      # no test opens a window
os.environ.setdefault('OMP_NUM_THREADS', '1')   # small tensors: more threads only wait for each other
