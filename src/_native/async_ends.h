// The ends of edges that need no Python: see tensorwire/async_edges.h.
#pragma once

#include <map>
#include <set>

#include "../tensorwire/include/tensorwire/async_edges.h"
#include "engine.h"
#include "watcher.h"

namespace tw {

// `count` slots, `stride` bytes apart; step n uses slot n % count.
struct Ring {
    u64 first, stride, nbytes, count;
    u64 at(u64 step) const { return first + (step % count) * stride; }
};

// In front of what a slot holds.
struct SlotHeader {
    u64 lent = 0;  // 0: the data follow; else one more than where they lie in the memory that the producer lends
    u64 unused[7] = {};
};
static_assert(sizeof(SlotHeader) == 64);

// Brings both into a slot; counts the copy, if the data are not lent.
void fill_slot(char* slot, const SlotHeader& header, const char* data, u64 nbytes);

// A word by which the other end learns of a step, and how it gets there.
class Announcement {
  public:
    virtual ~Announcement() = default;
    virtual bool raise(u64 step) = 0;  // false: the peer is lost
};

// How a producer's bytes get into the consumer's slots.
class Carrier {
  public:
    virtual ~Carrier() = default;
    // Brings both into the slot of `step`, which is free, and announces it. False: the peer is lost.
    virtual bool carry(u64 step, const SlotHeader& header, const char* data, u64 nbytes) = 0;
};

// The consumer's memory is mapped here.
std::unique_ptr<Carrier> mapped_carrier(std::shared_ptr<Span> slots, Ring ring, std::shared_ptr<Span> words, u64 arrival);
std::unique_ptr<Announcement> mapped_announcement(std::shared_ptr<Span> words, u64 offset);

struct RemoteRing {
    u64 key;  // of the slots
    Ring ring;
    u64 words_key, arrival;
};
// Over a connection of the tcp engine, from slots of our own.
std::unique_ptr<Carrier> posted_carrier(std::shared_ptr<Connection> connection, std::shared_ptr<Span> source, Ring ours, RemoteRing theirs);
std::unique_ptr<Announcement> posted_announcement(std::shared_ptr<Connection> connection, u64 key, u64 offset);

// What both ends have: their word, their peer, and how long they wait.
class AsyncEnd {
  public:
    AsyncEnd(std::shared_ptr<Watcher> watcher, u64 word, std::shared_ptr<Liveness> peer, double seconds)
        : watcher_(std::move(watcher)), word_(word), peer_(std::move(peer)), seconds_(seconds) {}
    std::string reason() { return peer_->lost() ? peer_->reason() : "the edge was closed"; }

  protected:
    const std::shared_ptr<Watcher> watcher_;
    const u64 word_;  // the credit, or the arrival
    const std::shared_ptr<Liveness> peer_;
    const double seconds_;
};

class AsyncProducer : public AsyncEnd {
  public:
    // `lends`: memory of this process that the consumer maps; null: none.
    AsyncProducer(AsyncEnd end, std::unique_ptr<Carrier> carrier, Ring ring, std::shared_ptr<Span> lends)
        : AsyncEnd(std::move(end)), carrier_(std::move(carrier)), ring_(ring), lends_(std::move(lends)) {}
    void send(u64 step, const char* data, u64 nbytes, std::function<void(Outcome)> sent);

  private:
    struct Waiting {
        const char* data;
        u64 nbytes;
        std::function<void(Outcome)> sent;
        u64 timer = 0;  // of one whose predecessors have not come
    };
    u64 lent(const char* data, u64 nbytes) const;
    bool free(u64 step) const { return step <= ring_.count || watcher_->reached(word_, step - ring_.count); }
    void advance(Outcome outcome);
    void limit(u64 step);

    const std::unique_ptr<Carrier> carrier_;
    const Ring ring_;
    const std::shared_ptr<Span> lends_;
    std::mutex mutex_;
    std::map<u64, Waiting> waiting_;  // by step
    u64 last_ = 0;                    // the last step that was sent
    bool watching_ = false;           // the watcher will call `advance`
    Outcome ended_ = Outcome::reached;  // else why nothing is sent any more
};

class AsyncConsumer : public AsyncEnd {
  public:
    // `lent`: what the producer lends, mapped here; null: nothing.
    AsyncConsumer(AsyncEnd end, std::shared_ptr<Span> memory, Ring ring, std::unique_ptr<Announcement> credit, std::shared_ptr<Span> lent)
        : AsyncEnd(std::move(end)), memory_(std::move(memory)), ring_(ring), credit_(std::move(credit)), lent_(std::move(lent)) {}
    u64 receive(u64 step, std::function<void(Outcome)> arrived);
    bool arrives(u64 step, double seconds) const { return watcher_->arrives(word_, step, *peer_, seconds); }
    bool cancel(u64 ticket) { return watcher_->cancel(ticket); }
    const char* slot(u64 step) const;
    void release(u64 step);

  private:
    const std::shared_ptr<Span> memory_;
    const Ring ring_;
    const std::unique_ptr<Announcement> credit_;
    const std::shared_ptr<Span> lent_;
    std::mutex mutex_;
    std::set<u64> released_;  // above `last_`
    u64 last_ = 0;            // up to here all slots came back
};

// What other languages see.
const tw_async_edges& async_edges();

}  // namespace tw
