#include "async_ends.h"

#include <cstring>

#include "copy.h"
#include "count.h"

namespace tw {
namespace {

constexpr u64 never = ~u64{0};       // a step that no word reaches
constexpr double forever = 1e9;     // seconds: a consumer may keep a tensor as long as it likes
constexpr double post_seconds = 60;  // how long a full connection may take to drain

void count_copy(u64 nbytes) {
    count(Counter::copies);
    count(Counter::copied_bytes, nbytes);
}

constexpr u64 least_kept = 256 << 10;  // a smaller one costs less to copy than to give back, which wakes a thread

class Mapped final : public Carrier, public Announcement {
  public:
    Mapped(std::shared_ptr<Span> slots, Ring ring, std::shared_ptr<Span> words, u64 offset)
        : slots_(std::move(slots)), ring_(ring), words_(std::move(words)), offset_(offset) {}

    bool carry(u64 step, const SlotHeader& header, const char* data, u64 nbytes) override {
        if (slots_->closed()) return false;
        fill_slot(slots_->base + ring_.at(step), header, data, nbytes);
        count(Counter::mapped_bytes, nbytes);
        return raise(step);
    }

    bool raise(u64 step) override {
        if (words_->closed()) return false;
        count(Counter::messages);
        tw::raise(*words_, offset_, step);
        return true;
    }

  private:
    const std::shared_ptr<Span> slots_;
    const Ring ring_;
    const std::shared_ptr<Span> words_;
    const u64 offset_;
};

class Posted final : public Carrier, public Announcement {
  public:
    Posted(std::shared_ptr<Connection> connection, std::shared_ptr<Span> source, Ring ours, RemoteRing theirs)
        : connection_(std::move(connection)), source_(std::move(source)), ours_(ours), theirs_(theirs) {}

    bool carry(u64 step, const SlotHeader& header, const char* data, u64 nbytes) override {
        fill_slot(source_->base + ours_.at(step), header, data, nbytes);
        Frame frame;
        frame.op = static_cast<u32>(Op::write);
        frame.key = theirs_.key;
        frame.offset = theirs_.ring.at(step);
        frame.length = sizeof header + nbytes;
        return post(frame, source_, ours_.at(step), step);
    }

    bool raise(u64 step) override {
        Frame frame;
        frame.op = static_cast<u32>(Op::write);
        frame.offset = no_signal;
        return post(frame, nullptr, 0, step);
    }

  private:
    bool post(Frame& frame, const std::shared_ptr<Span>& memory, u64 offset, u64 step) {
        frame.signal_key = theirs_.words_key;
        frame.signal_offset = theirs_.arrival;
        frame.signal_value = step;
        const double end = now() + post_seconds;
        for (u64 id = 0;;) {
            const Outcome outcome = connection_->post(frame, memory, offset, std::max(0.0, end - now()), false, id);
            if (outcome != Outcome::interrupted) return outcome == Outcome::reached;
        }
    }

    const std::shared_ptr<Connection> connection_;
    const std::shared_ptr<Span> source_;
    const Ring ours_;
    const RemoteRing theirs_;
};

}  // namespace

void fill_slot(char* slot, const SlotHeader& header, const char* data, u64 nbytes) {
    std::memcpy(slot, &header, sizeof header);
    if (header.lent) return;
    copy(slot + sizeof header, data, nbytes);
    count_copy(nbytes);
}

void AsyncProducer::send(u64 step, const char* data, u64 nbytes, std::function<void(Outcome)> sent) {
    bool early;
    {
        std::lock_guard g(mutex_);
        early = step > last_ + 1;
        waiting_.insert_or_assign(step, Waiting{data, nbytes, std::move(sent)});
    }
    advance(Outcome::reached);
    if (early) limit(step);
}

// A step that still waits for those before it waits no longer than for a slot.
void AsyncProducer::limit(u64 step) {
    {
        std::lock_guard g(mutex_);
        if (!waiting_.count(step)) return;
    }
    const u64 timer = watcher_->when(word_, never, peer_, seconds_, [this](Outcome found) { advance(found); });
    std::lock_guard g(mutex_);
    const auto at = waiting_.find(step);
    if (at == waiting_.end()) watcher_->cancel(timer);
    else at->second.timer = timer;
}

// One more than where the data lie in what is lent; 0: they do not.
u64 AsyncProducer::lent(const char* data, u64 nbytes) const {
    if (!lends_ || nbytes < least_kept || data < lends_->base) return 0;
    const u64 offset = static_cast<u64>(data - lends_->base);
    return lends_->holds(offset, nbytes) ? offset + 1 : 0;
}

// Sends what can be sent now; after anything but `reached` all that waits ends so, and what comes later.
// No lock is held while others are called.
void AsyncProducer::advance(Outcome outcome) {
    std::vector<std::pair<std::function<void(Outcome)>, Outcome>> calls;
    std::vector<std::pair<u64, std::function<void(Outcome)>>> borrowed;  // until their steps are released
    u64 credit = 0;  // to wait for
    {
        std::lock_guard g(mutex_);
        if (ended_ == Outcome::reached) ended_ = outcome;
        auto at = waiting_.begin();
        for (; ended_ == Outcome::reached && at != waiting_.end() && at->first == last_ + 1; at = waiting_.erase(at)) {
            if (!free(at->first)) {
                if (!watching_) credit = at->first - ring_.count;
                watching_ = true;
                break;
            }
            Waiting& w = at->second;
            SlotHeader header;
            header.lent = lent(w.data, w.nbytes);
            if (peer_->lost() || !carrier_->carry(at->first, header, w.data, w.nbytes)) {
                ended_ = Outcome::lost;
                break;
            }
            last_ = at->first;
            if (w.timer) watcher_->cancel(w.timer);
            if (header.lent) borrowed.emplace_back(last_, std::move(w.sent));
            else calls.emplace_back(std::move(w.sent), Outcome::reached);
        }
        if (ended_ != Outcome::reached) {
            for (auto& [step, each] : waiting_) {
                if (each.timer) watcher_->cancel(each.timer);
                calls.emplace_back(std::move(each.sent), ended_);
            }
            waiting_.clear();
        }
    }
    for (auto& [step, sent] : borrowed) watcher_->when(word_, step, peer_, forever, std::move(sent));
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

u64 AsyncConsumer::receive(u64 step, std::function<void(Outcome)> arrived) {
    if (watcher_->reached(word_, step)) {
        arrived(Outcome::reached);
        return 0;
    }
    return watcher_->when(word_, step, peer_, seconds_, std::move(arrived));
}

const char* AsyncConsumer::slot(u64 step) const {
    const char* at = memory_->base + ring_.at(step);
    SlotHeader header;
    std::memcpy(&header, at, sizeof header);
    if (!header.lent) return at + sizeof header;
    // A peer that lies gets its own consumer to read what it was allowed to read anyway.
    const u64 nbytes = ring_.nbytes - sizeof header;
    return lent_ && lent_->holds(header.lent - 1, nbytes) ? lent_->base + header.lent - 1 : nullptr;
}

void AsyncConsumer::release(u64 step) {
    std::lock_guard g(mutex_);
    released_.insert(step);
    const u64 before = last_;
    for (auto at = released_.begin(); at != released_.end() && *at == last_ + 1; at = released_.erase(at)) last_ = *at;
    if (last_ != before && !peer_->lost()) credit_->raise(last_);
}

std::unique_ptr<Carrier> mapped_carrier(std::shared_ptr<Span> slots, Ring ring, std::shared_ptr<Span> words, u64 arrival) {
    return std::make_unique<Mapped>(std::move(slots), ring, std::move(words), arrival);
}

std::unique_ptr<Announcement> mapped_announcement(std::shared_ptr<Span> words, u64 offset) {
    return std::make_unique<Mapped>(nullptr, Ring{0, 0, 0, 1}, std::move(words), offset);
}

std::unique_ptr<Carrier> posted_carrier(std::shared_ptr<Connection> connection, std::shared_ptr<Span> source, Ring ours, RemoteRing theirs) {
    return std::make_unique<Posted>(std::move(connection), std::move(source), ours, theirs);
}

std::unique_ptr<Announcement> posted_announcement(std::shared_ptr<Connection> connection, u64 key, u64 offset) {
    return std::make_unique<Posted>(std::move(connection), nullptr, Ring{0, 0, 0, 1}, RemoteRing{0, {0, 0, 0, 1}, key, offset});
}

// ---- what other languages see

namespace {

int number_of(Outcome outcome) {
    return outcome == Outcome::reached ? TW_DONE : outcome == Outcome::timed_out ? TW_TIMED_OUT : TW_LOST;
}

const tw_async_edges functions = {
    TENSORWIRE_ASYNC_EDGES_VERSION,
    [](void* producer, uint64_t step, const void* data, uint64_t nbytes, tw_call sent, void* context) {
        static_cast<AsyncProducer*>(producer)->send(step, static_cast<const char*>(data), nbytes,
                                                    [sent, context](Outcome outcome) { sent(context, number_of(outcome)); });
    },
    [](void* consumer, uint64_t step, tw_call arrived, void* context) {
        return static_cast<AsyncConsumer*>(consumer)->receive(step, [arrived, context](Outcome outcome) { arrived(context, number_of(outcome)); });
    },
    [](void* consumer, uint64_t step, double seconds) { return static_cast<int>(static_cast<AsyncConsumer*>(consumer)->arrives(step, seconds)); },
    [](void* consumer, uint64_t ticket) { return static_cast<int>(static_cast<AsyncConsumer*>(consumer)->cancel(ticket)); },
    [](void* consumer, uint64_t step) -> const void* { return static_cast<AsyncConsumer*>(consumer)->slot(step); },
    [](void* consumer, uint64_t step) { static_cast<AsyncConsumer*>(consumer)->release(step); },
    [](uint64_t nbytes) { count_copy(nbytes); },
    [](void* end, char* text, uint64_t nbytes) {
        const std::string reason = static_cast<AsyncEnd*>(end)->reason();
        if (!nbytes) return;
        text[reason.copy(text, nbytes - 1)] = 0;
    },
};

}  // namespace

const tw_async_edges& async_edges() { return functions; }

}  // namespace tw
