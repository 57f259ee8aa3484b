// Working memory that a thread keeps between calls.
#pragma once

#include <pthread.h>

#include <array>
#include <memory>
#include <new>

namespace foretell {

// The scratch objects of one thread, one of each type. They hang on a pthread key and not on `thread_local`: glibc
// ends the process when it finds no memory for a thread's block of `thread_local` variables.
class ThreadScratch {
  public:
    struct Slot {
        virtual ~Slot() = default;
    };
    static constexpr int kSlots = 16;  // types; next_slot() refuses more

    // The scratch of the calling thread. Throws std::bad_alloc.
    static ThreadScratch& mine();
    static int next_slot();

    // Free what the calling thread keeps. It must hold no reference to any of it.
    static void release() noexcept;

    std::array<std::unique_ptr<Slot>, kSlots> slots;
};

// The calling thread's T, made at its first use.
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
