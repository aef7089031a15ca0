// The ends of edges by their keys, and what all operators that have a key do alike.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorwire/async_edges.h"

namespace tensorwire {

using namespace tensorflow;

inline const tw_async_edges* edges = nullptr;  // set before the first operator runs

// One end of an edge, by its key; known once Python has connected it, or failed to.
struct End {
    std::mutex mutex;
    void* edge = nullptr;
    std::string failure;
    bool known = false;
    std::vector<std::function<void()>> waiting;  // until it is known
    int64_t runs = 0;                            // of operators without a step
    int64_t unsent = 0;                          // tensors that are kept until they have left
    absl::Status error;                          // of an earlier send
    std::atomic<bool> soon{false};               // a look would have found the last tensor, or did
};

// How long a receive looks for its tensor in TensorFlow's own thread, if the last one came as soon as that. Waking our
// thread and then one of TensorFlow's would take longer. No more than one receive of a process does so at a time.
constexpr double look_seconds = 300e-6;
constexpr double soon_seconds = 400e-6;  // so soon comes without a look what a look would have found: a wake-up is in it
inline std::atomic_flag looking = ATOMIC_FLAG_INIT;

constexpr int64_t most_unsent = 16;  // of a key: the next send is done when it has left, or memory would fill up

// One `T` for each key. They are never freed: threads may use them while the process ends.
template <typename T>
class Keyed {
  public:
    std::shared_ptr<T> find(const std::string& key) {
        std::lock_guard<std::mutex> g(mutex_);
        std::shared_ptr<T>& found = by_key_[key];
        if (!found) found = std::make_shared<T>();
        return found;
    }

  private:
    std::mutex mutex_;
    std::map<std::string, std::shared_ptr<T>> by_key_;
};

inline Keyed<End>& ends() {
    static auto* all = new Keyed<End>;
    return *all;
}

inline void when_known(End& end, std::function<void()> call) {
    {
        std::lock_guard<std::mutex> g(end.mutex);
        if (!end.known) {
            end.waiting.push_back(std::move(call));
            return;
        }
    }
    call();
}

inline absl::Status status_of(End& end, int outcome, const std::string& what) {
    if (outcome == TW_DONE) return absl::OkStatus();
    if (outcome == TW_TIMED_OUT) return errors::DeadlineExceeded(what, " did not happen in time; TENSORWIRE_TIMEOUT says how long it may take");
    char text[512] = "";
    edges->reason(end.edge, text, sizeof text);
    // Not Unavailable, of which TensorFlow makes an InternalError within functions.
    return errors::Aborted(what, " cannot happen: ", text);
}

class KeyedKernel : public AsyncOpKernel {
  public:
    explicit KeyedKernel(OpKernelConstruction* c) : AsyncOpKernel(c) {
        OP_REQUIRES_OK(c, c->GetAttr("key", &key_));
        end_ = ends().find(key_);
    }

  protected:
    // The step of this run: an input, or the number of this run.
    absl::Status step(OpKernelContext* c, int input, int64_t* number) {
        *number = c->input(input).scalar<int64_t>()();
        if (*number < 0) return errors::InvalidArgument("tensorwire: steps count from 1, and this is ", *number);
        if (*number) return absl::OkStatus();
        std::lock_guard<std::mutex> g(end_->mutex);
        *number = ++end_->runs;
        return absl::OkStatus();
    }

    // Begins a send: its token, its step, and whether it waits until its tensor has left.
    absl::Status begin_send(OpKernelContext* c, int64_t* number, bool* waits) {
        Tensor* token = nullptr;
        TF_RETURN_IF_ERROR(c->allocate_output(0, TensorShape({}), &token));
        token->scalar<float>()() = 0;
        {
            std::lock_guard<std::mutex> g(end_->mutex);
            TF_RETURN_IF_ERROR(end_->error);
        }
        TF_RETURN_IF_ERROR(step(c, 1, number));
        std::lock_guard<std::mutex> g(end_->mutex);
        *waits = ++end_->unsent > most_unsent;
        return absl::OkStatus();
    }

    std::string key_;
    std::shared_ptr<End> end_;
};

// A tensor has left, or never will; `done`: of the send, if it waited for that.
inline void end_send(End& end, const absl::Status& status, const AsyncOpKernel::DoneCallback& done) {
    {
        std::lock_guard<std::mutex> g(end.mutex);
        --end.unsent;
        if (!status.ok() && end.error.ok()) end.error = status;  // for the next send
    }
    if (done) done();
}

}  // namespace tensorwire
