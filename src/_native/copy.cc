#include "copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#include <xmmintrin.h>
#endif

namespace tw {

#if defined(__x86_64__)
static void copy_streaming(char* target, const char* source, size_t nbytes) {
    const size_t head = (16 - (reinterpret_cast<uintptr_t>(target) & 15)) & 15;
    memcpy(target, source, head);
    size_t i = head;
    for (; i + 64 <= nbytes; i += 64) {
        _mm_prefetch(source + i + 512, _MM_HINT_NTA);
        const auto* s = reinterpret_cast<const __m128i*>(source + i);
        auto* t = reinterpret_cast<__m128i*>(target + i);
        const __m128i a = _mm_loadu_si128(s), b = _mm_loadu_si128(s + 1), c = _mm_loadu_si128(s + 2), d = _mm_loadu_si128(s + 3);
        _mm_stream_si128(t, a);
        _mm_stream_si128(t + 1, b);
        _mm_stream_si128(t + 2, c);
        _mm_stream_si128(t + 3, d);
    }
    // Streaming stores are weakly ordered: without this fence a reader of the signal sees torn payloads.
    _mm_sfence();
    memcpy(target + i, source + i, nbytes - i);
}
#endif

void copy(void* target, const void* source, size_t nbytes) {
#if defined(__x86_64__)
    if (nbytes >= streaming_bytes) {
        copy_streaming(static_cast<char*>(target), static_cast<const char*>(source), nbytes);
        return;
    }
#endif
    if (nbytes) memcpy(target, source, nbytes);
}

}  // namespace tw
