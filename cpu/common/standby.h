// Helper threads at hand for the next call: waking a thread of XLA's pool takes 10 to 50 us, longer
// than many a product.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>

namespace sgap {

// Something that a thread runs and others can help with, several at once and also when it is done.
class Work {
 public:
  virtual ~Work() = default;
  virtual void Run() = 0;
  virtual void Help() = 0;
  virtual bool Done() const = 0;

  bool stand_by = false;  // should its helpers?
};

// How long a helper stands by. A call that comes later finds it back in XLA's pool.
constexpr std::chrono::microseconds kStandby(50);

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks at `ready` until it is true or `limit` has gone by; other threads get the core every now
// and then. Returns the last look.
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

// Lets the caller see the last tasks of others end, if that takes no longer than kStandby: who
// waits for the result would take as long to wake up.
void Linger(const Work& work);

// A call has ended.
void NoteCallEnd();

// Hands work to up to `wanted` threads that stand by; the number that took it.
size_t CallStandby(const std::shared_ptr<Work>& work, size_t wanted);

// Helps with what is handed over, until nothing has been for kStandby.
void StandBy();

}  // namespace sgap
