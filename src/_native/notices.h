// Tokens from native threads to the one thread that runs Python's callbacks.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "futex.h"

namespace tw {

// Shared with Python from within: dropping it must never need the GIL.
class Notices : public std::enable_shared_from_this<Notices> {
  public:
    void post(u64 token) {
        {
            std::lock_guard g(mutex_);
            tokens_.push_back(token);
        }
        some_.notify_one();
    }

    // Waits for one.
    u64 take() {
        std::unique_lock g(mutex_);
        some_.wait(g, [&] { return !tokens_.empty(); });
        const u64 token = tokens_.front();
        tokens_.pop_front();
        return token;
    }

  private:
    std::mutex mutex_;
    std::condition_variable some_;
    std::deque<u64> tokens_;
};

}  // namespace tw
