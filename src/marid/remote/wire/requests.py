"""The requests of a session: what a client may ask a worker to do, one step of work each.

Each is declared once: its fields with their kinds and bounds (``fields.py``), what the worker does (the docstring), and
what it answers. A request travels as a list that begins with its name; the table in ``docs/remote.md`` is
``requests_table.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, dataclass_transform

import torch

from marid.engine.plain import as_list, check_sizes
from marid.errors import WireError
from marid.execute.residency import ROLES
from marid.graph.node import Spec
from marid.remote.wire.codec import SEGMENT_BYTES, Buffer
from marid.remote.wire.fields import (
    ARGUMENT,
    DTYPE,
    HANDLE,
    HANDLES,
    NUMBER,
    SIZES,
    SPEC,
    VIEW,
    Record,
    choice,
    exact,
    listed,
    matching,
    nested,
    optional,
    pairs,
    segment,
    segments,
    text,
    whole,
    wholes,
)
from marid.remote.wire.kernel_settings import KernelSettings
from marid.remote.wire.program_records import BODY_BYTES, DIGEST_BYTES
from marid.remote.wire.tensors import CHUNK_BYTES, packing_of

TICKET_BYTES = 32
OPERATIONS = ("sum", "mean", "max", "min")
"""How tensors may be reduced."""

_INPUTS = 1 << 14
_CHUNKS = 1 << 14
_REQUESTS = 1 << 14  # in one message
_STATE_BYTES = torch.Generator().get_state().numel()

_DIGEST = exact(DIGEST_BYTES, "digest")
_PLACE = whole(0, HANDLES, "place")

HandleField = Annotated[int, HANDLE]
HandlesField = Annotated[tuple[int, ...], wholes(HANDLES, _INPUTS, "handles")]
DigestField = Annotated[bytes, _DIGEST]
DigestsField = Annotated[tuple[bytes, ...], listed(_DIGEST, _CHUNKS, "digests", weight=4)]
DtypeField = Annotated[torch.dtype, DTYPE]
SizesField = Annotated[tuple[int, ...], SIZES]
BodyField = Annotated[Buffer, segment(BODY_BYTES, "the compressed body")]
GroupField = Annotated[bytes, exact(16, "group")]
HostField = Annotated[str, matching(r"[\w.:-]+", 253, "host")]
SecondsField = Annotated[int, whole(1, 3600, "seconds")]


class Request:
    """What a client asks for."""

    __slots__ = ()


RECORDS: dict[type[Request], Record] = {}
ANSWERS: dict[type[Request], str] = {}


@dataclass_transform(frozen_default=True)
def _request(answer: str = "") -> Callable[[type[Any]], type[Any]]:
    """Declares a request, and what it is answered with, if with anything."""

    def declare(cls: type[Any]) -> type[Any]:
        made = dataclass(frozen=True, slots=True)(cls)
        RECORDS[made] = Record(made, made.__name__.lower())
        ANSWERS[made] = answer
        return made

    return declare


# --- tensors of the client -------------------------------------------------------------------------------------------


@_request()
class Upload(Request):
    """A tensor gets this handle. Its packed elements are ``data``, or the chunks that ``digests`` name (``Chunk``)."""

    handle: HandleField
    dtype: DtypeField
    shape: SizesField
    stride: SizesField
    data: Annotated[tuple[Buffer, ...], segments(SEGMENT_BYTES, "the elements")] = ()
    digests: DigestsField = ()

    def check(self) -> None:
        """The bytes are those that the elements take."""
        check_sizes(self.shape, self.stride, self.dtype)
        nbytes = packing_of(self.shape, self.stride, self.dtype).nbytes
        if self.digests:
            if self.data or len(self.digests) != -(-nbytes // CHUNK_BYTES):
                raise WireError("an upload has another number of chunks than its bytes take")
        elif sum(memoryview(piece).nbytes for piece in self.data) != nbytes:
            raise WireError("an upload has more or fewer bytes than its elements take")


@_request()
class Chunk(Request):
    """A chunk of a large tensor, named by the BLAKE3 of all of it; all but the last one have 4 MiB."""

    digest: DigestField
    data: Annotated[Buffer, segment(CHUNK_BYTES, "the chunk")]


@_request("positions of the chunks that the worker lacks")
class Have(Request):
    """Asks which chunks the worker has."""

    digests: DigestsField


@_request("as `have`")
class Load(Request):
    """As ``Have`` for the chunks of these bytes of a file, after the worker took from the file what it lacks: where
    it can see one of that name, and finds in it what the digests say."""

    path: Annotated[str, text(4096, "path")]
    offset: Annotated[int, whole(0, 1 << 48, "offset")]
    nbytes: Annotated[int, whole(0, 1 << 48, "bytes")]
    digests: DigestsField

    def check(self) -> None:
        """There are as many digests as chunks."""
        if len(self.digests) != -(-self.nbytes // CHUNK_BYTES):
            raise WireError("so many bytes of a file have another number of chunks")


@_request("the elements, packed: in segments, or in the header where they are 16 bytes or fewer")
class Fetch(Request):
    """Sends a tensor's elements, or those of a view of its memory, in elements."""

    handle: HandleField
    view: Annotated[tuple[int, tuple[int, ...], tuple[int, ...]] | None, optional(VIEW)] = None


@_request()
class Free(Request):
    """Forgets handles; those that are not there are no error."""

    handles: HandlesField


@_request()
class Roles(Request):
    """What the memory of tensors is for: hints, of which those of handles that are not there are no error. Sent only
    where memory may wait on the host."""

    roles: Annotated[tuple[tuple[int, str], ...], pairs(HANDLE, choice(ROLES, "role"), _INPUTS, "roles")]


# --- programs --------------------------------------------------------------------------------------------------------


@_request()
class Program(Request):
    """A program, to be named from now on by the digest of its body."""

    digest: DigestField
    body: BodyField


@_request()
class Geometry(Request):
    """The specs of all slots of a program, to be named by the digest of their body."""

    program: DigestField
    digest: DigestField
    body: BodyField


@_request()
class Sizes(Request):
    """The geometry ``digest`` of a program is as the geometry ``like``, but for the specs at these places: a size that
    changes at each run."""

    program: DigestField
    like: DigestField
    digest: DigestField
    changes: Annotated[tuple[tuple[int, Spec], ...], pairs(_PLACE, SPEC, _INPUTS, "changes")]


@_request("nothing; slot i of the program becomes handle `base` + i, for the slots that escape")
class Run(Request):
    """Runs a program with these inputs and numbers.

    With ``until``, runs only what is before that instruction, and keeps what is in the slots ``keep``: what had failed,
    once more.
    """

    program: DigestField
    geometry: DigestField
    inputs: HandlesField
    params: Annotated[tuple[Any, ...], listed(NUMBER, _INPUTS, "numbers")]
    base: HandleField
    until: Annotated[int | None, optional(whole(0, HANDLES, "instruction"))] = None
    keep: Annotated[tuple[int, ...], wholes(HANDLES, _INPUTS, "slots")] = ()


@_request("as `run`")
class Again(Request):
    """Runs a program as it was run last in this session, but for the inputs and numbers at these places."""

    program: DigestField
    geometry: DigestField
    inputs: Annotated[tuple[tuple[int, int], ...], pairs(_PLACE, HANDLE, _INPUTS, "inputs")]
    params: Annotated[tuple[tuple[int, Any], ...], pairs(_PLACE, NUMBER, _INPUTS, "numbers")]
    base: HandleField

    def run(self, inputs: tuple[int, ...], params: tuple[Any, ...]) -> Run:
        """The run that is meant, given those of the last one. Raises ``WireError``."""
        handles, numbers = list(inputs), list(params)
        for changes, of in ((self.inputs, handles), (self.params, numbers)):
            for place, value in changes:
                if place >= len(of):
                    raise WireError(f"a run has no place {place}")
                of[place] = value
        return Run(self.program, self.geometry, tuple(handles), tuple(numbers), self.base)


@_request(
    "`returned`, with `{t: [handle, spec, layout, same as, base]}` for tensors; `arguments`: their specs; `state`"
)
class Call(Request):
    """Runs one operator now. Arguments are handles, numbers, texts, dtypes and lists of them; ``state`` is that of
    the CPU generator it draws from, or None. The n-th tensor it returns becomes handle ``base`` + n."""

    operator: Annotated[str, text(256, "operator")]
    args: Annotated[tuple[Any, ...], listed(ARGUMENT, 64, "arguments")]
    kwargs: Annotated[tuple[tuple[str, Any], ...], pairs(text(64, "name"), ARGUMENT, 64, "named arguments")]
    state: Annotated[bytes | None, optional(exact(_STATE_BYTES, "state of a generator"))]
    base: HandleField


@_request()
class Configure(Request):
    """What kernels ask of their process is this from now on."""

    settings: Annotated[KernelSettings, nested(KernelSettings, "settings")]


# --- with other workers ----------------------------------------------------------------------------------------------


@_request()
class Pack(Request):
    """The bytes of the tensor ``source``, packed, in memory of the host, become ``handle``: what others may collect."""

    handle: HandleField
    source: HandleField


@_request()
class Take(Request):
    """What another worker has packed, and offers under this ticket, becomes a tensor of this geometry. Waits for it."""

    handle: HandleField
    ticket: Annotated[bytes, exact(TICKET_BYTES, "ticket")]
    dtype: DtypeField
    shape: SizesField
    stride: SizesField

    def check(self) -> None:
        """The tensor can be addressed."""
        check_sizes(self.shape, self.stride, self.dtype)


@_request("the port")
class Meet(Request):
    """Opens a store where the members of a process group meet."""

    group: GroupField
    timeout: SecondsField


@_request()
class Join(Request):
    """Forms a group with others, who meet at ``host`` and ``port`` and reach this member at ``own``. Waits for them."""

    group: GroupField
    rank: Annotated[int, whole(0, 4095, "rank")]
    size: Annotated[int, whole(1, 4096, "number of members")]
    host: HostField
    port: Annotated[int, whole(1, 65535, "port")]
    own: HostField
    timeout: SecondsField

    def check(self) -> None:
        """It is one of the members."""
        if self.rank >= self.size:
            raise WireError("a group has as many ranks as members")


@_request()
class Reduce(Request):
    """``handle`` becomes what ``source`` and those of the other members of a group are together. Waits for them."""

    group: GroupField
    operation: Annotated[str, choice(OPERATIONS, "operation")]
    handle: HandleField
    source: HandleField


@_request()
class Leave(Request):
    """A group is not needed any more."""

    group: GroupField


@_request("a map of counts")
class Stats(Request):
    """What the worker holds and has done."""


# --- all of them -----------------------------------------------------------------------------------------------------

_by_name = {cls.__name__.lower(): record for cls, record in RECORDS.items()}


def record_of(request: Request) -> Record:
    """How a request travels."""
    return RECORDS[type(request)]


def write_requests(requests: Sequence[Request]) -> tuple[list[Any], list[Buffer]]:
    """The requests as plain data, and the segments that go with them."""
    given: list[Buffer] = []
    return [RECORDS[type(request)].write(request, given) for request in requests], given


def read_requests(data: Any, given: Sequence[Buffer]) -> list[Request]:
    """The requests of a message, with its segments. Raises ``WireError`` when any of them is malformed."""
    requests = [_read(one, given) for one in as_list(data, _REQUESTS, "requests")]
    if not requests:
        raise WireError("a message has no requests")
    return requests


def _read(data: Any, given: Sequence[Buffer]) -> Request:
    record = _by_name.get(data[0]) if type(data) is list and data and type(data[0]) is str else None
    if record is None:
        raise WireError("a request has no name that is known")
    return record.read(data, given)
