// Helper threads that have ended a call spin for a while, so that the next call gets them without
// waking threads.
#include "cpu/common/parallel.h"

#include <algorithm>
#include <atomic>
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
std::atomic<Clock::rep> standby{Clock::duration(kStandby).count()};  // since that end

Clock::duration Standby() { return Clock::duration(standby.load(std::memory_order_relaxed)); }

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

// Waits for work to be handed over: null where none has been for Standby().
std::shared_ptr<Work> Await(Slot& slot) {
  const auto given = [&] { return slot.state.load(std::memory_order_acquire) == kGiven; };
  if (!SpinUntil(given, Standby()) && Become(slot, kWaiting, kFree)) return nullptr;
  while (!given()) Pause();  // taken: a caller is about to write `work`
  std::shared_ptr<Work> work = std::move(slot.work);
  slot.state.store(kFree, std::memory_order_release);
  return work;
}

}  // namespace

void Linger(const Work& work) {
  SpinUntil([&] { return work.Done(); }, kStandby);
}

void NoteCallEnd(Clock::duration took) {
  const Clock::duration shortest = kStandby, longest = kLongStandby;
  standby.store(std::clamp(took, shortest, longest).count(), std::memory_order_relaxed);
  last_end.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
}

bool CallsAreClose() {
  const Clock::duration end(last_end.load(std::memory_order_relaxed));
  return Clock::now().time_since_epoch() - end < Standby();
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
