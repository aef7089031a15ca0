// The limit of shared memory: a copy and a flag between two processes, with nothing around them.
//
// memory target|initiator NBYTES ping-pong|one-way|stream COPY, where COPY is memcpy, rep-movsb, nt-sse2, nt-avx2 or
// nt-avx512.
// stream: one way through two slots; a second flag gives each back.
#include "lines.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef void copy_t(char* to, const char* from, size_t nbytes);
typedef _Atomic uint64_t word_t;

static void copy_memcpy(char* to, const char* from, size_t nbytes) { memcpy(to, from, nbytes); }

#if defined(__x86_64__)
static void copy_rep_movsb(char* to, const char* from, size_t nbytes) {
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(nbytes)::"memory");
}

static void copy_nt_sse2(char* to, const char* from, size_t nbytes) {
    size_t i = 0;
    for (; i + 64 <= nbytes; i += 64) {
        _mm_prefetch(from + i + 512, _MM_HINT_NTA);
        for (size_t k = i; k < i + 64; k += 16)
            _mm_stream_si128((__m128i*)(to + k), _mm_load_si128((const __m128i*)(from + k)));
    }
    _mm_sfence();  // streaming stores are not ordered before the flag without it
    memcpy(to + i, from + i, nbytes - i);
}

__attribute__((target("avx2"))) static inline void nt_line(char* to, const char* from) {
    _mm_prefetch(from + 512, _MM_HINT_T0);
    const __m256i a = _mm256_loadu_si256((const __m256i*)from), b = _mm256_loadu_si256((const __m256i*)(from + 32));
    _mm256_stream_si256((__m256i*)to, a);
    _mm256_stream_si256((__m256i*)(to + 32), b);
}

// Two streams, 64 KiB apart, and the source fetched into all caches.
__attribute__((target("avx2"))) static void copy_nt_avx2(char* to, const char* from, size_t nbytes) {
    const size_t apart = 64 << 10;
    size_t i = 0;
    for (; i + 2 * apart <= nbytes; i += 2 * apart) {
        for (size_t k = i; k < i + apart; k += 128) {
            for (size_t j = k; j < k + 128; j += 64) nt_line(to + j, from + j);
            for (size_t j = k + apart; j < k + apart + 128; j += 64) nt_line(to + j, from + j);
        }
    }
    _mm_sfence();
    memcpy(to + i, from + i, nbytes - i);
}

__attribute__((target("avx512f"))) static void copy_nt_avx512(char* to, const char* from, size_t nbytes) {
    size_t i = 0;
    for (; i + 128 <= nbytes; i += 128) {
        _mm_prefetch(from + i + 1024, _MM_HINT_NTA);
        _mm_prefetch(from + i + 1088, _MM_HINT_NTA);
        const __m512i a = _mm512_load_si512(from + i), b = _mm512_load_si512(from + i + 64);
        _mm512_stream_si512((void*)(to + i), a);
        _mm512_stream_si512((void*)(to + i + 64), b);
    }
    _mm_sfence();
    memcpy(to + i, from + i, nbytes - i);
}
#endif

static copy_t* find_copy(const char* name) {
    if (!strcmp(name, "memcpy")) return copy_memcpy;
#if defined(__x86_64__)
    if (!strcmp(name, "rep-movsb")) return copy_rep_movsb;
    if (!strcmp(name, "nt-sse2")) return copy_nt_sse2;
    if (!strcmp(name, "nt-avx2") && __builtin_cpu_supports("avx2")) return copy_nt_avx2;
    if (!strcmp(name, "nt-avx512") && __builtin_cpu_supports("avx512f")) return copy_nt_avx512;
#endif
    errno = ENOTSUP;
    die(name);
    return NULL;
}

// For a process that has mapped the memory itself and loads this file as a library.
void copy_and_flag(const char* name, char* to, const char* from, size_t nbytes, word_t* flag, uint64_t value) {
    find_copy(name)(to, from, nbytes);
    atomic_store_explicit(flag, value, memory_order_release);
}

static void await(word_t* word, uint64_t value) {
    for (long spins = 1; atomic_load_explicit(word, memory_order_acquire) < value; spins++) {
#if defined(__x86_64__)
        _mm_pause();
#endif
        if (spins % 100000 == 0) sched_yield();  // both may have to share one core
    }
}

static char* map(int fd, size_t nbytes) {
    const int flags = MAP_SHARED | MAP_POPULATE | (fd < 0 ? MAP_ANONYMOUS : 0);
    char* p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (p == MAP_FAILED) die("mmap");
    return p;
}

int main(int argc, char** argv) {
    if (argc != 5) return 2;
    const int target = !strcmp(argv[1], "target"), ping_pong = !strcmp(argv[3], "ping-pong");
    const int stream = !strcmp(argv[3], "stream");
    const size_t nbytes = strtoul(argv[2], NULL, 10), room = (nbytes + BLOCK - 1) / BLOCK * BLOCK;
    copy_t* copy = find_copy(argv[4]);
    char line[LINE] = "-", theirs[LINE];
    leave_with_parent();
    int fd = -1, pid = 0;
    if (target) {
        fd = memfd_create("bench", 0);
        if (fd < 0 || ftruncate(fd, (off_t)(BLOCK + 2 * room))) die("memfd");
        snprintf(line, sizeof line, "%d %d", getpid(), fd);
    }
    hello(line, theirs);
    if (!target) {
        if (sscanf(theirs, "%d %d", &pid, &fd) != 2) die(theirs);
        snprintf(line, sizeof line, "/proc/%d/fd/%d", pid, fd);
        if ((fd = open(line, O_RDWR)) < 0) die(line);
    }
    char* shared = map(fd, BLOCK + 2 * room);
    char* source = target && !ping_pong ? NULL : map(-1, room);
    word_t *to_target = (word_t*)shared, *to_initiator = (word_t*)(shared + 256);
    char *there = shared + BLOCK, *here = there + room;
    uint64_t at = 0;
    ready();
    for (struct run run; next_run(&run);) {
        const uint64_t begin = at + (uint64_t)run.warm, end = begin + (uint64_t)run.count;
        double start = now();
        if (source) fill(source, nbytes, run.round);
        if (target && stream) {
            while (at < end) {
                await(to_target, ++at);
                atomic_store_explicit(to_initiator, at, memory_order_release);
            }
        } else if (target && ping_pong) {
            while (at < end) {
                await(to_target, ++at);
                copy(here, source, nbytes);
                atomic_store_explicit(to_initiator, at, memory_order_release);
            }
        } else if (!target) {
            while (at < end) {
                if (stream && at) await(to_initiator, at == begin ? at : at - 1);
                if (at == begin) start = now();
                at++;
                copy(stream && at % 2 ? here : there, source, nbytes);
                atomic_store_explicit(to_target, at, memory_order_release);
                if (ping_pong) await(to_initiator, at);
            }
            if (stream) await(to_initiator, end);
            start = now() - start;
        }
        if (target) {
            // One way: this line came when the initiator was done. Until then this process slept.
            await(to_target, at = end);
        }
        if (target || ping_pong) check(target && !(stream && end % 2) ? there : here, nbytes, run.round);
        answer(target ? 0 : start);
    }
    return 0;
}
