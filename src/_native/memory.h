// Python's reference to a span, and the checks at the start of every access to it.
#pragma once

#include <nanobind/nanobind.h>

#include "copy.h"
#include "span.h"
#include "unlocked.h"

namespace tw {

struct Memory {
    std::shared_ptr<Span> span;
};

constexpr u64 release_gil_bytes = 64 << 10;  // below, releasing the GIL costs more than it gives

inline void check(const Memory& m, u64 offset, u64 length) {
    if (!m.span->holds(offset, length)) throw nanobind::index_error("out of the region's range");
}

inline void check_writable(const Memory& m) {
    if (!m.span->writable) throw nanobind::value_error("this memory is read-only");
}

inline std::atomic<u64>& word(const Memory& m, u64 offset) {
    check(m, offset, 8);
    if (!m.span->aligned(offset)) throw nanobind::value_error("a signal word must be 8-byte aligned");
    return *m.span->word(offset);
}

// The caller keeps both ends alive.
inline void move(char* target, const char* source, u64 nbytes) {
    // A write is not seen before the one in front of it, on any processor.
    std::atomic_thread_fence(std::memory_order_release);
    if (nbytes < release_gil_bytes) {
        copy(target, source, nbytes);
        return;
    }
    Unlocked unlocked;
    copy(target, source, nbytes);
}

void bind_mapped(nanobind::module_& m);
void bind_holds(nanobind::module_& m);
void bind_edges(nanobind::module_& m);

}  // namespace tw
