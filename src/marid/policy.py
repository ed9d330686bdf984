"""Every threshold by which Marid decides how a program runs, each with its reason.

What a user may want to change is in ``settings.py``. The numbers here are Marid's own: they change speed, never
values. Those that C++ compares with on the path of every operation stand where they are used, with theirs:
``native/immediate.cpp``, ``native/memory.cpp``, ``native/queue.cpp`` and ``native/gemm/trials.cpp``. Bounds on what is
received from others are no policy; they are beside what reads it (``remote/``).
"""

from __future__ import annotations

# --- cutting ---------------------------------------------------------------------------------------------------------

CUT_SHARE_AFTER_STEP = 8
"""After an optimizer's step the tape is cut if this share (1/n) of the limits on what is pending is reached: a loop
that never reads then runs whole steps, which recur, in place of what happened to fill the tape."""
CUT_SHARE_UNREAD = 64
"""The same in a loop that takes many steps without a read: each step is a program of its own. ``gpt-unread`` took 24
to 26 ms a step with ``CUT_SHARE_AFTER_STEP`` alone, 19 to 20 with this (``docs/decisions.md``)."""
UNREAD_STEPS = 4
"""Steps of an optimizer without a read, after which a loop counts as one that reads only now and then."""
CUT_AT = 0.5
"""Of the limits on what is pending. Between this and 1 the cut waits for the place of the last one: so it recurs."""
HOST_OPERATIONS = 16
"""A cut of no more operations, all on single numbers that came from the host, is arithmetic and not counted as a wait:
a step counter or a learning rate. A condition of such a kind has a handful."""

# --- running ahead ---------------------------------------------------------------------------------------------------

AHEAD_TURNS = 2
"""Turns in a row of which nearly all had run, after which a loop is handed over in chunks. The first turn of a loop has
state to make that the others have not; one turn like the others is chance."""
AHEAD_SHARE = 0.95
"""Of the operations recorded in a turn, how many must have run: a loop that drops more would do work that nobody
asked for."""
AHEAD_CHUNKS = 6
"""Chunks of one turn. More of them start the device sooner; fewer have less that crosses from one program to the next
and is held until then."""
AHEAD_CHUNK = 192
"""Operations of little memory that are worth a chunk: handing one over takes some 60 us, as long as 30 to 60 of them.
With one thread for kernels and chunks of 128, 192 and 256, a step of a small BERT took 0.78, 0.70 and 0.80 of eager
PyTorch's time (1.06 without chunks), MAML's inner loop 1.82, 1.78 and 1.70 (1.66)."""
AHEAD_OPERATIONS = 64
"""Operations in a turn that is worth it: what is handed over is bound, launched and waited for."""
AHEAD_BYTES = 2 << 20
"""What operations of a turn make on average, beyond which it is not handed over in chunks: recording them takes a
hundredth of their time, and what crosses from one chunk to the next is held until that has run. A step whose results
have 20 MB each had a peak of 2.9 GB in chunks and has 1.5 GB whole, as in eager PyTorch."""
AHEAD_LINES = 256
"""Lines that read which are remembered for a device, before all are forgotten; a program has a few."""
IN_FLIGHT = 16
"""Tasks that may wait for the device's thread. Each holds its inputs; the user's thread waits for the first one."""

# --- running at once -------------------------------------------------------------------------------------------------

IMMEDIATE_RESULTS, IMMEDIATE_RESULTS_AHEAD = 5, 128
"""Of ``settings.immediate_bytes``, which part (1/n) an operation may make: 800 KB, and 32 KB where a processor is left
that could run operations while others are recorded. Whole turns as programs, with their compiled parts, and at once, in
eager PyTorch's time: results of 110 KB 0.93 and 0.70 (a vision transformer), some 100 KB 0.87 and 0.64 (an MLP's step),
200 to 500 KB 0.89 and 0.74 (BERT's step), 1.11 and 1.06 (200 bodies), 0.76 and 0.74 (a small GPT's step)."""
IMMEDIATE_READS = 4
"""How many times what they make such operations may touch, where they touch more than half of what they may: a stencil
2.8 times (281 KB), 200 bodies 2.2 (269 KB). A decoder, which touches its weights for each token, does so many more."""
IMMEDIATE_UNREAD, IMMEDIATE_UNREAD_PART = 8, 16
"""Once an eighth of ``settings.max_pending_nodes`` is pending, of no more than 32 KB each, operations run at once
although nothing was read: a tensor that is filled element by element makes programs that do not come again, at 35 to 75
us an operation in place of 1.3 (eager PyTorch 2.7). Where a processor is left for running ahead, what comes then may
touch a 16th of ``settings.immediate_bytes``. With 128 operations shorter programs are faster, too, but nobody would see
a small network's steps recorded any more."""
FEW_PARAMETERS, FEW_PARAMETERS_OF_SGD = 3, 8
"""Up to so many, an optimizer whose operations run at once takes one parameter after the other. A list costs 6 to 12 us
more to begin with; a step of Adam takes 26 us with one parameter and 36 with a list of one, 40 and 44 with two, 117 and
86 with eight (eager PyTorch 28, 44, 136). SGD without momentum is one operation a parameter: 17 and 20 us with four,
28 and 25 with eight."""
IMMEDIATE_RELAPSES = 5
"""Doublings of ``settings.immediate_after``, one for each time that running at once did not last at a line."""

# --- memory plans ----------------------------------------------------------------------------------------------------

MUCH_BYTES = 32 << 20
"""Programs that take so many bytes are planned from their first run on, and run as tables at once, so that memory is
never taken as eager PyTorch does. As ``kMuch`` in ``native/memory.cpp``."""
PLANS = 16
"""Sets of specs for which one program keeps a plan, the least recently used first to go."""
PLAN_USES = 3
"""Runs with the same specs that make up for watching one and planning."""
PLAN_WASTES = 4
"""Plans that were dropped with fewer uses, after which a program (whose sizes keep changing) is planned no more."""
PLAN_SEEN = 256
"""Sets of specs that are remembered to have come once: a plan is made when they come again."""
PLAN_ATTEMPTS = 3
"""Times that a program is watched because it left its plan, before it is left to PyTorch's allocator."""
PLAN_BLOCKS = 8192
"""Blocks that are placed: placing is quadratic. The smallest of more stay outside of the slab."""

# --- fitting into memory ---------------------------------------------------------------------------------------------

FIT_STEPS = 32
"""Parts of what a program would take, to which the room that there is for it is rounded down: a loop whose room varies
a little keeps its program."""
FIT_HEADROOM = 16
"""Of that room, which part (1/n) is left to what kernels use beside their results, until a run has shown how much that
is: 0 of 83 MiB in a GPT, 3 to 8 of 42 in a ResNet, whose convolutions lay gradients out anew."""
FIT_VARIANTS = 8
"""Programs that are kept of one for several rooms, and attempts that found none."""
FIT_SLOWER = 4.0
"""Times that a program may take longer for computing results again, before it counts as one that does not fit."""

# --- compiling -------------------------------------------------------------------------------------------------------

COMPILE_FUSIBLE = 3
"""Operations that Inductor can fuse, in a stretch that is worth compiling: a call and its guards cost something too."""
COMPILE_RULES = 3
"""Rules for shapes that one program is compiled for at most. The second one serves any size, as a rule."""
COMPILE_EXAMPLES = 4
"""Sets of sizes that are remembered, to see what changes."""
COMPILE_SAMPLES = 9
"""Runs of either tier whose medians are compared."""
COMPILE_WARM = 4
"""Runs with new code that do not count: their memory is planned, caches are filled."""
COMPILE_PATIENCE = 0.005
"""Seconds that compiling may add to any run, or a third of what the run takes where that is more."""
COMPILE_LOOKUP = 8
"""A program is looked up on disk once its runs took this fraction (1/n) of the time after which it is compiled."""
COMPILE_SIZES = 512
"""Sets of sizes whose guards are remembered for a compiled program: a cache that grows by one token comes with as many
as it has steps."""
COMPILER_IDLE = 120.0
"""Seconds after which a process that compiles ends when it has nothing to do."""
COMPILER_STARVED = 10.0
"""Seconds over which the share of a processor that it gets is measured."""
COMPILER_SHARE = 0.2
"""Below this share it starts anew with a niceness of at most ``COMPILER_NICENESS``. A loop that keeps all processors
busy, as kernels do whose threads wait actively, would otherwise never be compiled."""
COMPILER_NICENESS = 10
"""Linux gives this a tenth of a processor that others want too."""

# --- capturing on CUDA -----------------------------------------------------------------------------------------------

CAPTURE_LAUNCHES = 4
"""Instructions that launch something, in a stretch that is worth a graph, whose launch has a cost of its own."""
CAPTURE_REFUSALS = 16
"""Instructions that turn out not to be capturable, of a program that is captured all the same."""
CAPTURE_ATTEMPTS = 4
"""Times that a program is divided anew, and that one stretch is given up, before it is left alone."""
CAPTURED_PROGRAMS = 256
"""Programs of a device that have graphs, each with memory of its own."""

# --- interrupts ------------------------------------------------------------------------------------------------------

UNHEARD_SECONDS = 0.05
"""How long Ctrl-C may go unheard, beside one operation. Each look for it takes the interpreter's lock."""

# --- sharing a worker ------------------------------------------------------------------------------------------------

BACKGROUND_SECONDS = 0.01
"""Messages that take longer are applied in the background of a worker, where those of another session are brief."""
BRIEF_SHARE = 0.5
"""Messages are brief beside those of another session when they take at most this part of what those take."""
IN_USE_SECONDS = 10.0
"""For how long after a message of a session long work of others makes way for it."""
BETWEEN_SECONDS = 0.001
"""How long the background goes on before it looks whether it is to stop or to pause: beside an operator, the longest
that this waits."""

# --- learning what operators return ----------------------------------------------------------------------------------

PROBE_ELEMENTS = 1 << 14
"""Elements of a call that is tried on the CPU as it is, to see what it returns. Larger ones are tried with small
sizes."""
PROBE_WHOLE_ELEMENTS = 1 << 24
"""The same where small sizes say nothing."""
RULES_PER_OPERATOR = 8192
"""Calls of one operator whose rules are kept, before all are forgotten."""
PATTERNS_PER_OPERATOR = 4096
"""Patterns of calls for which it is kept whether derived rules may be trusted."""

# --- marid.compile ---------------------------------------------------------------------------------------------------

REPLAY_TEMPLATES = 8
"""Templates that calls of one kind keep: each is what the function did in another state."""
REPLAY_RECORDINGS = 4
"""Recordings kept to be compared with the next ones."""
REPLAY_LOST, REPLAY_RECORDED_AGAIN = 32, 3
"""How many replays of one kind of calls may be for nothing, beyond those that were not, before its Python runs in their
place: undone because a test of a number came out otherwise; and as how many a call counts that has to be recorded then,
since nothing recorded went on so."""
REPLAY_FIRST_CHECK, REPLAY_LAST_CHECK = 16, 128
"""Replays after which there is a check whatever it costs: each power of two from one to the other. What changes unseen
mostly does so soon."""
