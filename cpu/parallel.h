// Runs the independent tasks of one call on XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "standby.h"
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

// Below this many multiply-adds (or comparable operations) a call runs on the calling thread:
// waking another one costs more than it saves.
constexpr int64_t kInlineWork = 1 << 17;

inline xla::ffi::Future Finished() {
  xla::ffi::Promise promise;
  promise.SetAvailable();
  return xla::ffi::Future(promise);
}

// Works with up to `helpers` other threads: those that stand by, then others of the pool.
inline void Share(xla::ffi::ThreadPool& pool, const std::shared_ptr<Work>& work, int64_t helpers) {
  work->stand_by = CallsAreClose();
  BeforeXla(work.get());
  for (int64_t i = CallStandby(work, helpers); i < helpers; ++i) {
    pool.Schedule([work = work]() mutable {
      AfterXla(work.get());
      const bool stand_by = work->stand_by;
      work->Help();
      work.reset();  // what a call owned is not kept while standing by
      if (stand_by) StandBy();
    });
  }
  work->Help();
  Linger(*work);
}

// Calls run(task) for every task in [0, tasks), which must not throw. The calling thread works too
// and none waits for another, but for Linger's moment; `run` (and what it owns) lives until the
// last task is done.
template <typename Run>
xla::ffi::Future ParallelTasks(xla::ffi::ThreadPool& pool, int64_t tasks, int64_t work, Run run) {
  AfterXla(&finished_calls);
  const int64_t helpers =
      work < kInlineWork || tasks < 2 ? 0 : std::min<int64_t>(tasks, pool.num_threads()) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < tasks; ++task) run(task);
    BeforeXla(&finished_calls);
    return Finished();
  }

  struct Job final : Work {
    Job(Run run, int64_t tasks) : run(std::move(run)), tasks(tasks), unfinished(tasks) {}

    void Help() override {
      AfterXla(this);
      int64_t count = 0;
      for (int64_t task = next.fetch_add(1, std::memory_order_relaxed); task < tasks;
           task = next.fetch_add(1, std::memory_order_relaxed)) {
        run(task);
        ++count;
      }
      if (count > 0 && unfinished.fetch_sub(count, std::memory_order_acq_rel) == count) {
        BeforeXla(&finished_calls);
        promise.SetAvailable();
        NoteCallEnd();
        done.store(true, std::memory_order_release);
      }
    }

    bool Done() const override { return done.load(std::memory_order_acquire); }

    Run run;
    const int64_t tasks;
    xla::ffi::Promise promise;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> unfinished;
    std::atomic<bool> done{false};
  };

  auto job = std::make_shared<Job>(std::move(run), tasks);
  xla::ffi::Future future(job->promise);
  Share(pool, job, helpers);
  return future;
}

// As ParallelTasks for tasks in phases: run(task) counts through all of them, and a phase begins
// when the one before is done. A thread that finds the rest of a phase in the hands of others
// lingers for a moment, to help with the next one, but does not wait for it: whoever finishes the
// phase goes on.
template <typename Run>
xla::ffi::Future ParallelPhases(xla::ffi::ThreadPool& pool, const std::vector<int64_t>& phase_tasks,
                                int64_t work, Run run) {
  struct Job final : Work {
    Job(Run run, const std::vector<int64_t>& phase_tasks) : run(std::move(run)) {
      for (const int64_t count : phase_tasks) ends.push_back(tasks += count);
    }

    int64_t PhaseBegin(int64_t task) const {
      int64_t begin = 0;
      for (const int64_t end : ends) begin = end <= task ? end : begin;
      return begin;
    }

    void Help() override {
      AfterXla(this);
      using Clock = std::chrono::steady_clock;
      constexpr auto kLinger = std::chrono::microseconds(200);
      Clock::time_point idle_since{};
      int64_t task = next.load(std::memory_order_relaxed);
      while (task < tasks) {
        if (finished.load(std::memory_order_acquire) < PhaseBegin(task)) {
          if (idle_since == Clock::time_point{}) idle_since = Clock::now();
          if (Clock::now() - idle_since > kLinger) return;
          std::this_thread::yield();
          task = next.load(std::memory_order_relaxed);
        } else if (next.compare_exchange_weak(task, task + 1, std::memory_order_relaxed)) {
          run(task);
          if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) {
            BeforeXla(&finished_calls);
            promise.SetAvailable();
            NoteCallEnd();
            done.store(true, std::memory_order_release);
          }
          idle_since = Clock::time_point{};
          task = next.load(std::memory_order_relaxed);
        }
      }
    }

    bool Done() const override { return done.load(std::memory_order_acquire); }

    Run run;
    int64_t tasks = 0;
    std::vector<int64_t> ends;
    xla::ffi::Promise promise;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> finished{0};
    std::atomic<bool> done{false};
  };

  int64_t tasks = 0, widest = 0;
  for (const int64_t count : phase_tasks) {
    tasks += count;
    widest = std::max(widest, count);
  }
  const int64_t helpers = std::min<int64_t>(widest, pool.num_threads()) - 1;
  const bool one_phase = widest == tasks;
  if (work < kInlineWork || helpers <= 0 || one_phase) {
    return ParallelTasks(pool, tasks, one_phase ? work : 0, std::move(run));
  }
  AfterXla(&finished_calls);
  auto job = std::make_shared<Job>(std::move(run), phase_tasks);
  xla::ffi::Future future(job->promise);
  Share(pool, job, helpers);
  return future;
}

}  // namespace sgap
