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

class Queued final : public Carrier, public Announcement {
  public:
    Queued(std::shared_ptr<PostQueue> queue, u64 number, std::shared_ptr<Span> source, Ring ours)
        : queue_(std::move(queue)), number_(number), source_(std::move(source)), ours_(ours) {}

    bool carry(u64 step, const SlotHeader& header, const char* data, u64 nbytes) override {
        fill_slot(source_->base + ours_.at(step), header, data, nbytes);
        queue_->push({number_, step, sizeof header + nbytes});
        return true;
    }

    bool raise(u64 step) override {
        queue_->push({number_, step, 0});
        return true;
    }

  private:
    const std::shared_ptr<PostQueue> queue_;
    const u64 number_;
    const std::shared_ptr<Span> source_;
    const Ring ours_;
};

}  // namespace

std::unique_ptr<Carrier> queued_carrier(std::shared_ptr<PostQueue> queue, u64 number, std::shared_ptr<Span> source, Ring ours) {
    return std::make_unique<Queued>(std::move(queue), number, std::move(source), ours);
}

std::unique_ptr<Announcement> queued_announcement(std::shared_ptr<PostQueue> queue, u64 number) {
    return std::make_unique<Queued>(std::move(queue), number, nullptr, Ring{0, 0, 0, 1});
}

}  // namespace tw
