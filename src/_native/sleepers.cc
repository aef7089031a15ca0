#include "sleepers.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace tw {

namespace {

constexpr u64 event_token = 1, stop_token = 2;

}  // namespace

Sleepers::Sleepers(int fd, bool naps) : fd_(fd), naps_(naps), pid_(getpid()) {
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    outer_ = epoll_create1(EPOLL_CLOEXEC);
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.u64 = stop_token;
    bool good = wake_ >= 0 && stop_fd_ >= 0 && outer_ >= 0 && !epoll_ctl(outer_, EPOLL_CTL_ADD, stop_fd_, &e);
    e.data.u64 = event_token;
    good = good && !epoll_ctl(outer_, EPOLL_CTL_ADD, fd_, &e);
    if (!good) {
        const int error = errno;
        for (int each : {wake_, stop_fd_, outer_})
            if (each >= 0) ::close(each);
        throw std::system_error(error, std::generic_category(), "completion channel");
    }
    for (int each : {wake_, stop_fd_, outer_}) close_on_fork(each);
    enlist(static_cast<Progress*>(this));
}

Sleepers::~Sleepers() { close(); }

// When it returns, every descriptor is closed and nobody sleeps here.
void Sleepers::close() {
    if (getpid() == pid_) std::call_once(closing_, [this] { end(); });
}

void Sleepers::end() {
    stop_ = true;
    dismiss(static_cast<Progress*>(this));
    const u64 one = 1;
    if (write(stop_fd_, &one, 8) < 0) { /* it is awake */ }
    wake_all();
    kick();
    std::scoped_lock all(lead_mutex_, rest_mutex_, fds_mutex_);
    for (int* each : {&wake_, &stop_fd_, &outer_}) {
        forget_fd(*each);
        ::close(*each);
        *each = -1;
    }
}

void Sleepers::kick() {
    std::lock_guard g(fds_mutex_);
    const u64 one = 1;
    if (wake_ >= 0 && write(wake_, &one, 8) < 0) { /* it is awake */ }
}

void Sleepers::nudge() {
    // Pairs with the fence in lead(): either the leader sees the new word, or we see the leader.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_relaxed)) kick();
}

void Sleepers::wake_all() {
    {
        std::lock_guard g(followers_mutex_);
        for (Futex* futex : followers_) ring(*futex);
    }
    nudge();
}

void Sleepers::left() {
    watch(true);
    wake_all();
}

// Whether the resting thread is woken by events.
void Sleepers::watch(bool on) {
    epoll_event e{};
    if (on) e.events = EPOLLIN;
    e.data.u64 = event_token;
    std::lock_guard g(fds_mutex_);
    if (outer_ >= 0) epoll_ctl(outer_, EPOLL_CTL_MOD, fd_, &e);
}

Outcome Sleepers::rest(double seconds) {
    std::lock_guard g(rest_mutex_);
    if (stop_) return Outcome::lost;
    epoll_event events[2];
    const int n = epoll_wait(outer_, events, 2, static_cast<int>(std::min(seconds, 3600.0) * 1000));
    if (stop_) return Outcome::lost;
    for (int i = 0; i < n; i++) {
        if (events[i].data.u64 != event_token) continue;
        armed_.store(false);
        return Outcome::attend;
    }
    return n < 0 ? Outcome::interrupted : Outcome::timed_out;
}

Outcome Sleepers::wait(const Target& target, u64 at_least, double seconds) {
    const double start = now();
    if (spin(target, at_least, spin_seconds)) return Outcome::reached;
    const double end = start + std::min(seconds, slice_seconds);
    for (;;) {
        if (target.reached(at_least)) return Outcome::reached;
        if (target.lost() || stop_) return Outcome::lost;
        if (now() >= end) return seconds <= slice_seconds ? Outcome::timed_out : Outcome::interrupted;
        Outcome outcome;
        if (std::unique_lock leads(lead_mutex_, std::try_to_lock); leads) outcome = lead(target, at_least, end);
        else outcome = follow(target, at_least, end);
        if (outcome == Outcome::attend) return outcome;
        if (outcome == Outcome::interrupted && seconds > slice_seconds) return outcome;
    }
}

// Sleeps once, on the descriptor. `timed_out`: look again.
Outcome Sleepers::lead(const Target& target, u64 at_least, double end) {
    if (stop_) return Outcome::lost;
    if (!naps_ && !armed_) return Outcome::attend;
    if (!naps_) watch(false);
    sleeping_.store(true, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool event = false, whole = true;
    if (!target.reached(at_least) && !target.lost() && !stop_) whole = doze(end - now(), event);
    sleeping_.store(false, std::memory_order_relaxed);
    if (event) {
        armed_.store(false);
        return Outcome::attend;
    }
    if (!naps_) watch(true);
    if (target.reached(at_least) || target.lost() || now() >= end) {
        std::lock_guard g(followers_mutex_);  // one of them leads now
        if (!followers_.empty()) ring(*followers_.front());
    }
    return whole ? Outcome::timed_out : Outcome::interrupted;
}

// False: a signal came.
bool Sleepers::doze(double seconds, bool& event) {
    seconds = std::max(0.0, naps_ ? std::min(seconds, nap_seconds) : seconds);
    pollfd both[2] = {{naps_ ? -1 : fd_, POLLIN, 0}, {wake_, POLLIN, 0}};  // a napper leaves completions to the resting thread
    const timespec t{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};
    if (ppoll(both, 2, &t, nullptr) < 0) return errno != EINTR;
    u64 drained;
    if ((both[1].revents & POLLIN) && read(wake_, &drained, 8) < 0) { /* somebody else did */ }
    event = both[0].revents & POLLIN;
    return true;
}

Outcome Sleepers::follow(const Target& target, u64 at_least, double end) {
    Futex& futex = *target.futex;
    futex.parked.fetch_add(1, std::memory_order_seq_cst);
    {
        std::lock_guard g(followers_mutex_);
        followers_.push_back(&futex);
    }
    const u32 seen = futex.bell.load(std::memory_order_acquire);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool whole = true;
    // The leader may have left before it could see us: then the lead is free.
    if (std::unique_lock leads(lead_mutex_, std::try_to_lock); !leads && !target.reached(at_least) && !target.lost() && !stop_)
        whole = park(futex, seen, std::max(0.0, naps_ ? nap_seconds : end - now()));
    {
        std::lock_guard g(followers_mutex_);
        followers_.erase(std::find(followers_.begin(), followers_.end(), &futex));
    }
    futex.parked.fetch_sub(1, std::memory_order_relaxed);
    return whole ? Outcome::timed_out : Outcome::interrupted;
}

}  // namespace tw
