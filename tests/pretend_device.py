"""A pretend accelerator: tensors on a device of its own that compute on CPU memory.

`register()` once per process makes the device `pretend`. It refuses what CUDA refuses (tensors of mixed devices,
generators of the CPU), and `watch()` records, by source line, what would wait for the device, what is copied and what
is float64.
"""
import sys
import weakref
from collections import Counter
from contextlib import contextmanager

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = 'pretend'
aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_hosts = {}   # address → the CPU memory behind a storage of the device
_libraries = []   # registrations live as long as these
_watching = []   # records of `watch`
_generator = torch.Generator().manual_seed(0)   # the device draws from a generator of its own

WAITS = {'_local_scalar_dense', 'nonzero', 'masked_select', 'equal', 'is_nonzero', '_unique2', 'unique_dim', 'bincount',
         'unique_consecutive', 'histc', 'linalg_eigh', '_linalg_eigh', 'linalg_eig', '_linalg_svd', 'repeat_interleave'}
METADATA = {'view', 'as_strided', '_reshape_alias', 'unfold', 'set_', '_unsafe_view', 'alias'}
CPU_INDEX = {'index', 'index_put_', 'index_put', '_index_put_impl_', '_unsafe_index', '_unsafe_index_put'}
WIDE = {torch.float64, torch.complex128}


def missing() -> str | None:
    "Say what this version of torch lacks, or return `None`"
    needed = [(backend_registration, '_setup_privateuseone_for_python_backend'), (torch._C, '_acc'),
              (torch._C, '_construct_storage_from_data_pointer')]
    lacking = [name for owner, name in needed if not hasattr(owner, name)]
    return f'torch {torch.__version__} has no {", ".join(lacking)}' if lacking else None


class Record:
    "What happened while `watch` was active: how often, by source line"
    def __init__(self, refuse_float64=False):
        self.refuse_float64 = refuse_float64
        self.waits, self.to_device, self.to_cpu, self.float64 = Counter(), Counter(), Counter(), Counter()
        self.largest = 0   # bytes of the largest tensor that was made
        self.live = self.peak = 0   # bytes of all tensors that were made

@contextmanager
def watch(refuse_float64: bool = False):
    "Record what the device does; `refuse_float64`: raise an error as Apple's MPS does"
    record = Record(refuse_float64)
    _watching.append(record)
    try: yield record
    finally: _watching.remove(record)

def _source_line():
    "The innermost line of the package, else of the caller outside torch"
    frame, found = sys._getframe(2), None
    while frame is not None:
        file = frame.f_code.co_filename
        if 'reinit_nb/' in file: return f'{file.rpartition("reinit_nb/")[2]}:{frame.f_lineno}'
        if found is None and '/torch/' not in file and file != __file__: found = f'{file}:{frame.f_lineno}'
        frame = frame.f_back
    return found or 'backward'

def _count(kind):
    if _watching:
        line = _source_line()
        for record in _watching: getattr(record, kind)[line] += 1

def _freed(address, nbytes, records):
    _hosts.pop(address, None)
    for record in records: record.live -= nbytes


def _allocate(size, stride, dtype):
    "Return a tensor of the device"
    if dtype in WIDE and _watching:
        _count('float64')
        if any(record.refuse_float64 for record in _watching):
            raise TypeError(f'Cannot convert a tensor to {dtype} on the device {NAME!r}: it has no float64')
    elements = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))
    new = torch._C._acc.create_empty_tensor([0], dtype)
    storage = _new_storage(elements * dtype.itemsize)
    return aten.set_.source_Storage_storage_offset.redispatch(_CPU, new, storage, 0, size, stride)

def _new_storage(nbytes, source=None):
    "Return a storage of the device, with the bytes of another storage if one is given"
    host = torch.UntypedStorage(max(nbytes, 1))
    if source is not None and nbytes: host.copy_(_hosts.get(source.data_ptr(), source))
    _hosts[host.data_ptr()] = host
    storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), torch.device(NAME, 0), nbytes)
    records = list(_watching)
    weakref.finalize(storage, _freed, host.data_ptr(), nbytes, records)
    for record in records:
        record.live += nbytes
        record.peak = max(record.peak, record.live)
        record.largest = max(record.largest, nbytes)
    return storage

def _on_cpu(t):
    "Return a CPU tensor with the memory of a tensor of the device"
    host = _hosts[t.untyped_storage().data_ptr()]
    alias = torch.empty(0, dtype=t.dtype).set_(host, t.storage_offset(), t.size(), t.stride())
    if t.is_conj(): alias = torch._C._conj(alias) if hasattr(torch._C, '_conj') else alias.conj()
    return alias.neg() if t.is_neg() else alias


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return _allocate(size, stride, dtype or torch.get_default_dtype())

def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    stride = torch.empty(size, device='meta', memory_format=memory_format or torch.contiguous_format).stride()
    return _allocate(size, stride, dtype or torch.get_default_dtype())

def _copy_from(source, target, non_blocking=False):
    if source.device.type == NAME and target.device.type != NAME:
        _count('to_cpu')
        _count('waits')
    elif source.device.type != NAME: _count('to_device')
    a, b = (_on_cpu(t) if t.device.type == NAME else t for t in (source, target))
    b.copy_(a)
    return target

def _resize(t, size, memory_format=None):
    new = _empty(size, t.dtype)
    n = min(new.numel(), t.untyped_storage().nbytes() // t.dtype.itemsize)
    if n: _on_cpu(new).flatten()[:n] = torch.empty(0, dtype=t.dtype).set_(_hosts[t.untyped_storage().data_ptr()])[:n]
    aten.set_.source_Storage_storage_offset.redispatch(_CPU, t, new.untyped_storage(), 0, size, new.stride())
    return t


def _check_devices(op, name, tensors, generator):
    for t in tensors:
        if t.device.type == NAME or t.ndim == 0: continue
        if name in CPU_INDEX and t.dtype in (torch.long, torch.int, torch.bool, torch.uint8): _count('to_device')
        else:
            raise RuntimeError(f'Expected all tensors to be on the same device, but found {NAME}:0 and {t.device} '
                               f'in {op}')
    if generator is not None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generator.device}'")

def _has_mask(indices):
    "Is one of the indices a mask? How many entries it selects is known only on the device"
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)

def _with_tensors(op, args):
    "Replace numbers that stand for tensors by tensors; they do not change the type of the result"
    kind = next((o.dtype for o in args if isinstance(o, torch.Tensor)), torch.get_default_dtype())
    def convert(argument, o):
        if str(argument.type) != 'Tensor' or not isinstance(o, (bool, int, float)): return o
        return torch.tensor(o, dtype=torch.get_default_dtype() if isinstance(o, float) and not kind.is_floating_point
                            else kind)
    return [convert(*pair) for pair in zip(op._schema.arguments, args)]

def _run_on_cpu(op, *args, **kwargs):
    "Compute any operation with the CPU's kernel"
    name = op._schema.name.partition('::')[2]
    if name in METADATA: return op.redispatch(_CPU, *args, **kwargs)
    args = _with_tensors(op, args)
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [o for o in flat if isinstance(o, torch.Tensor)]
    _check_devices(op, name, tensors, next((o for o in flat if isinstance(o, torch.Generator)), None))
    if name in WAITS or name in CPU_INDEX and _has_mask(args[1]): _count('waits')
    ours = {}   # address of CPU alias (its id) → the tensor of the device
    def lend(o):
        if isinstance(o, torch.device): return torch.device('cpu')
        if not isinstance(o, torch.Tensor) or o.device.type != NAME: return o
        alias = _on_cpu(o)
        ours[id(alias)] = o, alias, alias.shape
        return alias
    cpu_args, cpu_kwargs = pytree.tree_unflatten([lend(o) for o in flat], spec)
    if any(a.name == 'generator' for a in op._schema.arguments): cpu_kwargs['generator'] = _generator
    out = op(*cpu_args, **cpu_kwargs)
    for t, alias, shape in ours.values():
        if alias.shape != shape: _adopt(_resize(t, alias.shape), alias)   # an `out=` that had to grow
    return pytree.tree_map_only(torch.Tensor, lambda o: _adopt(None, o) if id(o) not in ours else ours[id(o)][0], out)

def _adopt(t, o):
    "Return the result of a kernel as a tensor of the device"
    address = o.untyped_storage().data_ptr()
    if t is None and address in _hosts: raise NotImplementedError('an operation returned a view of its input')
    if t is None: t = _allocate(o.shape, o.stride(), o.dtype)
    _on_cpu(t).copy_(o)
    return t


class _Module:
    "What torch asks of `torch.pretend`"
    def is_initialized(self): return True
    def is_available(self): return True
    def current_device(self): return 0
    def _is_in_bad_fork(self): return False
    def device_count(self): return 1
    def manual_seed_all(self, seed): _generator.manual_seed(seed)
    def get_rng_state(self, device=None): return _generator.get_state()
    def set_rng_state(self, state, device=None): _generator.set_state(state)
    def get_amp_supported_dtype(self): return [torch.float32, torch.bfloat16, torch.float16]
    def synchronize(self, device=None): _count('waits')


def register() -> torch.device:
    "Make the device `pretend`, once per process"
    if _libraries: return torch.device(NAME, 0)
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    torch.__future__.set_swap_module_params_on_conversion(True)   # `Module.to` keeps its parameters, as on CUDA
    fallback = torch.library.Library('_', 'IMPL')
    fallback.fallback(_run_on_cpu, 'PrivateUse1')
    own = torch.library.Library('aten', 'IMPL')
    kernels = {'empty.memory_format': _empty, 'empty_strided': _empty_strided, '_copy_from': _copy_from,
               '_copy_from_and_resize': _copy_from, 'resize_': _resize}
    for name, kernel in kernels.items(): own.impl(name, kernel, 'PrivateUse1')
    for name, plain in (('convolution_overrideable', aten.convolution.default),
                        ('convolution_backward_overrideable', aten.convolution_backward.default)):
        own.impl(name, _convolution(plain), 'PrivateUse1')
    fallback.fallback(torch.library.fallthrough_kernel, 'AutocastPrivateUse1')
    for name in ('conv1d', 'conv2d', 'conv3d', 'linear', 'mm', 'addmm', 'bmm', 'baddbmm', 'matmul'):
        own.impl(name, _autocast(getattr(aten, name).default), 'AutocastPrivateUse1')
    for name in ('layer_norm', 'group_norm'):
        own.impl(name, _autocast(getattr(aten, name).default, torch.float32), 'AutocastPrivateUse1')
    _libraries.extend((fallback, own))
    _patch_storages()
    return torch.device(NAME, 0)

def _patch_storages():
    "Let storages of the device be copied and read from files, which in torch needs an allocator in C++"
    clone = torch.UntypedStorage.clone
    def clone_any(self): return _new_storage(self.nbytes(), self) if self.device.type == NAME else clone(self)
    torch.UntypedStorage.clone = clone_any
    def tag(storage): return f'{NAME}:0' if storage.device.type == NAME else None
    def place(storage, location): return _new_storage(storage.nbytes(), storage) if NAME in location else None
    torch.serialization.register_package(5, tag, place)

def _autocast(op, dtype=None):
    "Let an operation compute in another type, by default that of `torch.autocast`"
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    def run(*args, **kwargs):
        kind = dtype or torch.get_autocast_dtype(NAME)
        def cast(t): return t.to(kind) if t.is_floating_point() else t
        with torch._C._ExcludeDispatchKeyGuard(key):
            args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
            return op(*args, **kwargs)
    return run

def _convolution(plain):
    def run(*args, **kwargs):
        if plain is aten.convolution_backward.default: args = (*args[:3], None, *args[3:])
        return _run_on_cpu(plain, *args, **kwargs)
    return run
