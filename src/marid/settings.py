"""All settings, read in one place: field ``x`` is the environment variable ``MARID_X``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import platformdirs

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def _memory() -> int:
    """Bytes that this machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


@dataclass
class Settings:
    """What a user may change; assign to a field of ``marid.settings`` or set the variable before the import.

    An assignment raises ``AttributeError`` for a name that no field has, and ``TypeError`` for a value of another type.
    """

    devices: int = 8
    """How many ``remote_accelerator`` indices exist (1 to 64)."""
    engine: str = "cpu"
    """Where programs of this process run: "cpu", or a CUDA device of this machine ("cuda:0"). Read by the import: only
    the variable sets it."""
    print_materialize: bool | None = None
    """Whether the text of a tensor runs what its values need: with 1 always, with 0 never. Without it ``str`` (hence
    ``print``) does and ``repr`` does not; under ``marid run`` both do."""
    full_traceback: bool = False
    """Tracebacks of errors show Marid's own frames."""
    log_intercepts: bool = False
    """Log every recorded operation to the logger ``marid``; printed to standard error where logging is not set up."""
    profile_operators: bool = False
    """Measure what each operation of a program takes: ``marid.stats().operators``."""
    max_pending_nodes: int = 10_000
    """The tape is cut and run before more live nodes than this are pending (from half of it on; after an optimizer's
    step from an eighth, and from a 64th where a loop takes many steps without a read)."""
    max_pending_bytes: int = 4 << 30
    """The same for bytes: of all pending results, as if none of them took the memory of another."""
    cache_programs: int = 1024
    """How many programs are kept; the least recently used goes first."""
    cache_instructions: int = 30_000
    """How many instructions the kept programs may have together (about 1 KB each); the newest is always kept."""
    asynchronous: bool = True
    """Programs run on a thread of their own while recording goes on, where a processor is left for that."""
    immediate_bytes: int = 4 << 20
    """Where a loop reads what it makes, and its operations touch no more bytes than this each, on average, and make no
    more than a fifth of it, they run as they are written, on the thread that calls them; 0 for never. No more than a
    128th where a processor is left that could run them while others are recorded."""
    immediate_after: int = 8
    """After so many turns of the loop; 0 from the first read on. Without a read, after an eighth of
    ``max_pending_nodes`` operations that make no more than a 128th."""
    plan_bytes: int = 64 << 10
    """Programs whose results take fewer bytes at once are run without a memory plan."""
    passes: bool = True
    """Let passes (those of ``fast_math`` and registered ones) change what is compiled."""
    fast_math: bool = False
    """What is compiled may use formulas that round elsewhere (fused attention, norms and biases), within
    ``torch.testing``'s tolerances. Rows of attention that are masked out entirely are then 0, not NaN."""
    fast_products: bool = True
    """Products of float32 matrices run on oneDNN's kernel where, tried beside BLAS, it is faster and gives the same
    bits; threads share those of a single row where that gives the same bits."""
    verify_passes: bool = False
    """Check what every pass requires and promises. For tests: it costs more than the passes."""
    memory_limit: int = 0
    """A run that would make the devices hold more bytes than this computes results again in place of keeping them, or
    is refused before it starts where that does not suffice; 0 for no limit."""
    spill_limit: int = 0
    """So many bytes of what such a run does not use may wait in a file (of the folder for temporary files) where that
    makes it fit; 0 for none. For the device of this process on the CPU."""
    compile_recordings: int = 8
    """A function under ``marid.compile`` is given up, for one kind of arguments, after so many recordings of which no
    two did the same."""
    compile_kinds: int = 64
    """How many kinds of arguments (shapes, numbers, modes) a function under ``marid.compile`` may have."""
    compile_verify: int = 1
    """A function under ``marid.compile`` may spend so many percent of the time of its replays on running its Python in
    place of one, to be compared with; 0 for never."""
    pool_bytes: int = 128 << 20
    """How many bytes of freed results are kept to be used again, in place of fresh memory."""
    capture_after: int = 3
    """On CUDA, a program that has run so often with the same sizes is captured as CUDA graphs; 0 for never."""
    compile: bool = True
    """Compile programs that repeat, in a process of its own; what is compiled agrees with eager PyTorch to rounding."""
    compile_after: int = 8
    """A program that has run fewer times is not compiled."""
    compile_ms: int = 1000
    """Nor is one whose runs took fewer milliseconds in all."""
    compile_niceness: int = 19
    """How far that process gives way to others, 0 to 19; at most 10 once they left it no processor for ten seconds."""
    cache_bytes: int = 512 << 20
    """How many bytes of compiled code are kept on disk; the least recently used goes first."""
    worker_patience: int = 30
    """How many seconds a remote worker may be out of reach before what it holds counts as lost, and then how many it
    may take to come back."""
    replay_seconds: int = 60
    """A worker that is lost costs about so many seconds of doing work again: what lives on it is brought to the host
    often enough, unless that would take more than a tenth of the time."""
    journal_bytes: int = 4 << 30
    """How many bytes of uploaded tensors are kept for a worker that is lost."""
    journal_memory: int = min(4 << 30, _memory() // 8)
    """How many of them are kept in memory; what is older goes to files."""
    copies_bytes: int = 1 << 30
    """How many bytes workers keep of tensors that were copied from one to another, for a worker that is lost; at most
    a quarter of a worker's ``--memory-limit``."""
    progress: bool = True
    """Show a bar while much is uploaded to a worker, if standard error is a terminal."""
    cache_dir: Path = Path(platformdirs.user_cache_dir("marid"))
    """Where built files are kept."""

    def __post_init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value if name == "_listeners" else _checked(name, value))
        for listener in self.__dict__.get("_listeners", ()):
            listener()

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each assignment to a field."""
        self._listeners.append(listener)

    @classmethod
    def from_environment(cls) -> Settings:
        """Read ``MARID_*``. Raises ``ValueError`` naming the variable when a value cannot be understood."""
        self = cls()
        for field in fields(cls):
            text = os.environ.get(f"MARID_{field.name.upper()}")
            if text is not None:
                setattr(self, field.name, _parse(f"MARID_{field.name.upper()}", text, type(getattr(self, field.name))))
        if not 1 <= self.devices <= 64:
            raise ValueError(f"MARID_DEVICES must be between 1 and 64, but is {self.devices}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.engine):
            raise ValueError(f"MARID_ENGINE must be cpu, cuda or cuda:N, but is {self.engine!r}")
        return self


_KINDS: dict[str, type] = {field.name: type(field.default) for field in fields(Settings)}


def _checked(name: str, value: object) -> object:
    """What a field is set to by ``value``."""
    if name not in _KINDS:
        import difflib  # rarely needed

        close = difflib.get_close_matches(name, _KINDS, 1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"marid.settings has no field {name!r}{meant}")
    kind = _KINDS[name]
    if kind in (bool, type(None)):  # None: a switch that nobody has set
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        if value is None and kind is not bool:
            return value
        expected = "True or False"
    elif kind is int:
        if isinstance(value, (int, float)):
            return value
        expected = "a number"
    elif kind is str:
        if isinstance(value, str):
            return value
        expected = "text"
    else:
        if isinstance(value, (str, os.PathLike)):
            return Path(value)
        expected = "a path"
    raise TypeError(f"marid.settings.{name} must be {expected}, but is {value!r}")


def _parse(name: str, text: str, kind: type) -> object:
    if kind in (bool, type(None)):  # None: a switch that nobody has set
        if text.lower() in _TRUE or text.lower() in _FALSE:
            return text.lower() in _TRUE
        raise ValueError(f"{name} must be 0 or 1, but is {text!r}")
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name} must be a whole number, but is {text!r}") from None
    return kind(text)


settings = Settings.from_environment()
