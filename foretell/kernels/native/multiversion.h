// Function multiversioning: functions compiled for several instruction sets, selected when the library is loaded.
#pragma once

// For functions inlined into those, or into a file that is compiled for one instruction set.
#define FORETELL_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define MULTIVERSION
#endif
