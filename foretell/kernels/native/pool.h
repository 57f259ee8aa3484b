// A thread pool whose workers share the chunks of one job. The caller works too, so a late worker is not waited for.
#pragma once

#include <cstdint>
#include <mutex>

namespace foretell {

using Task = void (*)(const void* job, int64_t chunk);

class Pool;

// Up to `threads` threads, including the caller, for the lifetime of this object. If another caller holds the pool, the
// caller works alone: that is faster than waiting, and there are never more threads than requested.
class Team {
  public:
    explicit Team(int threads);

    int threads() const { return threads_; }

    // Run task(job, 0) .. task(job, chunks - 1), and return when all are done. If tasks throw, one of their exceptions
    // is thrown here, after the last chunk.
    void run(int64_t chunks, Task task, const void* job);

    // Call f(chunk) for each chunk.
    template <class F>
    void each(int64_t chunks, const F& f) {
        run(chunks, [](const void* job, int64_t chunk) { (*static_cast<const F*>(job))(chunk); }, &f);
    }

  private:
    Pool* pool_ = nullptr;
    std::unique_lock<std::mutex> mine_;
    int threads_ = 1;
};

// Let every worker thread free its scratch memory before its next job.
void release_workers_scratch() noexcept;

}  // namespace foretell
