#include "post_queue.h"

#include <chrono>

namespace tw {

void PostQueue::push(Post post) {
    {
        std::lock_guard g(mutex_);
        waiting_.push_back(post);
    }
    changed_.notify_one();
}

bool PostQueue::pop(double seconds, Post& post) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return closed_ || !waiting_.empty(); });
    if (waiting_.empty()) return false;
    post = waiting_.front();
    waiting_.pop_front();
    return true;
}

void PostQueue::close() {
    {
        std::lock_guard g(mutex_);
        closed_ = true;
    }
    changed_.notify_all();
}

namespace {

class QueuedPath final : public Path {
  public:
    QueuedPath(std::shared_ptr<PostQueue> queue, u64 whose, std::shared_ptr<Span> slots, Ring ring)
        : queue_(std::move(queue)), whose_(whose), slots_(std::move(slots)), ring_(ring) {}

    bool carry(u64 number, const EdgeHeader* header, const char* data, u64 nbytes) override {
        const u64 at = ring_.at(number);
        queue_->push({whose_, number, at, fill(slots_->base + at, header, data, nbytes)});
        return true;
    }

    bool raise(u64 number) override {
        queue_->push({whose_, number, 0, 0});
        return true;
    }

  private:
    const std::shared_ptr<PostQueue> queue_;
    const u64 whose_;
    const std::shared_ptr<Span> slots_;
    const Ring ring_;
};

}  // namespace

std::unique_ptr<Path> queued_path(std::shared_ptr<PostQueue> queue, u64 whose, std::shared_ptr<Span> slots, Ring ring) {
    return std::make_unique<QueuedPath>(std::move(queue), whose, std::move(slots), ring);
}

}  // namespace tw
