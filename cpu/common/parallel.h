// Runs the independent tasks of one call on XLA's thread pool. Helper threads stand by for the next
// call for a while: waking a thread of the pool takes 10 to 50 us, longer than many a call.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace sgap {

// ThreadSanitizer cannot see how XLA, which is not built with it, orders a task after its
// scheduling and a caller after a future: these two say so.
inline void BeforeXla(void* address) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(address);
#else
  (void)address;
#endif
}

inline void AfterXla(void* address) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(address);
#else
  (void)address;
#endif
}

inline char finished_calls;

// What one thread runs and others may help with: any number at once, and even when it is done.
class Work {
 public:
  virtual ~Work() = default;
  virtual void Run() = 0;
  virtual void Help() = 0;
  virtual bool Done() const = 0;

  bool stand_by = false;  // whether its helpers do afterwards
  bool is_part = false;   // whether the call that it is for goes on after it
};

// How long a helper stands by: as long as the call took that ended last, at least and at most.
// A call that comes later finds it back in XLA's pool. Calls from Python that follow each other
// begin 20 to 70 us after the last one's end (Zen 3), and 80 to 120 us where it went through 5 to 8
// MB, which leaves little of Python and JAX in the caches (Xeon, family 6 model 167).
constexpr std::chrono::microseconds kStandby(100), kLongStandby(400);

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() is true or `limit` has gone by, yielding the core now and then. Returns the
// last ready().
template <typename Ready, typename Duration>
bool SpinUntil(Ready ready, Duration limit) {
  constexpr int kLooks = 32;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return true;
      Pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

// Whether calls have been following each other so closely that a helper of this one should stand
// by: a program with one product now and then never delays what XLA has for its pool.
bool CallsAreClose();

// Waits up to kStandby for the last tasks of other threads: to wake up a caller that waits for the
// result would take as long.
void Linger(const Work& work);

// A call has ended that took so long.
void NoteCallEnd(std::chrono::steady_clock::duration took);

// Hands work to up to `wanted` threads that stand by. Returns how many took it.
size_t CallStandby(const std::shared_ptr<Work>& work, size_t wanted);

// Helps with work that callers hand over, until none has come for a while.
void StandBy();

// Below this many multiply-adds (or comparable operations) a call runs on the calling thread:
// waking another one costs more than it saves.
constexpr int64_t kInlineWork = 1 << 17;

inline xla::ffi::Future Finished() {
  xla::ffi::Promise promise;
  promise.SetAvailable();
  return xla::ffi::Future(promise);
}

// Calls that wait until all of them are known, to run together.
struct DeferredCall {
  std::vector<int64_t> phase_tasks;
  int64_t work;
  std::function<void(int64_t)> run;
  std::function<bool()> last_needed;  // null where the last phase is
};
using DeferredCalls = std::vector<DeferredCall>;

// Where the tasks of a call run: on XLA's threads, or later, with those of other calls.
class Pool {
 public:
  Pool(xla::ffi::ThreadPool threads) : threads_(threads) {}  // NOLINT: converts
  Pool(xla::ffi::ThreadPool threads, DeferredCalls* later, int64_t calls)
      : threads_(threads), later_(later), calls_(calls) {}

  // How many threads take part in a call, of several calls on average: what a call has in memory
  // for each of its threads, all of them have at once.
  int64_t num_threads() const { return std::max<int64_t>(threads_.num_threads() / calls_, 1); }
  const xla::ffi::ThreadPool& threads() const { return threads_; }
  DeferredCalls* later() const { return later_; }

 private:
  xla::ffi::ThreadPool threads_;
  DeferredCalls* later_ = nullptr;
  int64_t calls_ = 1;
};

// Works with up to `helpers` other threads: those that stand by, then others of the pool.
inline void RunShared(xla::ffi::ThreadPool pool, const std::shared_ptr<Work>& work,
                      int64_t helpers) {
  work->stand_by = CallsAreClose();
  BeforeXla(work.get());
  try {
    for (int64_t i = CallStandby(work, helpers); i < helpers; ++i) {
      pool.Schedule([work = work]() mutable {
        AfterXla(work.get());
        const bool stand_by = work->stand_by;
        work->Help();
        work.reset();  // what a call owned is not kept while standing by
        if (stand_by) StandBy();
      });
    }
  } catch (const std::bad_alloc&) {  // fewer help: those that came may not be left alone
  }
  work->Run();
  Linger(*work);
}

// The tasks of a call, in phases: run(task) counts through all of them, and a phase begins when the
// one before is done. Each thread has a share of a phase, next to each other, and helps with those
// of others when it is through: calls that repeat find what they read in the cache of the same
// core, and neighbouring tasks share it. The call ends before its last phase unless last_needed().
// A task that finds no memory makes the call fail: the tasks after it are counted and not run. An
// exception must not leave a thread of the pool, nor the calling thread while others are at work.
template <typename Task, typename Needed>
class Job final : public Work {
 public:
  // `threads` at most take part, the one that calls Run() among them.
  Job(Task run, Needed last_needed, const int64_t* phase_tasks, int64_t phases, int64_t threads)
      : run_(std::move(run)),
        last_needed_(std::move(last_needed)),
        phases_(phases),
        threads_(threads),
        last_phase_tasks_(phase_tasks[phases - 1]),
        shares_(phases * threads) {
    for (int64_t phase = 0; phase < phases; ++phase) {
      for (int64_t i = 0; i < threads; ++i) {
        Share& share = shares_[phase * threads + i];
        share.next.store(tasks_ + phase_tasks[phase] * i / threads, std::memory_order_relaxed);
        share.end = tasks_ + phase_tasks[phase] * (i + 1) / threads;
      }
      tasks_ += phase_tasks[phase];
    }
  }

  xla::ffi::Future Future() { return xla::ffi::Future(promise_); }

  void Run() override { Take(0); }
  void Help() override {
    const int64_t place = helpers_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (place < threads_) Take(place);
  }
  bool Done() const override { return done_.load(std::memory_order_acquire); }

 private:
  using Clock = std::chrono::steady_clock;

  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };

  // A thread that finds the rest of a phase in the hands of others lingers to help with the next
  // one, at most for as long as it has worked, but does not wait for it: whoever finishes the phase
  // goes on. It does not linger for a last phase that nobody needs so far.
  void Take(int64_t place) {
    AfterXla(this);
    Clock::duration worked = std::chrono::microseconds(200);
    for (int64_t phase = 0; phase < phases_; ++phase) {
      Share* shares = &shares_[phase * threads_];
      const Clock::time_point begin = Clock::now();
      int64_t count = 0;
      for (int64_t i = 0; i < threads_; ++i) {
        Share& share = shares[place + i < threads_ ? place + i : place + i - threads_];
        while (share.next.load(std::memory_order_relaxed) < share.end) {
          const int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
          if (task >= share.end) break;
          RunOrFail(task);
          ++count;
        }
      }
      const int64_t end = shares[threads_ - 1].end;
      if (count > 0) {
        const int64_t all = finished_.fetch_add(count, std::memory_order_acq_rel) + count;
        const bool last_is_next = all == tasks_ - last_phase_tasks_;
        if (all == tasks_ || (last_is_next && !last_needed_())) return End();
      }
      worked += Clock::now() - begin;
      if (phase + 1 == phases_ || (phase + 2 == phases_ && !last_needed_())) return;
      const auto phase_is_over = [&] { return finished_.load(std::memory_order_acquire) >= end; };
      if (!SpinUntil(phase_is_over, worked)) return;
    }
  }

  void RunOrFail(int64_t task) {
    if (no_memory_.load(std::memory_order_relaxed)) return;
    try {
      run_(task);
    } catch (const std::bad_alloc&) {
      no_memory_.store(true, std::memory_order_relaxed);
    }
  }

  void End() {
    if (ended_.exchange(true, std::memory_order_relaxed)) return;
    BeforeXla(&finished_calls);
    if (no_memory_.load(std::memory_order_relaxed)) {
      // Short enough for a string that allocates nothing.
      promise_.SetError({xla::ffi::ErrorCode::kResourceExhausted, "out of memory"});
    } else {
      promise_.SetAvailable();
    }
    if (!is_part) NoteCallEnd(Clock::now() - begin_);
    done_.store(true, std::memory_order_release);
  }

  const Clock::time_point begin_ = Clock::now();
  Task run_;
  Needed last_needed_;
  const int64_t phases_, threads_, last_phase_tasks_;
  int64_t tasks_ = 0;
  std::vector<Share> shares_;  // [phases, threads]
  xla::ffi::Promise promise_;
  std::atomic<int64_t> helpers_{0};
  std::atomic<int64_t> finished_{0};
  std::atomic<bool> no_memory_{false}, ended_{false}, done_{false};
};

// Calls run(task) for every task in [0, sum of phase_tasks), which may throw std::bad_alloc and
// nothing else: the call then fails. A phase begins when all tasks of the one before have ended,
// and the last one only if last_needed() is true then.
// The calling thread works too and none waits for another, but for a moment; `run` (and what it
// owns) lives until the last task is done.
template <typename Task, typename Needed>
xla::ffi::Future ParallelPhases(const Pool& pool, const std::vector<int64_t>& phase_tasks,
                                int64_t work, Task run, Needed last_needed) {
  if (pool.later()) {
    pool.later()->push_back({phase_tasks, work, std::move(run), std::move(last_needed)});
    return Finished();
  }
  AfterXla(&finished_calls);
  const auto phases = static_cast<int64_t>(phase_tasks.size());
  const int64_t widest = *std::max_element(phase_tasks.begin(), phase_tasks.end());
  const int64_t threads = work < kInlineWork ? 1 : std::min<int64_t>(widest, pool.num_threads());
  if (threads <= 1) {
    // Tests have pools of -1 threads: no result may depend on the order of a phase's tasks.
    const bool backwards = pool.threads().num_threads() < 0;
    int64_t begin = 0;
    for (int64_t phase = 0; phase < phases; ++phase) {
      if (phase > 0 && phase + 1 == phases && !last_needed()) break;
      const int64_t count = phase_tasks[phase];
      for (int64_t i = 0; i < count; ++i) run(begin + (backwards ? count - 1 - i : i));
      begin += count;
    }
    BeforeXla(&finished_calls);
    return Finished();
  }
  auto job = std::make_shared<Job<Task, Needed>>(std::move(run), std::move(last_needed),
                                                 phase_tasks.data(), phases, threads);
  xla::ffi::Future future = job->Future();
  RunShared(pool.threads(), job, threads - 1);
  return future;
}

template <typename Task>
xla::ffi::Future ParallelPhases(const Pool& pool, const std::vector<int64_t>& phase_tasks,
                                int64_t work, Task run) {
  if (pool.later()) {
    pool.later()->push_back({phase_tasks, work, std::move(run), nullptr});
    return Finished();
  }
  return ParallelPhases(pool, phase_tasks, work, std::move(run), [] { return true; });
}

// Runs the tasks, which throw nothing, and returns when all have ended: for what a handler has to
// know before it goes on. It waits for no thread that has not begun: the caller takes its tasks.
template <typename Task>
void RunAndWait(const xla::ffi::ThreadPool& pool, int64_t tasks, Task run) {
  AfterXla(&finished_calls);
  const auto needed = [] { return true; };
  const int64_t threads = std::min<int64_t>(tasks, pool.num_threads());
  const auto job =
      std::make_shared<Job<Task, decltype(needed)>>(std::move(run), needed, &tasks, 1, threads);
  job->is_part = true;
  RunShared(pool, job, threads - 1);
  while (!SpinUntil([&] { return job->Done(); }, kLongStandby)) {
  }
}

template <typename Task>
xla::ffi::Future ParallelTasks(const Pool& pool, int64_t tasks, int64_t work, Task run) {
  return ParallelPhases(pool, {tasks}, work, std::move(run));
}

}  // namespace sgap
