#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "spin_wait.h"
#include "scratch.h"

namespace foretell {
namespace {

// The number of a job, its chunks and the next chunk in one word: a thread that takes a chunk knows its job.
struct Ticket {
    static constexpr int kBits = 20;
    static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
    static constexpr int64_t kMostChunks = int64_t{1} << (kBits - 1);  // leaves room for increments past the last chunk

    uint64_t word;

    static uint64_t first(uint64_t job, int64_t chunks) { return job << (2 * kBits) | uint64_t(chunks) << kBits; }
    uint64_t job() const { return word >> (2 * kBits); }
    int64_t chunks() const { return int64_t(word >> kBits & kMask); }
    int64_t next() const { return int64_t(word & kMask); }
};

// Incremented for each request to release the scratch memory of the workers.
std::atomic<uint64_t> releases{0};

}  // namespace

class Pool {
  public:
    // Held by the caller that uses the pool.
    std::mutex callers;

    // Start threads up to the number wanted; return how many there are.
    int grow(int threads) {
        try {
            if (threads > range_count_) {
                ranges_ = std::make_unique<ItemRange[]>(threads);
                range_count_ = threads;
            }
            for (; size_ < threads - 1; ++size_) std::thread(&Pool::worker_loop, this, size_).detach();
        } catch (const std::exception&) {  // no more threads, or no memory for one
            return std::min(size_ + 1, std::max(range_count_, 1));
        }
        return threads;
    }

    ItemRange* ranges() { return ranges_.get(); }

    void run(int threads, int64_t chunks, Task task, const void* job) {
        task_ = task;
        job_ = job;
        workers_wanted_.store(threads - 1);
        done_.store(0);
        state_.store(Ticket::first(++jobs_, chunks));
        job_posted_.wake();
        work(0);
        job_done_.wait([this, chunks] { return done_.load() == chunks; });
        if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
    }

  private:
    // Threads are started on demand and never joined: asleep they cost nothing, and process exit ends them.
    void worker_loop(int id) {
        uint64_t last_job = 0, released = releases.load();
        for (;;) {
            job_posted_.wait([this, last_job] { return Ticket{state_.load()}.job() != last_job; });
            if (const uint64_t asked = releases.load(); asked != released) {
                ThreadScratch::release();
                released = asked;
            }
            last_job = id < workers_wanted_.load() ? work(id + 1) : Ticket{state_.load()}.job();
        }
    }

    // Take chunks until none is left. A job cannot end, nor another begin, while one of its chunks is running.
    uint64_t work(int thread) {
        for (;;) {
            const Ticket ticket{state_.fetch_add(1)};
            if (ticket.next() >= ticket.chunks()) return ticket.job();
            // A chunk that fails counts as done: its job is on the stack of the caller, which waits for all chunks.
            try {
                task_(job_, ticket.next(), thread);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(failing_);
                if (failure_ == nullptr) failure_ = std::current_exception();
            }
            if (done_.fetch_add(1) + 1 == ticket.chunks()) job_done_.wake();
        }
    }

    SpinWait job_posted_, job_done_;
    std::mutex failing_;
    std::exception_ptr failure_;  // of the current job; the caller reads it when all chunks are done
    Task task_ = nullptr;
    const void* job_ = nullptr;
    uint64_t jobs_ = 0;
    int size_ = 0;
    int range_count_ = 0;
    std::unique_ptr<ItemRange[]> ranges_;  // of the current job
    std::atomic<int> workers_wanted_{0};
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> done_{0};
};

namespace {

std::atomic<Pool*> the_pool{nullptr};

// A forked child has none of the threads and starts a new pool; the parent's is leaked.
void forget_pool() { the_pool.store(nullptr); }

Pool& pool() {
    static const int hooked = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)hooked;
    Pool* found = the_pool.load();
    if (found == nullptr) {
        Pool* made = new Pool;  // never deleted: its threads may be asleep in it when the process exits
        if (the_pool.compare_exchange_strong(found, made)) return *made;
        delete made;
    }
    return *found;
}

}  // namespace

void release_workers_scratch() noexcept { releases.fetch_add(1); }

Team::Team(int threads) {
    if (threads <= 1) return;
    pool_ = &pool();
    mine_ = std::unique_lock<std::mutex>(pool_->callers, std::try_to_lock);
    if (mine_.owns_lock()) threads_ = pool_->grow(threads);
}

void Team::run(int64_t chunks, Task task, const void* job) {
    if (threads_ > 1 && chunks > 1 && chunks < Ticket::kMostChunks) return pool_->run(threads_, chunks, task, job);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) task(job, chunk, 0);
}

ItemRange* Team::divide(int64_t items) {
    ItemRange* const ranges = pool_->ranges();
    for (int64_t i = 0; i < threads_; ++i) {
        ranges[i].first = items * i / threads_;
        ranges[i].next.store(ranges[i].first, std::memory_order_relaxed);
        ranges[i].stop = items * (i + 1) / threads_;
    }
    return ranges;
}

}  // namespace foretell
