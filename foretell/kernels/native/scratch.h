// Working memory that a thread keeps between calls.
#pragma once

#include <pthread.h>

#include <array>
#include <memory>
#include <new>

namespace foretell {

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
