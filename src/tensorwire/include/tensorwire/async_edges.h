/* Edges for programs in C or C++: a framework's own threads send and receive, none of them waits, and none needs Python.
 *
 * Python connects an edge (tensorwire.edge.async_edge) and hands over the address of its end, which stays valid until the
 * process ends. `tensorwire._native.async_edges()` is the address of the functions. Any thread may call; a callback runs in
 * the calling thread, or in one of Tensorwire's, and must not wait.
 *
 * Tensors arrive in the order in which they are sent, and a consumer takes one after the other. What fills more than a slot
 * comes in pieces; else the consumer may look at it where it lies.
 */
#ifndef TENSORWIRE_ASYNC_EDGES_H
#define TENSORWIRE_ASYNC_EDGES_H

#include <stdint.h>

#define TENSORWIRE_ASYNC_EDGES_VERSION 3

/* What became of a send or a receive. Refused: what arrived is malformed, or `allocate` did not want it. */
enum { TW_DONE = 0, TW_TIMED_OUT = 1, TW_LOST = 2, TW_REFUSED = 3 };

/* Kinds of headers that these edges carry: a tensor, or bytes that only the framework can make a tensor of. */
enum { TW_TENSOR = 1, TW_ENCODED = 5 };
enum { TW_MOST_DIMENSIONS = 8, TW_BYTES = 1 /* the dtype of encoded bytes, which have one dimension */ };

/* In front of each tensor, in little-endian order: docs/edges.md. A sender sets kind, dtype, rank, step, nbytes and lengths. */
struct tw_header {
    char magic[4];
    uint8_t version, kind, dtype, rank;
    uint64_t step, nbytes, offset, value;
    unsigned char region[32];
    uint64_t lengths[TW_MOST_DIMENSIONS], strides[TW_MOST_DIMENSIONS];
    unsigned char unused[56];
};

typedef void (*tw_call)(void* context, int outcome);
/* Memory for the `nbytes` of a header, or null to refuse it. `whole`: where they all lie already, if they do: if that is
 * returned, they stay there, perhaps read-only, until the slot of that number is released. */
typedef void* (*tw_allocate)(void* context, const struct tw_header* header, const void* whole, uint64_t slot);

struct tw_async_edges {
    uint64_t version;
    /* Sends `data`, the `nbytes` of a header. Calls `sent`, perhaps before it returns, when the data may be reused: it was
     * copied, or if it lies in memory that is lent, the consumer has released it. Once a send has timed out or is lost, so
     * are all that wait and all that come later. */
    void (*send)(void* producer, const struct tw_header* header, const void* data, tw_call sent, void* context);
    /* Takes the next tensor, one at a time. `allocate` is called when its header is here, `taken` when all of it is, both
     * perhaps before this returns. After a timeout, the next call goes on. */
    void (*take)(void* consumer, tw_allocate allocate, tw_call taken, void* context);
    /* Whether the next tensor begins to arrive within `seconds`, in which the caller's thread sees to it. */
    int (*arrives)(void* consumer, double seconds);
    /* Gives a slot back. The producer gets it when those before it came back, too. */
    void (*release)(void* consumer, uint64_t slot);
    /* Why an end is lost or refuses, for people: at most `nbytes` characters with the zero at their end. */
    void (*reason)(void* end, char* text, uint64_t nbytes);
};

#endif
