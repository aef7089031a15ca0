#include "monitor.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <system_error>

namespace tw {

std::thread start_thread(void (*body)(void*), void* argument) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    struct Restore {
        sigset_t& old;
        ~Restore() { pthread_sigmask(SIG_SETMASK, &old, nullptr); }
    } restore{old};
    return std::thread(body, argument);
}

void abandon_thread(std::thread& thread) {
    if (thread.joinable()) new std::thread(std::move(thread));
}

static constexpr u64 wake_token = 0;

Monitor::Monitor() : pid_(getpid()) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_ < 0 || wake_ < 0) {
        const int error = errno;
        if (epoll_ >= 0) ::close(epoll_);
        throw std::system_error(error, std::generic_category(), "epoll");
    }
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.u64 = wake_token;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &e);
    close_on_fork(epoll_);
    close_on_fork(wake_);
    thread_ = start_thread([](void* self) { static_cast<Monitor*>(self)->run(); }, this);
}

void Monitor::watch(int fd, std::shared_ptr<Liveness> liveness) {
    if (getpid() != pid_) throw std::system_error(EPERM, std::generic_category(), "the monitor belongs to the parent process");
    std::lock_guard g(mutex_);
    const u64 token = next_token_++;
    epoll_event e{};
    e.events = EPOLLRDHUP;  // EPOLLHUP and EPOLLERR come by themselves
    e.data.u64 = token;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e)) throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    watched_[token] = {fd, std::move(liveness)};
}

void Monitor::forget(int fd) {
    if (getpid() != pid_) return;
    std::lock_guard g(mutex_);
    for (auto it = watched_.begin(); it != watched_.end(); ++it) {
        if (it->second.fd != fd) continue;
        epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
        watched_.erase(it);
        return;
    }
}

void Monitor::run() {
    epoll_event events[16];
    while (!stop_) {
        const int n = epoll_wait(epoll_, events, 16, -1);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == wake_token) continue;
            std::shared_ptr<Liveness> liveness;
            {
                std::lock_guard g(mutex_);
                auto it = watched_.find(events[i].data.u64);
                if (it == watched_.end()) continue;
                liveness = std::move(it->second.liveness);
                epoll_ctl(epoll_, EPOLL_CTL_DEL, it->second.fd, nullptr);
                watched_.erase(it);
            }
            liveness->lose("its process closed the connection or died");
        }
    }
}

void Monitor::close() {
    if (getpid() != pid_) {
        abandon_thread(thread_);
        return;
    }
    std::call_once(closing_, [this] { end(); });
}

void Monitor::end() {
    stop_ = true;
    const u64 one = 1;
    if (write(wake_, &one, 8) < 0) { /* full means it is awake */ }
    if (thread_.joinable()) thread_.join();
    std::lock_guard g(mutex_);
    watched_.clear();
    for (int* fd : {&epoll_, &wake_}) {
        forget_fd(*fd);
        ::close(*fd);
        *fd = -1;
    }
}

Monitor::~Monitor() { close(); }

Heartbeat::Heartbeat(int fd, std::string beat, double interval) : fd_(fd), beat_(std::move(beat)), interval_(interval), pid_(getpid()) {
    thread_ = start_thread([](void* self) { static_cast<Heartbeat*>(self)->run(); }, this);
}

int Heartbeat::send(const char* data, size_t nbytes, double seconds) {
    if (getpid() != pid_) return EPERM;
    std::lock_guard g(mutex_);
    const double end = now() + seconds;
    for (size_t sent = 0; sent < nbytes;) {
        const ssize_t n = ::send(fd_, data + sent, nbytes - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) { sent += static_cast<size_t>(n); continue; }
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN) return errno;
        const double left = end - now();
        if (left <= 0) {
            if (sent) shutdown(fd_, SHUT_RDWR);  // half a frame: nothing after it could be read
            return ETIMEDOUT;
        }
        pollfd p{fd_, POLLOUT, 0};
        poll(&p, 1, static_cast<int>(left * 1000) + 1);
    }
    return 0;
}

void Heartbeat::run() {
    std::unique_lock g(sleep_mutex_);
    while (!stop_) {
        sleep_.wait_for(g, std::chrono::duration<double>(interval_));
        if (stop_) break;
        g.unlock();
        send(beat_.data(), beat_.size(), interval_);
        g.lock();
    }
}

void Heartbeat::close() {
    if (getpid() != pid_) {
        abandon_thread(thread_);
        return;
    }
    std::call_once(closing_, [this] { end(); });
}

void Heartbeat::end() {
    {
        std::lock_guard g(sleep_mutex_);
        stop_ = true;
    }
    sleep_.notify_all();
    if (thread_.joinable()) thread_.join();
}

Heartbeat::~Heartbeat() { close(); }

}  // namespace tw
