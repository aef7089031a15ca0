// Death on one machine, which the kernel reports before it frees the victim's memory.
//
// The peers of a device's channels map its page of words, read-only. Each word holds the id of the device's watching
// thread and is in that thread's robust futex list: when the thread dies, in whatever way, the kernel marks every word
// and wakes its waiter. The thread increments word 0: if it stands still, the process is stopped.
#pragma once

#include <linux/futex.h>

#include <thread>
#include <unordered_map>
#include <vector>

#include "futex.h"

namespace tw {

class DeathNotifier {
  public:
    static constexpr u32 words = 2000;  // the kernel follows a robust list for 2048 entries

    DeathNotifier(double heartbeat, double lost_after);  // seconds
    ~DeathNotifier();
    DeathNotifier(const DeathNotifier&) = delete;
    DeathNotifier& operator=(const DeathNotifier&) = delete;
    // A word that tells one peer of this process's death; 0 if none is free. When that liveness is lost here, `socket` is shut
    // down: a peer that was only stopped learns of it.
    u32 enter(std::shared_ptr<Liveness> liveness, int socket);
    // Ends that liveness when the peer's word says so, or its counter stood still for too long. Throws std::system_error
    // for a page that is none.
    void watch(u32 word, int fd, u32 peer_word, double peer_heartbeat);
    void leave(u32 word);  // before the socket is closed
    void close();            // a second caller waits for the first
    int fd() const { return fd_; }

  private:
    struct Word {
        std::atomic<u32> value;
        u32 unused;
    };
    struct Page;
    struct Entry {
        std::shared_ptr<Liveness> liveness;
        int socket = -1;
        std::shared_ptr<Page> page;  // null: the peer is not watched, or no more
        u32 peer_word = 0, expected = 0, beat = 0;
        u32 silent = 0, most_silent = 0;  // in ticks of our own: while this process was stopped, nobody was silent
    };
    void run();
    void end();
    void give_up(u32 word);  // mutex_ held; its watcher takes the connection for closed
    void scan(bool tick);
    void lose(u32 word, const std::shared_ptr<Liveness>& liveness, const char* why);
    const char* what_became_of(Entry& entry, bool tick);
    void sleep(double until, u32 seen);
    void wake();

    const double heartbeat_, lost_after_;
    const pid_t pid_;
    int fd_ = -1;
    char* map_ = nullptr;  // list nodes in private memory, and as far behind it the shared words
    Word* words_ = nullptr;
    robust_list_head head_{};
    u32 linked_ = 0;
    std::mutex mutex_;  // entries_, linked_
    std::unordered_map<u32, Entry> entries_;
    std::vector<std::pair<std::shared_ptr<Page>, u32>> slept_on_;  // by the thread alone
    std::atomic<u32> tid_{0}, bell_{0};
    std::atomic<bool> stop_{false};
    std::once_flag closing_;
    std::thread thread_;
};

}  // namespace tw
