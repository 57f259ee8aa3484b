// A thread pool whose workers share the chunks of one job. The caller works too, so a late worker is not waited for.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace foretell {

// Runs one chunk of a job on thread `thread` of the team; the caller is thread 0.
using Task = void (*)(const void* job, int64_t chunk, int thread);

constexpr int64_t kLeastToShare = 4;  // items that must be left of a range in work for another thread to take one

// The range of items of one thread, from which other threads may take, too. On a cache line of its own.
struct alignas(64) ItemRange {
    std::atomic<int64_t> next{0};
    int64_t first = 0, stop = 0;

    // Return the next item, or -1 if none is left.
    int64_t take() {
        const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
        return item < stop ? item : -1;
    }

    // Return an item for another thread, or -1 if none is left, or few that their owner is about to take: it has
    // prefetched them and ends as soon.
    int64_t take_for_other() {
        const int64_t item = next.load(std::memory_order_relaxed);
        return item > first && stop - item < kLeastToShare ? -1 : take();
    }
};

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
        run(chunks, [](const void* job, int64_t chunk, int) { (*static_cast<const F*>(job))(chunk); }, &f);
    }

    // Call f(item) for each item. A thread takes a contiguous range in ascending order, so that it finds in its cache
    // what it has prefetched, and then helps the others with theirs. The same thread gets the same range each time.
    template <class F>
    void split(int64_t items, const F& f) {
        if (threads_ == 1 || items <= 1) {
            for (int64_t item = 0; item < items; ++item) f(item);
            return;
        }
        struct Job {
            ItemRange* ranges;
            int threads;
            const F& f;
        };
        const Job job{divide(items), threads_, f};
        const auto work = [](const void* shared, int64_t chunk, int thread) {
            const Job& job = *static_cast<const Job*>(shared);
            const auto take_all = [&job](ItemRange& range) {
                for (int64_t item = range.take(); item >= 0; item = range.take()) job.f(item);
            };
            take_all(job.ranges[thread]);
            for (int i = 1; i < job.threads; ++i) {
                ItemRange& other = job.ranges[(thread + i) % job.threads];
                for (int64_t item = other.take_for_other(); item >= 0; item = other.take_for_other()) job.f(item);
            }
            take_all(job.ranges[chunk]);  // its owner may never come
        };
        run(threads_, work, &job);
    }

  private:
    // Divide items into one range per thread.
    ItemRange* divide(int64_t items);

    Pool* pool_ = nullptr;
    std::unique_lock<std::mutex> mine_;
    int threads_ = 1;
};

// Let every worker thread free its scratch memory before its next job.
void release_workers_scratch() noexcept;

}  // namespace foretell
