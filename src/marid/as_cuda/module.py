"""``torch.cuda``: what each of its public names is under ``marid run --as-cuda``.

Whatever a script takes from one of its submodules (``torch.cuda.random.get_rng_state``) is the same.
``docs/as_cuda.md`` shows the table, and a test compares both with ``torch.cuda.__all__``.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from marid.as_cuda.devices import COUNT, CUDA, index_of, ours
from marid.as_cuda.functions import legacy_types
from marid.as_cuda.streams import Event, Stream
from marid.errors import UnsupportedOperationError
from marid.frontend import handles, random

Kind = Literal["works", "stand-in", "refused"]
_AS_IT_IS: Any = object()
_CAPABILITY = (8, 0)
"""Of the oldest GPUs on which everything that the device can do (bfloat16, above all) works."""


@dataclass(frozen=True)
class Entry:
    """One name: whether it works, does nothing that harms, or is refused, and why or how (``note``)."""

    kind: Kind
    note: str = ""
    value: Any = _AS_IT_IS


# --- what works ------------------------------------------------------------------------------------------------------


def _memory(device: Any = None) -> tuple[int, int]:
    """Free and total bytes of the machine that runs the programs."""
    index_of(device)
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no such figures on this system
        return 0, 0


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=ours().get_device_name(index_of(device)),
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_memory()[1],
        multi_processor_count=os.cpu_count() or 1,
        max_threads_per_multi_processor=1,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )


_FIGURES = """
    allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes
    requested_bytes
""".split()


def _nested_stats(device: Any = None) -> dict[str, Any]:
    """What PyTorch makes ``memory_stats`` and ``memory_summary`` of. Only bytes that are in use, and their peak, are
    counted here."""
    index = index_of(device)
    nothing = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    used = nothing | {"current": ours().memory_allocated(index), "peak": ours().max_memory_allocated(index)}
    found: dict[str, Any] = {
        name: {"all": used if name.endswith("d_bytes") or name == "active_bytes" else nothing}
        | dict.fromkeys(("large_pool", "small_pool"), nothing)
        for name in _FIGURES
    }
    found["inactive_split_bytes"] = dict.fromkeys(("all", "large_pool", "small_pool"), nothing)
    counts = "num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free".split()
    return {
        **found,
        **dict.fromkeys(("oversize_allocations", "oversize_segments"), nothing),
        **dict.fromkeys(counts, 0),
        "max_split_size": -1,
    }


def _set_states(states: Any) -> None:
    for index, state in enumerate(states):
        ours().set_rng_state(state, index)


class _Current:
    """A block in which a device is the current one; none and negative indices stand for no change."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = handles.current_device()
        ours().set_device(self.idx if self.idx >= 0 else self.prev_idx)

    def __exit__(self, *_: object) -> None:
        ours().set_device(self.prev_idx)


class _CurrentOf(_Current):
    """The same, with the device of a tensor."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if handles.is_lazy(obj) else None)


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose argument is a device."""
    return lambda device=None: function(index_of(device))


def _processes(device: Any = None) -> str:
    used = ours().memory_allocated(index_of(device))
    return f"GPU:{index_of(device)}\nprocess {os.getpid():>10d} uses {used / (1 << 20):>12.3f} MB GPU memory"


def _used(device: Any = None) -> int:
    free, total = _memory(device)
    return total - free


# --- what does nothing -----------------------------------------------------------------------------------------------


class _Kept:
    """Settings that are kept for whoever asks, and change nothing."""

    fraction = 1.0
    sync_debug_mode = 0


def _set_fraction(fraction: float, device: Any = None) -> None:
    index_of(device)
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _Kept.fraction = fraction


def _set_sync_debug_mode(debug_mode: int | str) -> None:
    modes: dict[int | str, int] = {"default": 0, "warn": 1, "error": 2, 0: 0, 1: 1, 2: 2}
    if debug_mode not in modes:
        raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
    _Kept.sync_debug_mode = modes[debug_mode]


class _CudaError(int):
    success = 0


_RUNTIME = types.SimpleNamespace(
    cudaError=_CudaError,
    cudaGetErrorString=lambda code: f"error {int(code)}",
    cudaMemGetInfo=_memory,
    **dict.fromkeys("cudaProfilerStart cudaProfilerStop cudaHostRegister cudaHostUnregister".split(), lambda *_: 0),
)


def _nothing(*_: Any, **__: Any) -> None:
    pass


# --- the table -------------------------------------------------------------------------------------------------------

_GRAPHS = "programs that repeat are kept already; take the CUDA graph away"
_ALLOCATOR = "memory is Marid's own"
_SENSORS = "there are no sensors"
_POINTERS = "there is no CUDA stream, handle or pointer behind the device"
_COMPILER = "there is no compiler of CUDA kernels"
_NCCL = "there is no NCCL; torch.distributed has gloo"
_REFUSED = {
    _GRAPHS: "CUDAGraph graph graph_pool_handle",
    _ALLOCATOR: """caching_allocator_alloc caching_allocator_delete CUDAPluggableAllocator change_current_allocator
        MemPool use_mem_pool""",
    _SENSORS: "memory_usage utilization temperature power_draw clock_rate",
    _POINTERS: "ExternalStream GreenContext get_stream_from_external current_blas_handle current_solver_handle",
    _COMPILER: "jiterator._create_jit_fn jiterator._create_multi_output_jit_fn",
    _NCCL: """nccl.all_reduce nccl.reduce nccl.broadcast nccl.all_gather nccl.reduce_scatter nccl.unique_id
        nccl.init_rank""",
    "the results of tuning are cuBLAS's": "tunable.tune_gemm_in_file tunable.mgpu_tune_gemm_in_file tunable.read_file",
    "typed storages are PyTorch's past: make a tensor": """BFloat16Storage BoolStorage ByteStorage CharStorage
        ComplexDoubleStorage ComplexFloatStorage DoubleStorage FloatStorage HalfStorage IntStorage LongStorage
        ShortStorage""",
}
_FOR_A_DEVICE = """
    synchronize memory_allocated memory_reserved max_memory_allocated max_memory_reserved reset_peak_memory_stats
    get_device_name get_rng_state set_device
""".split()
_OURS = """
    is_available is_initialized init current_device manual_seed manual_seed_all seed seed_all initial_seed empty_cache
""".split()


def table() -> dict[str, Entry]:
    """What each public name of ``torch.cuda`` is, those of submodules after a point."""
    found: dict[str, Entry] = {}

    def works(note: str = "", /, **values: Any) -> None:
        found.update({name.replace("__", "."): Entry("works", note, value) for name, value in values.items()})

    def stands_in(note: str, /, **values: Any) -> None:
        found.update({name.replace("__", "."): Entry("stand-in", note, value) for name, value in values.items()})

    def as_they_are(names: str, note: str = "PyTorch's own") -> None:
        works(note, **dict.fromkeys(names.split(), _AS_IT_IS))

    works(**{name: getattr(ours(), name) for name in _OURS})
    works(**{name: _on_device(getattr(ours(), name)) for name in _FOR_A_DEVICE})
    works(**legacy_types())
    works("one device, that of this machine", device_count=lambda: COUNT)
    works(
        set_rng_state=lambda new_state, device=CUDA: ours().set_rng_state(new_state, index_of(device)),
        get_rng_state_all=lambda: [ours().get_rng_state(index) for index in range(COUNT)],
        set_rng_state_all=_set_states,
        default_generators=tuple(random.default_generator(index) for index in range(COUNT)),
        device=_Current,
        device_of=_CurrentOf,
        memory_cached=_on_device(ours().memory_reserved),
        max_memory_cached=_on_device(ours().max_memory_reserved),
        reset_max_memory_allocated=_on_device(ours().reset_peak_memory_stats),
        reset_max_memory_cached=_on_device(ours().reset_peak_memory_stats),
        list_gpu_processes=_processes,
    )
    works("bytes in use and their peak; other figures are 0", memory_stats_as_nested_dict=_nested_stats)
    as_they_are("memory_stats memory_summary", "PyTorch's own, of these figures")
    works("of the machine that runs the programs", mem_get_info=_memory, device_memory_used=_used)
    works(
        f"a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}",
        get_device_capability=lambda device=None: (index_of(device) and None) or _CAPABILITY,
        get_device_properties=_properties,
        get_arch_list=lambda: ["sm_{}{}".format(*_CAPABILITY)],
        is_bf16_supported=lambda including_emulation=True: True,  # noqa: ARG005
        is_tf32_supported=lambda: True,
    )
    works(
        "program order holds on all streams",
        Stream=Stream,
        Event=Event,
        current_stream=Stream,
        default_stream=Stream,
        stream=ours().stream,
        StreamContext=ours().stream,
    )
    as_they_are("get_gencode_flags has_half has_magma check_error cudaStatus CudaError DeferredCudaCallError")
    as_they_are("amp graphs jiterator memory nccl nvtx profiler random sparse streams tunable", "a module")

    stands_in("nothing to do", set_stream=_nothing, ipc_collect=_nothing, _lazy_init=_nothing)
    stands_in("true: libraries keep the states of generators only then", _initialized=True)
    stands_in("false", is_current_stream_capturing=lambda: False, _is_in_bad_fork=lambda: False)
    stands_in("no other device", can_device_access_peer=lambda device, peer: bool(index_of(device) + index_of(peer)))
    stands_in(
        "kept, and changes nothing",
        set_per_process_memory_fraction=_set_fraction,
        get_per_process_memory_fraction=lambda device=None: index_of(device) * 0 + _Kept.fraction,
        set_sync_debug_mode=_set_sync_debug_mode,
        get_sync_debug_mode=lambda: _Kept.sync_debug_mode,
    )
    stands_in("the functions themselves", make_graphed_callables=lambda callables, *_, **__: callables)
    stands_in("a profiler that sees nothing; bytes of memory", cudart=lambda: _RUNTIME, _cudart=_RUNTIME)
    stands_in("`native`", get_allocator_backend=lambda: "native")
    stands_in("nothing to switch", caching_allocator_enable=_nothing, caching_allocator_disabled=contextlib.nullcontext)
    stands_in("empty", memory_snapshot=lambda *_, **__: [])
    stands_in("empty: pinned memory is ordinary memory", host_memory_stats=dict, host_memory_stats_as_nested_dict=dict)
    stands_in(
        "nothing is counted",
        reset_accumulated_memory_stats=_on_device(_nothing),
        reset_accumulated_host_memory_stats=_nothing,
        reset_peak_host_memory_stats=_nothing,
    )
    ranges = dict.fromkeys("nvtx__mark nvtx__range_end nvtx__range_pop nvtx__range_push nvtx__range_start".split())
    stands_in("nobody looks at the ranges", **{name: lambda *_: 0 for name in ranges})
    stands_in("no NCCL", nccl__is_available=lambda tensors: False, nccl__version=lambda: (0, 0, 0))  # noqa: ARG005
    switches = "enable tuning_enable record_untuned_enable set_max_tuning_duration set_max_tuning_iterations"
    switches += " set_filename set_rotating_buffer_size set_numerical_check_tolerances"
    stands_in("nothing is tuned", **{f"tunable__{name}": _nothing for name in switches.split()})
    asked = "is_enabled tuning_is_enabled record_untuned_is_enabled"
    stands_in("nothing is tuned", **{f"tunable__{name}": lambda: False for name in asked.split()})
    asked = "get_max_tuning_duration get_max_tuning_iterations get_rotating_buffer_size"
    stands_in("nothing is tuned", **{f"tunable__{name}": lambda: 0 for name in asked.split()})
    stands_in("nothing is tuned", tunable__get_filename=str, tunable__get_results=tuple, tunable__get_validators=tuple)

    for reason, names in _REFUSED.items():
        found.update({name: Entry("refused", reason, _refusing(name, reason)) for name in names.split()})
    return found


def _refusing(name: str, reason: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedOperationError(f"torch.cuda.{name} under `marid run --as-cuda`: {reason}")

    owner, _, own = name.rpartition(".")
    found = getattr(getattr(torch.cuda, owner) if owner else torch.cuda, own, None)
    # A class stays one, for isinstance and for annotations.
    return type(own, (), {"__new__": refuse}) if isinstance(found, type) else refuse


def replace_torch_cuda() -> None:
    """Let ``torch.cuda`` and its submodules have what the table says."""
    modules = [torch.cuda]
    modules += [one for one in vars(torch.cuda).values() if isinstance(one, types.ModuleType)]
    modules = [one for one in modules if one.__name__.startswith("torch.cuda")]
    for name, entry in table().items():
        if entry.value is _AS_IT_IS:
            continue
        owner, _, own = name.rpartition(".")
        if owner:
            setattr(getattr(torch.cuda, owner), own, entry.value)
            continue
        setattr(torch.cuda, own, entry.value)
        for module in modules:
            if own in vars(module):
                setattr(module, own, entry.value)
