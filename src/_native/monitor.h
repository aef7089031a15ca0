// Native threads that work while Python computes: they watch sockets for hang-ups, and send this process's heartbeat.
#pragma once

#include <condition_variable>
#include <map>
#include <thread>

#include "futex.h"

namespace tw {

// Starts a thread that takes no signals: Python's handlers run in the main thread.
std::thread start_thread(void (*body)(void*), void* argument);
// In a forked child the thread does not exist: its handle can be neither joined nor detached, so it is left alone.
void abandon_thread(std::thread& thread);

// One epoll thread: a watched socket whose peer is gone ends the liveness that goes with it.
class Monitor {
  public:
    Monitor();
    ~Monitor();
    void watch(int fd, std::shared_ptr<Liveness> liveness);
    void forget(int fd);  // before the descriptor is closed
    void close();         // a second caller waits for the first

  private:
    void run();
    void end();
    struct Watched {
        int fd;
        std::shared_ptr<Liveness> liveness;
    };
    int epoll_ = -1, wake_ = -1;
    std::atomic<bool> stop_{false};
    std::once_flag closing_;
    std::mutex mutex_;  // watched_, epoll_
    std::map<u64, Watched> watched_;  // by token: a number is soon reused, and an event may be older than its reuse
    u64 next_token_ = 1;
    std::thread thread_;
    pid_t pid_;
};

// Sends `beat` on a socket every `interval` seconds; other frames go through send(), so that none interleave.
class Heartbeat {
  public:
    Heartbeat(int fd, std::string beat, double interval);
    ~Heartbeat();
    // 0, or the errno that ended the connection; ETIMEDOUT leaves a torn frame behind and closes it.
    int send(const char* data, size_t nbytes, double seconds);
    void close();  // likewise

  private:
    void run();
    void end();
    int fd_;
    std::string beat_;
    double interval_;
    std::mutex mutex_;
    std::mutex sleep_mutex_;
    std::condition_variable sleep_;
    bool stop_ = false;
    std::once_flag closing_;
    std::thread thread_;
    pid_t pid_;
};

}  // namespace tw
