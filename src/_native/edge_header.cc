#include "edge_header.h"

#include <algorithm>
#include <cstring>

namespace tw {
namespace {

constexpr char magic[] = {'T', 'W', 'E', 'H'};
constexpr u8 version = 2;
enum Kind : u8 { tensor = TW_TENSOR, integer = 2, floating = 3, boolean = 4, encoded = TW_ENCODED };

template <typename T>
bool zero(const T& bytes) {
    return std::all_of(std::begin(bytes), std::end(bytes), [](auto each) { return each == 0; });
}

// False: the product is most_bytes or more.
bool multiply(u64& number, u64 by) { return !__builtin_mul_overflow(number, by, &number) && number < most_bytes; }

// Whether the payload of a tensor, gaps included, has the bytes that the header says, and nothing overflows on the way
// there or to strides.
bool fits(const EdgeHeader& h) {
    if (h.dtype >= std::size(dtypes) || h.rank > TW_MOST_DIMENSIONS) return false;
    u64 size = dtypes[h.dtype].nbytes;  // of a contiguous tensor, without its empty dimensions
    u64 last = 0;                       // the last element
    bool empty = false, too_far = false;
    for (int dim = 0; dim < TW_MOST_DIMENSIONS; ++dim) {
        const u64 length = h.lengths[dim], stride = h.strides[dim];
        if (dim >= h.rank) {
            if (length || stride) return false;
            continue;
        }
        empty |= !length;
        u64 reach = std::max<u64>(length, 1) - 1;
        if (stride >= most_bytes || !multiply(size, reach + 1)) return false;
        too_far |= !multiply(reach, stride) || (last += reach) >= most_bytes;
    }
    if (empty) return h.nbytes == 0;
    return !too_far && multiply(++last, dtypes[h.dtype].nbytes) && last == h.nbytes;
}

}  // namespace

void mark(EdgeHeader& header) {
    std::memcpy(header.magic, magic, sizeof magic);
    header.version = version;
}

void lie_contiguous(EdgeHeader& header) {
    u64 stride = 1;
    for (int dim = header.rank; dim--;) {
        header.strides[dim] = stride;
        stride *= std::max<u64>(header.lengths[dim], 1);
    }
}

std::string refusal(const EdgeHeader& h, u64 bound, u64 memory, bool encodes) {
    if (std::memcmp(h.magic, magic, sizeof magic) || h.version != version)
        return "not a header of this version of Tensorwire: use the same version and kind of edge at both ends";
    const bool nowhere = zero(h.region);
    if (h.kind == tensor || (encodes && h.kind == encoded)) {
        if (!fits(h)) return "malformed header: " + std::to_string(h.nbytes) + " bytes for a tensor of other lengths, strides, rank or dtype";
        if (h.kind == encoded && (h.dtype != TW_BYTES || h.rank != 1)) return "malformed header: what is encoded is not bytes";
        if (h.nbytes > bound) return "a tensor of " + std::to_string(h.nbytes) + " bytes on an edge for " + std::to_string(bound) + ": the same bound at both ends";
        if (h.value) return "malformed header: a tensor with a number";
        u64 head;  // of a remote region: its length, above access and version
        std::memcpy(&head, h.region, sizeof head);
        const u64 room = nowhere ? memory : head >> 16;
        if ((h.offset || !nowhere) && (h.offset > room || h.nbytes > room - h.offset))
            return "malformed header: " + std::to_string(h.nbytes) + " bytes at " + std::to_string(h.offset) + " of " + std::to_string(room);
        return "";
    }
    if (h.dtype || h.rank || !zero(h.lengths) || !zero(h.strides) || !nowhere || h.offset || h.nbytes) return "malformed header: a number with a shape or a payload";
    const bool known = h.kind == integer || h.kind == floating || (h.kind == boolean && h.value < 2);
    return known ? "" : "malformed header: kind " + std::to_string(h.kind) + ", value " + std::to_string(h.value);
}

}  // namespace tw
