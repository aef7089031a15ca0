// A thread that polls words for others: it calls back when a word has reached a number, and sleeps while none is due.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <thread>

#include "span.h"

namespace tw {

class Watcher {
  public:
    using Call = std::function<void(Outcome)>;

    // All words lie in one span, whose futex announces them. `naps`: nothing does; it looks now and then.
    explicit Watcher(std::shared_ptr<Span> words, bool naps = false);
    ~Watcher();
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

    bool reached(u64 offset, u64 at_least) const { return words_->word(offset)->load(std::memory_order_acquire) >= at_least; }
    // Whether a word reaches a number within so many seconds. The calling thread sees to it, and drives tcp meanwhile.
    bool arrives(u64 offset, u64 at_least, const Liveness& peer, double seconds) const;
    // Calls back once: `reached`, `timed_out`, or `lost` with the peer or when this is closed.
    void when(u64 offset, u64 at_least, std::shared_ptr<Liveness> peer, double seconds, Call call);
    // All calls that are still to come are made now, with `lost`. A second caller waits for the first.
    void close();

  private:
    struct Entry {
        u64 offset, at_least;
        std::shared_ptr<Liveness> peer;
        double end;
        Call call;
    };
    struct Due {
        Call call;
        Outcome outcome;
    };
    Outcome look(const Entry& entry, double time) const;
    void expect(int more) const;
    void collect(std::vector<Due>& due, double& next);
    void run();

    const std::shared_ptr<Span> words_;
    const bool naps_;
    std::mutex mutex_;
    std::condition_variable added_;
    std::list<Entry> entries_;
    bool closed_ = false;
    std::mutex closing_;  // held until the thread has ended
    std::thread thread_;  // from the first entry on
    std::atomic<std::thread::id> runner_{};
};

}  // namespace tw
