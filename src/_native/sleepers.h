// Waits for words that a NIC writes, without Python and without a running core.
//
// The NIC wakes no futex. It makes a descriptor readable once an armed completion queue has an entry. So one waiter
// sleeps on that descriptor and the others at their futexes, until the one has polled or leaves. Only Python can arm
// and drain the queues: `attend` sends the caller there, and it returns.
#pragma once

#include <sys/types.h>

#include <vector>

#include "futex.h"

namespace tw {

class Sleepers : public Progress, public std::enable_shared_from_this<Sleepers> {
  public:
    // `fd`: readable once an armed queue has something. `naps`: signals come without completions; look now and then.
    Sleepers(int fd, bool naps);
    ~Sleepers() override;
    Outcome wait(const Target& target, u64 at_least, double seconds) override;
    // For the one thread that attends when nobody waits. `attend`: something came; `lost`: closed.
    Outcome rest(double seconds);
    void armed() { armed_.store(true); }
    void left();  // a waiter that was sent to attend does not come back
    void wake_all();  // words may have changed, whichever: everybody looks
    void kick() override;
    void nudge() override;
    void close();  // a second caller waits for the first

  private:
    void end();
    Outcome lead(const Target& target, u64 at_least, double end);
    Outcome follow(const Target& target, u64 at_least, double end);
    bool doze(double seconds, bool& event);
    void watch(bool on);

    const int fd_;
    const bool naps_;
    int wake_ = -1, stop_fd_ = -1, outer_ = -1;
    std::atomic<bool> armed_{false}, sleeping_{false}, stop_{false};
    std::once_flag closing_;
    std::mutex lead_mutex_, rest_mutex_;  // held while its owner sleeps
    std::mutex followers_mutex_;
    std::vector<Futex*> followers_;
    std::mutex fds_mutex_;  // wake_ and outer_ are open; the last to be taken
    pid_t pid_;
};

}  // namespace tw
