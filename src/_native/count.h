// The counters of this process: what was transferred, copied and registered.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace tw {

enum class Counter { messages, bytes, mapped_bytes, copies, copied_bytes, registrations, rpcs, pickles };
constexpr const char* counter_names[] = {"messages", "bytes", "mapped_bytes", "copies", "copied_bytes", "registrations", "rpcs", "pickles"};
constexpr size_t counter_count = std::size(counter_names);

inline std::array<std::atomic<uint64_t>, counter_count> counted{};

inline void count(Counter which, uint64_t n = 1) {
    counted[static_cast<size_t>(which)].fetch_add(n, std::memory_order_relaxed);
}

}  // namespace tw
