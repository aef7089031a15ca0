// The tcp engine: applies one-sided operations that peers send, without Python.
//
// A connection has two ends: the initiator posts operations, the target applies them to its regions and
// acknowledges in order. Frames are a fixed 64-byte header, little-endian, and a payload. docs/devices.md has the format.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "notices.h"
#include "pages.h"
#include "span.h"

namespace tw {

enum class Op : u32 { write = 1, read = 2, fetch_add = 3, compare_swap = 4, ack = 16, refuse = 17, data = 18, old_value = 19, beat = 32 };
enum class Refusal : u32 { none = 0, key = 1, range = 2, access = 3, alignment = 4 };

constexpr u32 frame_magic = 0x31465754;  // "TWF1"
constexpr u64 no_signal = ~u64{0};          // as signal_offset: no signal; as a write's offset: nothing but a signal
constexpr u64 most_outstanding = 4096;      // operations an initiator may have in flight

struct Frame {
    u32 magic = frame_magic;
    u32 op = 0;
    u64 id = 0;
    u64 key = 0, offset = 0, length = 0;
    u64 signal_key = 0, signal_offset = no_signal, signal_value = 0;  // atomics: operand in signal_key and signal_value
};
static_assert(sizeof(Frame) == 64);
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian"
#endif

// What is known of the peer's device since the handshake.
struct PeerDevice {
    u64 id = 0;
    double heartbeat = 0;  // seconds between its signs of life; 0: it sends none, and wants none
};

class Engine;

class Connection : public std::enable_shared_from_this<Connection> {
  public:
    Connection(Engine& engine, int fd, u64 token, bool initiator, std::shared_ptr<Liveness> liveness, PeerDevice peer);
    ~Connection();
    // Gives the operation a number and sends it; waits while too many are outstanding. Only if the outcome is
    // `reached` was it started. `memory` is a write's source or a read's destination.
    // With a fence it waits first until every earlier read and atomic is answered.
    Outcome post(Frame frame, std::shared_ptr<Span> memory, u64 offset, double seconds, bool fence, u64& id);
    // Posts the token once that operation is done, or the connection lost.
    void notify(u64 id, std::shared_ptr<Notices> notices, u64 token);
    Target completion() { return {&done_, &futex_, liveness.get(), engine_liveness_.get()}; }
    u64 done() const { return done_.load(std::memory_order_acquire); }
    bool refused(u64 id) { return any_refusal_.load(std::memory_order_acquire) && refusal(id) != Refusal::none; }
    Refusal refusal(u64 id);
    u64 old_value(u64 id);
    // Afterwards no thread touches the memory of any of its operations, and the peer signals nothing that it had not
    // acknowledged and whose source may change. Waits for another thread that is at it. `own`: it is our own doing, and
    // no loss.
    void close(const std::string& reason, bool own = false);

    const std::shared_ptr<Liveness> liveness;

  private:
    friend class Engine;
    struct Outgoing {
        Frame frame;
        std::shared_ptr<Span> span;
        const char* payload;
        u64 length, sent;
        bool lent;  // the payload goes by reference
    };
    struct Pending {
        u64 id;
        std::shared_ptr<Span> span;
        char* at;
        u64 length;
    };
    bool end(const std::string& reason, bool own = false);  // as close(); false, at once: another thread is at it, or was
    void enqueue(Frame frame, std::shared_ptr<Span> span, const char* payload, u64 length);
    bool flush(std::vector<std::shared_ptr<Span>>& finished);  // send_mutex_ held; false: close it, once that is released
    ssize_t send_copied();                                     // send_mutex_ held
    void update_interest();                                    // send_mutex_ held
    bool has_room() const { return posted_.load() - done() < most_outstanding; }
    bool poll();                                               // sends and receives what it can; whether anything moved
    bool midway() const { return midway_.load(std::memory_order_relaxed); }
    bool writable();
    bool readable();
    void tick(double heartbeat, double lost_after);
    void beat();
    bool receive();
    ssize_t receive_payload();
    ssize_t receive_frames();
    void acknowledge();
    bool parse();
    bool begin_request(const Frame& f);
    Refusal judge(const Frame& f, std::shared_ptr<Span>& target);
    Refusal judge_signal(const Frame& f);
    void answer(const Frame& f, std::shared_ptr<Span> target);
    void refuse(u64 id);
    bool begin_reply(const Frame& f);
    const char* take_answer(const Frame& f, Pending& answered);
    void end_payload();
    void expect(std::shared_ptr<Span> span, char* at, u64 length);
    bool broken(const char* why);
    void complete(u64 id);
    void notify_listeners(u64 id);

    Engine& engine_;
    const std::shared_ptr<Liveness> engine_liveness_;
    int fd_;  // closed under both receive_mutex_ and send_mutex_
    const u64 token_;
    const bool initiator_;
    const PeerDevice peer_;
    const bool near_;  // the peer is on this machine
    std::atomic<bool> sent_{false}, heard_{false};  // since the last tick
    u32 silent_ = 0;  // ticks; drive_mutex_ held
    std::atomic<bool> dead_{false}, closed_{false};  // from the beginning of end(); from its end
    std::atomic<bool> sending_{false}, paused_{false}, midway_{false};  // something is left to send; replies pile up; half way
    Futex futex_;

    // Locks are taken in this order: drive, receive, send, result. None is held while Python's is asked for.
    std::mutex send_mutex_;
    std::deque<Outgoing> outgoing_;
    std::atomic<u64> posted_{0}, last_question_{0};  // a question: a read or an atomic
    u32 interest_ = 0;
    PagePipe pipe_;
    u64 lent_ = 0;  // the last write whose payload went by reference

    struct Listener {
        u64 id, token;
        std::shared_ptr<Notices> notices;
    };
    std::mutex result_mutex_;  // pending_, refusals_, old_values_, listeners_
    std::vector<Listener> listeners_;
    std::atomic<bool> has_listeners_{false};
    std::deque<Pending> pending_;
    std::unordered_map<u64, Refusal> refusals_;
    std::atomic<bool> any_refusal_{false};  // ever
    std::unordered_map<u64, u64> old_values_;
    std::atomic<u64> done_{0};

    std::mutex receive_mutex_;  // everything below; held by the thread that drives
    std::atomic<std::thread::id> receiver_{};
    std::vector<char> staging_;
    size_t begin_ = 0, end_ = 0;
    bool in_payload_ = false, arrived_ = false;
    Frame frame_{};
    Refusal refused_ = Refusal::none;
    std::shared_ptr<Span> into_;
    char* at_ = nullptr;  // null: the payload is refused and thrown away
    u64 left_ = 0;
    u64 applied_ = 0, acknowledged_ = 0;
};

class Engine : public Progress, public std::enable_shared_from_this<Engine> {
  public:
    Engine(std::shared_ptr<Liveness> liveness, double heartbeat, double lost_after);
    ~Engine() override;
    void expose(u64 key, std::shared_ptr<Span> span, bool writable);
    void withdraw(u64 key);
    std::shared_ptr<Connection> connect(int fd, bool initiator, std::shared_ptr<Liveness> liveness, PeerDevice peer);
    void expel(u64 device, const std::string& reason);
    Outcome wait(const Target& target, u64 at_least, double seconds) override;
    void kick() override;
    void nudge() override;
    void expect(int more) override;
    void close();  // a second caller waits for the first
    size_t connections();
    u64 sleeps() const { return sleeps_.load(std::memory_order_relaxed); }      // of waiters, ever
    u64 wake_ups() const { return wake_ups_.load(std::memory_order_relaxed); }  // of the engine's thread, ever

  private:
    friend class Connection;
    struct Exposed {
        std::shared_ptr<Span> span;
        bool writable;
    };
    std::shared_ptr<Connection> find(u64 token);
    bool find_exposed(u64 key, Exposed& out);
    void drop(u64 token);
    std::vector<std::shared_ptr<Connection>> all();
    void tick();  // drive_mutex_ held
    enum class Turn { idle, busy, interrupted };
    Turn progress(double seconds);  // drive_mutex_ held
    Turn poll_recent();
    Turn poll_all();
    bool midway() const;
    Outcome drive(const Target& target, u64 at_least, double end, bool last_slice);
    void arm(bool on);
    void leave(std::unique_lock<std::mutex>& lock, Outcome outcome);  // of drive_mutex_, which it may let go
    void look_in(double seconds);                    // drive_mutex_ not held
    std::optional<Outcome> wait_beside(std::unique_lock<std::mutex>& lock, const Target& target, u64 at_least, double start, double seconds);
    void run();
    void end();

    const std::shared_ptr<Liveness> liveness_;
    const double heartbeat_, lost_after_;
    int inner_ = -1, outer_ = -1, wake_ = -1, stop_fd_ = -1, timer_ = -1, soon_ = -1;
    std::atomic<bool> stop_{false}, closed_{false};
    std::once_flag closing_;
    std::atomic<bool> sleeping_{false};  // the driver may be blocked
    std::mutex kick_mutex_;              // wake_ and soon_ are open
    std::mutex drive_mutex_;
    std::mutex table_mutex_;
    std::unordered_map<u64, Exposed> exposed_;
    std::unordered_map<u64, std::shared_ptr<Connection>> connections_;
    u64 next_token_ = 16;
    std::vector<std::weak_ptr<Connection>> recent_;  // with drive_mutex_: had traffic lately; asked without epoll
    u64 turns_ = 0;
    // With drive_mutex_: of waiters; of the engine's thread. When a message came is not known: a wake-up is in it.
    Patience waiting_{15e-6, 400e-6, 400e-6}, lingering_{0, 30e-6, 100e-6};
    bool armed_ = true;  // with drive_mutex_: messages wake the engine's thread
    double left_ = 0;    // with drive_mutex_: when a waiter left last, to whose next wait messages are left
    std::atomic<bool> set_{false};  // the timer soon_
    std::atomic<u64> sleeps_{0}, wake_ups_{0};
    std::atomic<u32> wanting_{0};  // waiters that would drive if the engine's thread did not
    std::atomic<u32> beside_{0};   // waiters that do not drive
    std::thread thread_;
    pid_t pid_;
};

}  // namespace tw
