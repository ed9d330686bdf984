// What recording a call (record.cpp), its results (results.cpp) and running it at once (immediate.cpp) share: the objects of
// frontend/record.py, graph/node.py and graph/tape.py, with __slots__, read and written where the slots lie.
#pragma once
#include "call.h"
#include "handle.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

// From PyTorch's Python half, whose headers take long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace marid {

extern Slots operation, storage, recorder, known, tape, spec;
enum OperationSlot { kMutates };
enum StorageSlot { kLastRead, kLastWrite, kStorageHandle };
enum RecorderSlot {
  kRecorderOp,
  kPlain,
  kDraws,
  kIndexes,
  kSameValue,
  kExactFloats,
  kExactLists,
  kKnown,
  kBumps,
  kDeriver,
  kAtOnce,
  kAtOnceByRule
};
enum KnownSlot { kRepeats, kResult, kPattern, kViewOf, kReturned, kSeveral, kWrites, kTape, kCost };
enum TapeSlot { kSequence, kEntries, kBudget, kImmediate };
enum SpecSlot { kSpecPattern, kSpecDevice };

extern PyObject* tapes;  // see frontend/handles.py
extern PyObject* last_write_of;  // see graph/node.py
extern PyObject* run_pending;  // see frontend/materialize.py
extern PyObject *draw_for, *dispatch, *make_recorder_of;  // see frontend/record.py
extern PyObject* resize_memory;  // see frontend/storage_objects.py
extern PyObject* recorders;  // by identity of the operator
extern PyObject* address_name;  // of an attribute

// The values of the tensors of a call, in the order of their appearance; or of its results.
using Concrete = c10::SmallVector<at::Tensor, 8>;
using Results = c10::SmallVector<at::Tensor, 4>;

// The write that a reader must see, if any: a pending one, or one that failed unnoticed (graph/node.py). Borrowed.
PyObject* last_write(PyObject* of);

// The number of the next node of a tape; empty after an error.
Ref next_number(PyObject* on);

// The storage of a tensor of this tape, made when it has none: `storage_of` in frontend/handles.py.
// Borrowed; null after an error.
PyObject* storage_behind(Handle* handle, PyObject* on);

// Note what the node must see and, for what it writes, who may still have to read. Everything that can fail comes first.
bool order(PyObject* of, PyObject* on, const Call& call, PyObject* writes);

// The tape of the device that a spec is of; null after an error. Borrowed.
PyObject* tape_of(PyObject* of);

// A handle like a pattern, given by its address; null after an error.
at::Tensor new_handle(PyObject* address, PyObject* value);

at::Tensor argument(const Call& call, PyObject* index);

// What a recorder's operation comes from that is called now; false after an error.
bool find_origin(PyObject* by, Origin* origin);

// A node, of which all is set but what it needs and what it is a view of; empty after an error.
Ref new_node(PyObject* on, const Origin& origin, PyObject* spec);

// The results of a node for the user; false after an error.
bool give_results(PyObject* of, PyObject* like, const Call& call, Results& results);

// Record a call without tensors that makes one tensor on the device, where one like it was recorded before; false to leave it
// to Python, or after an error. `plain` are the arguments as they are recorded.
bool recorded_anew(const Operator& op, c10::ArrayRef<c10::IValue> plain, c10::DeviceIndex device, Results& results);

// The arguments of the overload that takes a generator (`op.general`), for a call that gives none.
torch::jit::Stack with_generator(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

// Put what a call returns in the place of its arguments.
void give_back(const Operator& op, Results& results, torch::jit::Stack* stack);

// Let PyTorch know that what a call wrote has changed, where kernels for lists do not.
void note_writes(PyObject* by, const Operator& op, c10::ArrayRef<c10::IValue> arguments);

}  // namespace marid
