// Runs the independent tasks of one call on XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace sgap {

// Below this many multiply-adds (or comparable operations) a call runs on the calling thread:
// waking another one costs more than it saves.
constexpr int64_t kInlineWork = 1 << 17;

inline xla::ffi::Future Finished() {
  xla::ffi::Promise promise;
  promise.SetAvailable();
  return xla::ffi::Future(promise);
}

// Calls run(task) for every task in [0, tasks), which must not throw. The calling thread works too
// and no thread waits for another; `run` (and what it owns) lives until the last task is done.
template <typename Run>
xla::ffi::Future ParallelTasks(xla::ffi::ThreadPool& pool, int64_t tasks, int64_t work, Run run) {
  const int64_t helpers =
      work < kInlineWork || tasks < 2 ? 0 : std::min<int64_t>(tasks, pool.num_threads()) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < tasks; ++task) run(task);
    return Finished();
  }

  struct Job {
    Job(Run run, int64_t tasks) : run(std::move(run)), tasks(tasks), unfinished(tasks) {}

    void Drain() {
      int64_t done = 0;
      for (int64_t task = next.fetch_add(1, std::memory_order_relaxed); task < tasks;
           task = next.fetch_add(1, std::memory_order_relaxed)) {
        run(task);
        ++done;
      }
      if (done > 0 && unfinished.fetch_sub(done, std::memory_order_acq_rel) == done) {
        promise.SetAvailable();
      }
    }

    Run run;
    const int64_t tasks;
    xla::ffi::Promise promise;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> unfinished;
  };

  auto job = std::make_shared<Job>(std::move(run), tasks);
  xla::ffi::Future future(job->promise);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->Drain(); });
  job->Drain();
  return future;
}

}  // namespace sgap
