// Threads that share the chunks of one job. The caller works too, so a worker that is late is not waited for.
#pragma once

#include <cstdint>

namespace foretell {

using Task = void (*)(const void* job, int64_t chunk);

// Run task(job, 0) .. task(job, chunks - 1) on up to `threads` threads, and return when all are done.
void run_chunks(int threads, int64_t chunks, Task task, const void* job);

}  // namespace foretell
