// What wakes a waiter: doors, and the life of a peer.
//
// A door is a 32-bit futex word beside the signals it announces. It is shared between processes, so it never
// carries FUTEX_PRIVATE. The waker makes a system call only if somebody is parked.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tw {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

double now();  // seconds, CLOCK_MONOTONIC

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Door {
    std::atomic<u32> bell{0};
    std::atomic<u32> parked{0};
};

void ring(Door& door);
// Sleeps until the bell differs from `seen`, a signal arrives (then false), or `seconds` pass.
bool park(Door& door, u32 seen, double seconds);

// Doors that a loss must ring, whoever is lost: waiters look at their peer's life themselves.
void enlist(Door* door);
void dismiss(Door* door);
void ring_all();

class Notices;

// Alive until lost, once and for good. Owned by native code, so that its end never needs the GIL. A channel's life has its device's as parent.
class Life : public std::enable_shared_from_this<Life> {
  public:
    explicit Life(std::shared_ptr<Life> parent = nullptr);
    ~Life();
    void lose(const std::string& reason);
    bool lost() const { return lost_.load(std::memory_order_acquire) != 0; }
    // A channel below this life is lost: ends waits that named no peer.
    bool child_lost() const { return child_lost_.load(std::memory_order_acquire) != 0; }
    bool forked() const { return forked_.load(std::memory_order_relaxed); }
    void mark_forked() { forked_.store(true); lost_.store(1); }  // in the child: takes no lock
    std::string reason();
    // Posts the token when this life is lost; at once if it is.
    void notify(std::shared_ptr<Notices> notices, u64 token);

  private:
    std::atomic<u32> lost_{0}, child_lost_{0};
    std::atomic<bool> forked_{false};
    std::mutex mutex_;
    std::string reason_;
    std::vector<std::pair<std::shared_ptr<Notices>, u64>> told_;
    std::shared_ptr<Life> parent_;
};

// Descriptors that a forked child gives up at once: the peer learns of our death only when no copy is open.
void close_on_fork(int fd);
void forget_fd(int fd);
void install_fork_handlers();

// Something that must run for a word to change: the tcp engine.
class Progress;

enum class Outcome { reached, timed_out, lost, interrupted };

struct Target {
    std::atomic<u64>* word;
    Door* door;
    const Life* peer;  // may be null
    const Life* own;   // may be null
    const std::atomic<u32>* closed = nullptr;  // of the region that is waited on
    bool reached(u64 at_least) const { return word->load(std::memory_order_acquire) >= at_least; }
    bool lost() const {
        return (own && (own->lost() || (!peer && own->child_lost()))) || (peer && peer->lost()) ||
               (closed && closed->load(std::memory_order_acquire));
    }
};

class Progress {
  public:
    virtual ~Progress() = default;
    virtual Outcome wait(const Target& target, u64 at_least, double seconds) = 0;
    virtual void kick() = 0;   // makes a blocked driver look at its condition again
    virtual void nudge() = 0;  // the same after a store of this process; free while nobody blocks
};

void enlist(Progress* progress);
void dismiss(Progress* progress);

// Spins about 5 us by the clock, then parks. Returns `interrupted` now and then so that the caller may look for signals.
Outcome wait_parked(const Target& target, u64 at_least, double seconds);

constexpr double spin_seconds = 5e-6;
constexpr double slice_seconds = 0.1;  // no sleep is longer: a peer may die between its store and its ring

}  // namespace tw
