#include "engine.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>

#include "monitor.h"
#include "unlocked.h"

namespace tw {

namespace {
constexpr u64 wake_token = 1, inner_token = 2, stop_token = 3, timer_token = 4, soon_token = 5;
constexpr double lock_spin_seconds = 15e-6;
constexpr double midway_spin_seconds = 60e-6;  // a sleep in the middle of a transfer costs more than the wait
constexpr double give_way_seconds = 150e-6;  // a longer poll does: a yield in a shorter one costs more than it brings
constexpr double grace_seconds = 500e-6;  // after a short wait, for the next one to begin
constexpr size_t most_recent = 4;
constexpr double between_looks = 150e-9;  // each takes the socket's lock, for which the kernel waits when bytes arrive
constexpr u64 turns_per_epoll = 4;

// Until it is time for the next look.
void rest(double from) {
    while (now() < from + between_looks) relax();
}
}  // namespace

Engine::Engine(std::shared_ptr<Liveness> liveness, double heartbeat, double lost_after)
    : liveness_(std::move(liveness)), heartbeat_(heartbeat), lost_after_(lost_after), pid_(getpid()) {
    inner_ = epoll_create1(EPOLL_CLOEXEC);
    outer_ = epoll_create1(EPOLL_CLOEXEC);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    soon_ = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (inner_ < 0 || outer_ < 0 || wake_ < 0 || stop_fd_ < 0 || timer_ < 0 || soon_ < 0) {
        const int error = errno;
        for (int fd : {inner_, outer_, wake_, stop_fd_, timer_, soon_})
            if (fd >= 0) ::close(fd);
        throw std::system_error(error, std::generic_category(), "epoll");
    }
    for (int fd : {inner_, outer_, wake_, stop_fd_, timer_, soon_}) close_on_fork(fd);
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.u64 = wake_token;
    epoll_ctl(inner_, EPOLL_CTL_ADD, wake_, &e);
    // Among the connections: whoever drives them, a waiter or the engine's thread, keeps their hearts beating.
    e.data.u64 = timer_token;
    epoll_ctl(inner_, EPOLL_CTL_ADD, timer_, &e);
    const time_t whole = static_cast<time_t>(heartbeat_);
    const timespec every{whole, static_cast<long>((heartbeat_ - static_cast<double>(whole)) * 1e9)};
    const itimerspec beat{every, every};
    timerfd_settime(timer_, 0, &beat, nullptr);
    e.data.u64 = inner_token;
    epoll_ctl(outer_, EPOLL_CTL_ADD, inner_, &e);
    e.data.u64 = stop_token;
    epoll_ctl(outer_, EPOLL_CTL_ADD, stop_fd_, &e);
    e.data.u64 = soon_token;
    epoll_ctl(outer_, EPOLL_CTL_ADD, soon_, &e);
    enlist(static_cast<Progress*>(this));
    thread_ = start_thread([](void* self) { static_cast<Engine*>(self)->run(); }, this);
}

Engine::~Engine() {
    // Whoever drives now may want the GIL before it lets go.
    std::optional<Unlocked> unlocked;
    if (!closed_ && Py_IsInitialized() && PyGILState_Check()) unlocked.emplace();
    close();
}

void Engine::close() {
    if (getpid() != pid_) {
        abandon_thread(thread_);
        return;
    }
    std::call_once(closing_, [this] { end(); });
}

void Engine::end() {
    closed_ = true;
    std::unordered_map<u64, Exposed> exposed;  // dies after the lock: a span may need the GIL's owner to go on
    {
        std::lock_guard g(table_mutex_);
        exposed.swap(exposed_);
    }
    for (auto& c : all()) c->close("the device was closed", true);
    liveness_->close("the device was closed");
    stop_ = true;
    const u64 one = 1;
    if (write(stop_fd_, &one, 8) < 0) { /* it is awake */ }
    kick();
    if (thread_.joinable()) thread_.join();
    std::lock_guard drive(drive_mutex_);  // no waiter drives any more
    dismiss(static_cast<Progress*>(this));
    for (int fd : {inner_, outer_, wake_, stop_fd_, timer_, soon_}) forget_fd(fd);
    std::lock_guard kicks(kick_mutex_);
    for (int* fd : {&inner_, &outer_, &wake_, &stop_fd_, &timer_, &soon_}) {
        ::close(*fd);
        *fd = -1;
    }
}

void Engine::kick() {
    std::lock_guard g(kick_mutex_);
    const u64 one = 1;
    if (wake_ >= 0 && write(wake_, &one, 8) < 0) { /* it is awake */ }
}

void Engine::nudge() {
    // Pairs with the fence in drive(): either the driver sees the new word, or we see the driver.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_relaxed)) kick();
}

void Engine::expose(u64 key, std::shared_ptr<Span> span, bool writable) {
    std::lock_guard g(table_mutex_);
    if (!closed_) exposed_[key] = {std::move(span), writable};
}

void Engine::withdraw(u64 key) {
    std::lock_guard g(table_mutex_);
    exposed_.erase(key);
}

bool Engine::find_exposed(u64 key, Exposed& out) {
    std::lock_guard g(table_mutex_);
    auto it = exposed_.find(key);
    if (it == exposed_.end() || it->second.span->closed()) return false;
    out = it->second;
    return true;
}

std::shared_ptr<Connection> Engine::connect(int fd, bool initiator, std::shared_ptr<Liveness> liveness, PeerDevice peer) {
    std::lock_guard g(table_mutex_);
    if (closed_ || getpid() != pid_) {
        close_socket(fd);
        throw std::system_error(EBADF, std::generic_category(), "the engine is closed");
    }
    const u64 token = next_token_++;
    auto c = std::make_shared<Connection>(*this, fd, token, initiator, std::move(liveness), peer);
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

std::vector<std::shared_ptr<Connection>> Engine::all() {
    std::lock_guard g(table_mutex_);
    std::vector<std::shared_ptr<Connection>> found;
    for (auto& [token, c] : connections_) found.push_back(c);
    return found;
}

void Engine::expel(u64 device, const std::string& reason) {
    for (auto& c : all())
        if (c->peer_.id == device) c->close(reason);
}

void Engine::tick() {
    for (auto& c : all()) c->tick(heartbeat_, lost_after_);
}

size_t Engine::connections() {
    std::lock_guard g(table_mutex_);
    return connections_.size();
}

void Engine::arm(bool on) {
    if (armed_ == on) return;
    armed_ = on;
    epoll_event e{};
    if (on) e.events = EPOLLIN;
    e.data.u64 = inner_token;
    epoll_ctl(outer_, EPOLL_CTL_MOD, inner_, &e);
}

Engine::Turn Engine::progress(double seconds) {
    if (seconds > 0) {
        // Not epoll_wait's own timeout: it counts milliseconds.
        pollfd p{inner_, POLLIN, 0};
        const timespec t{0, static_cast<long>(std::min(seconds, slice_seconds) * 1e9)};
        const int ready = ppoll(&p, 1, &t, nullptr);
        if (ready < 0 && errno == EINTR) return Turn::interrupted;
        if (ready <= 0) return Turn::idle;
        return poll_all();
    }
    const Turn turn = poll_recent();
    // The others get their turn, but not a system call for every look.
    if (++turns_ % turns_per_epoll) return turn;
    return poll_all() == Turn::busy ? Turn::busy : turn;
}

// Of those with a transfer midway each is asked, of the others the next one.
Engine::Turn Engine::poll_recent() {
    bool any = false;
    for (size_t i = 0; i < recent_.size();) {
        const auto c = recent_[i].lock();
        if (!c || c->dead_) {
            recent_.erase(recent_.begin() + static_cast<ptrdiff_t>(i));
            continue;
        }
        if (c->midway() || turns_ % recent_.size() == i) any |= c->poll();
        i++;
    }
    return any ? Turn::busy : Turn::idle;
}

bool Engine::midway() const {
    for (const auto& weak : recent_)
        if (const auto c = weak.lock(); c && c->midway()) return true;
    return false;
}

Engine::Turn Engine::poll_all() {
    epoll_event events[64];
    const int n = epoll_wait(inner_, events, 64, 0);
    bool any = false, ticked = false;
    for (int i = 0; i < n; i++) {
        if (events[i].data.u64 == wake_token) {
            u64 drained;
            if (read(wake_, &drained, 8) > 0) any = true;
            continue;
        }
        if (events[i].data.u64 == timer_token) {
            u64 expirations;  // many, if this process was stopped: one tick all the same
            ticked = read(timer_, &expirations, 8) > 0;
            continue;
        }
        auto c = find(events[i].data.u64);
        if (!c) continue;
        any = true;
        if (events[i].events & EPOLLOUT) c->writable();
        if (events[i].events & ~static_cast<u32>(EPOLLOUT)) c->readable();
        const auto same = [&](const std::weak_ptr<Connection>& other) { return other.lock() == c; };
        if (std::any_of(recent_.begin(), recent_.end(), same)) continue;
        if (recent_.size() >= most_recent) recent_.erase(recent_.begin());
        recent_.push_back(c);
    }
    if (ticked) tick();  // after what has arrived was read
    return any || ticked ? Turn::busy : Turn::idle;
}

void Engine::run() {
    epoll_event events[4];
    double last = now();  // when something happened
    while (!stop_) {
        if (epoll_wait(outer_, events, 4, -1) < 0 && errno != EINTR) return;
        if (stop_) return;
        // Before the lock is tried: who has it then sets the timer again when it leaves.
        u64 expirations;
        if (read(soon_, &expirations, 8) > 0) set_.store(false);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        std::unique_lock g(drive_mutex_, std::try_to_lock);
        if (!g) continue;
        double t = now();
        if (!armed_ && t < left_ + grace_seconds) {  // others have waited since
            const double rest = left_ + grace_seconds - t;
            g.unlock();
            look_in(rest);
            continue;
        }
        arm(true);
        wake_ups_.fetch_add(1, std::memory_order_relaxed);
        lingering_.waited(t - last);
        for (last = t; !stop_; t = now()) {
            if (progress(0) == Turn::busy) last = now();
            else if (wanting_.load(std::memory_order_relaxed)) break;
            else if (t - last >= (midway() ? midway_spin_seconds : lingering_.seconds())) break;
            else rest(now());
        }
    }
}

// A waiter drives progress itself while it can; the engine's thread does only when nobody waits.
Outcome Engine::wait(const Target& target, u64 at_least, double seconds) {
    if (target.reached(at_least)) return Outcome::reached;
    const double start = now(), end = start + std::min(seconds, slice_seconds);
    std::unique_lock lock(drive_mutex_, std::try_to_lock);
    if (!lock) {
        beside_.fetch_add(1);
        const auto outcome = wait_beside(lock, target, at_least, start, seconds);
        beside_.fetch_sub(1);
        if (outcome) return *outcome;
    }
    if (closed_) return target.reached(at_least) ? Outcome::reached : Outcome::lost;
    arm(false);
    const Outcome outcome = drive(target, at_least, end, seconds <= slice_seconds);
    leave(lock, outcome);
    return outcome;
}

// While another thread drives. Nothing: this one may now.
std::optional<Outcome> Engine::wait_beside(std::unique_lock<std::mutex>& lock, const Target& target, u64 at_least, double start, double seconds) {
    wanting_.fetch_add(1, std::memory_order_relaxed);
    for (double t = start; !lock && t - start < lock_spin_seconds && !target.reached(at_least); t = now()) {
        relax();
        (void)lock.try_lock();
    }
    wanting_.fetch_sub(1, std::memory_order_relaxed);
    if (lock) return std::nullopt;  // even if it is reached: who has had the lock has to leave
    if (target.reached(at_least)) return Outcome::reached;
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    return wait_parked(target, at_least, std::max(0.0, seconds - (now() - start)));
}

// The engine's thread takes over: at once, or where waits are short only if the next one does not begin soon. A message
// that wakes it in between costs the sender more than the rest of the way.
void Engine::leave(std::unique_lock<std::mutex>& lock, Outcome outcome) {
    if (outcome != Outcome::reached || !waiting_.polls() || beside_.load()) return arm(true);
    left_ = now();
    lock.unlock();
    look_in(grace_seconds);  // only now: a timer that ends while somebody drives is left to the one who drives
    expect(0);               // whoever began to wait meanwhile found the lock taken
}

void Engine::expect(int more) {
    if (beside_.fetch_add(static_cast<u32>(more)) + static_cast<u32>(more) == 0) return;
    const std::unique_lock lock(drive_mutex_, std::try_to_lock);
    if (lock && !closed_) arm(true);  // or who has it does so when it leaves
}

// Wakes the engine's thread so much later, if nothing does earlier: to set a timer takes as long as a small transfer.
void Engine::look_in(double seconds) {
    if (set_.exchange(true)) return;
    const itimerspec once{{0, 0}, {0, 1 + static_cast<long>(seconds * 1e9)}};
    std::lock_guard g(kick_mutex_);
    if (soon_ >= 0) timerfd_settime(soon_, 0, &once, nullptr);
}

Outcome Engine::drive(const Target& target, u64 at_least, double end, bool last_slice) {
    double last = now(), yielded = last;
    for (;;) {
        // At least one turn, however short the wait: polling must bring what it polls for.
        const Turn turn = progress(0);
        if (target.reached(at_least)) return Outcome::reached;
        if (target.lost() || stop_) return Outcome::lost;
        const double t = now();
        if (t >= end) return last_slice ? Outcome::timed_out : Outcome::interrupted;
        if (turn == Turn::busy) last = t;
        const bool polls = t - last < waiting_.seconds() || (t - last < midway_spin_seconds && midway());
        if (polls && !(t - last > give_way_seconds && yield_to_others(t, yielded))) {
            if (turn == Turn::idle) rest(t);
            continue;
        }
        sleeping_.store(true, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        Turn slept = Turn::busy;
        if (!target.reached(at_least) && !target.lost()) {
            sleeps_.fetch_add(1, std::memory_order_relaxed);
            slept = progress(end - t);
        }
        sleeping_.store(false, std::memory_order_relaxed);
        const double woken = now();
        waiting_.waited(woken - last);
        if (slept == Turn::busy) last = woken;
        if (slept == Turn::interrupted && !last_slice) return Outcome::interrupted;
    }
}

}  // namespace tw
