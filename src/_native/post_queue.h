// Writes of edges that need no Python, on devices to which only Python can post: a Python thread takes them from here.
//
// Senders and releasers do not call that thread, because they may hold locks, or Python's.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "async_ends.h"

namespace tw {

// `nbytes` of the memory at `at`, and the signal `value`; or with 0 the signal alone. `whose`: the number of a path.
struct Post {
    u64 whose, value, at, nbytes;
};

class PostQueue {
  public:
    void push(Post post);
    // False: none came within `seconds`, or this is closed.
    bool pop(double seconds, Post& post);
    void close();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Post> waiting_;
    bool closed_ = false;
};

std::unique_ptr<Path> queued_path(std::shared_ptr<PostQueue> queue, u64 whose, std::shared_ptr<Span> slots = nullptr, Ring ring = {});

}  // namespace tw
