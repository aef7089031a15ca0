#include "engine.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "monitor.h"

namespace tw {

namespace {
constexpr u64 wake_token = 1, inner_token = 2, stop_token = 3;
constexpr double drive_spin_seconds = 15e-6;  // a round trip on loopback takes about 10
}  // namespace

Engine::Engine(std::shared_ptr<Life> life) : life_(std::move(life)), pid_(getpid()) {
    inner_ = epoll_create1(EPOLL_CLOEXEC);
    outer_ = epoll_create1(EPOLL_CLOEXEC);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (inner_ < 0 || outer_ < 0 || wake_ < 0 || stop_fd_ < 0) throw std::system_error(errno, std::generic_category(), "epoll");
    for (int fd : {inner_, outer_, wake_, stop_fd_}) close_on_fork(fd);
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.u64 = wake_token;
    epoll_ctl(inner_, EPOLL_CTL_ADD, wake_, &e);
    e.data.u64 = inner_token;
    epoll_ctl(outer_, EPOLL_CTL_ADD, inner_, &e);
    e.data.u64 = stop_token;
    epoll_ctl(outer_, EPOLL_CTL_ADD, stop_fd_, &e);
    enlist(static_cast<Progress*>(this));
    thread_ = start_thread([](void* self) { static_cast<Engine*>(self)->run(); }, this);
}

Engine::~Engine() { close(); }

void Engine::close() {
    if (getpid() != pid_) {
        if (thread_.joinable()) thread_.detach();
        return;
    }
    if (closed_.exchange(true)) return;
    std::vector<std::shared_ptr<Connection>> all;
    {
        std::lock_guard g(table_mutex_);
        for (auto& [token, c] : connections_) all.push_back(c);
        exposed_.clear();
    }
    for (auto& c : all) c->close("the device was closed");
    life_->lose("the device was closed");
    stop_ = true;
    const u64 one = 1;
    if (write(stop_fd_, &one, 8) < 0) { /* it is awake */ }
    kick();
    if (thread_.joinable()) thread_.join();
    std::lock_guard drive(drive_mutex_);  // no waiter drives any more
    dismiss(static_cast<Progress*>(this));
    for (int fd : {inner_, outer_, wake_, stop_fd_}) {
        forget_fd(fd);
        ::close(fd);
    }
    inner_ = outer_ = wake_ = stop_fd_ = -1;
}

void Engine::kick() {
    const u64 one = 1;
    if (wake_ >= 0 && write(wake_, &one, 8) < 0) { /* it is awake */ }
}

void Engine::expose(u64 key, std::shared_ptr<Span> span, bool writable) {
    std::lock_guard g(table_mutex_);
    exposed_[key] = {std::move(span), writable};
}

void Engine::withdraw(u64 key) {
    std::lock_guard g(table_mutex_);
    exposed_.erase(key);
}

bool Engine::look(u64 key, Exposed& out) {
    std::lock_guard g(table_mutex_);
    auto it = exposed_.find(key);
    if (it == exposed_.end() || it->second.span->header->closed.load(std::memory_order_acquire)) return false;
    out = it->second;
    return true;
}

std::shared_ptr<Connection> Engine::connect(int fd, bool initiator, std::shared_ptr<Life> life) {
    std::lock_guard g(table_mutex_);
    if (closed_) throw std::system_error(EBADF, std::generic_category(), "the engine is closed");
    const u64 token = next_token_++;
    auto c = std::make_shared<Connection>(*this, fd, token, initiator, std::move(life));
    connections_[token] = c;
    epoll_event e{};
    e.events = c->interest_ = EPOLLIN | EPOLLRDHUP;
    e.data.u64 = token;
    if (epoll_ctl(inner_, EPOLL_CTL_ADD, fd, &e)) {
        connections_.erase(token);
        throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    }
    return c;
}

std::shared_ptr<Connection> Engine::find(u64 token) {
    std::lock_guard g(table_mutex_);
    auto it = connections_.find(token);
    return it == connections_.end() ? nullptr : it->second;
}

void Engine::drop(u64 token) {
    std::lock_guard g(table_mutex_);
    connections_.erase(token);
}

size_t Engine::connections() {
    std::lock_guard g(table_mutex_);
    return connections_.size();
}

void Engine::arm(bool on) {
    epoll_event e{};
    e.events = on ? EPOLLIN : 0;
    e.data.u64 = inner_token;
    epoll_ctl(outer_, EPOLL_CTL_MOD, inner_, &e);
}

bool Engine::progress(int timeout_ms) {
    epoll_event events[64];
    const int n = epoll_wait(inner_, events, 64, timeout_ms);
    bool any = false;
    for (int i = 0; i < n; i++) {
        if (events[i].data.u64 == wake_token) {
            u64 drained;
            if (read(wake_, &drained, 8) > 0) any = true;
            continue;
        }
        auto c = find(events[i].data.u64);
        if (!c) continue;
        any = true;
        if (events[i].events & EPOLLOUT) c->writable();
        if (events[i].events & ~static_cast<u32>(EPOLLOUT)) c->readable();
    }
    return any;
}

void Engine::run() {
    epoll_event events[4];
    while (!stop_) {
        if (epoll_wait(outer_, events, 4, -1) < 0 && errno != EINTR) return;
        if (stop_) return;
        std::unique_lock g(drive_mutex_, std::try_to_lock);
        if (g) {
            while (!stop_ && progress(0)) {}
        }
    }
}

// A waiter drives progress itself while it can; the engine's thread does only when nobody waits.
Outcome Engine::wait(const Target& target, u64 at_least, double seconds) {
    if (target.reached(at_least)) return Outcome::reached;
    const double start = now(), end = start + std::min(seconds, slice_seconds);
    std::unique_lock drive(drive_mutex_, std::try_to_lock);
    for (double t = start; !drive && t - start < drive_spin_seconds; t = now()) {
        if (target.reached(at_least)) return Outcome::reached;
        relax();
        (void)drive.try_lock();
    }
    if (!drive) return wait_parked(target, at_least, seconds);
    if (closed_) return target.reached(at_least) ? Outcome::reached : Outcome::lost;
    arm(false);
    Outcome outcome;
    double last = now();
    for (;;) {
        if (target.reached(at_least)) { outcome = Outcome::reached; break; }
        if (target.lost() || stop_) { outcome = Outcome::lost; break; }
        const double t = now();
        if (t >= end) { outcome = seconds <= slice_seconds ? Outcome::timed_out : Outcome::interrupted; break; }
        if (t - last < drive_spin_seconds) {
            if (progress(0)) last = now();
        } else {
            if (progress(std::max(1, static_cast<int>((end - t) * 1000)))) last = now();
        }
    }
    arm(true);
    return outcome;
}

}  // namespace tw
