// Helper threads that have ended a call spin for kStandby, so that the next call gets them without
// waking threads.
#include "cpu/common/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

namespace sgap {
namespace {

using Clock = std::chrono::steady_clock;

enum State : int { kFree, kWaiting, kTaken, kGiven };

// kFree -> kWaiting by the thread that stands by; kWaiting -> kTaken -> kGiven by the caller, who
// writes `work` in between; back to kFree by the thread.
struct alignas(64) Slot {
  std::atomic<State> state{kFree};
  std::shared_ptr<Work> work;
};

Slot slots[16];
std::atomic<int> waiting{0};  // a hint: whether looking through the slots is worthwhile
std::atomic<Clock::rep> last_end{0};

bool Become(Slot& slot, State from, State to) {
  return slot.state.compare_exchange_strong(from, to, std::memory_order_acq_rel);
}

Slot* Claim() {
  for (Slot& slot : slots) {
    if (slot.state.load(std::memory_order_relaxed) == kFree && Become(slot, kFree, kWaiting)) {
      return &slot;
    }
  }
  return nullptr;
}

// Tasks of each thread that run at once, before calls of several phases have others wait: these
// then find in the cache what their earlier phases left there.
constexpr int64_t kTogether = 8;

// The tasks of deferred calls, one after another in phases of their own.
class Together {
 public:
  Together(DeferredCalls calls, int64_t threads) : calls_(std::move(calls)) {
    const auto several = [](const DeferredCall& call) { return Unconditional(call) > 1; };
    const bool waits = std::any_of(calls_.begin(), calls_.end(), several);
    for (size_t first = 0; first < calls_.size();) {
      size_t last = first, phases = 0;
      for (int64_t tasks = 0; last < calls_.size() && (!waits || tasks < kTogether * threads);) {
        const DeferredCall& call = calls_[last++];
        tasks += Narrowest(call);
        phases = std::max(phases, Unconditional(call));
      }
      for (size_t phase = 0; phase < phases; ++phase) AddPhase(first, last, phase);
      first = last;
    }
    conditional_ = std::any_of(calls_.begin(), calls_.end(),
                               [](const DeferredCall& call) { return bool(call.last_needed); });
    if (conditional_) AddLastPhases();
    for (const DeferredCall& call : calls_) work_ += call.work;
  }

  const std::vector<int64_t>& PhaseTasks() const { return phase_tasks_; }
  int64_t Work() const { return work_; }

  void Run(int64_t task) const {
    const auto after =
        std::upper_bound(parts_.begin(), parts_.end(), task,
                         [](int64_t task, const Part& part) { return task < part.begin; });
    const Part& part = *(after - 1);
    calls_[part.call].run(part.first + task - part.begin);
  }

  bool LastNeeded() const {
    return !conditional_ || std::any_of(calls_.begin(), calls_.end(), [](const DeferredCall& call) {
      return call.last_needed && call.last_needed();
    });
  }

 private:
  // Tasks from `begin` on are those of a call from its task `first` on.
  struct Part {
    int64_t begin;
    size_t call;
    int64_t first;
  };

  static size_t Unconditional(const DeferredCall& call) {
    return call.phase_tasks.size() - (call.last_needed ? 1 : 0);
  }

  // The fewest tasks of a phase that has any: so many can run at once all the time.
  static int64_t Narrowest(const DeferredCall& call) {
    int64_t least = INT64_MAX;
    for (const int64_t tasks : call.phase_tasks) least = tasks > 0 ? std::min(least, tasks) : least;
    return least == INT64_MAX ? 0 : least;
  }

  void Add(size_t index, size_t phase) {
    const std::vector<int64_t>& tasks = calls_[index].phase_tasks;
    if (tasks[phase] == 0) return;
    int64_t first = 0;
    for (size_t i = 0; i < phase; ++i) first += tasks[i];
    parts_.push_back({tasks_, index, first});
    tasks_ += tasks[phase];
    phase_tasks_.back() += tasks[phase];
  }

  void AddPhase(size_t first, size_t last, size_t phase) {
    phase_tasks_.push_back(0);
    for (size_t i = first; i < last; ++i) {
      if (phase < Unconditional(calls_[i])) Add(i, phase);
    }
  }

  void AddLastPhases() {
    phase_tasks_.push_back(0);
    for (size_t i = 0; i < calls_.size(); ++i) {
      if (calls_[i].last_needed) Add(i, calls_[i].phase_tasks.size() - 1);
    }
  }

  const DeferredCalls calls_;
  std::vector<Part> parts_;
  std::vector<int64_t> phase_tasks_;
  int64_t tasks_ = 0, work_ = 0;
  bool conditional_ = false;
};

// Waits for work to be handed over: null where none has been for kStandby.
std::shared_ptr<Work> Await(Slot& slot) {
  const auto given = [&] { return slot.state.load(std::memory_order_acquire) == kGiven; };
  if (!SpinUntil(given, kStandby) && Become(slot, kWaiting, kFree)) return nullptr;
  while (!given()) Pause();  // taken: a caller is about to write `work`
  std::shared_ptr<Work> work = std::move(slot.work);
  slot.state.store(kFree, std::memory_order_release);
  return work;
}

}  // namespace

void Linger(const Work& work) {
  SpinUntil([&] { return work.Done(); }, kStandby);
}

void NoteCallEnd() {
  last_end.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
}

bool CallsAreClose() {
  const Clock::duration end(last_end.load(std::memory_order_relaxed));
  return Clock::now().time_since_epoch() - end < kStandby;
}

size_t CallStandby(const std::shared_ptr<Work>& work, size_t wanted) {
  size_t found = 0;
  if (waiting.load(std::memory_order_relaxed) == 0) return found;
  for (Slot& slot : slots) {
    if (found == wanted) break;
    if (slot.state.load(std::memory_order_relaxed) != kWaiting) continue;
    if (!Become(slot, kWaiting, kTaken)) continue;
    slot.work = work;
    slot.state.store(kGiven, std::memory_order_release);
    ++found;
  }
  return found;
}

xla::ffi::Future RunTogether(xla::ffi::ThreadPool threads, DeferredCalls calls) {
  if (calls.empty()) return Finished();
  const auto together = std::make_shared<Together>(std::move(calls), threads.num_threads());
  return ParallelPhases(
      threads, together->PhaseTasks(), together->Work(),
      [together](int64_t task) { together->Run(task); },
      [together] { return together->LastNeeded(); });
}

void StandBy() {
  for (Slot* slot = Claim(); slot; slot = Claim()) {
    waiting.fetch_add(1, std::memory_order_relaxed);
    const std::shared_ptr<Work> work = Await(*slot);
    waiting.fetch_sub(1, std::memory_order_relaxed);
    if (!work) return;
    work->Help();
  }
}

}  // namespace sgap
