// Functions that are compiled for several instruction sets, and chosen when the library is loaded.
#pragma once

// For what is compiled into them, or into a file that is compiled for one.
#define FORETELL_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define SEVERAL __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define SEVERAL
#endif
