#include "death_notifier.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <system_error>

#include "monitor.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace tw {

namespace {

constexpr size_t table_bytes = 64 << 10;  // a multiple of the page on every machine; pages without words stay unborn
constexpr u32 beat_word = 0;

// Linux 5.16; not in older headers. The number is the same on every architecture.
constexpr long futex_waitv_number = 449;
constexpr size_t most_waited_on = 128;
struct WaitOn {
    u64 value, address;
    u32 flags, unused;
};
constexpr u32 flag_32_bits = 2, flag_private = 128;

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

timespec to_timespec(double seconds) {
    const double whole = std::floor(seconds);
    return {static_cast<time_t>(whole), static_cast<long>((seconds - whole) * 1e9)};
}

}  // namespace

// A peer's page.
struct DeathNotifier::Page {
    explicit Page(int fd) {
        struct stat st;
        if (fstat(fd, &st)) fail(errno, "fstat");
        const int seals = fcntl(fd, F_GET_SEALS);
        if (seals < 0 || !(seals & F_SEAL_SHRINK) || st.st_size != static_cast<off_t>(table_bytes)) fail(EINVAL, "not a page of words");
        void* p = mmap(nullptr, table_bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) fail(errno, "mmap");
        words = static_cast<Word*>(p);
    }
    ~Page() { munmap(words, table_bytes); }
    Word* words;
};

DeathNotifier::DeathNotifier(double heartbeat, double lost_after) : heartbeat_(heartbeat), lost_after_(lost_after), pid_(getpid()) {
    fd_ = memfd_create("tensorwire-words", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) fail(errno, "memfd_create");
    void* p = MAP_FAILED;
    if (ftruncate(fd_, table_bytes) == 0)
        p = mmap(nullptr, 2 * table_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p != MAP_FAILED) {
        map_ = static_cast<char*>(p);
        p = mmap(map_ + table_bytes, table_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, 0);
    }
    if (p == MAP_FAILED) {
        const int error = errno;
        if (map_) munmap(map_, 2 * table_bytes);
        ::close(fd_);
        fail(error, "mmap");
    }
    words_ = static_cast<Word*>(p);
    madvise(map_, 2 * table_bytes, MADV_DONTFORK);
    // Peers get this very descriptor; our own mapping stays writable. (An older kernel refuses the last seal only.)
    fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    fcntl(fd_, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
    fcntl(fd_, F_ADD_SEALS, F_SEAL_SEAL);
    close_on_fork(fd_);
    // No list pointer lies in shared memory: the kernel finds a word at a fixed distance behind its node.
    head_.list.next = &head_.list;
    head_.futex_offset = static_cast<long>(table_bytes);
    thread_ = start_thread([](void* self) { static_cast<DeathNotifier*>(self)->run(); }, this);
    tid_.wait(0);
}

u32 DeathNotifier::enter(std::shared_ptr<Liveness> liveness, int socket) {
    if (getpid() != pid_) fail(EPERM, "the death notifier belongs to the parent process");
    std::lock_guard g(mutex_);
    if (stop_) fail(EBADF, "the death notifier is closed");
    u32 word = 1;
    while (word < words && entries_.count(word)) word++;
    if (word == words) return 0;
    auto node = [&](u32 i) { return i ? reinterpret_cast<robust_list*>(map_ + i * sizeof(Word)) : &head_.list; };
    if (word > linked_) {
        // The kernel may follow the list at any moment: the new node points on before it is pointed to.
        node(word)->next = &head_.list;
        std::atomic_thread_fence(std::memory_order_release);
        node(linked_)->next = node(word);
        linked_ = word;
    }
    // As if somebody waited, always: the kernel wakes nobody otherwise.
    words_[word].value.store(tid_.load() | FUTEX_WAITERS, std::memory_order_release);
    entries_[word].liveness = std::move(liveness);
    entries_[word].socket = socket;
    return word;
}

void DeathNotifier::watch(u32 word, int fd, u32 peer_word, double peer_heartbeat) {
    if (getpid() != pid_) fail(EPERM, "the death notifier belongs to the parent process");
    if (peer_word == beat_word || peer_word >= words || !(peer_heartbeat >= 0)) fail(EINVAL, "no such word");
    auto page = std::make_shared<Page>(fd);
    {
        std::lock_guard g(mutex_);
        auto it = entries_.find(word);
        if (it == entries_.end()) fail(EINVAL, "no such word");
        Entry& e = it->second;
        e.peer_word = peer_word;
        e.expected = page->words[peer_word].value.load(std::memory_order_acquire);
        e.beat = page->words[beat_word].value.load(std::memory_order_relaxed);
        // A peer that beats more slowly than we look is not silent.
        const double patience = std::max(lost_after_, 3 * peer_heartbeat);
        e.most_silent = static_cast<u32>(std::min(std::ceil(patience / heartbeat_), 4e9));
        e.page = std::move(page);
    }
    wake();
}

void DeathNotifier::leave(u32 word) {
    if (getpid() != pid_) return;
    Entry gone;  // dies after the lock
    {
        std::lock_guard g(mutex_);
        auto it = entries_.find(word);
        if (it == entries_.end()) return;
        gone = std::move(it->second);
        entries_.erase(it);
        give_up(word);
    }
    wake();
}

void DeathNotifier::give_up(u32 word) {
    words_[word].value.store(0, std::memory_order_release);
    syscall(SYS_futex, reinterpret_cast<u32*>(&words_[word].value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void DeathNotifier::wake() {
    bell_.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, reinterpret_cast<u32*>(&bell_), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

const char* DeathNotifier::what_became_of(Entry& e, bool tick) {
    const u32 value = e.page->words[e.peer_word].value.load(std::memory_order_acquire);
    if (value & FUTEX_OWNER_DIED) return "its process died";
    if (value != e.expected || !(value & FUTEX_WAITERS)) return "it closed the connection";
    if (!tick) return nullptr;
    const u32 beat = e.page->words[beat_word].value.load(std::memory_order_relaxed);
    e.silent = beat == e.beat ? e.silent + 1 : 0;
    e.beat = beat;
    return e.silent < e.most_silent ? nullptr : "it gave no sign of life for too long: its process is stopped";
}

void DeathNotifier::scan(bool tick) {
    struct Loss {
        u32 word;
        std::shared_ptr<Liveness> liveness;
        const char* why;
    };
    std::vector<Loss> losses;
    slept_on_.clear();
    {
        std::lock_guard g(mutex_);
        for (auto& [word, e] : entries_) {
            if (!e.page) continue;
            if (const char* why = what_became_of(e, tick)) {
                losses.push_back({word, e.liveness, why});
                e.page.reset();
            } else if (slept_on_.size() + 1 < most_waited_on) {
                slept_on_.emplace_back(e.page, e.peer_word);
            }
        }
    }
    for (auto& [word, liveness, why] : losses) lose(word, liveness, why);
}

void DeathNotifier::lose(u32 word, const std::shared_ptr<Liveness>& liveness, const char* why) {
    liveness->lose(why);  // before the hang-up, which knows less
    std::lock_guard g(mutex_);
    auto it = entries_.find(word);
    if (it != entries_.end() && it->second.liveness == liveness && it->second.socket >= 0) shutdown(it->second.socket, SHUT_RDWR);
}

void DeathNotifier::sleep(double until, u32 seen) {
    std::vector<WaitOn> on{{seen, reinterpret_cast<u64>(&bell_), flag_32_bits | flag_private, 0}};
    for (auto& [page, word] : slept_on_) {
        // What looked alive a moment ago: if it changed since, the call returns at once.
        const u32 value = page->words[word].value.load(std::memory_order_acquire);
        if ((value & FUTEX_OWNER_DIED) || !(value & FUTEX_WAITERS)) return;
        on.push_back({value, reinterpret_cast<u64>(&page->words[word].value), flag_32_bits, 0});
    }
    const timespec end = to_timespec(until);
    if (syscall(futex_waitv_number, on.data(), on.size(), 0, &end, CLOCK_MONOTONIC) >= 0) return;
    if (errno == EAGAIN || errno == ETIMEDOUT || errno == EINTR) return;
    const timespec left = to_timespec(std::max(0.0, until - now()));  // an older kernel: the hang-up tells of deaths
    syscall(SYS_futex, reinterpret_cast<u32*>(&bell_), FUTEX_WAIT_PRIVATE, seen, &left, nullptr, 0);
}

void DeathNotifier::run() {
    syscall(SYS_set_robust_list, &head_, sizeof(head_));
    tid_.store(static_cast<u32>(gettid()));
    tid_.notify_all();
    double due = now() + heartbeat_;
    while (!stop_) {
        const u32 seen = bell_.load(std::memory_order_acquire);
        const bool tick = now() >= due;
        if (tick) {
            words_[beat_word].value.fetch_add(1, std::memory_order_relaxed);
            due = now() + heartbeat_;
        }
        scan(tick);
        if (!stop_) sleep(due, seen);
    }
    slept_on_.clear();
    syscall(SYS_set_robust_list, nullptr, sizeof(head_));
}

void DeathNotifier::close() {
    if (getpid() != pid_) {
        abandon_thread(thread_);
        return;
    }
    std::call_once(closing_, [this] { end(); });
}

void DeathNotifier::end() {
    stop_ = true;
    wake();
    if (thread_.joinable()) thread_.join();
    std::unordered_map<u32, Entry> gone;
    std::lock_guard g(mutex_);
    gone.swap(entries_);
    for (auto& [word, entry] : gone) give_up(word);
    munmap(map_, 2 * table_bytes);
    forget_fd(fd_);
    ::close(fd_);
    fd_ = -1;
}

DeathNotifier::~DeathNotifier() { close(); }

}  // namespace tw
