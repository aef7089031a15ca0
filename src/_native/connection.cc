// One connection of the tcp engine: the state machines that send and receive frames.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "count.h"
#include "engine.h"

namespace tw {

namespace {
constexpr size_t staging_bytes = 64 << 10;
constexpr size_t most_replies = 1024;    // replies a target queues before it stops reading
constexpr int reads_per_turn = 64;       // then other connections get theirs
}  // namespace

Connection::Connection(Engine& engine, int fd, u64 token, bool initiator, std::shared_ptr<Liveness> l, PeerDevice peer)
    : liveness(std::move(l)), engine_(engine), engine_liveness_(engine.liveness_), fd_(fd), token_(token), initiator_(initiator), peer_(peer), near_(within_machine(fd)), staging_(staging_bytes) {
    close_on_fork(fd_);
    enlist(&futex_);
}

Connection::~Connection() {
    dismiss(&futex_);
    if (fd_ >= 0) close_socket(fd_);
}

void Connection::close(const std::string& reason, bool own) {
    if (!end(reason, own)) closed_.wait(false);
}

bool Connection::end(const std::string& reason, bool own) {
    if (liveness->forked()) return true;  // a thread that the child does not have may hold a mutex
    if (dead_.exchange(true)) return false;
    shutdown(fd_, SHUT_RDWR);  // whoever is receiving comes back soon
    std::deque<Outgoing> unsent;
    std::deque<Pending> unanswered;
    std::shared_ptr<Span> into;
    {
        std::unique_lock receiving(receive_mutex_, std::defer_lock);
        if (receiver_.load() != std::this_thread::get_id()) receiving.lock();
        std::lock_guard g(send_mutex_);
        std::lock_guard r(result_mutex_);
        epoll_ctl(engine_.inner_, EPOLL_CTL_DEL, fd_, nullptr);
        unsent.swap(outgoing_);
        unanswered.swap(pending_);
        into.swap(into_);
        at_ = nullptr;
        if (lent_ > done()) sever(fd_);  // before anybody hears of it and reuses the memory
        pipe_.close();
        close_socket(fd_);
        fd_ = -1;
    }
    own ? liveness->close(reason) : liveness->lose(reason);
    notify_listeners(~u64{0});
    engine_.drop(token_);
    closed_ = true;  // last: a second close() returns, whose caller may end what listens
    closed_.notify_all();
    return true;
}

bool Connection::broken(const char* why) {
    end(why);
    return false;
}

// ---- sending

Outcome Connection::post(Frame frame, std::shared_ptr<Span> memory, u64 offset, double seconds, bool fence, u64& id) {
    if (liveness->lost() || engine_liveness_->lost()) return Outcome::lost;
    std::vector<std::shared_ptr<Span>> finished;
    const double end = now() + seconds;
    if (fence) {
        const Outcome outcome = engine_.wait(completion(), last_question_, seconds);
        if (outcome != Outcome::reached) return outcome;
    }
    std::unique_lock g(send_mutex_);
    while (!dead_ && !has_room()) {
        const u64 need = posted_ - most_outstanding / 2;
        g.unlock();
        const Outcome outcome = engine_.wait(completion(), need, std::max(0.0, end - now()));
        if (outcome != Outcome::reached) return outcome;
        g.lock();
    }
    if (dead_) {
        g.unlock();
        while (!liveness->lost()) std::this_thread::yield();  // who closes it says why, soon
        return Outcome::lost;
    }
    id = frame.id = ++posted_;
    count(Counter::messages);  // before anything of it can be seen at the other end
    if (memory) count(Counter::bytes, frame.length);
    char* at = memory ? memory->base + offset : nullptr;
    const bool idle = outgoing_.empty();
    if (frame.op == static_cast<u32>(Op::write)) {
        const bool large = frame.length >= (idle ? least_lent_alone : least_lent);
        const bool lent = near_ && large && memory->file() >= 0 && pipe_.open();
        if (lent) lent_ = frame.id;
        outgoing_.push_back({frame, std::move(memory), at, frame.length, 0, lent});
    } else {
        last_question_ = frame.id;
        std::lock_guard r(result_mutex_);
        pending_.push_back({frame.id, std::move(memory), at, frame.length});
        outgoing_.push_back({frame, nullptr, nullptr, 0, 0, false});
    }
    bool sound = true;
    if (idle) sound = flush(finished);
    else update_interest();
    g.unlock();
    if (!sound) this->end("the source of a write cannot be read");
    return Outcome::reached;
}

void Connection::enqueue(Frame frame, std::shared_ptr<Span> span, const char* payload, u64 length) {
    std::vector<std::shared_ptr<Span>> finished;
    bool sound = true;
    {
        std::lock_guard g(send_mutex_);
        if (dead_) return;
        const bool idle = outgoing_.empty();
        outgoing_.push_back({frame, std::move(span), payload, length, 0, false});
        if (idle) sound = flush(finished);
        else update_interest();
    }
    if (!sound) end("the source of a read cannot be read");
}

// As many frames as fit into one call, up to the first payload that is to be lent.
ssize_t Connection::send_copied() {
    iovec v[64];
    int k = 0;
    bool more = false;
    for (auto& o : outgoing_) {
        if (k > 62 || more) break;
        if (o.sent < sizeof(Frame)) {
            v[k++] = {reinterpret_cast<char*>(&o.frame) + o.sent, sizeof(Frame) - o.sent};
            more = o.lent;
            if (o.length && !o.lent) v[k++] = {const_cast<char*>(o.payload), o.length};
        } else {
            const u64 done = o.sent - sizeof(Frame);
            v[k++] = {const_cast<char*>(o.payload) + done, o.length - done};
        }
    }
    msghdr m{};
    m.msg_iov = v;
    m.msg_iovlen = static_cast<size_t>(k);
    return sendmsg(fd_, &m, MSG_DONTWAIT | MSG_NOSIGNAL | (more ? MSG_MORE : 0));
}

bool Connection::flush(std::vector<std::shared_ptr<Span>>& finished) {
    while (!outgoing_.empty() && !dead_) {
        const Outgoing& first = outgoing_.front();
        ssize_t n;
        if (first.lent && first.sent >= sizeof(Frame)) {
            const u64 done = first.sent - sizeof(Frame);
            n = pipe_.send(fd_, first.payload + done, first.length - done);
        } else {
            n = send_copied();
        }
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EFAULT) return false;
            break;  // full: EPOLLOUT goes on; dead: the reading side finds out and closes
        }
        sent_.store(true, std::memory_order_relaxed);
        for (u64 left = static_cast<u64>(n); left;) {
            Outgoing& o = outgoing_.front();
            const u64 rest = sizeof(Frame) + o.length - o.sent;
            if (left < rest) { o.sent += left; break; }
            left -= rest;
            finished.push_back(std::move(o.span));
            outgoing_.pop_front();
        }
    }
    update_interest();
    return true;
}

void Connection::update_interest() {
    sending_.store(!outgoing_.empty(), std::memory_order_relaxed);
    u32 want = EPOLLRDHUP;
    if (initiator_ || outgoing_.size() < most_replies) want |= EPOLLIN;
    paused_.store(!(want & EPOLLIN), std::memory_order_relaxed);
    if (!outgoing_.empty()) want |= EPOLLOUT;
    if (want == interest_ || dead_) return;
    interest_ = want;
    epoll_event e{};
    e.events = want;
    e.data.u64 = token_;
    epoll_ctl(engine_.inner_, EPOLL_CTL_MOD, fd_, &e);
}

bool Connection::writable() {
    std::vector<std::shared_ptr<Span>> finished;
    bool sound, moved;
    {
        std::lock_guard g(send_mutex_);
        const size_t before = outgoing_.empty() ? 0 : outgoing_.front().sent;
        sound = flush(finished);
        moved = !finished.empty() || (!outgoing_.empty() && outgoing_.front().sent != before);
    }
    if (moved) heard_.store(true, std::memory_order_relaxed);  // there is room again: the peer has taken something
    if (!sound) end("the source of a transfer cannot be read");
    return moved;
}

bool Connection::poll() {
    const bool sent = sending_.load(std::memory_order_relaxed) && writable();
    return (!paused_.load(std::memory_order_relaxed) && readable()) || sent;
}

// ---- signs of life

void Connection::beat() {
    std::vector<std::shared_ptr<Span>> finished;
    std::lock_guard g(send_mutex_);
    if (dead_ || !outgoing_.empty()) return;  // what waits to be sent is a sign of life, too
    Frame f;
    f.op = static_cast<u32>(Op::beat);
    outgoing_.push_back({f, nullptr, nullptr, 0, 0, false});
    flush(finished);
}

void Connection::tick(double heartbeat, double lost_after) {
    if (dead_ || peer_.heartbeat <= 0) return;
    if (!sent_.exchange(false)) beat();
    silent_ = heard_.exchange(false) ? 0 : silent_ + 1;
    // A peer that beats more slowly than we look is not silent.
    if (silent_ * heartbeat < std::max(lost_after, 3 * peer_.heartbeat)) return;
    if (!paused_) readable();  // this process may have been stopped, or late: what has arrived counts
    if (!heard_) end("it gave no sign of life for too long: its process is stopped, or the link is cut");
}

// ---- receiving

bool Connection::readable() {
    std::lock_guard g(receive_mutex_);
    receiver_ = std::this_thread::get_id();
    arrived_ = false;
    if (receive()) acknowledge();
    receiver_ = std::thread::id();
    midway_.store(in_payload_ || sending_, std::memory_order_relaxed);
    return arrived_;
}

// A payload goes straight to its place; what follows it in the same read goes to the staging area.
ssize_t Connection::receive_payload() {
    iovec v[2] = {{at_, left_}, {staging_.data(), staging_.size()}};
    msghdr m{};
    m.msg_iov = v;
    m.msg_iovlen = 2;
    if (!at_) {  // thrown away
        v[0] = {staging_.data(), std::min<u64>(left_, staging_.size())};
        m.msg_iovlen = 1;
    }
    const ssize_t n = recvmsg(fd_, &m, MSG_DONTWAIT);
    if (n <= 0) return n;
    const u64 mine = std::min<u64>(static_cast<u64>(n), left_);
    left_ -= mine;
    if (at_) at_ += mine;
    begin_ = 0;
    end_ = static_cast<size_t>(n) - mine;
    if (!left_) end_payload();
    return n;
}

ssize_t Connection::receive_frames() {
    if (begin_) memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    const ssize_t n = recv(fd_, staging_.data() + end_, staging_.size() - end_, MSG_DONTWAIT);
    if (n > 0) end_ += static_cast<size_t>(n);
    return n;
}

bool Connection::receive() {
    for (int turn = 0; turn < reads_per_turn && !dead_; turn++) {
        const ssize_t n = in_payload_ ? receive_payload() : receive_frames();
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (n > 0) heard_.store(true, std::memory_order_relaxed);
        // A process that dies with bytes of ours unread resets the connection.
        if (n == 0 || (n < 0 && errno == ECONNRESET)) return broken("its process closed the connection or died");
        if (n < 0) return broken(("its connection broke: " + std::string(strerror(errno))).c_str());
        arrived_ = true;
        if (!parse()) return false;
        if (!in_payload_ && end_ - begin_ < sizeof(Frame) && static_cast<size_t>(n) < staging_.size() / 2) break;
    }
    return !dead_;
}

// One frame for all that was applied in this turn.
void Connection::acknowledge() {
    if (initiator_ || applied_ == acknowledged_) return;
    Frame f;
    f.op = static_cast<u32>(Op::ack);
    f.id = acknowledged_ = applied_;
    enqueue(f, nullptr, nullptr, 0);
}

bool Connection::parse() {
    while (!dead_ && !in_payload_ && end_ - begin_ >= sizeof(Frame)) {
        memcpy(&frame_, staging_.data() + begin_, sizeof(Frame));
        begin_ += sizeof(Frame);
        if (frame_.magic != frame_magic) return broken("it sent a malformed frame");
        if (frame_.op == static_cast<u32>(Op::beat)) {
            if (frame_.id || frame_.length || peer_.heartbeat <= 0) return broken("it sent a malformed frame");
            continue;  // that it came is all it says
        }
        if (!(initiator_ ? begin_reply(frame_) : begin_request(frame_))) return false;
        if (!in_payload_) continue;
        const u64 here = std::min<u64>(left_, end_ - begin_);
        if (at_) {
            memcpy(at_, staging_.data() + begin_, here);
            at_ += here;
        }
        begin_ += here;
        left_ -= here;
        if (!left_) end_payload();
    }
    return !dead_;
}

void Connection::expect(std::shared_ptr<Span> span, char* at, u64 length) {
    into_ = std::move(span);
    at_ = at;
    left_ = length;
    in_payload_ = true;
}

bool Connection::begin_request(const Frame& f) {
    if (f.id != applied_ + 1) return broken("it sent a frame out of order");
    const auto op = static_cast<Op>(f.op);
    if (op != Op::write && op != Op::read && op != Op::fetch_add && op != Op::compare_swap) return broken("it sent an unknown frame");
    if (op != Op::write && op != Op::read && f.length != 8) return broken("it sent a malformed frame");
    std::shared_ptr<Span> target;
    refused_ = judge(f, target);
    if (refused_ == Refusal::none) refused_ = judge_signal(f);
    if (op == Op::write) {
        char* at = refused_ == Refusal::none && f.length ? target->base + f.offset : nullptr;
        expect(at ? std::move(target) : nullptr, at, f.length);
        if (!left_) end_payload();
        return true;
    }
    applied_ = f.id;
    if (refused_ == Refusal::none) answer(f, std::move(target));
    else refuse(f.id);
    return true;
}

Refusal Connection::judge(const Frame& f, std::shared_ptr<Span>& target) {
    const auto op = static_cast<Op>(f.op);
    if (op == Op::write && f.length == 0 && f.offset == no_signal) return Refusal::none;  // a signal alone
    Engine::Exposed found{};
    if (!engine_.find_exposed(f.key, found)) return Refusal::key;
    if (!found.span->holds(f.offset, f.length)) return Refusal::range;
    if (op != Op::read && !found.writable) return Refusal::access;
    if (op != Op::read && op != Op::write && !found.span->aligned(f.offset)) return Refusal::alignment;
    target = std::move(found.span);
    return Refusal::none;
}

Refusal Connection::judge_signal(const Frame& f) {
    if (static_cast<Op>(f.op) != Op::write || f.signal_offset == no_signal) return Refusal::none;
    Engine::Exposed found{};
    if (!engine_.find_exposed(f.signal_key, found)) return Refusal::key;
    if (!found.span->holds(f.signal_offset, 8)) return Refusal::range;
    if (!found.writable) return Refusal::access;
    return found.span->aligned(f.signal_offset) ? Refusal::none : Refusal::alignment;
}

void Connection::refuse(u64 id) {
    Frame reply;
    reply.op = static_cast<u32>(Op::refuse);
    reply.id = acknowledged_ = id;
    reply.key = static_cast<u64>(refused_);
    enqueue(reply, nullptr, nullptr, 0);
}

void Connection::answer(const Frame& f, std::shared_ptr<Span> target) {
    Frame reply;
    reply.id = acknowledged_ = f.id;
    if (static_cast<Op>(f.op) == Op::read) {
        reply.op = static_cast<u32>(Op::data);
        reply.length = f.length;
        const char* from = target->base + f.offset;
        enqueue(reply, std::move(target), from, f.length);
        return;
    }
    std::atomic<u64>& word = *target->word(f.offset);
    reply.op = static_cast<u32>(Op::old_value);
    u64 old = f.signal_key;
    if (static_cast<Op>(f.op) == Op::fetch_add) old = word.fetch_add(f.signal_value, std::memory_order_acq_rel);
    else word.compare_exchange_strong(old, f.signal_value, std::memory_order_acq_rel);
    reply.key = old;
    ring(target->header->futex);
    enqueue(reply, nullptr, nullptr, 0);
}

// What is wrong with a reply, or null. An acknowledgement covers everything before it, but no question still open.
const char* Connection::take_answer(const Frame& f, Pending& answered) {
    const auto op = static_cast<Op>(f.op);
    if (f.id <= done()) return "it acknowledged an operation twice";
    if (f.id > posted_) return "it acknowledged an operation nobody posted";
    std::lock_guard g(result_mutex_);
    const bool asked = !pending_.empty() && pending_.front().id == f.id;
    if (!asked && !pending_.empty() && pending_.front().id < f.id) return "it left a question unanswered";
    switch (op) {
        case Op::ack:
            return asked ? "it left a question unanswered" : nullptr;
        case Op::refuse:
            if (!f.key || f.key > ~u32{0}) return "it sent a malformed frame";  // 0 would read as done
            refusals_[f.id] = static_cast<Refusal>(f.key);
            any_refusal_.store(true, std::memory_order_release);
            break;
        case Op::data:
        case Op::old_value:
            if (!asked) return "it answered a question nobody asked";
            if (op == Op::data && (!pending_.front().span || f.length != pending_.front().length)) return "it sent a malformed frame";
            if (op == Op::old_value && pending_.front().span) return "it sent a malformed frame";
            if (op == Op::old_value) old_values_[f.id] = f.key;
            break;
        default:
            return "it sent an unknown frame";
    }
    if (asked) {
        answered = std::move(pending_.front());
        pending_.pop_front();
    }
    return nullptr;
}

bool Connection::begin_reply(const Frame& f) {
    Pending answered{};
    if (const char* why = take_answer(f, answered)) return broken(why);
    if (static_cast<Op>(f.op) != Op::data) {
        complete(f.id);
        return true;
    }
    expect(std::move(answered.span), answered.at, f.length);
    if (!left_) end_payload();
    return true;
}

void Connection::end_payload() {
    in_payload_ = false;
    into_.reset();
    at_ = nullptr;
    if (initiator_) {
        complete(frame_.id);
        return;
    }
    // Its pages may have been the sender's own until we read them.
    if (near_ && frame_.length >= least_lent && severed(fd_)) return (void)broken("its process closed the connection or died");
    applied_ = frame_.id;
    if (refused_ != Refusal::none) return refuse(frame_.id);
    if (frame_.signal_offset == no_signal) return;
    Engine::Exposed signal{};
    if (!engine_.find_exposed(frame_.signal_key, signal) || !signal.span->holds(frame_.signal_offset, 8)) return;  // closed meanwhile
    signal.span->word(frame_.signal_offset)->store(frame_.signal_value, std::memory_order_release);
    ring(signal.span->header->futex);
}

void Connection::complete(u64 id) {
    done_.store(id, std::memory_order_seq_cst);
    ring(futex_);
    if (has_listeners_) notify_listeners(id);
}

void Connection::notify(u64 id, std::shared_ptr<Notices> notices, u64 token) {
    std::lock_guard g(result_mutex_);
    listeners_.push_back({id, token, std::move(notices)});
    has_listeners_ = true;
    // Either complete() and close() see it now, or we see what they did.
    if (done_.load() < id && !liveness->lost()) return;
    listeners_.back().notices->post(token);
    listeners_.pop_back();
}

void Connection::notify_listeners(u64 id) {
    std::lock_guard g(result_mutex_);
    const auto over = [id](const Listener& t) { return t.id <= id; };
    for (const Listener& t : listeners_)
        if (over(t)) t.notices->post(t.token);
    listeners_.erase(std::remove_if(listeners_.begin(), listeners_.end(), over), listeners_.end());
    has_listeners_ = !listeners_.empty();
}

Refusal Connection::refusal(u64 id) {
    std::lock_guard g(result_mutex_);
    auto it = refusals_.find(id);
    if (it == refusals_.end()) return Refusal::none;
    return it->second;
}

u64 Connection::old_value(u64 id) {
    std::lock_guard g(result_mutex_);
    auto it = old_values_.find(id);
    if (it == old_values_.end()) return 0;
    const u64 v = it->second;
    old_values_.erase(it);
    return v;
}

}  // namespace tw
