// The device's own thread: runs are handed to it and done one after another, in the order in which they came, while the
// threads of the user go on recording. It takes the interpreter's lock only to position a generator.
//
// A run that cannot go on (an operation raised) halts the queue: what comes after may need what it did not make. Whoever
// waits is told, takes back what was not run, and lets the queue go on.
#include "queue.h"

#include "expose.h"

#include "execute.h"
#include "memory.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

using namespace marid;

enum State { kWaiting, kDone, kRaised };
enum Memory { kPlain, kWatched, kPlanned };

struct Job {
  int64_t number = 0;
  Run* run = nullptr;
  Ref positioned;
  struct Link {
    int64_t slot;
    const Run* from;
    int64_t from_slot;
  };
  std::vector<Link> links;
  Memory memory = kPlain;
  const MemoryPlan* plan = nullptr;
  int64_t peak = 0;
  int threads = 1;
  unsigned rounding = 0;

  State state = kWaiting;
  MemoryRun* watched = nullptr;
  bool left = false;
  double seconds = 0;
  std::chrono::steady_clock::time_point began;
  Warnings* warnings = nullptr;
};

// For an operation that draws: the generator for the next instruction of a job, or null where Python failed.
c10::GeneratorImpl* generator_for(Job& job) {
  InterpreterLock lock;
  Ref found(PyObject_CallFunction(job.positioned.get(), "N", PyLong_FromVoidPtr(&job)));
  if (!found || found.get() == Py_None) {
    if (!found) PyErr_WriteUnraisable(job.positioned.get());
    return nullptr;
  }
  return static_cast<c10::GeneratorImpl*>(PyLong_AsVoidPtr(found.get()));
}

// Give back the OpenMP threads of the calling thread. libgomp counts those of all threads: when there are more of them
// than processors, none waits actively any more, and every parallel loop of the process takes several times longer. So
// the user's thread gives its own back when work is handed over, and the device's thread when it has nothing to do.
int (*release_threads)(int) = nullptr;
constexpr int kSoft = 1;  // omp_pause_soft
constexpr auto kIdle = std::chrono::milliseconds(1);

void give_threads_back() {
  if (release_threads != nullptr) release_threads(kSoft);
}

struct Queue {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Job*> jobs;  // the first one runs, unless the queue is halted
  std::atomic<int64_t> submitted = 0, done = 0;  // changed with the lock
  bool halted = false, stopping = false;
  std::thread thread;
};

// Left behind at a fork, with whatever state it was in: the child has a new one, and no thread yet.
Queue* queue = new Queue;

unsigned rounding_of_thread() {
#if defined(__x86_64__)
  return _mm_getcsr();
#else
  return 0;
#endif
}

State perform(Job& job) {
#if defined(__x86_64__)
  _mm_setcsr(job.rounding);  // denormal numbers, as the thread that submitted it has them
#endif
  if (at::get_num_threads() != job.threads) at::set_num_threads(job.threads);
  for (const Job::Link& link : job.links) job.run->slots[link.slot] = link.from->slots[link.from_slot];
  job.warnings = new Warnings;
  if (job.memory == kPlanned && !memory_follow(job.plan, job.peak)) job.memory = kPlain;
  if (job.memory == kWatched) memory_watch(job.peak);
  Status status;
  c10::GeneratorImpl* generator = nullptr;
  while ((status = go(*job.run, generator, std::numeric_limits<float>::max())) == kRunAgain || status == kRunDraws) {
    generator = status == kRunDraws ? generator_for(job) : nullptr;
    if (status == kRunDraws && generator == nullptr) break;
  }
  if (job.memory == kWatched) job.watched = memory_end_watched();
  if (job.memory == kPlanned) job.left = memory_end();
  job.warnings->end();
  return status == kRunDone ? kDone : kRaised;
}

void work(Queue* own) {
  at::AutoDispatchBelowADInplaceOrView below;  // no gradients, no views to track; there are no modes on this thread
  std::unique_lock<std::mutex> held(own->lock);
  while (true) {
    auto wanted = [&] { return own->stopping || (!own->jobs.empty() && !own->halted); };
    if (!own->changed.wait_for(held, kIdle, wanted)) {
      held.unlock();
      give_threads_back();
      held.lock();
      own->changed.wait(held, wanted);
    }
    if (own->stopping) return;
    Job* job = own->jobs.front();
    held.unlock();
    job->began = std::chrono::steady_clock::now();
    State state = perform(*job);
    job->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - job->began).count();
    held.lock();
    job->state = state;
    own->jobs.pop_front();
    if (state == kDone) {
      own->done = job->number;
    } else {
      own->halted = true;
    }
    own->changed.notify_all();
  }
}

// A run to hand over; inputs in `slots` are made by earlier jobs, whose runs are `from`, in their slots `from_slots`.
// `positioned` gives it generators, by its address.
Job* job_new(Run* run, const std::vector<int64_t>& slots, const std::vector<const Run*>& from,
             const std::vector<int64_t>& from_slots, Memory memory, const MemoryPlan* plan, int64_t peak,
             PyObject* positioned) {
  auto* job = new Job;
  job->run = run;
  job->positioned = Ref::to(positioned);
  for (size_t i = 0; i < slots.size(); i++) job->links.push_back({slots[i], from.at(i), from_slots.at(i)});
  job->memory = memory;
  job->plan = plan;
  job->peak = peak;
  job->threads = at::get_num_threads();
  job->rounding = rounding_of_thread();
  return job;
}
// Hand it over: its number, which grow; 0 when the process is about to end.
int64_t job_submit(Job* job) {
  give_threads_back();
  std::lock_guard<std::mutex> held(queue->lock);
  if (queue->stopping) return 0;
  if (!queue->thread.joinable()) queue->thread = std::thread(work, queue);
  job->number = ++queue->submitted;
  queue->jobs.push_back(job);
  queue->changed.notify_all();
  return job->number;
}
// What watched memory saw, once, or null.
MemoryRun* job_watched(Job* job) { return std::exchange(job->watched, nullptr); }
// When it began, in seconds of a steady clock.
double job_began(const Job* job) { return std::chrono::duration<double>(job->began.time_since_epoch()).count(); }
double job_seconds(const Job* job) { return job->seconds; }
bool job_left(const Job* job) { return job->left; }
// What kernels warned of, once, for warnings_of.
Warnings* job_warnings(Job* job) { return std::exchange(job->warnings, nullptr); }
// Once it is done, raised, or taken back.
void job_free(Job* job) { delete job; }

// How to give OpenMP threads back, where that can be done: the address of omp_pause_resource_all.
void queue_release_threads(int (*function)(int)) { release_threads = function; }
// The number of the last job that is done.
int64_t queue_done() { return queue->done; }
// Wait for a job, or for so many seconds, or until the queue is halted.
void queue_wait(int64_t number, double seconds) {
  std::unique_lock<std::mutex> held(queue->lock);
  auto over = [&] { return queue->done >= number || queue->halted || queue->stopping; };
  queue->changed.wait_for(held, std::chrono::duration<double>(seconds), over);
}
// Whether this is the device's thread.
bool queue_is_here() { return queue->thread.get_id() == std::this_thread::get_id(); }
// Whether the queue is halted.
bool queue_halted() {
  std::lock_guard<std::mutex> held(queue->lock);
  return queue->halted;
}
// Forget what has not begun, which the caller has taken back, and go on.
void queue_resume() {
  std::lock_guard<std::mutex> held(queue->lock);
  queue->jobs.clear();
  queue->done = queue->submitted.load();
  queue->halted = false;
}
// Before the process ends: no job begins any more, and the thread is gone.
void queue_stop() {
  {
    std::lock_guard<std::mutex> held(queue->lock);
    queue->stopping = true;
  }
  queue->changed.notify_all();
  if (queue->thread.joinable()) queue->thread.join();
}
// In a child of a fork, where there is no such thread and nothing to do.
void queue_forked() { queue = new Queue; }

}  // namespace

namespace marid {

bool queue_is_busy() { return queue->done != queue->submitted; }

PyMethodDef queue_functions[] = {
    held<job_new>("job_new"),
    released<job_submit>("job_submit"),
    held<job_watched>("job_watched"),
    held<job_began>("job_began"),
    held<job_seconds>("job_seconds"),
    held<job_left>("job_left"),
    held<job_warnings>("job_warnings"),
    held<job_free>("job_free"),
    held<queue_release_threads>("queue_release_threads"),
    held<queue_done>("queue_done"),
    released<queue_wait>("queue_wait"),
    held<queue_is_here>("queue_is_here"),
    held<queue_halted>("queue_halted"),
    held<queue_resume>("queue_resume"),
    released<queue_stop>("queue_stop"),
    held<queue_forked>("queue_forked"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
