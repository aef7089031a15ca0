// The operators of varying edges: the size of what they carry is known only when it is sent.
//
// A send hands its tensor over as a message, in chunks, and is done. The chunks are taken out of their slots while a
// receive waits, and no sooner, so that a producer that is ahead does not fill the consumer's memory. Messages come in
// the order in which they were sent, and a receive gets the one of its step: others are kept until they are asked for.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "keyed_ends.h"
#include "tensorflow/core/framework/cancellation.h"
#include "varying_messages.h"

namespace tensorwire {

class SendVaryingKernel : public KeyedKernel {
  public:
    using KeyedKernel::KeyedKernel;

    void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
        auto sending = std::make_shared<Sending>();
        const Tensor& tensor = c->input(0);
        if (encoded(tensor.dtype())) {  // before it takes a number: what cannot be encoded is no send
            const absl::Status status = encode(tensor, &sending->payload);
            OP_REQUIRES_ASYNC(c, status.ok(), absl::Status(status.code(), "tensorwire: " + key_ + " cannot carry this tensor: " + std::string(status.message())), done);
        } else {
            sending->tensor = tensor;
        }
        int64_t number = 0;
        bool waits = false;
        OP_REQUIRES_OK_ASYNC(c, begin_send(c, &number, &waits), done);
        sending->end = end_;
        sending->key = key_;
        if (waits) sending->done = done;
        const absl::string_view data = sending->data();
        sending->front = front_of(number, tensor.dtype(), tensor.shape(), data.size());
        if (data.size() < small_payload) sending->front.append(data.data(), data.size());
        when_known(*end_, [sending] { sending->begin(sending); });
        if (!waits) done();
    }

  private:
    // A tensor that has not left. Each of its chunks refers to it.
    struct Sending {
        std::shared_ptr<End> end;
        std::string key;
        Tensor tensor;
        std::string payload;  // encoded, instead of the tensor
        std::string front;
        DoneCallback done;
        std::atomic<uint64_t> left{0};  // chunks
        std::atomic<bool> over{false};

        absl::string_view data() const { return payload.empty() ? tensor.tensor_data() : absl::string_view(payload); }

        void begin(const std::shared_ptr<Sending>& me) {
            if (!end->edge) return finish(errors::Aborted(end->failure));
            const absl::string_view rest = data().size() < small_payload ? absl::string_view() : data();
            const uint64_t chunks = 1 + (rest.size() + chunk_bytes - 1) / chunk_bytes;
            left = chunks;
            uint64_t number = 0;
            {
                std::lock_guard<std::mutex> g(end->mutex);
                number = end->chunks + 1;
                end->chunks += chunks;
            }
            send(me, number, front);
            for (size_t at = 0; at < rest.size(); at += chunk_bytes) send(me, ++number, rest.substr(at, chunk_bytes));
        }

        void send(const std::shared_ptr<Sending>& me, uint64_t number, absl::string_view chunk) {
            edges->send(end->edge, number, chunk.data(), chunk.size(), [](void* at, int outcome) {
                const std::unique_ptr<std::shared_ptr<Sending>> held(static_cast<std::shared_ptr<Sending>*>(at));
                Sending& sending = **held;
                const bool last = --sending.left == 0;
                // The first failure is the end: chunks after it need not be heard of.
                if (outcome != TW_DONE || last) sending.finish(status_of(*sending.end, outcome, "tensorwire: sending " + sending.key));
            }, new std::shared_ptr<Sending>(me));
        }

        void finish(const absl::Status& status) {
            if (!over.exchange(true)) end_send(*end, status, done);
        }
    };
};

// A receive that has no tensor yet.
struct Waiting {
    OpKernelContext* context;
    AsyncOpKernel::DoneCallback done;
    std::string key;
    PartialTensorShape shape;
    CancellationToken token = CancellationManager::kInvalidToken;
    bool cancelled = false;  // guarded by the mutex of `Incoming`
    bool asked = false;      // the next chunk was asked for since it waits

    void finish(const absl::StatusOr<Tensor>& result, bool deregisters = true) {
        if (CancellationManager* manager = context->cancellation_manager(); manager && deregisters) manager->TryDeregisterCallback(token);
        if (!result.ok()) context->SetStatus(result.status());
        else if (!shape.IsCompatibleWith(result->shape()))
            context->SetStatus(errors::Aborted("tensorwire: receiving ", key, " cannot happen: a tensor of shape ", result->shape().DebugString(), " came, and this takes ", shape.DebugString()));
        else context->set_output(0, *result);
        const AsyncOpKernel::DoneCallback call = std::move(done);
        call();
    }

    absl::Status was_cancelled() const { return errors::Cancelled("tensorwire: receiving ", key, " was cancelled"); }
};

constexpr size_t most_kept = 256;  // messages of other steps than those that are received, or they would fill memory

// The consumer's end of a varying edge.
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
        absl::StatusOr<Tensor> result = errors::Internal("");  // of one that need not wait
        bool waits = false;
        {
            std::lock_guard<std::mutex> g(mutex_);
            if (waiting->cancelled) {
                result = waiting->was_cancelled();
            } else if (const auto found = kept_.find(step); found != kept_.end()) {
                result = std::move(found->second);
                kept_.erase(found);
            } else if (!broken_.ok()) {
                result = broken_;
            } else if (!waiting_.emplace(step, waiting).second) {
                result = errors::InvalidArgument("tensorwire: receiving ", key_, ": step ", step, " is being received already");
            } else {
                waits = true;
            }
        }
        if (!waits) return waiting->finish(result);
        when_known(*end_, [this] { end_->edge ? read() : fail(errors::Aborted(end_->failure)); });
    }

    void cancel(const std::shared_ptr<Waiting>& waiting) {
        {
            std::lock_guard<std::mutex> g(mutex_);
            waiting->cancelled = true;
            auto at = waiting_.begin();
            while (at != waiting_.end() && at->second != waiting) ++at;
            if (at == waiting_.end()) return;  // it is over, or has not begun
            waiting_.erase(at);
        }
        waiting->finish(waiting->was_cancelled(), false);
    }

  private:
    using Due = std::vector<std::pair<std::shared_ptr<Waiting>, absl::StatusOr<Tensor>>>;

    // Asks for the next chunk while a receive waits. One thread does so at a time: one that comes meanwhile leaves it the
    // work, and a chunk that is there already is no deeper call.
    void read() {
        Due due;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            if (reading_) return;
            reading_ = true;
            ask(lock);
            if (!asked_ && !waiting_.empty())
                take_all(errors::FailedPrecondition("tensorwire: receiving ", key_, " cannot happen: ", most_kept, " tensors of other steps came, and nobody has received them"), true, due);
            reading_ = false;
        }
        for (auto& [each, with] : due) each->finish(with);
    }

    // The caller holds the mutex.
    void ask(std::unique_lock<std::mutex>& lock) {
        while (!asked_ && !waiting_.empty() && kept_.size() < most_kept) {
            asked_ = true;
            for (auto& [step, each] : waiting_) each->asked = true;
            const uint64_t chunk = chunk_;
            lock.unlock();
            edges->receive(end_->edge, chunk, [](void* self, int outcome) { static_cast<Incoming*>(self)->arrived(outcome); }, this);
            lock.lock();
        }
    }

    // Until `asked_` is false again, no other thread touches what arrives.
    void arrived(int outcome) {
        absl::Status broken, failed = status_of(*end_, outcome, "tensorwire: receiving " + key_);
        absl::StatusOr<Tensor> result = errors::Internal("");
        bool complete = false;
        if (outcome == TW_DONE) {
            broken = arriving_.take(static_cast<const char*>(edges->slot(end_->edge, chunk_)), dtype_);
            edges->release(end_->edge, chunk_);
            complete = broken.ok() && arriving_.complete();
            if (complete) {
                edges->copied(arriving_.nbytes());
                result = arriving_.finish(dtype_);
                if (!result.ok()) result = prefixed(result.status());
            }
        }
        Due due;
        {
            std::lock_guard<std::mutex> g(mutex_);
            if (outcome == TW_DONE) ++chunk_;
            if (complete) broken = deliver(arriving_.step(), std::move(result), due);
            if (!broken.ok()) broken_ = failed = prefixed(broken);
            if (!failed.ok()) take_all(failed, !broken.ok(), due);
            asked_ = false;
        }
        for (auto& [each, with] : due) each->finish(with);
        read();
    }

    // Finds the receive of a message, or keeps it. The mutex is held.
    absl::Status deliver(int64_t step, absl::StatusOr<Tensor> result, Due& due) {
        if (const auto found = waiting_.find(step); found != waiting_.end()) {
            due.emplace_back(std::move(found->second), std::move(result));
            waiting_.erase(found);
            return absl::OkStatus();
        }
        if (kept_.emplace(step, std::move(result)).second) return absl::OkStatus();
        return errors::Aborted("step ", step, " was sent twice");
    }

    // Receives that fail: all, or those that waited when the chunk was asked for that did not come. The mutex is held.
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
        for (auto& [each, with] : due) each->finish(with);
    }

    absl::Status prefixed(const absl::Status& status) const {
        return absl::Status(status.code(), "tensorwire: receiving " + key_ + " cannot happen: " + std::string(status.message()));
    }

    std::mutex mutex_;
    std::shared_ptr<End> end_;
    std::string key_;
    DataType dtype_ = DT_INVALID;
    std::map<int64_t, std::shared_ptr<Waiting>> waiting_;      // by step
    std::map<int64_t, absl::StatusOr<Tensor>> kept_;           // by step: messages that came before they were asked for
    Arriving arriving_;
    uint64_t chunk_ = 1;    // the next one
    bool asked_ = false;    // for it
    bool reading_ = false;  // a thread is in `read`
    absl::Status broken_;   // why nothing more can be received
};

inline Keyed<Incoming>& incoming() {
    static auto* all = new Keyed<Incoming>;
    return *all;
}

class ReceiveVaryingKernel : public KeyedKernel {
  public:
    explicit ReceiveVaryingKernel(OpKernelConstruction* c) : KeyedKernel(c) {
        DataType dtype = DT_INVALID;
        OP_REQUIRES_OK(c, c->GetAttr("T", &dtype));
        OP_REQUIRES_OK(c, c->GetAttr("shape", &shape_));
        incoming_ = incoming().find(key_);
        incoming_->describe(end_, key_, dtype);
    }

    void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
        int64_t number = 0;
        OP_REQUIRES_OK_ASYNC(c, step(c, 1, &number), done);
        auto waiting = std::make_shared<Waiting>();
        waiting->context = c;
        waiting->done = std::move(done);
        waiting->key = key_;
        waiting->shape = shape_;
        if (CancellationManager* manager = c->cancellation_manager()) {
            waiting->token = manager->get_cancellation_token();
            if (!manager->RegisterCallback(waiting->token, [waiting, from = incoming_] { from->cancel(waiting); }))
                return waiting->finish(waiting->was_cancelled(), false);
        }
        incoming_->receive(number, waiting);
    }

  private:
    PartialTensorShape shape_;
    std::shared_ptr<Incoming> incoming_;
};

}  // namespace tensorwire
