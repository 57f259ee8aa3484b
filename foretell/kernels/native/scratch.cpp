#include "scratch.h"

#include <atomic>
#include <stdexcept>

namespace foretell {
namespace {

void free_scratch(void* kept) { delete static_cast<ThreadScratch*>(kept); }

pthread_key_t scratch_key() {
    static const pthread_key_t key = [] {
        pthread_key_t made;
        if (pthread_key_create(&made, free_scratch) != 0) throw std::bad_alloc();
        return made;
    }();
    return key;
}

}  // namespace

ThreadScratch& ThreadScratch::mine() {
    const pthread_key_t key = scratch_key();
    if (void* const kept = pthread_getspecific(key)) return *static_cast<ThreadScratch*>(kept);
    auto made = std::make_unique<ThreadScratch>();
    if (pthread_setspecific(key, made.get()) != 0) throw std::bad_alloc();
    return *made.release();
}

int ThreadScratch::next_slot() {
    static std::atomic<int> given{0};
    const int slot = given.fetch_add(1);
    if (slot >= kSlots) throw std::logic_error("raise kSlots");
    return slot;
}

void ThreadScratch::release() noexcept {
    try {
        const pthread_key_t key = scratch_key();
        free_scratch(pthread_getspecific(key));
        pthread_setspecific(key, nullptr);
    } catch (const std::bad_alloc&) {  // no key could be made: nothing is kept
    }
}

}  // namespace foretell
