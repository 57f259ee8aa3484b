// Entry point of single linear layers, and the selection of the instruction set.
#include "entry.h"
#include "kernels.h"
#include "pool.h"
#include "gemm.h"

namespace foretell {

const Kernels& kernels_of(int32_t level) {
#if defined(__x86_64__)
    if (level == 2) return vnni_kernels;
    if (level == 1) return avx2_kernels;
#endif
    (void)level;
    return portable_kernels;
}

}  // namespace foretell

// Return the best level of `kernels_of` on this CPU. Lower levels work, too.
FORETELL_API int foretell_best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (wide && __builtin_cpu_supports("avx512vnni")) return 2;
    const bool converts = __builtin_cpu_supports("f16c");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts) return 1;
#endif
    return 0;
}

// Multiply x [count, inputs] by the weights, into y [count, outputs].
FORETELL_API int64_t foretell_linear(
    const foretell::Weights* weights, const float* x, int64_t count, float* y, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        Team team(count * weights->inputs * weights->outputs < kMinParallelProducts ? 1 : threads);
        multiply(team, *weights, scratch<QuantizedInputs>().quantize(team, *weights, x, count), count, y);
        return 0;
    });
}
