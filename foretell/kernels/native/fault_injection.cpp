// Fault injection for tests: compiled only with -DFORETELL_FAULTS (and -Wl,-Bsymbolic, so that the library's own
// operator new is the one below).
#ifdef FORETELL_FAULTS

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "entry.h"

namespace {

// Allocations until one fails; below 0 none does.
std::atomic<int64_t> allocations_left{-1};

}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // sanitizers have their own operator new

namespace {

void* allocate(void* (*take)(size_t, size_t), size_t size, size_t alignment) {
    if (allocations_left.load() >= 0 && allocations_left.fetch_sub(1) == 0) throw std::bad_alloc();
    void* const made = take(size, alignment);
    if (made == nullptr) throw std::bad_alloc();
    return made;
}

}  // namespace

void* operator new(size_t size) {
    return allocate([](size_t bytes, size_t) { return std::malloc(bytes); }, size, 0);
}
void* operator new(size_t size, std::align_val_t alignment) {
    const auto take = [](size_t bytes, size_t to) { return std::aligned_alloc(to, (bytes + to - 1) / to * to); };
    return allocate(take, size, static_cast<size_t>(alignment));
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }
void operator delete(void* made, std::align_val_t) noexcept { std::free(made); }
void operator delete(void* made, size_t, std::align_val_t) noexcept { std::free(made); }

#endif

namespace foretell {
namespace {

volatile int64_t shared_count = 0;

// Run f in each of ceil_div to `threads` threads at the same time: each chunk waits until all have begun.
template <class F>
void in_each_thread(int threads, const F& f) {
    Team team(threads);
    std::atomic<int> begun{0};
    team.each(team.threads(), [&](int64_t) {
        for (begun.fetch_add(1); begun.load() < team.threads();) std::this_thread::yield();
        f();
    });
}

}  // namespace
}  // namespace foretell

// Free all scratch memory, and let the allocation after `count` more of them fail; below 0 none.
FORETELL_API void foretell_fail_allocation(int64_t count) {
    foretell::ThreadScratch::release();
    foretell::release_workers_scratch();
    allocations_left.store(count);
}

// Return whether the injected failure has not happened yet.
FORETELL_API bool foretell_failure_pending() { return allocations_left.load() >= 0; }

// Fail in every thread but the caller's.
FORETELL_API int64_t foretell_fail_in_workers(int threads) {
    using namespace foretell;
    const auto caller = std::this_thread::get_id();
    return entry([&]() -> int64_t {
        in_each_thread(threads, [&] {
            if (std::this_thread::get_id() != caller) throw std::bad_alloc();
        });
        return 0;
    });
}

// Write past the end of an array.
FORETELL_API int64_t foretell_overflow(int64_t size) {
    std::vector<int64_t> numbers(size);
    numbers.data()[size] = 1;
    return numbers.data()[size / 2];
}

// Overflow a signed number.
FORETELL_API int foretell_undefined(int number) { return number + 2147483647; }

// Count in several threads without a lock.
FORETELL_API int64_t foretell_race(int threads) {
    using namespace foretell;
    in_each_thread(threads, [] { shared_count = shared_count + 1; });
    return shared_count;
}

#endif
