// Copies that pick their stores by size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tw {

// Which of them is fastest depends on the processor: docs/devices.md. Plain: the C library's. Streaming stores bypass
// the caches.
enum class Kernel : uint8_t { plain, movsb, streaming };
constexpr const char* kernel_names[] = {"memcpy", "movsb", "streaming"};
constexpr size_t kernel_count = 3;

// From so many bytes on, which kernel; below the first, plain.
using Steps = std::vector<std::pair<size_t, Kernel>>;

bool has(Kernel kernel);  // on this processor
Steps steps();
void set_steps(Steps steps);
Kernel kernel_for(size_t nbytes);
// Whether so much is copied by what the last step says: then its pieces are, too.
bool is_large(size_t nbytes);
uint64_t copied_by(Kernel kernel);  // how many copies, ever; plain ones are not counted

// Ordered before any later release store of this thread, whatever the kernel. `part`: of something large.
void copy(void* target, const void* source, size_t nbytes, bool part = false);
void copy_by(Kernel kernel, void* target, const void* source, size_t nbytes);

// Seconds that each kernel takes for each number of bytes, in 32 MiB of the kind of memory that regions are; infinity
// where it does not exist. Empty if `seconds` are too few on this machine now.
std::vector<std::pair<size_t, std::vector<double>>> time_copies(double seconds);

}  // namespace tw
