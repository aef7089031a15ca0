/* Edges for programs in C or C++: a framework's own threads send and receive, none of them waits, and none needs Python.
 *
 * Python connects an edge (tensorwire.edge.async_edge) and hands over the address of its end, which stays valid until the
 * process ends. `tensorwire._native.async_edges()` is the address of the functions. Any thread may call; a callback runs in
 * the calling thread, or in one of Tensorwire's, and must not wait.
 */
#ifndef TENSORWIRE_ASYNC_EDGES_H
#define TENSORWIRE_ASYNC_EDGES_H

#include <stdint.h>

#define TENSORWIRE_ASYNC_EDGES_VERSION 2

/* What became of a send or a receive. */
enum { TW_DONE = 0, TW_TIMED_OUT = 1, TW_LOST = 2 };

typedef void (*tw_call)(void* context, int outcome);

struct tw_async_edges {
    uint64_t version;
    /* Sends `data` in `step`, 1 or more, once the steps before it have been sent and the consumer has released a slot.
     * Calls `sent`, perhaps before it returns, when the data may be reused: it was copied, or if it lies in memory that
     * is lent, the consumer has released it. It waits for those steps no longer than for a slot; once one has timed out
     * or is lost, so are all that wait and all that come later. */
    void (*send)(void* producer, uint64_t step, const void* data, uint64_t nbytes, tw_call sent, void* context);
    /* Calls `arrived` when `step` has arrived. If it has, that is before this returns, which is with 0; else with a ticket. */
    uint64_t (*receive)(void* consumer, uint64_t step, tw_call arrived, void* context);
    /* Whether `step` has arrived, or does so within `seconds`, in which the caller's thread sees to it. */
    int (*arrives)(void* consumer, uint64_t step, double seconds);
    /* Whether `arrived` was still to be called, and will not be. */
    int (*cancel)(void* consumer, uint64_t ticket);
    /* The memory of a step that has arrived, until it is released; it may be read-only. */
    const void* (*slot)(void* consumer, uint64_t step);
    /* Gives a slot back. The producer gets it when those of all earlier steps came back, too. */
    void (*release)(void* consumer, uint64_t step);
    /* Counts a copy that the caller made. */
    void (*copied)(uint64_t nbytes);
    /* Why an end is lost, for people: at most `nbytes` characters with the zero at their end. */
    void (*reason)(void* end, char* text, uint64_t nbytes);
};

#endif
