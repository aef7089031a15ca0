#include "copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>

#include "span.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tw {

namespace {

constexpr size_t piece_bytes = 64 << 10;  // smaller pieces of something large are plain copies
constexpr int least_rounds = 2, most_rounds = 5;
constexpr size_t timed_bytes[] = {1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20};

// Tables are never freed: a copy may look at one that was replaced. There are few.
std::atomic<const Steps*> current{new Steps{{size_t{16} << 20, Kernel::streaming}}};
std::atomic<uint64_t> counts[kernel_count];

#if defined(__x86_64__)
void copy_movsb(char* target, const char* source, size_t nbytes) {
    asm volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(nbytes) : : "memory");
}

// Two streams, so far apart that each has pages and banks of memory of its own: 5 to 25 % faster from 16 MiB on than one.
constexpr size_t apart = 64 << 10;
constexpr size_t page_bytes = 4096;
// How far the source is fetched in front of the copy, into all caches: with PREFETCHNTA Intel's take twice the time.
constexpr size_t ahead = 512;
constexpr unsigned erms = 1 << 9;  // of leaf 7's EBX: fast `rep movsb`

// A load waits for an earlier store to the same place of another page. Where the target's place is a little behind the
// source's, a copy towards higher addresses therefore takes two to ten times as long, and one towards lower ones does not.
bool trails(const char* target, const char* source) {
    const size_t behind = (reinterpret_cast<uintptr_t>(target) - reinterpret_cast<uintptr_t>(source)) % page_bytes;
    return behind && behind < page_bytes / 2;
}

// Copies lines to an aligned target, and returns how many bytes that was.
#define TW_STREAM(name, isa, Vector, load, stream)                                                                    \
    __attribute__((target(isa))) size_t name(char* target, const char* source, size_t nbytes) {                      \
        const auto line = [&](size_t at, size_t ahead) __attribute__((target(isa), always_inline)) {                 \
            _mm_prefetch(source + at + ahead, _MM_HINT_T0);                                                           \
            constexpr size_t count = 64 / sizeof(Vector);                                                             \
            Vector v[count];                                                                                          \
            for (size_t k = 0; k < count; k++) v[k] = load(reinterpret_cast<const Vector*>(source + at) + k);         \
            for (size_t k = 0; k < count; k++) stream(reinterpret_cast<Vector*>(target + at) + k, v[k]);              \
        };                                                                                                            \
        const size_t whole = nbytes - nbytes % 64, pairs = nbytes - nbytes % (2 * apart);                             \
        if (trails(target, source)) {                                                                                 \
            for (size_t i = whole; i > pairs; i -= 64) line(i - 64, -ahead);                                          \
            for (size_t i = pairs; i; i -= 2 * apart)                                                                 \
                for (size_t k = i; k > i - apart; k -= 128)                                                           \
                    line(k - 64, -ahead), line(k - 128, -ahead), line(k - apart - 64, -ahead), line(k - apart - 128, -ahead); \
            return whole;                                                                                             \
        }                                                                                                             \
        for (size_t i = 0; i < pairs; i += 2 * apart)                                                                 \
            for (size_t k = i; k < i + apart; k += 128) line(k, ahead), line(k + 64, ahead), line(k + apart, ahead), line(k + apart + 64, ahead); \
        for (size_t i = pairs; i < whole; i += 64) line(i, ahead);                                                    \
        return whole;                                                                                                 \
    }
TW_STREAM(stream_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
TW_STREAM(stream_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
TW_STREAM(stream_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
#undef TW_STREAM

using Stream = size_t (*)(char*, const char*, size_t);

Stream widest() {
    if (__builtin_cpu_supports("avx512f")) return stream_avx512;
    return __builtin_cpu_supports("avx2") ? stream_avx2 : stream_sse2;
}

void copy_streaming(char* target, const char* source, size_t nbytes) {
    static const Stream stream = widest();
    const size_t head = std::min(nbytes, -reinterpret_cast<uintptr_t>(target) & 63);  // whole cache lines from there on
    memcpy(target, source, head);
    const size_t done = head + stream(target + head, source + head, nbytes - head);
    // Streaming stores are weakly ordered: without this fence a reader of the signal sees torn payloads.
    _mm_sfence();
    memcpy(target + done, source + done, nbytes - done);
}
#endif

}  // namespace

bool has(Kernel kernel) {
#if defined(__x86_64__)
    unsigned a, b = 0, c, d;
    if (kernel == Kernel::movsb) return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & erms);
    return true;
#else
    return kernel == Kernel::plain;
#endif
}

Steps steps() { return *current.load(std::memory_order_acquire); }

void set_steps(Steps steps) {
    steps.erase(std::remove_if(steps.begin(), steps.end(), [](const auto& step) { return !has(step.second); }), steps.end());
    current.store(new Steps(std::move(steps)), std::memory_order_release);
}

Kernel kernel_for(size_t nbytes) {
    Kernel found = Kernel::plain;
    for (const auto& [from, kernel] : *current.load(std::memory_order_acquire)) {
        if (nbytes < from) break;
        found = kernel;
    }
    return found;
}

bool is_large(size_t nbytes) {
    const Steps& steps = *current.load(std::memory_order_acquire);
    return !steps.empty() && nbytes >= steps.back().first;
}

uint64_t copied_by(Kernel kernel) { return counts[static_cast<size_t>(kernel)].load(std::memory_order_relaxed); }

void copy_by([[maybe_unused]] Kernel kernel, void* target, const void* source, size_t nbytes) {
#if defined(__x86_64__)
    if (kernel != Kernel::plain) {
        counts[static_cast<size_t>(kernel)].fetch_add(1, std::memory_order_relaxed);
        auto* run = kernel == Kernel::movsb ? copy_movsb : copy_streaming;
        run(static_cast<char*>(target), static_cast<const char*>(source), nbytes);
        return;
    }
#endif
    if (nbytes) memcpy(target, source, nbytes);
}

void copy(void* target, const void* source, size_t nbytes, bool part) {
    const bool large = part && nbytes >= piece_bytes;
    copy_by(nbytes < piece_bytes ? Kernel::plain : kernel_for(large ? std::numeric_limits<size_t>::max() : nbytes), target, source, nbytes);
}

namespace {

using Timed = std::vector<std::pair<size_t, std::vector<double>>>;

Timed medians(std::vector<double> (&taken)[std::size(timed_bytes)][kernel_count]) {
    Timed found;
    for (size_t size = 0; size < std::size(timed_bytes); size++) {
        auto& times = found.emplace_back(timed_bytes[size], std::vector<double>{}).second;
        for (auto& each : taken[size]) {
            if (each.empty()) {
                times.push_back(std::numeric_limits<double>::infinity());
                continue;
            }
            const auto middle = each.begin() + (static_cast<ptrdiff_t>(each.size()) - 1) / 2;
            std::nth_element(each.begin(), middle, each.end());
            times.push_back(*middle);
        }
    }
    return found;
}

}  // namespace

std::vector<std::pair<size_t, std::vector<double>>> time_copies(double seconds) {
    const double end = now() + seconds;
    const size_t most = *std::rbegin(timed_bytes);
    const auto target = Span::allocate(most, true);
    const auto source = Span::allocate(most, true);
    memset(source->base, 1, most);  // some processors copy zeros, and pages that were never touched, faster
    std::vector<double> taken[std::size(timed_bytes)][kernel_count];
    for (int round = 0; round < most_rounds; round++) {
        for (size_t size = 0; size < std::size(timed_bytes); size++) {
            for (size_t which = 0; which < kernel_count; which++) {
                const auto kernel = static_cast<Kernel>(which);
                if (!has(kernel)) continue;
                if (now() > end) return round < least_rounds ? Timed{} : medians(taken);
                // The first ones leave the caches as this kernel leaves them: many, for what fits into them.
                double begin = 0;
                for (size_t turns = std::max<size_t>(most / timed_bytes[size], 2); turns > 0; turns--) {
                    begin = now();
                    copy_by(kernel, target->base, source->base, timed_bytes[size]);
                }
                taken[size][which].push_back(now() - begin);
            }
        }
    }
    return medians(taken);
}

}  // namespace tw
