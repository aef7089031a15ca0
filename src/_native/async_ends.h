// The ends of edges that need no Python: see tensorwire/async_edges.h.
#pragma once

#include <deque>
#include <set>

#include "edge_header.h"
#include "engine.h"
#include "watcher.h"

namespace tw {

// `count` slots of `nbytes`, none of which share a cache line; number n is in slot n % count.
struct Ring {
    u64 nbytes = 0, count = 1;
    u64 stride() const { return (nbytes + 63) / 64 * 64; }
    u64 at(u64 number) const { return number % count * stride(); }
};

// How an end's words, and a producer's slots, get to the other end.
class Path {
  public:
    virtual ~Path() = default;
    // Brings the header, if there is one, and the data into the slot of that number, which is free, and raises the word.
    // False: the peer is lost.
    virtual bool carry(u64 number, const EdgeHeader* header, const char* data, u64 nbytes) = 0;
    virtual bool raise(u64 number) = 0;  // the word alone

  protected:
    // Fills a slot, and counts the copy; how many bytes it has now.
    static u64 fill(char* slot, const EdgeHeader* header, const char* data, u64 nbytes);
};

// The peer's memory is mapped here. `slots`: null for a consumer, here and below.
std::unique_ptr<Path> mapped_path(std::shared_ptr<Span> words, u64 word, std::shared_ptr<Span> slots = nullptr, Ring ring = {});
// Over a connection of the tcp engine, from slots of our own to those with the key.
std::unique_ptr<Path> posted_path(std::shared_ptr<Connection> connection, u64 words_key, u64 word, std::shared_ptr<Span> slots = nullptr, Ring ring = {}, u64 key = 0);

// What an end waits for: its word, which is the credit or the arrival, and its peer; and how long.
struct Awaited {
    std::shared_ptr<Watcher> watcher;
    u64 word;
    std::shared_ptr<Liveness> peer;
    double seconds;
};

class AsyncEnd {
  public:
    explicit AsyncEnd(Awaited awaited) : watcher_(std::move(awaited.watcher)), word_(awaited.word), peer_(std::move(awaited.peer)), seconds_(awaited.seconds) {}
    std::string reason();

  protected:
    const std::shared_ptr<Watcher> watcher_;
    const u64 word_;
    const std::shared_ptr<Liveness> peer_;
    const double seconds_;
    std::mutex mutex_;
    std::string refused_;  // why what arrived is
};

// Memory that the producer lends: what lies there is not copied into slots. The region is packed, as the peer knows it.
struct Lent {
    std::shared_ptr<Span> memory;  // null: nothing is lent
    unsigned char region[sizeof EdgeHeader::region] = {};
};

class AsyncProducer : public AsyncEnd {
  public:
    AsyncProducer(Awaited awaited, std::unique_ptr<Path> path, Ring ring, Lent lends = {})
        : AsyncEnd(std::move(awaited)), path_(std::move(path)), ring_(ring), lends_(std::move(lends)) {}
    // The caller sets what async_edges.h says.
    void send(EdgeHeader header, const char* data, std::function<void(Outcome)> sent);

  private:
    struct Waiting {
        EdgeHeader header;
        const char* data;
        u64 nbytes;  // that slots hold: none of what is lent
        std::function<void(Outcome)> sent;
        bool begun = false;
        u64 at = 0;  // bytes of them that have left
    };
    bool lend(EdgeHeader& header, const char* data) const;
    bool free(u64 number) const { return number <= ring_.count || watcher_->reached(word_, number - ring_.count); }
    void advance(Outcome outcome);

    const std::unique_ptr<Path> path_;
    const Ring ring_;
    const Lent lends_;
    std::deque<Waiting> waiting_;
    u64 last_ = 0;            // the last slot that was sent
    bool watching_ = false;   // the watcher will call `advance`
    Outcome ended_ = Outcome::reached;  // else why nothing is sent any more
};

class AsyncConsumer : public AsyncEnd {
  public:
    using Allocate = std::function<void*(const EdgeHeader&, const void*, u64)>;
    using Taken = std::function<void(int)>;  // with an outcome of async_edges.h

    // `lent`: mapped here.
    AsyncConsumer(Awaited awaited, std::shared_ptr<Span> memory, Ring ring, std::unique_ptr<Path> credit, Lent lent = {})
        : AsyncEnd(std::move(awaited)), memory_(std::move(memory)), ring_(ring), credit_(std::move(credit)), lent_(std::move(lent)) {}
    void take(Allocate allocate, Taken taken);
    bool arrives(double seconds) const { return watcher_->arrives(word_, next_, *peer_, seconds); }
    void release(u64 number);

  private:
    // A tensor of which some pieces have arrived.
    struct Taking {
        bool begun = false;
        EdgeHeader header;
        char* data;
        u64 at;  // bytes that are there
    };
    const char* read(EdgeHeader& header);
    void go_on(Outcome outcome);
    bool take_piece();

    const std::shared_ptr<Span> memory_;
    const Ring ring_;
    const std::unique_ptr<Path> credit_;
    const Lent lent_;
    std::set<u64> released_;  // above `last_`
    u64 last_ = 0;            // up to here all slots came back
    std::atomic<u64> next_{1};  // the slot of the next piece; changed by one thread at a time, as what follows
    Taking taking_;
    Allocate allocate_;
    Taken taken_;
};

// What other languages see.
const tw_async_edges& async_edges();

}  // namespace tw
