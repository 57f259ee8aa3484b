// Waits for a condition that another thread makes true soon.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace foretell {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins, then yields the core, then sleeps: the gaps between the products of a step are short, but torch's threads and
// other processes must still get the core.
class SpinWait {
  public:
    // `ready` must load with memory_order_seq_cst, and its condition must be stored with it before `wake`.
    template <class Ready>
    void wait(Ready ready) {
        if (spin(ready)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        while (!ready()) condition_.wait(lock);
        sleepers_.fetch_sub(1);
    }

    void wake() {
        if (sleepers_.load() == 0) return;
        { std::lock_guard<std::mutex> lock(mutex_); }  // held by a waiter between its check and its sleep
        condition_.notify_all();
    }

  private:
    static constexpr int kPauses = 200;                              // spins; a few microseconds
    static constexpr std::chrono::microseconds kYieldTime{300};  // longer than the gap between two products

    template <class Ready>
    static bool spin(Ready ready) {
        for (int i = 0; i < kPauses; ++i) {
            if (ready()) return true;
            pause_briefly();
        }
        const auto end = std::chrono::steady_clock::now() + kYieldTime;
        while (std::chrono::steady_clock::now() < end) {
            if (ready()) return true;
            std::this_thread::yield();
        }
        return ready();
    }

    std::mutex mutex_;
    std::condition_variable condition_;
    std::atomic<int> sleepers_{0};
};

}  // namespace foretell
