// Waiting for something another thread will do soon.
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

// Waits first on the core, then lets others have it, then sleeps: the gaps between the products of a step are short,
// and whoever else wants the core (torch's threads, another process) must get it all the same.
class Gate {
  public:
    // `ready` must load with memory_order_seq_cst, and what makes it true be stored so before `wake`.
    template <class Ready>
    void wait(Ready ready) {
        if (watch(ready)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        while (!ready()) condition_.wait(lock);
        sleepers_.fetch_sub(1);
    }

    void wake() {
        if (sleepers_.load() == 0) return;
        { std::lock_guard<std::mutex> lock(mutex_); }  // one who has looked and not yet slept holds it
        condition_.notify_all();
    }

  private:
    static constexpr int kPauses = 200;                              // a few microseconds
    static constexpr std::chrono::microseconds kPatience{300};  // longer than what lies between two products

    template <class Ready>
    static bool watch(Ready ready) {
        for (int i = 0; i < kPauses; ++i) {
            if (ready()) return true;
            pause_briefly();
        }
        const auto end = std::chrono::steady_clock::now() + kPatience;
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
