// The device's own thread: runs are handed to it and done one after another, in the order in which they came, while the
// threads of the user go on recording. It takes the interpreter's lock only to position a generator.
//
// A run that cannot go on (an operation raised) halts the queue: what comes after may need what it did not make. Whoever
// waits is told, takes back what was not run, and lets the queue go on.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

extern "C" {
int marid_run_go(void* run, void* generator, double seconds);
void marid_run_link(void* run, int64_t slot, void* from, int64_t from_slot);
void* marid_warnings_begin();
void marid_warnings_suspend(void* warnings);
void marid_memory_watch(int64_t expected);
int marid_memory_follow(void* plan, int64_t peak);
int marid_memory_end();
void* marid_memory_end_watched();
}

namespace {

enum State { kWaiting, kDone, kRaised };
enum Memory { kPlain, kWatched, kPlanned };

struct Job {
  int64_t number = 0;
  void* run = nullptr;
  struct Link {
    int64_t slot;
    void* from;
    int64_t from_slot;
  };
  std::vector<Link> links;
  Memory memory = kPlain;
  void* plan = nullptr;
  int64_t peak = 0;
  int threads = 1;
  unsigned rounding = 0;

  State state = kWaiting;
  void* watched = nullptr;
  int left = 0;
  double seconds = 0;
  std::chrono::steady_clock::time_point began;
  void* warnings = nullptr;
};

// For an operation that draws: the generator for the next instruction of a job, or null where Python failed.
using Positioned = void* (*)(void* job);

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
  Positioned positioned = nullptr;
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

State perform(Job& job, Positioned positioned) {
#if defined(__x86_64__)
  _mm_setcsr(job.rounding);  // denormal numbers, as the thread that submitted it has them
#endif
  if (at::get_num_threads() != job.threads) at::set_num_threads(job.threads);
  for (const Job::Link& link : job.links) marid_run_link(job.run, link.slot, link.from, link.from_slot);
  job.warnings = marid_warnings_begin();
  if (job.memory == kPlanned && marid_memory_follow(job.plan, job.peak) == 0) job.memory = kPlain;
  if (job.memory == kWatched) marid_memory_watch(job.peak);
  int status;
  void* generator = nullptr;
  while ((status = marid_run_go(job.run, generator, std::numeric_limits<float>::max())) == 1 || status == 2) {
    generator = status == 2 ? positioned(&job) : nullptr;
    if (status == 2 && generator == nullptr) break;
  }
  if (job.memory == kWatched) job.watched = marid_memory_end_watched();
  if (job.memory == kPlanned) job.left = marid_memory_end();
  marid_warnings_suspend(job.warnings);
  return status == 0 ? kDone : kRaised;
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
    State state = perform(*job, own->positioned);
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

}  // namespace

extern "C" {

// Hand a run over; `links` are (slot, run, slot of that run): inputs that an earlier job makes. Freed by marid_job_free
// once it is done, raised, or taken back. `memory` is 0, or 1 to be watched, or 2 to follow `plan`.
void* marid_job_new(void* run, int64_t links, const int64_t* slots, void* const* from, const int64_t* from_slots,
                    int memory, void* plan, int64_t peak) {
  auto* job = new Job;
  job->run = run;
  for (int64_t i = 0; i < links; i++) job->links.push_back({slots[i], from[i], from_slots[i]});
  job->memory = static_cast<Memory>(memory);
  job->plan = plan;
  job->peak = peak;
  job->threads = at::get_num_threads();
  job->rounding = rounding_of_thread();
  return job;
}
// How to give OpenMP threads back, where that can be done: the address of omp_pause_resource_all.
void marid_queue_release_threads(void* function) { release_threads = reinterpret_cast<int (*)(int)>(function); }
// Its number; they grow. 0 when the process is about to end.
int64_t marid_job_submit(void* given, void* positioned) {
  auto* job = static_cast<Job*>(given);
  give_threads_back();
  std::lock_guard<std::mutex> held(queue->lock);
  if (queue->stopping) return 0;
  queue->positioned = reinterpret_cast<Positioned>(positioned);
  if (!queue->thread.joinable()) queue->thread = std::thread(work, queue);
  job->number = ++queue->submitted;
  queue->jobs.push_back(job);
  queue->changed.notify_all();
  return job->number;
}
// What watched memory saw, once, or null.
void* marid_job_watched(void* job) { return std::exchange(static_cast<Job*>(job)->watched, nullptr); }
// When it began, in seconds of a steady clock.
double marid_job_began(void* job) {
  return std::chrono::duration<double>(static_cast<Job*>(job)->began.time_since_epoch()).count();
}
double marid_job_seconds(void* job) { return static_cast<Job*>(job)->seconds; }
int marid_job_left(void* job) { return static_cast<Job*>(job)->left; }
// What kernels warned of; ended by marid_warnings_free.
void* marid_job_warnings(void* job) { return std::exchange(static_cast<Job*>(job)->warnings, nullptr); }
void marid_job_free(void* job) { delete static_cast<Job*>(job); }

// The number of the last job that is done.
int64_t marid_queue_done() { return queue->done; }
// Whether what was handed over is not all done.
int marid_queue_busy() { return queue->done != queue->submitted ? 1 : 0; }
// Wait for a job: 0 when it is done, 1 after so many seconds, 2 when the queue is halted.
int marid_queue_wait(int64_t number, double seconds) {
  std::unique_lock<std::mutex> held(queue->lock);
  auto over = [&] { return queue->done >= number || queue->halted || queue->stopping; };
  queue->changed.wait_for(held, std::chrono::duration<double>(seconds), over);
  if (queue->done >= number) return 0;
  return queue->halted || queue->stopping ? 2 : 1;
}
// Whether this is the device's thread.
int marid_queue_is_here() { return queue->thread.get_id() == std::this_thread::get_id() ? 1 : 0; }
// Whether the queue is halted.
int marid_queue_halted() {
  std::lock_guard<std::mutex> held(queue->lock);
  return queue->halted ? 1 : 0;
}
// Forget what has not begun, which the caller has taken back, and go on.
void marid_queue_resume() {
  std::lock_guard<std::mutex> held(queue->lock);
  queue->jobs.clear();
  queue->done = queue->submitted.load();
  queue->halted = false;
}
// Before the process ends: no job begins any more, and the thread is gone.
void marid_queue_stop() {
  {
    std::lock_guard<std::mutex> held(queue->lock);
    queue->stopping = true;
  }
  queue->changed.notify_all();
  if (queue->thread.joinable()) queue->thread.join();
}
// In a child of a fork, where there is no such thread and nothing to do.
void marid_queue_forked() { queue = new Queue; }

}  // extern "C"
