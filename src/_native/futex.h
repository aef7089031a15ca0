// The causes that wake a waiter: futexes, and the liveness of a peer.
//
// A futex is a 32-bit word beside the signals that it announces. It is shared between processes, so it never
// carries FUTEX_PRIVATE. The waker makes a system call only if a waiter is parked.
#pragma once

#include <algorithm>
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

struct Futex {
    std::atomic<u32> bell{0};
    std::atomic<u32> parked{0};
    std::atomic<double> rung{0};  // when somebody was woken last, by `now()`, which processes of a machine share
};

void ring(Futex& futex);
// Sleeps until the bell differs from `seen`, a signal arrives (then false), or `seconds` pass.
bool park(Futex& futex, u32 seen, double seconds);

// Futexes that a loss must ring, whoever is lost: waiters look at their peer's liveness themselves.
void enlist(Futex* futex);
void dismiss(Futex* futex);
void ring_all();

class Notices;

// Alive until lost, once and for good. Owned by native code, so that its end never needs the GIL. A channel's liveness has its
// device's as parent, which counts the peers that are lost: that ends waits that named no peer.
class Liveness : public std::enable_shared_from_this<Liveness> {
  public:
    // `peer`: the process at the other end, in words. `inbound`: the peer made the connection, so nobody here closes it.
    explicit Liveness(std::shared_ptr<Liveness> parent = nullptr, std::string peer = "", bool inbound = false);
    ~Liveness();
    void lose(const std::string& reason);
    // Our own doing: ends what `lose` ends, but is no loss, and the parent forgets the loss that came before it.
    void close(const std::string& reason);
    bool lost() const { return lost_.load(std::memory_order_acquire) != 0; }
    bool closed() const { return closed_.load(std::memory_order_acquire); }  // that end was our own doing
    // A peer is lost and its channel not closed yet; or a peer that had connected is, and none has connected since.
    bool child_lost() const { return children_lost_.load(std::memory_order_acquire) || inbound_lost_.load(std::memory_order_acquire); }
    u32 losses() const { return losses_.load(std::memory_order_acquire); }  // of children, ever
    bool forked() const { return forked_.load(std::memory_order_relaxed); }
    void mark_forked() { forked_.store(true); lost_.store(1); }  // in the child: takes no lock
    std::string reason();
    std::string last_loss();  // of a child, with its peer
    // Posts the token when this liveness is lost; at once if it is.
    void notify(std::shared_ptr<Notices> notices, u64 token);
    const std::string peer;

  private:
    using Listener = std::pair<std::shared_ptr<Notices>, u64>;
    bool end(const std::string& reason, bool own, std::vector<Listener>& listeners);
    void count(const std::string& loss, bool inbound);
    std::atomic<u32> lost_{0}, children_lost_{0}, losses_{0};
    std::atomic<bool> closed_{false}, inbound_lost_{false}, forked_{false};
    std::mutex mutex_;  // a child's is taken before its parent's
    std::string reason_, last_loss_;
    std::vector<Listener> listeners_;
    std::shared_ptr<Liveness> parent_;
    const bool inbound_;
    bool counted_ = false;  // among its parent's lost children
};

// Descriptors that a forked child gives up at once: the peer learns of our death only when no copy is open.
void close_on_fork(int fd);
void forget_fd(int fd);
// No fork comes between a socket's birth or end and its place in that list. -1 and errno where there is none.
int open_socket(int family, int type);
int accept_socket(int listener);  // waits for a connection first
void close_socket(int fd);
void install_fork_handlers();
// Told in a forked child, by the thread that forked, before those descriptors are given up. Takes no lock.
class AtFork {
  public:
    virtual void in_child() = 0;

  protected:
    ~AtFork() = default;
};
void enlist(AtFork* one);
void dismiss(AtFork* one);

// Something that must run for a word to change: the tcp engine, or whoever drains completion queues.
class Progress;

enum class Outcome { reached, timed_out, lost, interrupted, attend };  // attend: Python has to do something first

struct Target {
    std::atomic<u64>* word;
    Futex* futex;
    const Liveness* peer;  // may be null
    const Liveness* own;   // may be null
    const std::atomic<u32>* closed = nullptr;  // of the region that is waited on
    u32 losses = 0;                            // of `own`'s children when the wait began
    bool reached(u64 at_least) const { return word->load(std::memory_order_acquire) >= at_least; }
    bool lost() const {
        return (own && (own->lost() || (!peer && (own->child_lost() || own->losses() != losses)))) || (peer && peer->lost()) ||
               (closed && closed->load(std::memory_order_acquire));
    }
};

class Progress {
  public:
    virtual ~Progress() = default;
    virtual Outcome wait(const Target& target, u64 at_least, double seconds) = 0;
    virtual void kick() = 0;   // makes a blocked driver look at its condition again
    virtual void nudge() = 0;  // the same after a store of this process; free while nobody blocks
    virtual void expect(int) {}  // so many more, or fewer, wait for what arrives, and drive nothing
};

void enlist(Progress* progress);
void dismiss(Progress* progress);

// How long to poll before sleeping. It is learned as hypervisors learn theirs (halt polling): after a wait so short that
// polling would have been cheaper than a sleep it doubles, and after a long one it is the shortest again.
class Patience {
  public:
    Patience(double least, double most, double worth_polling) : least_(least), most_(most), worth_polling_(worth_polling), seconds_(least) {}
    double seconds() const { return seconds_; }
    bool polls() const { return seconds_ > least_; }  // waits have been short lately
    // From the last event to the one that ended a sleep. Where only the time of the wake-up is known, that is in it.
    void waited(double seconds) {
        if (seconds > worth_polling_) seconds_ = least_;
        else seconds_ = std::min(most_, std::max(2 * seconds_, first_step));
    }

  private:
    static constexpr double first_step = 15e-6;
    const double least_, most_, worth_polling_;
    double seconds_;
};

constexpr double spin_seconds = 5e-6;
constexpr double slice_seconds = 0.1;  // no sleep is longer: a peer may die between its store and its ring
constexpr double nap_seconds = 50e-6;  // between looks at words that nobody announces

// Lets others use the processor, unless it did so less than 5 us before `t`, at `yielded`; true: they kept it for long.
bool yield_to_others(double t, double& yielded);

// Looks again and again for about so long, and after `keeps` seconds yields now and then; one that `gives_way` ends early
// where others need the processor.
bool spin(const Target& target, u64 at_least, double seconds, double keeps = spin_seconds, bool gives_way = false);
// The same for as long as this thread's last waits have taught, then parks. Returns `interrupted` now and then so that the caller
// may look for signals.
Outcome wait_parked(const Target& target, u64 at_least, double seconds);

}  // namespace tw
