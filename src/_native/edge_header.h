// The header in front of what crosses an edge. docs/edges.md has its layout; no other is on the wire.
#pragma once

#include <string>

#include "../tensorwire/include/tensorwire/async_edges.h"
#include "futex.h"

namespace tw {

using EdgeHeader = tw_header;
static_assert(sizeof(EdgeHeader) == 256);

struct Dtype {
    const char* name;  // that numpy and torch give it; the short floats only torch
    u64 nbytes;
};
// A dtype's place is its number in headers: new ones go to the end.
constexpr Dtype dtypes[] = {
    {"bool", 1}, {"uint8", 1}, {"int8", 1}, {"uint16", 2}, {"int16", 2}, {"float16", 2}, {"bfloat16", 2}, {"uint32", 4}, {"int32", 4}, {"float32", 4},
    {"uint64", 8}, {"int64", 8}, {"float64", 8}, {"complex64", 8}, {"complex128", 16},
    {"float8_e4m3fn", 1}, {"float8_e4m3fnuz", 1}, {"float8_e5m2", 1}, {"float8_e5m2fnuz", 1}, {"float8_e8m0fnu", 1},
};

constexpr u64 most_bytes = u64{1} << 63;  // of a payload: so that no length or offset overflows, in whatever reads it

// Sets magic and version.
void mark(EdgeHeader& header);
// Sets the strides of a tensor whose elements lie in the order of their indices; an empty dimension counts as one of length 1.
void lie_contiguous(EdgeHeader& header);
// Why a peer cannot have meant this; empty if all is well. `bound`: the most bytes of payload. `memory`: the bytes of what an
// offset without a region is in; 0: nothing. `encodes`: whether bytes may come that a framework has encoded.
std::string refusal(const EdgeHeader& header, u64 bound, u64 memory = 0, bool encodes = false);

}  // namespace tw
