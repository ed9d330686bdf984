"""Everything that Marid does to PyTorch and to the process, and how it is undone.

At the import there is a device and nothing else (``registration.py``): a name, its methods, its module, its location in
files, its backend in groups of ``torch.distributed``. ``CHANGES`` are made when the first tensor of the device is about
to be, and ``uninstall`` undoes them. What is not listed there stays once it is there, and is about nothing but Marid:
the device, ``KERNELS`` of operators for its tensors, operators of the namespace ``marid``, a method of Marid's own
class, a device guard, an allocator and a choice of attention's kernel for the device, a list of what operators are
defined later, and what is called at a fork and at the exit of the process, which then finds nothing to do.

Elsewhere, on request or for a moment: ``marid run`` (``runner.py``, ``as_cuda/``), which owns its process; ``import
marid.lightning``, which adds to Lightning (``frameworks.py``); and ``marid.compile``, while it runs a function for the
first times (``replay/host.py``, ``replay/impure.py``, ``replay/conversions.py``). ``MARID_ENGINE=cuda:N`` makes that
GPU the current one of the thread that uses the device first (``execute/cuda.py``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import init_device_mesh

from marid import registration
from marid.changes import Change, Undo, all_or_nothing, entered, listed, replace, replaced, set_attribute
from marid.execute import arena
from marid.frontend import (
    autocast,
    backward,
    convolutions,
    device,
    distributed,
    dynamo,
    factories,
    group_norm,
    higher_order,
    hints,
    late,
    nested,
    overrides,
    random,
    recomputation,
    record,
    recurrent,
    replicas,
    script_modules,
    spared_imports,
    special,
    subclasses,
    tuples,
    uninitialized,
)
from marid.frontend.limits import optimizer_stepped
from marid.frontend.tensor import LazyTensor
from marid.imports import changed_when_imported
from marid.ops import own_operators
from marid.semantics import scopes

_HANDLERS = (convolutions, distributed, group_norm, random, recurrent, special)  # importing them registers theirs


# --- what is more than a replacement ---------------------------------------------------------------------------------


def _collate() -> Undo:
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[LazyTensor] = device.stacked
    return lambda: default_collate_fn_map.pop(LazyTensor, None) and None


def _letters_of_device_meshes() -> Undo:
    made = init_device_mesh.__code__
    changed = made.replace(co_names=tuple("isidentifier" if name == "isalpha" else name for name in made.co_names))
    init_device_mesh.__code__ = changed

    def undo() -> None:
        if init_device_mesh.__code__ is changed:
            init_device_mesh.__code__ = made

    return undo


def _draw_as_on_the_cpu() -> Undo:
    draws = "torch.distributed.tensor._random"

    def change() -> Undo:  # the other module has it by name, where it has been imported already
        places = [name for name in (draws, "torch.distributed.tensor._dispatch") if name in sys.modules]
        targets = [f"{place}.is_rng_supported_mesh" for place in places]
        return all_or_nothing(replace(target, distributed.drawing_as_on_the_cpu) for target in targets)

    return changed_when_imported(draws, change)


def _change_dynamo() -> Undo:
    replacements = {
        "torch._dynamo.convert_frame.CatchErrorsWrapper.__call__": dynamo.skipping,
        "torch._dynamo.variables.builder.VariableBuilder._wrap": dynamo.refusing,
        "torch._dynamo.variables.tensor.TensorVariable.__init__": dynamo.refusing_devices,
    }

    def applies() -> Iterator[Undo]:
        yield dynamo.leave_alone()
        for target, make in replacements.items():
            yield replace(target, make)

    return all_or_nothing(applies())


# --- the table -------------------------------------------------------------------------------------------------------

_NO_FOREACH = "optimizers take the device's parameters as they take those of the CPU"
_SWITCHED = "kernels read it when they run: what was recorded before runs before it changes"
_CLASSES = "classes that a user derives from tensors and parameters are kept on the device"
_LAZY_MODULES = "a parameter without a shape yet can be on the device"
_FILES_OF_TORCHSCRIPT = "PyTorch's C++ writes and reads memory there, which the device does not have"
_EXACT_TYPE = "it goes by the exact type of tensors"

CHANGES: list[Change] = [
    Change(
        "c10::GetCPUAllocator()",
        "runs are watched and planned; outside of them it is the allocator that was there",
        arena.install,
    ),
    Change(
        "torch._C._TensorMeta.__instancecheck__",
        "whether an argument is a tensor is found out in a third of the time",
        subclasses.quicken_instance_checks,
    ),
    Change("torch.accelerator.memory_stats()", "the figures of the device", device.give_figures),
    replaced(
        "torch.nn.Module._apply", "a parameter that moves to the device, or from it, stays itself", device.keeping
    ),
    replaced(
        "torch.nn.modules.module.is_traceable_wrapper_subclass",
        "the same, in the move that is the first use",
        device.swapping,
    ),
    replaced("torch.utils.swap_tensors", "the same, whoever refers to it", device.swapping_whoever_holds_them),
    *[
        replaced(f"torch.jit.{kind}.{name}", _FILES_OF_TORCHSCRIPT, script_modules.saving_from_the_cpu)
        for kind in ("ScriptModule", "RecursiveScriptModule")
        for name in ("save", "save_to_buffer")
    ],
    replaced("torch.jit.load", _FILES_OF_TORCHSCRIPT, script_modules.loading_through_the_cpu),
    replaced(
        "torch.library.Library.impl", "operators composed of others are left to these", overrides.leaving_composed
    ),
    replaced("torch.Tensor.as_subclass", _CLASSES, subclasses.giving(LazyTensor)),
    replaced("torch.Tensor._make_subclass", _CLASSES, subclasses.making(LazyTensor)),
    replaced("torch.nn.Parameter.__new__", _CLASSES, subclasses.making_parameters(LazyTensor)),
    *[
        replaced(f"torch.nn.parameter.{kind}.__deepcopy__", _LAZY_MODULES, uninitialized.copying)
        for kind in ("UninitializedParameter", "UninitializedBuffer")
    ],
    Change(
        "torch.nn.parameter.UninitializedTensorMixin.device",
        _LAZY_MODULES,
        lambda: set_attribute(torch.nn.parameter.UninitializedTensorMixin, "device", property(uninitialized.device_of)),
    ),
    replaced("torch.nn.parameter.UninitializedTensorMixin.materialize", _LAZY_MODULES, uninitialized.materializing),
    replaced(
        "torch.nn.TransformerEncoder.forward", "its fast path is made of nested tensors, for padding", nested.padding
    ),
    replaced(
        "torch.nn.LinearCrossEntropyOptions._adjust",
        "chunk sizes are chosen by device type: as on the CPU",
        overrides.adjusting_as_on_the_cpu,
        "2.13",
    ),
    replaced(
        "torch._decomp.decompositions._upsample_linear_vec",
        "under deterministic algorithms interpolation takes this for devices that are not the CPU",
        overrides.interpolating_as_on_the_cpu,
    ),
    replaced(
        "torch.optim.swa_utils._get_foreach_kernels_supported_devices",
        "averaged models take the CPU's formula",
        overrides.without_the_device,
    ),
    *[
        replaced(f"torch.utils.checkpoint.{name}", "what is computed again draws what it drew, as on the CPU", make)
        for name, make in (
            ("DefaultDeviceType._default_device_type", recomputation.on_the_device),
            ("get_device_states", recomputation.keeping_generators),
        )
    ],
    *[
        replaced(f"torch.optim.{name}._default_to_fused_or_foreach", _NO_FOREACH, overrides.chosen_as_on_the_cpu(name))
        for name in overrides.OPTIMIZERS
    ],
    replaced(
        "torch.nn.parallel.DistributedDataParallel._ddp_init_helper",
        "its reducer compares memory that tensors of the device do not have",
        distributed.telling_gradients_apart,
    ),
    entered(
        "torch.distributed.Backend.default_device_backend_map",
        "groups are gloo's where a script names no backend",
        registration.DEVICE_TYPE,
        distributed.GLOO,
    ),
    replaced(
        "torch.distributed.distributed_c10d.BackendConfig.__init__",
        "a group's backend for the CPU does the work of the device",
        distributed.for_device_and_cpu,
    ),
    Change(
        "torch.distributed.tensor: is_rng_supported_mesh; and sys.meta_path until it is imported",
        "with a state of random numbers a device is taken for one like CUDA, with Philox's state",
        _draw_as_on_the_cpu,
    ),
    Change(
        "torch.distributed.device_mesh.init_device_mesh: str.isalpha",
        "it takes the underscore in the device's name for an index; its code is changed, because others "
        "have imported the function by then",
        _letters_of_device_meshes,
    ),
    *[
        replaced(f"torch.nn.parallel.comm.{name}", "tensors move between devices that are not CUDA's", make)
        for name, make in {
            "scatter": replicas.scattering,
            "gather": replicas.gathering,
            "broadcast_coalesced": replicas.broadcasting,
            "reduce_add_coalesced": replicas.reducing,
        }.items()
    ],
    listed("torch.optim.optimizer._foreach_supported_types", _EXACT_TYPE, LazyTensor),
    listed("torch.utils._foreach_utils._foreach_supported_types", _EXACT_TYPE, LazyTensor),
    replaced("torch.fx.experimental.proxy_tensor.HANDLED_TYPES", _EXACT_TYPE, lambda types: (*types, LazyTensor)),
    Change(
        "torch.utils.data._utils.collate.default_collate_fn_map",
        "workers would stack into shared memory, which the device has not",
        _collate,
    ),
    *[
        replaced(
            f"torch._higher_order_ops.{name}.__call__",
            "gradients of what their functions close over are lost where Dynamo has not traced them",
            higher_order.run_as_python,
        )
        for name in higher_order.OPERATORS
    ],
    Change("torch.utils._pytree.SUPPORTED_NODES", "LazyTuple", tuples.register),
    *[
        replaced(f"torch.autograd{place}._engine_run_backward", backward.WHY, backward.on_this_thread)
        for place in (".graph", "")
    ],
    *[replaced(f"torch._C.{name}", _SWITCHED, device.running_everything_before) for name in device.SWITCHES],
    *[
        replaced(target, "an operator's calls run before it is another one", device.running_everything_before)
        for target in (
            "torch.library.Library._destroy",
            "torch.library.Library.impl",
            "torch._library.custom_ops.CustomOpDef.register_kernel",
        )
    ],
    replaced("torch.set_autocast_enabled", "operators are listed for autocast when it is first on", autocast.listing),
    replaced("torch.set_num_threads", _SWITCHED, lambda _: getattr(torch._C, "set_num_threads")),  # noqa: B009
    Change(
        "step hooks of optimizers that have written to the device",
        "a loop that reads nothing runs whole steps",
        lambda: scopes.meet_optimizers(optimizer_stepped),
    ),
    replaced("sys.excepthook", "who asks for a device that is not there is told of this one", hints.hinting),
    Change("sys.meta_path", "Ctrl-C leaves no package half imported", late.find_whole),
    Change(
        "torch._compile.getattr, a name that hides the builtin there; and the code of steps of torch.optim",
        "Dynamo is not imported where nothing is to be traced, until somebody else does",
        spared_imports.spare_dynamo,
    ),
    Change(
        "sys.modules while a meta kernel runs; and sys.meta_path",
        "sympy is not imported where sizes are numbers, until somebody else does",
        spared_imports.spare_sympy,
    ),
    replaced(
        "torch._subclasses.fake_tensor.FakeTensorMode.__torch_dispatch__",
        "it leaves calls to classes of tensors that it does not know, and tensors of the device are no such class to "
        "PyTorch's dispatcher",
        dynamo.beside_fake_tensors,
    ),
    Change(
        "torch._dynamo: CatchErrorsWrapper.__call__, VariableBuilder._wrap, TensorVariable.__init__, SKIP_DIRS; and "
        "sys.meta_path until it is imported",
        "what uses tensors of the device is left to Python",
        lambda: changed_when_imported(spared_imports.DYNAMO, _change_dynamo, spared_imports.require_dynamo),
    ),
]

KERNELS = [factories.register, overrides.register, lambda: own_operators.when_defined(record.record_in_cpp)]
"""What registers kernels for the device, at the dispatch keys that only its tensors have; those stay."""
_to_register = list(KERNELS)
_lock = threading.RLock()
_undo: Undo | None = None


def first_use() -> None:
    """Make all the changes, unless they have been made."""
    with _lock:
        if registration.device_module._initialized:
            return
        registration.device_module._initialized = True  # for what the changes themselves do
        device.give_devices()
        _make_changes()


def _make_changes() -> None:
    global _undo
    try:
        while _to_register:
            _to_register[0]()
            _to_register.pop(0)
        _undo = all_or_nothing(change.apply() for change in CHANGES)
    except BaseException:
        registration.device_module._initialized = False
        raise


def uninstall() -> None:
    """Undo all that was done to PyTorch and the process. The device stays known, and the next tensor that is made there
    changes it again; those that there are can be read."""
    global _undo
    with _lock:
        if _undo is not None:
            _undo()
            _undo = None
            registration.device_module._initialized = False
            device.require_first_use()


registration.when_used(first_use)
