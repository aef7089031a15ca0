// The counters of this process: what was transferred, copied and registered.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace tw {

enum class Counter {
    messages, bytes, mapped_bytes, copies, copied_bytes, registrations, rpcs, pickles, pushes, applied, merged, discarded, host_waits
};
constexpr const char* counter_names[] = {"messages", "bytes", "mapped_bytes", "copies", "copied_bytes", "registrations", "rpcs", "pickles",
                                         "pushes", "applied", "merged", "discarded", "host_waits"};
constexpr size_t counter_count = std::size(counter_names);

using Counts = std::array<std::atomic<uint64_t>, counter_count>;
inline Counts counted{}, counted_locked{};

inline void count(Counter which, uint64_t n = 1) {
    counted[static_cast<size_t>(which)].fetch_add(n, std::memory_order_relaxed);
}

// The same by a thread that holds the GIL: nobody else writes there meanwhile, and an atomic addition would cost more
// than the rest of a small write.
inline void count_locked(Counter which, uint64_t n = 1) {
    auto& counter = counted_locked[static_cast<size_t>(which)];
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}

inline uint64_t count_of(size_t which) {
    return counted[which].load(std::memory_order_relaxed) + counted_locked[which].load(std::memory_order_relaxed);
}

}  // namespace tw
