#include "async_ends.h"

#include <cstring>

#include "copy.h"
#include "count.h"

namespace tw {
namespace {

constexpr double forever = 1e9;     // seconds: a consumer may keep a tensor as long as it likes
constexpr double post_seconds = 60;  // how long a full connection may take to drain

void count_copy(u64 nbytes) {
    count(Counter::copies);
    count(Counter::copied_bytes, nbytes);
}

constexpr u64 least_kept = 256 << 10;  // a smaller one costs less to copy than to give back, which wakes a thread

class MappedPath final : public Path {
  public:
    MappedPath(std::shared_ptr<Span> words, u64 word, std::shared_ptr<Span> slots, Ring ring)
        : words_(std::move(words)), word_(word), slots_(std::move(slots)), ring_(ring) {}

    bool carry(u64 number, const EdgeHeader* header, const char* data, u64 nbytes) override {
        if (slots_->closed()) return false;
        count(Counter::mapped_bytes, fill(slots_->base + ring_.at(number), header, data, nbytes));
        return raise(number);
    }

    bool raise(u64 number) override {
        if (words_->closed()) return false;
        count(Counter::messages);
        tw::raise(*words_, word_, number);
        return true;
    }

  private:
    const std::shared_ptr<Span> words_;
    const u64 word_;
    const std::shared_ptr<Span> slots_;
    const Ring ring_;
};

class PostedPath final : public Path {
  public:
    PostedPath(std::shared_ptr<Connection> connection, u64 words_key, u64 word, std::shared_ptr<Span> slots, Ring ring, u64 key)
        : connection_(std::move(connection)), words_key_(words_key), word_(word), slots_(std::move(slots)), ring_(ring), key_(key) {}

    bool carry(u64 number, const EdgeHeader* header, const char* data, u64 nbytes) override {
        Frame frame;
        frame.key = key_;
        frame.offset = ring_.at(number);
        frame.length = fill(slots_->base + ring_.at(number), header, data, nbytes);
        return post(frame, slots_, number);
    }

    bool raise(u64 number) override {
        Frame frame;
        frame.offset = no_signal;
        return post(frame, nullptr, number);
    }

  private:
    bool post(Frame& frame, const std::shared_ptr<Span>& memory, u64 number) {
        frame.op = static_cast<u32>(Op::write);
        frame.signal_key = words_key_;
        frame.signal_offset = word_;
        frame.signal_value = number;
        const double end = now() + post_seconds;
        for (u64 id = 0;;) {
            const Outcome outcome = connection_->post(frame, memory, memory ? frame.offset : 0, std::max(0.0, end - now()), false, id);
            if (outcome != Outcome::interrupted) return outcome == Outcome::reached;
        }
    }

    const std::shared_ptr<Connection> connection_;
    const u64 words_key_, word_;
    const std::shared_ptr<Span> slots_;
    const Ring ring_;
    const u64 key_;
};

int number_of(Outcome outcome) {
    return outcome == Outcome::reached ? TW_DONE : outcome == Outcome::timed_out ? TW_TIMED_OUT : TW_LOST;
}

}  // namespace

u64 Path::fill(char* slot, const EdgeHeader* header, const char* data, u64 nbytes) {
    const u64 front = header ? sizeof *header : 0;
    if (header) std::memcpy(slot, header, front);
    if (nbytes) {
        copy(slot + front, data, nbytes);
        count_copy(nbytes);
    }
    return front + nbytes;
}

std::unique_ptr<Path> mapped_path(std::shared_ptr<Span> words, u64 word, std::shared_ptr<Span> slots, Ring ring) {
    return std::make_unique<MappedPath>(std::move(words), word, std::move(slots), ring);
}

std::unique_ptr<Path> posted_path(std::shared_ptr<Connection> connection, u64 words_key, u64 word, std::shared_ptr<Span> slots, Ring ring, u64 key) {
    return std::make_unique<PostedPath>(std::move(connection), words_key, word, std::move(slots), ring, key);
}

std::string AsyncEnd::reason() {
    std::lock_guard g(mutex_);
    return !refused_.empty() ? refused_ : peer_->lost() ? peer_->reason() : "the edge was closed";
}

void AsyncProducer::send(EdgeHeader header, const char* data, std::function<void(Outcome)> sent) {
    mark(header);
    lie_contiguous(header);
    const u64 nbytes = lend(header, data) ? 0 : header.nbytes;
    {
        std::lock_guard g(mutex_);
        waiting_.push_back({header, data, nbytes, std::move(sent)});
    }
    advance(Outcome::reached);
}

// Whether the data lie in what is lent; then the header says where.
bool AsyncProducer::lend(EdgeHeader& header, const char* data) const {
    const Span* memory = lends_.memory.get();
    if (!memory || header.nbytes < least_kept || data < memory->base) return false;
    const u64 offset = static_cast<u64>(data - memory->base);
    if (!memory->holds(offset, header.nbytes)) return false;
    std::memcpy(header.region, lends_.region, sizeof header.region);
    header.offset = offset;
    return true;
}

// Sends what can be sent now; after anything but `reached` all that waits ends so, and what comes later.
// No lock is held while others are called.
void AsyncProducer::advance(Outcome outcome) {
    std::vector<std::pair<std::function<void(Outcome)>, Outcome>> calls;
    std::vector<std::pair<u64, std::function<void(Outcome)>>> borrowed;  // until their slots are released
    u64 credit = 0;  // to wait for
    {
        std::lock_guard g(mutex_);
        if (ended_ == Outcome::reached) ended_ = outcome;
        while (ended_ == Outcome::reached && !waiting_.empty()) {
            const u64 number = last_ + 1;
            if (!free(number)) {
                if (!watching_) credit = number - ring_.count;
                watching_ = true;
                break;
            }
            Waiting& w = waiting_.front();
            const EdgeHeader* header = w.begun ? nullptr : &w.header;
            const u64 piece = std::min(w.nbytes - w.at, ring_.nbytes - (header ? sizeof *header : 0));
            if (peer_->lost() || !path_->carry(number, header, w.data + w.at, piece)) {
                ended_ = Outcome::lost;
                break;
            }
            last_ = number;
            w.begun = true;
            w.at += piece;
            if (w.at < w.nbytes) continue;
            if (w.nbytes < w.header.nbytes) borrowed.emplace_back(last_, std::move(w.sent));
            else calls.emplace_back(std::move(w.sent), Outcome::reached);
            waiting_.pop_front();
        }
        if (ended_ != Outcome::reached) {
            for (Waiting& each : waiting_) calls.emplace_back(std::move(each.sent), ended_);
            waiting_.clear();
        }
    }
    for (auto& [number, sent] : borrowed) watcher_->when(word_, number, peer_, forever, std::move(sent));
    if (credit)
        watcher_->when(word_, credit, peer_, seconds_, [this](Outcome found) {
            {
                std::lock_guard g(mutex_);
                watching_ = false;
            }
            advance(found);
        });
    for (auto& [call, found] : calls) call(found);
}

// The header in the next slot, and where its payload begins, or null if it is refused. The peer may change what lies there:
// it is read once.
const char* AsyncConsumer::read(EdgeHeader& header) {
    const char* at = memory_->base + ring_.at(next_);
    std::memcpy(&header, at, sizeof header);
    std::string why = refusal(header, most_bytes, 0, true);
    const bool lent = std::memcmp(header.region, Lent().region, sizeof header.region);
    if (why.empty() && lent && (!lent_.memory || std::memcmp(header.region, lent_.region, sizeof header.region) || !lent_.memory->holds(header.offset, header.nbytes)))
        why = "malformed header: the payload lies where nothing is lent";
    if (why.empty()) return lent ? lent_.memory->base + header.offset : at + sizeof header;
    std::lock_guard g(mutex_);
    refused_ = why;
    return nullptr;
}

void AsyncConsumer::release(u64 number) {
    std::lock_guard g(mutex_);
    if (number != last_ + 1) {
        released_.insert(number);
        return;
    }
    last_ = number;
    for (auto at = released_.begin(); at != released_.end() && *at == last_ + 1; at = released_.erase(at)) last_ = *at;
    if (!peer_->lost()) credit_->raise(last_);
}

void AsyncConsumer::take(Allocate allocate, Taken taken) {
    allocate_ = std::move(allocate);
    taken_ = std::move(taken);
    go_on(Outcome::reached);
}

void AsyncConsumer::go_on(Outcome outcome) {
    int found = number_of(outcome);
    for (bool whole = false; found == TW_DONE && !whole;) {
        if (!watcher_->reached(word_, next_)) {
            watcher_->when(word_, next_, peer_, seconds_, [this](Outcome next) { go_on(next); });
            return;
        }
        if (!take_piece()) found = TW_REFUSED;
        else whole = taking_.at == taking_.header.nbytes;
    }
    if (found == TW_DONE) taking_.begun = false;
    const Taken taken = std::move(taken_);  // which may take the next one
    taken(found);
}

// False: it is refused, and so is everything after it.
bool AsyncConsumer::take_piece() {
    const u64 number = next_;
    const char* const slot = memory_->base + ring_.at(number);
    const char* from = slot;
    u64 room = ring_.nbytes;  // bytes that follow there
    EdgeHeader& header = taking_.header;
    if (!taking_.begun) {
        from = read(header);
        if (!from) return false;
        room = from == slot + sizeof header ? room - sizeof header : header.nbytes;  // or it is lent
        taking_.data = static_cast<char*>(allocate_(header, header.nbytes <= room ? from : nullptr, number));
        if (!taking_.data) return false;
        taking_.begun = true;
        taking_.at = 0;
    }
    ++next_;
    const bool stays = taking_.data == from;
    const u64 nbytes = std::min(header.nbytes - taking_.at, room);
    if (!stays && nbytes) copy(taking_.data + taking_.at, from, nbytes);
    taking_.at += nbytes;
    if (stays) return true;
    if (header.nbytes && taking_.at == header.nbytes) count_copy(header.nbytes);
    release(number);
    return true;
}

// ---- what other languages see

namespace {

const tw_async_edges functions = {
    TENSORWIRE_ASYNC_EDGES_VERSION,
    [](void* producer, const tw_header* header, const void* data, tw_call sent, void* context) {
        static_cast<AsyncProducer*>(producer)->send(*header, static_cast<const char*>(data), [sent, context](Outcome outcome) { sent(context, number_of(outcome)); });
    },
    [](void* consumer, tw_allocate allocate, tw_call taken, void* context) {
        static_cast<AsyncConsumer*>(consumer)->take([allocate, context](const EdgeHeader& header, const void* whole, u64 slot) { return allocate(context, &header, whole, slot); },
                                                    [taken, context](int outcome) { taken(context, outcome); });
    },
    [](void* consumer, double seconds) { return static_cast<int>(static_cast<AsyncConsumer*>(consumer)->arrives(seconds)); },
    [](void* consumer, uint64_t slot) { static_cast<AsyncConsumer*>(consumer)->release(slot); },
    [](void* end, char* text, uint64_t nbytes) {
        const std::string reason = static_cast<AsyncEnd*>(end)->reason();
        if (!nbytes) return;
        text[reason.copy(text, nbytes - 1)] = 0;
    },
};

}  // namespace

const tw_async_edges& async_edges() { return functions; }

}  // namespace tw
