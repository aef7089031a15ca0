#include "futex.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <unordered_set>

#include "notices.h"
#include "unlocked.h"

namespace tw {

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

static long futex_call(std::atomic<u32>& word, int op, u32 value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<u32*>(&word), op, value, timeout, nullptr, 0);
}

void ring(Futex& futex) {
    // Pairs with the fence in park(): either the waiter sees the new word, or we see the waiter.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (futex.parked.load(std::memory_order_relaxed) == 0) return;
    futex.rung.store(now(), std::memory_order_relaxed);
    futex.bell.fetch_add(1, std::memory_order_release);
    futex_call(futex.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

bool park(Futex& futex, u32 seen, double seconds) {
    timespec t{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};
    return futex_call(futex.bell, FUTEX_WAIT, seen, &t) == 0 || errno != EINTR;
}

bool yield_to_others(double t, double& yielded) {
    constexpr double crowded_seconds = 10e-6;
    if (t - yielded < spin_seconds) return false;
    sched_yield();  // to whoever is to send it, where processes share a processor; more often would slow all others
    yielded = now();
    return yielded - t > crowded_seconds;
}

bool spin(const Target& target, u64 at_least, double seconds, double keeps, bool gives_way) {
    constexpr double give_way_seconds = 100e-6;  // a shorter poll goes on
    const double start = now();
    double yielded = start + keeps - spin_seconds;
    for (double t = start; t - start < seconds; t = now()) {
        for (int i = 0; i < 16; i++) {
            if (target.reached(at_least)) return true;
            relax();
        }
        if (yield_to_others(t, yielded) && gives_way && yielded - start > give_way_seconds) break;
    }
    return target.reached(at_least);
}

Outcome wait_parked(const Target& target, u64 at_least, double seconds) {
    thread_local Patience patience{spin_seconds, 400e-6, 400e-6};
    const double start = now();
    if (spin(target, at_least, std::min(seconds, patience.seconds()), spin_seconds, true)) return Outcome::reached;
    Futex& futex = *target.futex;
    const double end = start + std::min(seconds, slice_seconds);
    Outcome outcome = Outcome::interrupted;
    futex.parked.fetch_add(1, std::memory_order_seq_cst);
    for (;;) {
        const u32 seen = futex.bell.load(std::memory_order_acquire);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (target.reached(at_least)) { outcome = Outcome::reached; break; }
        if (target.lost()) { outcome = Outcome::lost; break; }
        const double left = end - now();
        if (left <= 0) { outcome = seconds <= slice_seconds ? Outcome::timed_out : Outcome::interrupted; break; }
        if (!park(futex, seen, left) && seconds > slice_seconds) break;  // Python may have to handle that signal
    }
    futex.parked.fetch_sub(1, std::memory_order_relaxed);
    if (outcome == Outcome::timed_out) return outcome;  // polls teach nothing
    // How long the wake-up took differs between machines, and is no part of the wait.
    const double came = outcome == Outcome::reached ? std::max(futex.rung.load(std::memory_order_relaxed), start) : now();
    patience.waited(came - start);
    return outcome;
}

namespace {

struct Registry {
    std::mutex mutex;
    std::unordered_set<Futex*> futexes;
    std::unordered_set<Progress*> engines;
    std::unordered_set<Liveness*> lives;
    std::unordered_set<AtFork*> at_fork;
    std::unordered_set<int> fds;
};

// Never destroyed: threads and late destructors may still use it while the process ends.
Registry& registry() {
    static Registry* r = new Registry;
    return *r;
}

}  // namespace

void enlist(Futex* futex) { std::lock_guard g(registry().mutex); registry().futexes.insert(futex); }
void dismiss(Futex* futex) { std::lock_guard g(registry().mutex); registry().futexes.erase(futex); }
void enlist(Progress* p) { std::lock_guard g(registry().mutex); registry().engines.insert(p); }
void dismiss(Progress* p) { std::lock_guard g(registry().mutex); registry().engines.erase(p); }
void enlist(AtFork* one) { std::lock_guard g(registry().mutex); registry().at_fork.insert(one); }
void dismiss(AtFork* one) { std::lock_guard g(registry().mutex); registry().at_fork.erase(one); }

void ring_all() {
    std::lock_guard g(registry().mutex);
    for (Futex* d : registry().futexes) {
        d->bell.fetch_add(1, std::memory_order_release);
        futex_call(d->bell, FUTEX_WAKE, INT_MAX, nullptr);
    }
    for (Progress* p : registry().engines) p->kick();
}

Liveness::Liveness(std::shared_ptr<Liveness> parent, std::string name, bool inbound)
    : peer(std::move(name)), parent_(std::move(parent)), inbound_(inbound) {
    if (parent_ && inbound_) parent_->inbound_lost_.store(false, std::memory_order_release);
    std::lock_guard g(registry().mutex);
    registry().lives.insert(this);
}

Liveness::~Liveness() {
    std::lock_guard g(registry().mutex);
    registry().lives.erase(this);
}

// Whether it was alive.
bool Liveness::end(const std::string& reason, bool own, std::vector<Listener>& listeners) {
    if (lost_.load()) return false;
    reason_ = reason;
    closed_.store(own, std::memory_order_release);
    lost_.store(1, std::memory_order_release);
    listeners.swap(listeners_);
    return true;
}

void Liveness::count(const std::string& loss, bool inbound) {
    std::lock_guard g(mutex_);
    last_loss_ = loss;
    if (inbound) inbound_lost_.store(true, std::memory_order_release);
    else children_lost_.fetch_add(1, std::memory_order_acq_rel);
    losses_.fetch_add(1, std::memory_order_acq_rel);
}

void Liveness::lose(const std::string& reason) {
    if (forked()) return;  // a thread that the child does not have may hold the mutex
    std::vector<Listener> listeners;
    {
        std::lock_guard g(mutex_);
        if (!end(reason, false, listeners)) return;
        counted_ = parent_ && !inbound_;
        if (parent_) parent_->count((peer.empty() ? "a peer" : peer) + " is lost: " + reason, inbound_);
    }
    ring_all();
    for (auto& [notices, token] : listeners) notices->post(token);
}

void Liveness::close(const std::string& reason) {
    if (forked()) return;
    std::vector<Listener> listeners;
    {
        std::lock_guard g(mutex_);
        if (counted_) parent_->children_lost_.fetch_sub(1, std::memory_order_acq_rel);
        counted_ = false;
        if (!end(reason, true, listeners)) return;
    }
    ring_all();
    for (auto& [notices, token] : listeners) notices->post(token);
}

void Liveness::notify(std::shared_ptr<Notices> notices, u64 token) {
    if (forked()) return notices->post(token);
    {
        std::lock_guard g(mutex_);
        if (!lost_.load()) {
            listeners_.emplace_back(std::move(notices), token);
            return;
        }
    }
    notices->post(token);
}

std::string Liveness::reason() {
    if (forked()) return "it belongs to the parent process: a forked child cannot use it";
    std::lock_guard g(mutex_);
    return reason_;
}

std::string Liveness::last_loss() {
    if (forked()) return reason();
    std::lock_guard g(mutex_);
    return last_loss_;
}

void close_on_fork(int fd) { std::lock_guard g(registry().mutex); registry().fds.insert(fd); }
void forget_fd(int fd) { std::lock_guard g(registry().mutex); registry().fds.erase(fd); }

int open_socket(int family, int type) {
    std::lock_guard g(registry().mutex);  // which a fork takes, too
    const int fd = socket(family, type | SOCK_CLOEXEC, 0);
    if (fd >= 0) registry().fds.insert(fd);
    return fd;
}

int accept_socket(int listener) {
    pollfd p{listener, POLLIN, 0};
    if (poll(&p, 1, -1) < 0) return -1;
    std::lock_guard g(registry().mutex);
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);  // the listener does not block
    if (fd >= 0) registry().fds.insert(fd);
    return fd;
}

void close_socket(int fd) {
    std::lock_guard g(registry().mutex);
    registry().fds.erase(fd);
    close(fd);
}

static void before_fork() { registry().mutex.lock(); }
static void after_fork_in_parent() { registry().mutex.unlock(); }

static void after_fork_in_child() {
    Unlocked::after_fork_in_child();
    Registry& r = registry();
    for (Liveness* liveness : r.lives) liveness->mark_forked();
    for (AtFork* one : r.at_fork) one->in_child();
    // The numbers stay taken, by /dev/null: objects copied from the parent will close them again.
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null >= 0) {
        for (int fd : r.fds) dup3(null, fd, O_CLOEXEC);
        close(null);
    }
    r.fds.clear();
    r.engines.clear();
    r.mutex.unlock();
}

void install_fork_handlers() {
    static const int once = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    (void)once;
}

}  // namespace tw
