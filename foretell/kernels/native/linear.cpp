// The library's front: what Python calls, and how the work is cut up.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace foretell {
namespace {

constexpr int64_t kPanel = 128;                  // rows that stay in a core's own cache while the weights pass by
constexpr int64_t kRuns = 2;                     // pieces a thread: more share better, fewer read memory faster
constexpr int64_t kWorthSharing = 1 << 17;       // products; below it waking a thread costs more than it gives
constexpr int64_t kWorthSharingGroups = 1 << 9;  // to quantize

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

const Kernels& kernels_of(int32_t level) {
#if defined(__x86_64__)
    if (level == 2) return vnni_kernels;
    if (level == 1) return avx2_kernels;
#endif
    (void)level;
    return plain_kernels;
}

// Where rows are quantized to; each thread that calls keeps its own.
struct Scratch {
    std::vector<int8_t> values;
    std::vector<float> scales;
    std::vector<int32_t> offsets;

    void fit(int64_t groups) {
        if (int64_t(scales.size()) >= groups) return;
        values.resize(groups * kGroup);
        scales.resize(groups);
        offsets.resize(groups);
    }
};

struct QuantizeJob {
    const float* x;
    int64_t inputs, groups;
    int32_t excess;
    Quantize quantize;
    Scratch* scratch;

    static void run(const void* job, int64_t row) {
        const auto& j = *static_cast<const QuantizeJob*>(job);
        const int64_t at = row * j.groups;
        Scratch& to = *j.scratch;
        const float* const x = j.x + row * j.inputs;
        j.quantize(x, j.inputs, j.excess, &to.values[at * kGroup], &to.scales[at], &to.offsets[at]);
    }
};

// A grid of pieces: some blocks of outputs by a panel of rows.
struct ProductJob {
    const Weights& weights;
    Rows rows;
    Product product;
    int64_t count, blocks, run_blocks, runs;
    float* y;

    static void run(const void* job, int64_t piece) {
        const auto& j = *static_cast<const ProductJob*>(job);
        const int64_t first = piece / j.runs * kPanel, stop = std::min(first + kPanel, j.count);
        const int64_t begin = piece % j.runs * j.run_blocks, end = std::min(begin + j.run_blocks, j.blocks);
        for (int64_t block = begin; block < end; ++block) j.product(j.weights, j.rows, first, stop, block, j.y);
    }
};

Rows quantize(const Weights& weights, const float* x, int64_t count, int threads) {
    static thread_local Scratch scratch;
    const int64_t groups = up(weights.inputs, kGroup);
    scratch.fit(count * groups);
    const int32_t excess = weights.bits == 8 ? kExcess8 : kExcess4;
    const QuantizeJob job{x, weights.inputs, groups, excess, kernels_of(weights.level).quantize, &scratch};
    run_chunks(count * groups < kWorthSharingGroups ? 1 : threads, count, QuantizeJob::run, &job);
    return Rows{scratch.values.data(), scratch.scales.data(), scratch.offsets.data(), groups};
}

}  // namespace
}  // namespace foretell

#define FORETELL_API extern "C" __attribute__((visibility("default")))

// 2: AVX-512 with VNNI; 1: AVX2; 0: neither. Lower ones always work, too.
FORETELL_API int foretell_best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (wide && __builtin_cpu_supports("avx512vnni")) return 2;
    if (__builtin_cpu_supports("avx2")) return 1;
#endif
    return 0;
}

// x [count, inputs] times the weights, into y [count, outputs].
FORETELL_API void foretell_linear(
    const foretell::Weights* weights, const float* x, int64_t count, float* y, int threads) {
    using namespace foretell;
    if (count * weights->inputs * weights->outputs < kWorthSharing) threads = 1;
    const Kernels& kernels = kernels_of(weights->level);
    const Rows rows = quantize(*weights, x, count, threads);
    const int64_t blocks = up(weights->outputs, kBlock);
    const int64_t run_blocks = up(blocks, kRuns * threads), runs = up(blocks, run_blocks);
    const Product product = weights->bits == 8 ? kernels.int8 : kernels.int4;
    const ProductJob job{*weights, rows, product, count, blocks, run_blocks, runs, y};
    run_chunks(threads, runs * up(count, kPanel), ProductJob::run, &job);
}
