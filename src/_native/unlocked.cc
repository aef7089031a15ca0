#include "unlocked.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace tw {

namespace {
std::atomic<bool> ending{false};
std::atomic<int> returning{0};  // threads that may be asking for the GIL
std::atomic<pthread_t> ender{};
}  // namespace

Unlocked::~Unlocked() {
    // Counted before `ending` is read: end_of_interpreter() either waits for this thread or stops it.
    returning.fetch_add(1);
    if (ending.load() && !pthread_equal(ender.load(), pthread_self())) {
        returning.fetch_sub(1);
        for (;;) pause();
    }
    PyEval_RestoreThread(state_);
    returning.fetch_sub(1);
}

void Unlocked::end_of_interpreter() {
    ender = pthread_self();
    ending = true;
    PyThreadState* state = PyEval_SaveThread();
    while (returning.load() > 0) usleep(100);
    PyEval_RestoreThread(state);
}

void Unlocked::after_fork_in_child() {
    returning = 0;  // of threads that the child does not have
}

}  // namespace tw
