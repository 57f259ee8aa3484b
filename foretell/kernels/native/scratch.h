// Working memory that a thread keeps between calls.
#pragma once

#include <pthread.h>

#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"

namespace foretell {

// Allocates from the start of a cache line: a wide load or store that crosses one takes twice as long.
template <class T>
struct LineAllocator {
    using value_type = T;

    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}

    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{kLine})); }
    void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t{kLine}); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
};

template <class T>
using AlignedVector = std::vector<T, LineAllocator<T>>;

inline void grow(AlignedVector<float>& memory, int64_t size) {
    if (int64_t(memory.size()) < size) memory.resize(size);
}

// The scratch objects of one thread, one of each type. They use a pthread key and not `thread_local`: glibc ends the
// process if it cannot allocate a thread's `thread_local` block.
class ThreadScratch {
  public:
    struct Slot {
        virtual ~Slot() = default;
    };
    static constexpr int kSlots = 16;  // number of types; next_slot() throws beyond it

    // The scratch of the calling thread. Throws std::bad_alloc.
    static ThreadScratch& mine();
    static int next_slot();

    // Free the scratch of the calling thread, which must hold no reference to it.
    static void release() noexcept;

    std::array<std::unique_ptr<Slot>, kSlots> slots;
};

// Return the calling thread's T, created on first use.
template <class T>
T& scratch() {
    struct Holder final : ThreadScratch::Slot {
        T value{};
    };
    static const int index = ThreadScratch::next_slot();
    std::unique_ptr<ThreadScratch::Slot>& slot = ThreadScratch::mine().slots[index];
    if (slot == nullptr) slot = std::make_unique<Holder>();
    return static_cast<Holder&>(*slot).value;
}

}  // namespace foretell
