// The boundary between the library and Python: no exception may cross it.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>

#include "pool.h"
#include "scratch.h"

#define FORETELL_API extern "C" __attribute__((visibility("default")))

namespace foretell {

// Error codes of an entry point; foretell/kernels/native/library.py has the same.
constexpr int64_t kNoMemory = -1, kFailed = -2;

// Return the result of f, at least 0, or an error code. After a failure scratch memory is freed: the next, smaller call
// may need it, and it may have grown only in part.
template <class F>
int64_t entry(const F& f) noexcept {
    int64_t status = kFailed;
    try {
        return f();
    } catch (const std::bad_alloc&) {
        status = kNoMemory;
    } catch (const std::length_error&) {  // a vector that no address space would hold
        status = kNoMemory;
    } catch (...) {
    }
    ThreadScratch::release();
    release_workers_scratch();
    return status;
}

}  // namespace foretell
