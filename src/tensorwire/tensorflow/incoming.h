// The consumer's end of an edge: which receive gets which tensor.
//
// Tensors are taken while a receive waits, and no sooner, so that a producer that is ahead does not fill the consumer's
// memory. They come in the order in which they were sent, and a receive gets the one of its step, in its slot unless it takes
// a copy: others are copied, and kept until they are asked for.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "keyed_ends.h"
#include "tensorflow/core/framework/cancellation.h"
#include "described_tensors.h"

namespace tensorwire {

// A receive that has no tensor yet.
struct Waiting {
    OpKernelContext* context;
    AsyncOpKernel::DoneCallback done;
    const PartialTensorShape& shape;  // its kernel's, which outlives its runs
    bool copies;
    const std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
    CancellationToken token = CancellationManager::kInvalidToken;
    std::atomic<bool> looked{false};  // until `look_seconds` had passed, or its tensor came
    bool asked = false;               // the next tensor was asked for since it waits
};

constexpr size_t most_kept = 256;  // tensors of other steps than those that are received, or they would fill memory

class Incoming {
  public:
    // Before the first receive; all of a key say the same.
    void describe(const std::shared_ptr<End>& end, const std::string& key, DataType dtype) {
        std::lock_guard<std::mutex> g(mutex_);
        if (end_) return;
        end_ = end;
        key_ = key;
        dtype_ = dtype;
    }

    void receive(int64_t step, const std::shared_ptr<Waiting>& waiting) {
        absl::StatusOr<Tensor> result;  // of one that need not wait
        bool waits = false, looks = false;
        {
            std::lock_guard<std::mutex> g(mutex_);
            if (const auto found = kept_.find(step); found != kept_.end()) {
                result = std::move(found->second);
                kept_.erase(found);
            } else if (!broken_.ok()) {
                result = broken_;
            } else if (!waiting_.emplace(step, waiting).second) {
                result = errors::InvalidArgument("tensorwire: receiving ", key_, ": step ", step, " is being received already");
            } else {
                waits = true;
                looks = !asked_ && !looks_;
                looks_ |= looks;
            }
        }
        if (!waits) return finish(*waiting, result);
        if (looks) look(*waiting);
        when_known(*end_, [this] { end_->edge ? read() : fail(errors::Aborted(end_->failure)); });
        let_cancel(step, waiting);
    }

  private:
    using Due = std::vector<std::pair<std::shared_ptr<Waiting>, absl::StatusOr<Tensor>>>;

    void finish(Waiting& waiting, const absl::StatusOr<Tensor>& result) {
        OpKernelContext* const context = waiting.context;
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - waiting.since;
        end_->soon = waited.count() < (waiting.looked ? look_seconds : soon_seconds);
        if (waiting.token != CancellationManager::kInvalidToken) context->cancellation_manager()->TryDeregisterCallback(waiting.token);
        if (!result.ok()) context->SetStatus(result.status());
        else if (!waiting.shape.IsCompatibleWith(result->shape()))
            context->SetStatus(errors::Aborted("tensorwire: receiving ", key_, " cannot happen: a tensor of shape ", result->shape().DebugString(), " came, and this takes ", waiting.shape.DebugString()));
        else context->set_output(0, *result);
        const AsyncOpKernel::DoneCallback done = std::move(waiting.done);
        done();
    }

    // A receive that still waits can be cancelled from now on.
    void let_cancel(int64_t step, const std::shared_ptr<Waiting>& waiting) {
        {
            std::lock_guard<std::mutex> g(mutex_);
            if (!waits(step, waiting)) return;
            CancellationManager* manager = waiting->context->cancellation_manager();
            if (!manager) return;
            const CancellationToken token = manager->get_cancellation_token();
            if (manager->RegisterCallback(token, [this, step, waiting] { cancel(step, waiting); })) {
                waiting->token = token;
                return;
            }
        }
        cancel(step, waiting);  // the whole step was, already
    }

    void cancel(int64_t step, const std::shared_ptr<Waiting>& waiting) {
        {
            std::lock_guard<std::mutex> g(mutex_);
            if (!waits(step, waiting)) return;
            waiting_.erase(step);
            waiting->token = CancellationManager::kInvalidToken;
        }
        finish(*waiting, errors::Cancelled("tensorwire: receiving ", key_, " was cancelled"));
    }

    // The mutex is held.
    bool waits(int64_t step, const std::shared_ptr<Waiting>& waiting) const {
        const auto found = waiting_.find(step);
        return found != waiting_.end() && found->second == waiting;
    }

    // Perhaps waits a moment for what comes next, which no other thread asks for meanwhile.
    void look(Waiting& waiting) {
        void* edge = nullptr;
        {
            std::lock_guard<std::mutex> g(end_->mutex);
            edge = end_->edge;
        }
        if (edge && end_->soon && !looking.test_and_set()) {
            waiting.looked = true;
            edges->arrives(edge, look_seconds);
            looking.clear();
        }
        std::lock_guard<std::mutex> g(mutex_);
        looks_ = false;
    }

    // Asks for the next tensor while a receive waits. One thread does so at a time: one that comes meanwhile leaves it the
    // work, and a tensor that is there already is no deeper call.
    void read() {
        Due due;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            if (reading_) return;
            reading_ = true;
            ask(lock);
            if (!asked_ && !looks_ && !waiting_.empty())
                take_all(errors::FailedPrecondition("tensorwire: receiving ", key_, " cannot happen: ", most_kept, " tensors of other steps came, and nobody has received them"), true, due);
            reading_ = false;
        }
        for (auto& [each, with] : due) finish(*each, with);
    }

    // The caller holds the mutex.
    void ask(std::unique_lock<std::mutex>& lock) {
        while (!asked_ && !looks_ && !waiting_.empty() && kept_.size() < most_kept) {
            asked_ = true;
            for (auto& [step, each] : waiting_) each->asked = true;
            lock.unlock();
            edges->take(end_->edge, [](void* self, const tw_header* header, const void* whole, uint64_t slot) {
                return static_cast<Incoming*>(self)->allocate(*header, whole, slot);
            }, [](void* self, int outcome) { static_cast<Incoming*>(self)->arrived(outcome); }, this);
            lock.lock();
        }
    }

    void* allocate(const tw_header& header, const void* whole, uint64_t slot) {
        bool copies = true;
        {
            std::lock_guard<std::mutex> g(mutex_);
            const auto found = waiting_.find(static_cast<int64_t>(header.step));
            if (found != waiting_.end()) copies = found->second->copies;
        }
        return arriving_.allocate(header, dtype_, copies ? nullptr : whole, end_->edge, slot);
    }

    // Until `asked_` is false again, no other thread touches what arrives.
    void arrived(int outcome) {
        const bool complete = outcome == TW_DONE;
        absl::Status failed = arriving_.refused.ok() ? status_of(*end_, outcome, "tensorwire: receiving " + key_) : prefixed(arriving_.refused);
        absl::StatusOr<Tensor> result;
        if (complete) {
            result = arriving_.finish(dtype_);
            if (!result.ok()) result = prefixed(result.status());
        }
        Due due;
        {
            std::lock_guard<std::mutex> g(mutex_);
            bool broken = outcome == TW_REFUSED;
            if (complete && !deliver(std::move(result), due)) {
                broken = true;
                failed = prefixed(errors::Aborted("step ", arriving_.step, " was sent twice"));
            }
            if (broken) broken_ = failed;
            if (!failed.ok()) take_all(failed, broken, due);
            asked_ = false;
        }
        for (auto& [each, with] : due) finish(*each, with);
        read();
    }

    // Finds the receive of what has arrived, or keeps it; false: there was one of its step. The mutex is held.
    bool deliver(absl::StatusOr<Tensor> result, Due& due) {
        const auto found = waiting_.find(arriving_.step);
        if (found == waiting_.end()) return kept_.emplace(arriving_.step, std::move(result)).second;
        due.emplace_back(std::move(found->second), std::move(result));
        waiting_.erase(found);
        return true;
    }

    // Receives that fail: all, or those that waited when the tensor was asked for that did not come. The mutex is held.
    void take_all(const absl::Status& status, bool all, Due& due) {
        for (auto at = waiting_.begin(); at != waiting_.end();) {
            if (!all && !at->second->asked) {
                ++at;
                continue;
            }
            due.emplace_back(std::move(at->second), status);
            at = waiting_.erase(at);
        }
    }

    void fail(const absl::Status& status) {
        Due due;
        {
            std::lock_guard<std::mutex> g(mutex_);
            take_all(status, true, due);
        }
        for (auto& [each, with] : due) finish(*each, with);
    }

    absl::Status prefixed(const absl::Status& status) const {
        return absl::Status(status.code(), "tensorwire: receiving " + key_ + " cannot happen: " + std::string(status.message()));
    }

    std::mutex mutex_;
    std::shared_ptr<End> end_;
    std::string key_;
    DataType dtype_ = DT_INVALID;
    std::map<int64_t, std::shared_ptr<Waiting>> waiting_;      // by step
    std::map<int64_t, absl::StatusOr<Tensor>> kept_;           // by step: those that came before they were asked for
    Arriving arriving_;
    bool asked_ = false;    // for the next one
    bool reading_ = false;  // a thread is in `read`
    bool looks_ = false;    // a thread is in `look`, and in `read` next
    absl::Status broken_;   // why nothing more can be received
};

inline Keyed<Incoming>& incoming() {
    static auto* all = new Keyed<Incoming>;
    return *all;
}

class ReceiveKernel : public KeyedKernel {
  public:
    explicit ReceiveKernel(OpKernelConstruction* c) : KeyedKernel(c) {
        DataType dtype = DT_INVALID;
        OP_REQUIRES_OK(c, c->GetAttr("T", &dtype));
        OP_REQUIRES_OK(c, c->GetAttr("shape", &shape_));
        OP_REQUIRES_OK(c, c->GetAttr("copy", &copy_));
        incoming_ = incoming().find(key_);
        incoming_->describe(end_, key_, dtype);
    }

    void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
        int64_t number = 0;
        OP_REQUIRES_OK_ASYNC(c, step(c, 1, &number), done);
        incoming_->receive(number, std::shared_ptr<Waiting>(new Waiting{c, std::move(done), shape_, copy_}));
    }

  private:
    PartialTensorShape shape_;
    bool copy_;
    std::shared_ptr<Incoming> incoming_;
};

}  // namespace tensorwire
