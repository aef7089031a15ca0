// One connection of the tcp engine: the state machines that send and receive frames.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "engine.h"

namespace tw {

namespace {
constexpr size_t staging_bytes = 64 << 10;
constexpr u64 most_outstanding = 4096;   // operations an initiator may have in flight
constexpr size_t most_replies = 1024;    // replies a target queues before it stops reading
constexpr int reads_per_turn = 64;       // then other connections get theirs
}  // namespace

Connection::Connection(Engine& engine, int fd, u64 token, bool initiator, std::shared_ptr<Life> l)
    : life(std::move(l)), engine_(engine), engine_life_(engine.life_), fd_(fd), token_(token), initiator_(initiator), staging_(staging_bytes) {
    close_on_fork(fd_);
    enlist(&door_);
}

Connection::~Connection() {
    dismiss(&door_);
    forget_fd(fd_);
    ::close(fd_);
}

void Connection::close(const std::string& reason) {
    if (dead_.exchange(true)) return;
    shutdown(fd_, SHUT_RDWR);
    std::deque<Outgoing> unsent;
    {
        std::lock_guard g(send_mutex_);
        epoll_ctl(engine_.inner_, EPOLL_CTL_DEL, fd_, nullptr);
        unsent.swap(outgoing_);  // sources are free again: nothing of them will be sent any more
    }
    life->lose(reason);
    engine_.drop(token_);
}

bool Connection::broken(const char* why) {
    close(why);
    return false;
}

// ---- sending

u64 Connection::post(Frame frame, std::shared_ptr<Span> memory, u64 offset, double seconds) {
    std::vector<std::shared_ptr<Span>> finished;
    std::unique_lock g(send_mutex_);
    const double end = now() + seconds;
    while (!dead_ && posted_ - done() >= most_outstanding) {
        const u64 need = posted_ - most_outstanding / 2;
        g.unlock();
        const double left = end - now();
        if (left <= 0 || engine_.wait(completion(), need, left) == Outcome::timed_out) return 0;
        g.lock();
    }
    if (dead_) return 0;
    frame.id = ++posted_;
    char* at = memory ? memory->base + offset : nullptr;
    const bool idle = outgoing_.empty();
    if (frame.op == static_cast<u32>(Op::write)) {
        outgoing_.push_back({frame, std::move(memory), at, frame.length, 0});
    } else {
        std::lock_guard r(result_mutex_);
        pending_.push_back({frame.id, std::move(memory), at, frame.length});
        outgoing_.push_back({frame, nullptr, nullptr, 0, 0});
    }
    if (idle) flush(finished);
    else update_interest();
    return frame.id;
}

void Connection::enqueue(Frame frame, std::shared_ptr<Span> span, const char* payload, u64 length) {
    std::vector<std::shared_ptr<Span>> finished;
    std::lock_guard g(send_mutex_);
    if (dead_) return;
    const bool idle = outgoing_.empty();
    outgoing_.push_back({frame, std::move(span), payload, length, 0});
    if (idle) flush(finished);
    else update_interest();
}

void Connection::flush(std::vector<std::shared_ptr<Span>>& finished) {
    while (!outgoing_.empty() && !dead_) {
        iovec v[64];
        int k = 0;
        for (auto& o : outgoing_) {
            if (k > 62) break;
            if (o.sent < sizeof(Frame)) {
                v[k++] = {reinterpret_cast<char*>(&o.frame) + o.sent, sizeof(Frame) - o.sent};
                if (o.length) v[k++] = {const_cast<char*>(o.payload), o.length};
            } else {
                const u64 done = o.sent - sizeof(Frame);
                v[k++] = {const_cast<char*>(o.payload) + done, o.length - done};
            }
        }
        msghdr m{};
        m.msg_iov = v;
        m.msg_iovlen = static_cast<size_t>(k);
        const ssize_t n = sendmsg(fd_, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR) continue;
            break;  // full: EPOLLOUT goes on; dead: the reading side finds out and closes
        }
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
}

void Connection::update_interest() {
    u32 want = EPOLLRDHUP;
    if (initiator_ || outgoing_.size() < most_replies) want |= EPOLLIN;
    if (!outgoing_.empty()) want |= EPOLLOUT;
    if (want == interest_ || dead_) return;
    interest_ = want;
    epoll_event e{};
    e.events = want;
    e.data.u64 = token_;
    epoll_ctl(engine_.inner_, EPOLL_CTL_MOD, fd_, &e);
}

void Connection::writable() {
    std::vector<std::shared_ptr<Span>> finished;
    std::lock_guard g(send_mutex_);
    flush(finished);
}

// ---- receiving

bool Connection::readable() {
    for (int turn = 0; turn < reads_per_turn && !dead_; turn++) {
        ssize_t n;
        if (in_payload_) {
            iovec v[2];
            int k = 1;
            if (at_) {
                v[0] = {at_, left_};
                v[1] = {staging_.data(), staging_.size()};
                k = 2;
            } else {
                v[0] = {staging_.data(), std::min<u64>(left_, staging_.size())};
            }
            msghdr m{};
            m.msg_iov = v;
            m.msg_iovlen = static_cast<size_t>(k);
            n = recvmsg(fd_, &m, MSG_DONTWAIT);
            if (n > 0) {
                const u64 mine = std::min<u64>(static_cast<u64>(n), left_);
                left_ -= mine;
                if (at_) at_ += mine;
                begin_ = 0;
                end_ = static_cast<size_t>(n) - mine;
                if (!left_) end_payload();
            }
        } else {
            if (begin_) memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);
            end_ -= begin_;
            begin_ = 0;
            n = recv(fd_, staging_.data() + end_, staging_.size() - end_, MSG_DONTWAIT);
            if (n > 0) end_ += static_cast<size_t>(n);
        }
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (n <= 0) return broken(n == 0 ? "its process closed the connection or died" : strerror(errno));
        if (!parse()) return false;
        if (!in_payload_ && end_ - begin_ < sizeof(Frame) && static_cast<size_t>(n) < staging_.size() / 2) break;
    }
    if (!initiator_ && applied_ > acknowledged_ && !dead_) {
        Frame f;
        f.op = static_cast<u32>(Op::ack);
        f.id = acknowledged_ = applied_;
        enqueue(f, nullptr, nullptr, 0);
    }
    return !dead_;
}

bool Connection::parse() {
    while (!in_payload_ && end_ - begin_ >= sizeof(Frame)) {
        memcpy(&frame_, staging_.data() + begin_, sizeof(Frame));
        begin_ += sizeof(Frame);
        if (frame_.magic != frame_magic) return broken("it sent a malformed frame");
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
    return true;
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
    const bool writes = op != Op::read;
    const bool atomic = op == Op::fetch_add || op == Op::compare_swap;
    if (atomic && f.length != 8) return broken("it sent a malformed frame");
    refused_ = Refusal::none;
    Engine::Exposed target{}, signal{};
    // A signal alone is a write of nothing: its own key is checked below.
    const bool bare = op == Op::write && f.length == 0 && f.signal_offset != no_signal;
    if (!bare) {
        if (!engine_.look(f.key, target)) refused_ = Refusal::key;
        else if (!target.span->holds(f.offset, f.length)) refused_ = Refusal::range;
        else if (writes && !target.writable) refused_ = Refusal::access;
        else if (atomic && !target.span->aligned(f.offset)) refused_ = Refusal::alignment;
    }
    if (refused_ == Refusal::none && op == Op::write && f.signal_offset != no_signal) {
        if (!engine_.look(f.signal_key, signal)) refused_ = Refusal::key;
        else if (!signal.span->holds(f.signal_offset, 8)) refused_ = Refusal::range;
        else if (!signal.writable) refused_ = Refusal::access;
        else if (!signal.span->aligned(f.signal_offset)) refused_ = Refusal::alignment;
    }
    if (op == Op::write) {
        const bool ok = refused_ == Refusal::none && f.length;
        expect(ok ? target.span : nullptr, ok ? target.span->base + f.offset : nullptr, f.length);
        if (!left_) end_payload();
        return true;
    }
    applied_ = f.id;
    Frame reply;
    reply.id = acknowledged_ = f.id;
    reply.length = op == Op::read ? f.length : 0;
    if (refused_ != Refusal::none) {
        reply.op = static_cast<u32>(Op::refuse);
        reply.key = static_cast<u64>(refused_);
        reply.length = 0;
        enqueue(reply, nullptr, nullptr, 0);
    } else if (op == Op::read) {
        reply.op = static_cast<u32>(Op::data);
        const char* from = target.span->base + f.offset;
        enqueue(reply, std::move(target.span), from, f.length);
    } else {
        std::atomic<u64>& word = *target.span->word(f.offset);
        reply.op = static_cast<u32>(Op::old_value);
        u64 old = f.signal_key;
        if (op == Op::fetch_add) old = word.fetch_add(f.signal_value, std::memory_order_acq_rel);
        else word.compare_exchange_strong(old, f.signal_value, std::memory_order_acq_rel);
        reply.key = old;
        ring(target.span->header->door);
        enqueue(reply, nullptr, nullptr, 0);
    }
    return true;
}

bool Connection::begin_reply(const Frame& f) {
    const auto op = static_cast<Op>(f.op);
    if (f.id <= done()) return broken("it acknowledged an operation twice");
    {
        std::lock_guard g(send_mutex_);
        if (f.id > posted_) return broken("it acknowledged an operation nobody posted");
    }
    if (op == Op::ack) {
        complete(f.id);
        return true;
    }
    Pending first{};
    {
        std::lock_guard g(result_mutex_);
        const bool mine = !pending_.empty() && pending_.front().id == f.id;
        if (op == Op::refuse) {
            refusals_[f.id] = static_cast<Refusal>(f.key);
            if (mine) pending_.pop_front();
        } else {
            if (!mine || (op != Op::data && op != Op::old_value)) return broken("it answered a question nobody asked");
            first = std::move(pending_.front());
            pending_.pop_front();
            if (op == Op::old_value) old_values_[f.id] = f.key;
        }
    }
    if (op != Op::data) {
        complete(f.id);
        return true;
    }
    if (f.length != first.length) return broken("it sent a malformed frame");
    expect(std::move(first.span), first.at, f.length);
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
    applied_ = frame_.id;
    if (refused_ != Refusal::none) {
        Frame f;
        f.op = static_cast<u32>(Op::refuse);
        f.id = acknowledged_ = frame_.id;
        f.key = static_cast<u64>(refused_);
        enqueue(f, nullptr, nullptr, 0);
        return;
    }
    if (frame_.signal_offset == no_signal) return;
    Engine::Exposed signal{};
    if (!engine_.look(frame_.signal_key, signal) || !signal.span->holds(frame_.signal_offset, 8)) return;  // closed meanwhile
    signal.span->word(frame_.signal_offset)->store(frame_.signal_value, std::memory_order_release);
    ring(signal.span->header->door);
}

void Connection::complete(u64 id) {
    done_.store(id, std::memory_order_release);
    ring(door_);
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
