#include "watcher.h"

#include <algorithm>

namespace tw {

// A look keeps the processor so long: a framework's idle threads spin for about 20 us when they get it, and what comes
// meanwhile is seen late.
static constexpr double keep_seconds = 50e-6;

Watcher::Watcher(std::shared_ptr<Span> words, bool naps) : words_(std::move(words)), naps_(naps) {}

Watcher::~Watcher() { close(); }

Outcome Watcher::look(const Entry& entry, double time) const {
    if (reached(entry.offset, entry.at_least)) return Outcome::reached;
    if (words_->closed() || (words_->own && words_->own->lost()) || (entry.peer && entry.peer->lost())) return Outcome::lost;
    return time >= entry.end ? Outcome::timed_out : Outcome::interrupted;
}

// Entries wait for what arrives, and do not drive it.
void Watcher::expect(int more) const {
    if (const auto progress = words_->progress.lock()) progress->expect(more);
}

bool Watcher::arrives(u64 offset, u64 at_least, const Liveness& peer, double seconds) const {
    if (reached(offset, at_least)) return true;
    if (seconds <= 0) return false;
    const Target target = words_->target(offset, &peer);
    const auto progress = words_->progress.lock();
    if (!progress || naps_) return spin(target, at_least, seconds, keep_seconds);
    for (const double begun = now();;) {
        const Outcome outcome = progress->wait(target, at_least, std::max(0.0, begun + seconds - now()));
        if (outcome != Outcome::interrupted) return outcome == Outcome::reached;
    }
}

void Watcher::when(u64 offset, u64 at_least, std::shared_ptr<Liveness> peer, double seconds, Call call) {
    expect(1);
    {
        std::lock_guard g(mutex_);
        if (!closed_ && !(words_->own && words_->own->forked())) {
            entries_.push_back({offset, at_least, std::move(peer), now() + seconds, std::move(call)});
            call = nullptr;
            if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
        }
    }
    if (call) {
        expect(-1);
        return call(Outcome::lost);
    }
    added_.notify_one();
    // The thread may have looked before the entry was there, and sleep through what has happened since.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (reached(offset, at_least)) ring(words_->header->futex);
}

void Watcher::close() {
    {
        std::lock_guard g(mutex_);
        closed_ = true;
    }
    added_.notify_one();
    words_->header->futex.bell.fetch_add(1, std::memory_order_release);
    ring(words_->header->futex);
    const bool forked = words_->own && words_->own->forked(), inside = runner_ == std::this_thread::get_id();
    std::unique_lock one(closing_, std::defer_lock);
    if (inside) (void)one.try_lock();  // whoever has it waits for this thread
    else if (!forked) one.lock();
    if ((inside && !one) || !thread_.joinable()) return;
    if (forked || inside) thread_.detach();  // the child has no such thread
    else thread_.join();
}

// Takes what is due; `next`: when to look again at the latest.
void Watcher::collect(std::vector<Due>& due, double& next) {
    const double time = now();
    next = time + slice_seconds;
    for (auto at = entries_.begin(); at != entries_.end();) {
        const Outcome outcome = closed_ ? Outcome::lost : look(*at, time);
        if (outcome == Outcome::interrupted) {
            next = std::min(next, at->end);
            ++at;
            continue;
        }
        due.push_back({std::move(at->call), outcome});
        at = entries_.erase(at);
    }
}

void Watcher::run() {
    runner_ = std::this_thread::get_id();
    Futex& futex = words_->header->futex;
    std::vector<Due> due;
    double idle_since = now();
    for (;;) {
        double next = 0;
        futex.parked.fetch_add(1, std::memory_order_seq_cst);
        const u32 seen = futex.bell.load(std::memory_order_acquire);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        bool sleep = false;
        {
            std::unique_lock lock(mutex_);
            collect(due, next);
            if (due.empty() && entries_.empty()) {
                futex.parked.fetch_sub(1, std::memory_order_relaxed);
                if (closed_) return;
                added_.wait(lock, [this] { return closed_ || !entries_.empty(); });
                idle_since = now();
                continue;
            }
            // It looks again for a moment before it sleeps: what is waited for is often nearly there.
            sleep = due.empty() && now() - idle_since >= spin_seconds;
        }
        if (sleep) park(futex, seen, std::max(0.0, naps_ ? nap_seconds : next - now()));
        futex.parked.fetch_sub(1, std::memory_order_relaxed);
        if (due.empty()) {
            if (!sleep) relax();
            continue;
        }
        expect(-static_cast<int>(due.size()));
        for (Due& each : due) each.call(each.outcome);
        due.clear();
        idle_since = now();
    }
}

}  // namespace tw
