// Threads that share the chunks of one job. The caller works too, so a worker that is late is not waited for.
#pragma once

#include <cstdint>
#include <mutex>

namespace foretell {

using Task = void (*)(const void* job, int64_t chunk);

class Pool;

// Up to `threads` threads, the caller among them, for as long as this lives. Where another caller has the threads, the
// caller is alone: that is quicker than to wait, and there are never more threads at work than were asked for.
class Team {
  public:
    explicit Team(int threads);

    int threads() const { return threads_; }

    // Run task(job, 0) .. task(job, chunks - 1), and return when all are done. If tasks throw, one of their exceptions
    // is thrown here, after the last chunk.
    void run(int64_t chunks, Task task, const void* job);

    // The same for a function of the chunk.
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
