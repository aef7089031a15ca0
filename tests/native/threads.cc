// Two threads on one region, two engines on one socket pair, and their ends: a sanitizer watches.
//
// `threads` exits with 0 if every value was right, and the sanitizer turns any finding into another status. Two mistakes
// can be asked for, to see that they are found: `threads racy` signals before the payload, `threads leaky` loses memory.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "async_ends.h"
#include "copy.h"
#include "death_notifier.h"
#include "engine.h"
#include "monitor.h"
#include "notices.h"
#include "pages.h"
#include "post_queue.h"

using namespace tw;

namespace {

constexpr u64 payload_at = 64, payload_bytes = 4096;
constexpr double patience = 60.0;

#define REQUIRE(condition)                                                   \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition); \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

// What a binding does around the native waits, which come back now and then.
template <typename Wait>
Outcome until(Wait wait) {
    const double end = now() + patience;
    Outcome outcome;
    do {
        outcome = wait(std::max(0.0, end - now()));
    } while (outcome == Outcome::interrupted);
    return outcome;
}

void await_word(const std::shared_ptr<Span>& span, u64 offset, u64 at_least, Progress* progress = nullptr) {
    const Target target = span->target(offset, nullptr);
    const Outcome outcome = until([&](double left) { return progress ? progress->wait(target, at_least, left) : wait_parked(target, at_least, left); });
    REQUIRE(outcome == Outcome::reached);
}

bool holds_only(const char* at, u64 nbytes, char value) {
    for (u64 i = 0; i < nbytes; i++)
        if (at[i] != value) return false;
    return true;
}

std::shared_ptr<Span> region(u64 nbytes) {
    auto span = Span::allocate(nbytes, true);
    span->own = std::make_shared<Liveness>();
    return span;
}

// A ring of one slot: arrival word at 0, credit word at 8, payload behind them. Every 64th step one side comes late, so
// that the other parks.
void one_region(bool racy) {
    constexpr u64 steps = 5000;
    auto span = region(payload_at + payload_bytes);
    std::thread producer([&] {
        std::vector<char> source(payload_bytes);
        for (u64 step = 1; step <= steps; step++) {
            await_word(span, 8, step - 1);
            memset(source.data(), static_cast<int>(step), payload_bytes);
            if (racy) raise(*span, 0, step);
            copy(span->base + payload_at, source.data(), payload_bytes);
            if (!racy) raise(*span, 0, step);
            if (step % 64 == 0) usleep(100);
        }
    });
    for (u64 step = 1; step <= steps; step++) {
        await_word(span, 0, step);
        const bool right = holds_only(span->base + payload_at, payload_bytes, static_cast<char>(step));
        REQUIRE(right || racy);
        if (step % 64 == 32) usleep(100);
        raise(*span, 8, step);
    }
    producer.join();
}

// Many threads ring one futex while others come and go.
void one_door() {
    constexpr u64 threads = 3, each = 2000;
    auto span = region(64);
    std::vector<std::thread> all;
    for (u64 t = 0; t < threads; t++) {
        all.emplace_back([&] {
            for (u64 i = 0; i < each; i++) {
                span->word(0)->fetch_add(1, std::memory_order_acq_rel);
                span->announce();
            }
        });
    }
    for (u64 seen = 0; seen < threads * each; seen += 50) await_word(span, 0, seen);
    for (auto& t : all) t.join();
    await_word(span, 0, threads * each);
}

// Two ends of a connection within this machine.
void connect_pair(int (&fds)[2]) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t n = sizeof at;
    auto* address = reinterpret_cast<sockaddr*>(&at);
    REQUIRE(bind(listener, address, n) == 0 && listen(listener, 1) == 0 && getsockname(listener, address, &n) == 0);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    const int little = 64 << 10;  // so that writes queue up
    setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
    REQUIRE(connect(fds[0], address, n) == 0);
    REQUIRE((fds[1] = accept(listener, nullptr, nullptr)) >= 0);
    ::close(listener);
    for (int fd : fds) fcntl(fd, F_SETFL, O_NONBLOCK);
}

struct Ends {
    std::shared_ptr<Liveness> liveness = std::make_shared<Liveness>(), peer_liveness = std::make_shared<Liveness>();
    std::shared_ptr<Engine> engine = std::make_shared<Engine>(liveness, 0.001, patience), peer = std::make_shared<Engine>(peer_liveness, 0.001, patience);
    std::shared_ptr<Connection> out, in;
    Ends() {
        int fds[2];
        connect_pair(fds);
        out = engine->connect(fds[0], true, std::make_shared<Liveness>(liveness), PeerDevice{1, 0.001});
        in = peer->connect(fds[1], false, std::make_shared<Liveness>(peer_liveness), PeerDevice{1, 0.001});
    }
    void close() {
        engine->close();
        peer->close();
    }
};

u64 post(Ends& ends, Frame frame, const std::shared_ptr<Span>& memory = nullptr, u64 offset = 0, bool fence = false) {
    u64 id = 0;
    until([&](double left) { return ends.out->post(frame, memory, offset, left, fence, id); });
    return id;
}

void complete(Ends& ends, u64 id) {
    REQUIRE(until([&](double left) { return ends.engine->wait(ends.out->completion(), id, left); }) == Outcome::reached);
}

Frame frame_of(Op op, u64 offset, u64 length) {
    Frame f;
    f.op = static_cast<u32>(op);
    f.key = f.signal_key = 7;
    f.offset = offset;
    f.length = length;
    return f;
}

// Writes with signals one way while a waiter of the target drives its engine and the initiator's thread its own; beside
// them a second thread reads and adds on the same connection.
void two_engines() {
    constexpr u64 steps = 600, adds = 300;
    Ends ends;
    auto inbox = region(payload_at + payload_bytes), credits = region(8);
    inbox->progress = ends.peer;
    ends.peer->expose(7, inbox, true);
    std::thread consumer([&] {
        for (u64 step = 1; step <= steps; step++) {
            await_word(inbox, 0, step, ends.peer.get());
            REQUIRE(holds_only(inbox->base + payload_at, payload_bytes, static_cast<char>(step)));
            raise(*credits, 0, step);
        }
    });
    std::thread adder([&] {
        auto own = region(8);
        for (u64 i = 0; i < adds; i++) {
            Frame f = frame_of(Op::fetch_add, 16, 8);
            f.signal_value = 1;
            const u64 id = post(ends, f);
            complete(ends, id);
            REQUIRE(ends.out->old_value(id) == i);
            complete(ends, post(ends, frame_of(Op::read, 16, 8), own));
            REQUIRE(own->word(0)->load(std::memory_order_relaxed) == i + 1);
        }
    });
    auto notices = std::make_shared<Notices>();
    std::thread told([&] {
        u64 sum = 0;
        while (const u64 token = notices->take()) sum += token;
        REQUIRE(sum == steps * (steps + 1) / 2);
    });
    auto source = region(payload_bytes);
    for (u64 step = 1; step <= steps; step++) {
        await_word(credits, 0, step - 1);
        memset(source->base, static_cast<int>(step), payload_bytes);
        Frame f = frame_of(Op::write, payload_at, payload_bytes);
        f.signal_offset = 0;
        f.signal_value = step;
        const u64 id = post(ends, f, source, 0, step % 7 == 0);
        ends.out->notify(id, notices, step);
        if (step % 2) complete(ends, id);
        else await_word(credits, 0, step);  // applied, so sent; nobody of this process may drive meanwhile
    }
    consumer.join();
    adder.join();
    ends.close();  // whatever was not done by then is lost: told all the same
    notices->post(0);
    told.join();
}

// Everything ends while somebody waits and operations are on their way.
void ends_under_way() {
    for (int round = 0; round < 20; round++) {
        Ends ends;
        auto inbox = region(64), source = region(64);
        inbox->progress = ends.peer;
        inbox->own = ends.peer_liveness;
        ends.peer->expose(7, inbox, true);
        std::thread waiter([&] {
            const Target target = inbox->target(0, nullptr);
            REQUIRE(until([&](double left) { return ends.peer->wait(target, 1000, left); }) == Outcome::lost);
        });
        std::thread poster([&] {
            while (post(ends, frame_of(Op::write, 8, 8), source)) {}
            REQUIRE(ends.out->liveness->lost() || ends.liveness->lost());
        });
        if (round % 3 == 0) ends.out->close("the channel was closed");
        if (round % 3 == 1) ends.peer->withdraw(7);
        if (round % 2) ends.peer->close();
        else ends.engine->close();
        poster.join();
        ends.close();
        waiter.join();
    }
}

// Whichever of two who close an engine comes back first: all that listened has been told.
void two_who_close() {
    for (int round = 0; round < 50; round++) {
        Ends ends;
        auto notices = std::make_shared<Notices>();
        for (u64 token = 1; token <= 1000; token++) ends.out->notify(~u64{0}, notices, token);
        std::atomic<bool> told{false};
        std::vector<std::thread> closers;
        for (int i = 0; i < 2; i++) {
            closers.emplace_back([&, i] {
                if (i && round % 2) ends.out->close("the channel was closed", true);
                else ends.engine->close();
                if (told.exchange(true)) return;
                notices->post(0);
                u64 count = 0;
                while (notices->take()) count++;
                REQUIRE(count == 1000);
            });
        }
        for (auto& each : closers) each.join();
        ends.close();
    }
}

// Writes by reference, more of them than the sockets hold, from a place in the middle of a page; the last are cut off.
void lent_pages() {
    constexpr u64 nbytes = 2 * least_lent + 12345, steps = 20;
    Ends ends;
    auto inbox = region(payload_at + nbytes), source = region(nbytes + 77);
    inbox->progress = ends.peer;
    ends.peer->expose(7, inbox, true);
    for (u64 step = 1; step <= steps; step++) {
        memset(source->base, static_cast<int>(step), nbytes + 77);
        Frame f = frame_of(Op::write, payload_at, nbytes);
        f.signal_offset = 0;
        f.signal_value = step;
        post(ends, f, source, 77);
        const u64 id = post(ends, f, source, 0);
        await_word(inbox, 0, step, ends.peer.get());
        complete(ends, id);
        REQUIRE(holds_only(inbox->base + payload_at, nbytes, static_cast<char>(step)));
    }
    while (post(ends, frame_of(Op::write, payload_at, nbytes), source))
        if (ends.out->done() > 3 * steps) ends.peer->close();
    ends.close();
}

// splice() raises SIGPIPE, which would end this program.
void a_peer_that_reads_no_more() {
    int fds[2];
    connect_pair(fds);
    auto source = region(least_lent);
    PagePipe pipe;
    REQUIRE(within_machine(fds[0]) && pipe.open());
    REQUIRE(pipe.send(fds[0], source->base, least_lent) > 0 && !severed(fds[0]));
    sever(fds[1]);
    REQUIRE(severed(fds[0]));
    shutdown(fds[0], SHUT_RDWR);
    PagePipe another;
    REQUIRE(another.open());
    ssize_t n = 0;
    for (int i = 0; i < 2; i++) n = another.send(fds[0], source->base, least_lent);  // the first may be told of the reset
    REQUIRE(n < 0 && errno == EPIPE);
    for (int fd : fds) ::close(fd);
}

// The same while some of what is sent has left already: then splice() raises it, too, and tells of no error.
void a_socket_that_is_shut_down_midway() {
    auto source = region(16 * least_lent);
    std::vector<char> room(1 << 20);
    for (u64 round = 0; round < 300; round++) {
        int fds[2];
        connect_pair(fds);
        std::thread reader([&] {
            for (u64 got = 0; got < round << 14;) {
                const ssize_t n = recv(fds[1], room.data(), room.size(), 0);
                if (n <= 0) break;
                got += static_cast<u64>(n);
            }
            shutdown(fds[0], SHUT_WR);
        });
        PagePipe pipe;
        REQUIRE(pipe.open());
        for (ssize_t n = 0; n >= 0 || errno == EAGAIN;) n = pipe.send(fds[0], source->base, source->nbytes);
        REQUIRE(errno == EPIPE);
        reader.join();
        for (int fd : fds) ::close(fd);
    }
}

// A hang-up wakes a waiter, from the monitor's thread.
void a_hang_up() {
    for (int round = 0; round < 20; round++) {
        int fds[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
        Monitor monitor;
        auto span = region(64);
        auto liveness = std::make_shared<Liveness>(span->own);
        monitor.watch(fds[0], liveness);
        std::thread waiter([&] {
            const Target target = span->target(0, liveness.get());
            REQUIRE(until([&](double left) { return wait_parked(target, 1, left); }) == Outcome::lost);
        });
        ::close(fds[1]);
        waiter.join();
        monitor.forget(fds[0]);
        monitor.close();
        ::close(fds[0]);
    }
}

// Two devices watch each other's words, more of them than the kernel waits for at once, while channels come and go.
void words_of_life() {
    constexpr int channels = 150;
    auto one = std::make_unique<DeathNotifier>(0.001, patience), other = std::make_unique<DeathNotifier>(0.001, patience);
    std::vector<std::shared_ptr<Liveness>> lives;
    std::vector<u32> left, right;
    std::vector<int> sockets;
    for (int i = 0; i < channels; i++) {
        int fds[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
        sockets.insert(sockets.end(), fds, fds + 2);
        lives.push_back(std::make_shared<Liveness>());
        left.push_back(one->enter(lives.back(), fds[0]));
        right.push_back(other->enter(std::make_shared<Liveness>(), fds[1]));
        one->watch(left.back(), other->fd(), right.back(), 0.001);
        other->watch(right.back(), one->fd(), left.back(), 0.001);
    }
    auto span = region(64);
    std::thread waiter([&] {
        const Target target = span->target(0, lives.back().get());
        REQUIRE(until([&](double left) { return wait_parked(target, 1, left); }) == Outcome::lost);
    });
    for (int i = 0; i < channels / 2; i++) {
        other->leave(right[i]);
        while (!lives[i]->lost()) usleep(100);
        one->leave(left[i]);
        REQUIRE(!lives[i + channels / 2]->lost());
    }
    other->close();
    waiter.join();
    one->close();
    for (int fd : sockets) ::close(fd);
}

// Ends that need no Python: two threads send tensors, of which every third fills many slots, and one takes them; what fits
// into a slot stays there until another thread has looked at it. `queued`: a thread posts what the ends
// write, as one of Python's does for a NIC.
void ends_of_other_programs(bool queued) {
    constexpr u64 tensors = 2000, nobody = 0, producers = 1, consumers = 2;
    const Ring ring{sizeof(EdgeHeader) + payload_bytes, 4};
    auto words = region(16), slots = region(ring.at(3) + ring.stride()), source = region(slots->nbytes);  // credit at 0, arrival at 8
    auto watcher = std::make_shared<Watcher>(words);
    auto queue = std::make_shared<PostQueue>();
    auto peer = std::make_shared<Liveness>();
    std::thread poster([&] {
        Post post;
        for (;;) {
            post.whose = nobody;
            if (!queue->pop(patience, post)) return;
            REQUIRE(post.whose != nobody);
            if (post.nbytes) copy(slots->base + post.at, source->base + post.at, post.nbytes);
            raise(*words, post.whose == producers ? 8 : 0, post.value);
        }
    });
    AsyncProducer out({watcher, 0, peer, patience}, queued ? queued_path(queue, producers, source, ring) : mapped_path(words, 8, slots, ring), ring);
    AsyncConsumer in({watcher, 8, peer, patience}, slots, ring, queued ? queued_path(queue, consumers) : mapped_path(words, 0));
    std::atomic<u64> sent{0};
    std::vector<std::thread> all;
    for (u64 first : {1, 2})
        all.emplace_back([&, first] {
            for (u64 step = first; step <= tensors; step += 2) {
                EdgeHeader header{};
                header.kind = TW_TENSOR;
                header.dtype = TW_BYTES;
                header.rank = 1;
                header.step = step;
                header.nbytes = header.lengths[0] = step % 3 ? payload_bytes : 5 * payload_bytes + step;
                auto* data = new std::vector<char>(header.nbytes, static_cast<char>(step));
                out.send(header, data->data(), [&sent, data](Outcome outcome) {
                    REQUIRE(outcome == Outcome::reached);
                    delete data;
                    sent++;
                });
            }
        });
    EdgeHeader header;
    std::vector<char> copied;
    std::vector<std::thread> lookers;
    const auto join = [](auto& threads) {
        for (auto& each : threads) each.join();
        threads.clear();
    };
    for (u64 taken = 0; taken < tensors; taken++) {
        std::atomic<bool> there{false};
        const void* stays = nullptr;
        u64 slot = 0;
        if (taken % 5 == 0) in.arrives(1e-4);
        in.take([&](const EdgeHeader& found, const void* whole, u64 number) -> void* {
            header = found;
            stays = whole;
            slot = number;
            copied.resize(found.nbytes);
            return whole ? const_cast<void*>(whole) : copied.data();
        }, [&there](int outcome) {
            REQUIRE(outcome == TW_DONE);
            there = true;
        });
        while (!there) usleep(10);
        if (!stays) REQUIRE(holds_only(copied.data(), header.nbytes, static_cast<char>(header.step)));
        else lookers.emplace_back([&in, stays, slot, step = header.step] {
            REQUIRE(holds_only(static_cast<const char*>(stays), payload_bytes, static_cast<char>(step)));
            in.release(slot);
        });
        if (lookers.size() == 3) join(lookers);
    }
    join(lookers);
    join(all);
    while (sent < tensors) usleep(100);
    REQUIRE(in.arrives(1e-4) == false);
    for (u64 step = 1; step <= ring.count + 1; step++)  // one more than there are slots
        out.send(header, copied.data(), [&sent](Outcome outcome) {
            REQUIRE(outcome == Outcome::reached || outcome == Outcome::lost);
            sent++;
        });
    watcher->close();
    while (sent < tensors + ring.count + 1) usleep(100);
    queue->close();
    poster.join();
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && !strcmp(argv[1], "racy")) {
        one_region(true);
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "leaky")) {
        for (int i = 0; i < 10; i++) std::make_shared<Liveness>()->notify(std::make_shared<Notices>(), *new u64(1));
        return 0;
    }
    one_region(false);
    one_door();
    two_engines();
    ends_under_way();
    two_who_close();
    lent_pages();
    a_peer_that_reads_no_more();
    a_socket_that_is_shut_down_midway();
    a_hang_up();
    words_of_life();
    ends_of_other_programs(false);
    ends_of_other_programs(true);
    puts("every value was right");
}
