// tensorwire._native: what Python sees of the native core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <system_error>

#include "count.h"
#include "death_notifier.h"
#include "engine.h"
#include "file_map.h"
#include "memory.h"
#include "monitor.h"
#include "notices.h"
#include "rows.h"
#include "sleepers.h"
#include "tensor.h"
#include "views.h"
#include "window.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tw;

namespace {

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Span& s = *nb::inst_ptr<Memory>(nb::handle(self))->span;
    return PyBuffer_FillInfo(view, self, s.base, static_cast<Py_ssize_t>(s.nbytes), s.writable ? 0 : 1, flags);
}

int get_window(PyObject* self, Py_buffer* view, int flags) {
    const Window& w = *nb::inst_ptr<Window>(nb::handle(self));
    return PyBuffer_FillInfo(view, self, w.base, static_cast<Py_ssize_t>(w.nbytes), 0, flags);
}

PyType_Slot window_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_window)}, {0, nullptr}};
PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

void store(const Memory& m, u64 offset, u64 value) {
    check_writable(m);
    word(m, offset);
    raise(*m.span, offset, value);
}

u64 fetch_add(const Memory& m, u64 offset, u64 value) {
    check_writable(m);
    const u64 old = word(m, offset).fetch_add(value, std::memory_order_acq_rel);
    m.span->announce();
    return old;
}

u64 compare_swap(const Memory& m, u64 offset, u64 expected, u64 value) {
    check_writable(m);
    word(m, offset).compare_exchange_strong(expected, value, std::memory_order_acq_rel);
    m.span->announce();
    return expected;
}

void mark_closed(const Memory& m) {
    if (!m.span->has_futex() || (m.span->own && m.span->own->forked())) return;  // a child shares the page with its parent
    m.span->header->closed.store(1, std::memory_order_release);
    m.span->announce();
}

void put(const Memory& source, u64 source_offset, const Memory& target, u64 target_offset, u64 nbytes) {
    check(source, source_offset, nbytes);
    check(target, target_offset, nbytes);
    check_writable(target);
    move(target.span->base + target_offset, source.span->base + source_offset, nbytes);
}

void put_signal(const Memory& source, u64 source_offset, const Memory& target, u64 target_offset, u64 nbytes,
                const Memory& signal, u64 signal_offset, u64 value) {
    word(signal, signal_offset);  // refused before anything changes
    check_writable(signal);
    put(source, source_offset, target, target_offset, nbytes);
    store(signal, signal_offset, value);
}

// 0: reached, 1: timed out, 2: lost, 4: attend first. Python handles signals in its main thread only: no other asks for the GIL in between.
int wait_outcome(const Target& target, Progress* progress, u64 at_least, double seconds) {
    if (target.reached(at_least)) return 0;
    const double end = now() + seconds;
    const auto main = [] { return gettid() == getpid(); };
    for (;;) {
        Outcome outcome;
        {
            Unlocked unlocked;
            do {
                const double left = std::max(0.0, end - now());
                outcome = progress ? progress->wait(target, at_least, left) : wait_parked(target, at_least, left);
            } while (outcome == Outcome::interrupted && !main());
        }
        if (outcome != Outcome::interrupted) return static_cast<int>(outcome);
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

int wait_word(const Memory& m, u64 offset, u64 at_least, double seconds, const Liveness* peer) {
    word(m, offset);
    if (m.span->closed()) return 2;
    if (m.span->own && m.span->own->forked()) return 2;  // the word may be on a page that the child does not have
    if (!m.span->has_futex()) throw nb::value_error("nobody can wait on read-only memory of a peer");
    const std::shared_ptr<Span> keep = m.span;
    const std::shared_ptr<Progress> progress = keep->progress.lock();
    return wait_outcome(keep->target(offset, peer), progress.get(), at_least, seconds);
}

// The operation's number, or 0: the connection is lost, or `seconds` passed while it was full.
u64 post(Connection& c, const Frame& frame, const std::shared_ptr<Span>& memory, u64 offset, double seconds, bool fence = false) {
    const double end = now() + seconds;
    for (;;) {
        Outcome outcome;
        u64 id = 0;
        {
            Unlocked unlocked;
            outcome = c.post(frame, memory, offset, std::max(0.0, end - now()), fence, id);
        }
        if (outcome != Outcome::interrupted) return id;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

// The short way of a write with prepared views. 0: something is unusual, and nothing was posted.
u64 post_write(Connection& c, const View& source, const RemoteView& target, nb::handle signal, bool fence, double seconds) {
    if (source.nbytes != target.nbytes || source.span->closed() || c.liveness->lost()) return 0;
    Frame f;
    f.op = static_cast<u32>(Op::write);
    f.key = target.key; f.offset = target.offset; f.length = source.nbytes;
    if (!signal.is_none()) {
        nb::handle value;
        const RemoteView* flag = take_signal(signal, value);
        if (!flag || !is_word(*flag) || !take_value(value, f.signal_value)) return 0;
        f.signal_key = flag->key; f.signal_offset = flag->offset;
    }
    const u64 id = post(c, f, source.span, source.offset, seconds, fence);
    if (!id && !c.liveness->lost()) {
        PyErr_SetString(PyExc_TimeoutError, "the channel stayed full");
        throw nb::python_error();
    }
    return id;
}

constexpr int refused_outcome = 3;

struct HeartbeatBytes {
    static int send(Heartbeat& p, nb::bytes data, double seconds) {
        const char* at = data.c_str();
        const size_t n = data.size();
        Unlocked unlocked;
        return p.send(at, n, seconds);
    }
};

Kernel kernel_named(const std::string& name) {
    const auto* found = std::find(std::begin(kernel_names), std::end(kernel_names), name);
    if (found == std::end(kernel_names)) throw nb::value_error("a kernel is memcpy, movsb or streaming");
    return static_cast<Kernel>(found - kernel_names);
}

int descriptor(int fd, const char* what) {
    if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
    return fd;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Tensorwire's native core: shared words, waits, copies and the tcp engine.";
    // A process may end without closing its devices: their threads keep them, and the kernel tells the peers.
    nb::set_leak_warnings(false);
    install_fork_handlers();
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&Unlocked::end_of_interpreter));
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const std::system_error& e) {
            nb::object args = nb::make_tuple(e.code().value(), e.what());
            PyErr_SetObject(PyExc_OSError, args.ptr());
        }
    });

    nb::class_<Notices>(m, "Notices", "Tokens that native code posts, and one thread takes.")
        .def(nb::new_([] { return std::make_shared<Notices>(); }))
        .def("post", &Notices::post, "token"_a)
        .def("take", [](Notices& n) {
                 std::optional<Unlocked> unlocked(std::in_place);
                 const u64 token = n.take();
                 unlocked.reset();
                 return token;
             }, "The next token; waits for it.");

    nb::class_<Liveness>(m, "Liveness", "Alive until lost, once and for good.", nb::is_weak_referenceable())
        .def(nb::new_([](std::shared_ptr<Liveness> parent, std::string peer, bool inbound) {
                 return std::make_shared<Liveness>(std::move(parent), std::move(peer), inbound);
             }), "parent"_a.none() = nb::none(), "peer"_a = "", "inbound"_a = false)
        .def("lose", &Liveness::lose, "reason"_a, nb::call_guard<Unlocked>(), "Marks it lost and wakes every waiter of the process.")
        .def("close", &Liveness::close, "reason"_a, nb::call_guard<Unlocked>(), "The same by our own doing: no loss for the parent, and the end of one.")
        .def("notify", &Liveness::notify, "notices"_a, "token"_a, "Posts the token when it is lost; at once if it is.")
        .def_prop_ro("lost", &Liveness::lost)
        .def_prop_ro("closed", &Liveness::closed, "Whether that end was our own doing.")
        .def_prop_ro("child_lost", &Liveness::child_lost)
        .def_prop_ro("last_loss", &Liveness::last_loss, "Which child was lost, and why.")
        .def_ro("peer", &Liveness::peer)
        .def_prop_ro("forked", &Liveness::forked, "True in a forked child, for what its parent made.")
        .def_prop_ro("reason", &Liveness::reason);

    bind_tensors(m);
    bind_rows(m);
    bind_file_maps(m);

    nb::class_<Memory>(m, "Memory", "A span of memory that transfers may touch.", nb::type_slots(memory_slots), nb::is_weak_referenceable())
        .def(nb::init<const Memory&>(), "other"_a)
        .def_static("allocate", [](u64 nbytes, bool reserve) {
                 Unlocked unlocked;
                 return Memory{Span::allocate(nbytes, reserve)};
             }, "nbytes"_a, "reserve"_a = true, "A new sealed memfd, zeroed; touched if `reserve`.")
        .def_static("map", [](int fd, bool writable) {
                 Unlocked unlocked;
                 return Memory{Span::map(fd, writable)};
             }, "fd"_a, "writable"_a, "A peer's memfd.")
        .def_static("wrap", [](nb::object buffer) { return Memory{borrow(std::move(buffer))}; }, "buffer"_a, "Memory of a contiguous Python buffer, or of a contiguous tensor with DLPack.")
        .def("bind", [](Memory& self, std::shared_ptr<Liveness> own, std::shared_ptr<Engine> engine) {
                 self.span->own = std::move(own);
                 self.span->progress = engine;
             }, "own"_a, "engine"_a.none() = nb::none(), "Whose memory it is, and what must run while somebody waits on it.")
        .def("bind", [](Memory& self, std::shared_ptr<Liveness> own, std::shared_ptr<Sleepers> sleepers) {
                 self.span->own = std::move(own);
                 self.span->progress = sleepers;
             }, "own"_a, "sleepers"_a)
        .def("dont_fork", [](const Memory& s) { s.span->dont_fork(); }, "Children forked from now on do not get these pages: for mapped memory. Touching them there is a SIGSEGV.")
        .def("lies_in", [](Memory& self, const Memory& whole, u64 offset) { self.span->lies_in(whole.span, offset); }, "whole"_a, "offset"_a, "Says of a wrapped part of `whole` that it is one: then a window can show it.")
        .def_prop_ro("nbytes", [](const Memory& s) { return s.span->nbytes; })
        .def_prop_ro("fd", [](const Memory& s) { return s.span->fd; })
        .def_prop_ro("address", [](const Memory& s) { return reinterpret_cast<uintptr_t>(s.span->base); })
        .def_prop_ro("writable", [](const Memory& s) { return s.span->writable; })
        .def_prop_ro("closed", [](const Memory& s) { return s.span->closed(); })
        .def("mark_closed", &mark_closed, "Ends waits on it, here and where it is mapped; peers are refused.")
        .def("load", [](const Memory& s, u64 offset) { return word(s, offset).load(std::memory_order_acquire); }, "offset"_a)
        .def("store", &store, "offset"_a, "value"_a, "Release store of a signal word, and wake its waiters.")
        .def("fetch_add", &fetch_add, "offset"_a, "value"_a)
        .def("compare_swap", &compare_swap, "offset"_a, "expected"_a, "value"_a)
        .def("wait", &wait_word, "offset"_a, "at_least"_a, "seconds"_a, "peer"_a.none() = nb::none(),
             "Without the GIL until the word reached `at_least`: 0 reached, 1 timed out, 2 lost or closed, ATTEND.");

    bind_mapped(m);
    bind_holds(m);

    m.attr("COUNTERS") = nb::cast(std::vector<std::string>(std::begin(counter_names), std::end(counter_names)));
    m.def("count", [](size_t which, u64 amount) { count(static_cast<Counter>(std::min(which, counter_count - 1)), amount); }, "which"_a, "amount"_a,
          "Adds to the counter at that place of COUNTERS.");
    m.def("counted", [] {
        std::vector<u64> now;
        for (size_t which = 0; which < counter_count; which++) now.push_back(count_of(which));
        return now;
    }, "All counters, in the order of COUNTERS.");
    m.def("put", &put, "source"_a, "source_offset"_a, "target"_a, "target_offset"_a, "nbytes"_a, "Copies between mapped memories.");
    m.def("put_signal", &put_signal, "source"_a, "source_offset"_a, "target"_a, "target_offset"_a, "nbytes"_a, "signal"_a, "signal_offset"_a, "value"_a,
          "Copies, then stores the signal with release.");

    nb::class_<Window>(m, "Window", "A view of regions, side by side in one address range: copy-on-write, or shared.", nb::type_slots(window_slots))
        .def(nb::init<u64, bool, bool>(), "nbytes"_a, "shared"_a = false, "read_only"_a = false)
        .def("place", [](Window& w, u64 offset, const Memory& memory, u64 source, u64 length) { w.place(offset, memory.span, source, length); },
             "offset"_a, "memory"_a, "source"_a, "length"_a)
        .def("refresh", &Window::refresh, "offset"_a, "length"_a, nb::call_guard<Unlocked>())
        .def("modified", &Window::modified, "limit"_a, nb::call_guard<Unlocked>(), "Offsets of pages written through the window.")
        .def_ro("nbytes", &Window::nbytes)
        .def_prop_ro("address", [](const Window& w) { return reinterpret_cast<uintptr_t>(w.base); });

    nb::class_<Monitor>(m, "Monitor", "A thread that notices hang-ups of watched sockets.")
        .def(nb::init<>())
        .def("watch", &Monitor::watch, "fd"_a, "liveness"_a)
        .def("forget", &Monitor::forget, "fd"_a)
        .def("close", &Monitor::close, nb::call_guard<Unlocked>());

    nb::class_<DeathNotifier>(m, "DeathNotifier", "A thread whose own death the kernel tells to peers, and that watches theirs.")
        .def(nb::init<double, double>(), "heartbeat"_a, "lost_after"_a)
        .def("enter", &DeathNotifier::enter, "liveness"_a, "socket"_a = -1, "The number of a word that tells one peer of our death; 0 if none is free.")
        .def("watch", &DeathNotifier::watch, "word"_a, "fd"_a, "peer_word"_a, "peer_heartbeat"_a, "That peer's page and word.")
        .def("leave", &DeathNotifier::leave, "word"_a)
        .def("close", &DeathNotifier::close, nb::call_guard<Unlocked>())
        .def_prop_ro("fd", &DeathNotifier::fd);

    nb::class_<Heartbeat>(m, "Heartbeat", "A thread that sends heartbeats on a socket, and the one way to send anything else there.")
        .def("__init__", [](Heartbeat* self, int fd, nb::bytes beat, double interval) { new (self) Heartbeat(fd, std::string(beat.c_str(), beat.size()), interval); },
             "fd"_a, "beat"_a, "interval"_a)
        .def("send", &HeartbeatBytes::send, "data"_a, "seconds"_a, "0, or the errno that ended the connection.")
        .def("close", &Heartbeat::close, nb::call_guard<Unlocked>());

    nb::class_<Engine>(m, "Engine", "The tcp engine of one device.")
        .def(nb::new_([](std::shared_ptr<Liveness> liveness, double heartbeat, double lost_after) {
                 return std::make_shared<Engine>(std::move(liveness), heartbeat, lost_after);
             }), "liveness"_a, "heartbeat"_a, "lost_after"_a)
        .def("expose", [](Engine& e, u64 key, const Memory& memory, bool writable) { e.expose(key, memory.span, writable); }, "key"_a, "memory"_a, "writable"_a)
        .def("withdraw", &Engine::withdraw, "key"_a)
        .def("connect", [](Engine& e, int fd, bool initiator, std::shared_ptr<Liveness> liveness, u64 device, double heartbeat) {
                 return e.connect(fd, initiator, std::move(liveness), {device, heartbeat});
             }, "fd"_a, "initiator"_a, "liveness"_a, "device"_a, "heartbeat"_a, nb::keep_alive<0, 1>(),
             "Takes over a connected, authenticated socket of that peer device, which beats so often; 0: never.")
        .def("expel", &Engine::expel, "device"_a, "reason"_a, nb::call_guard<Unlocked>(), "Closes every connection of that peer device.")
        .def_prop_ro("connections", &Engine::connections)
        .def_prop_ro("sleeps", &Engine::sleeps, "How often a waiter slept.")
        .def_prop_ro("wake_ups", &Engine::wake_ups, "How often the engine's own thread was woken.")
        .def("close", &Engine::close, nb::call_guard<Unlocked>());

    nb::class_<Connection>(m, "Connection", "One connection of the engine.")
        .def("write", [](Connection& c, const Memory& source, u64 source_offset, u64 length, u64 key, u64 offset, u64 signal_key, u64 signal_offset, u64 value, double seconds, bool fence) {
                 check(source, source_offset, length);
                 Frame f;
                 f.op = static_cast<u32>(Op::write);
                 f.key = key; f.offset = offset; f.length = length;
                 f.signal_key = signal_key; f.signal_offset = signal_offset; f.signal_value = value;
                 return post(c, f, source.span, source_offset, seconds, fence);
             }, "source"_a, "source_offset"_a, "length"_a, "key"_a, "offset"_a, "signal_key"_a, "signal_offset"_a, "value"_a, "seconds"_a, "fence"_a = false)
        .def("write_view", &post_write, "source"_a, "target"_a, "signal"_a.none(), "fence"_a, "seconds"_a,
             "The number of the write; 0: not posted, take the long way. TimeoutError: full all the time.")
        .def("signal", [](Connection& c, u64 key, u64 offset, u64 value, double seconds, bool fence) {
                 Frame f;
                 f.op = static_cast<u32>(Op::write);
                 f.offset = no_signal;
                 f.signal_key = key; f.signal_offset = offset; f.signal_value = value;
                 return post(c, f, nullptr, 0, seconds, fence);
             }, "key"_a, "offset"_a, "value"_a, "seconds"_a, "fence"_a = false)
        .def("read", [](Connection& c, const Memory& target, u64 target_offset, u64 length, u64 key, u64 offset, double seconds) {
                 check(target, target_offset, length);
                 check_writable(target);
                 Frame f;
                 f.op = static_cast<u32>(Op::read);
                 f.key = key; f.offset = offset; f.length = length;
                 return post(c, f, target.span, target_offset, seconds);
             }, "target"_a, "target_offset"_a, "length"_a, "key"_a, "offset"_a, "seconds"_a)
        .def("fetch_add", [](Connection& c, u64 key, u64 offset, u64 value, double seconds) {
                 Frame f;
                 f.op = static_cast<u32>(Op::fetch_add);
                 f.key = key; f.offset = offset; f.length = 8; f.signal_value = value;
                 return post(c, f, nullptr, 0, seconds);
             }, "key"_a, "offset"_a, "value"_a, "seconds"_a)
        .def("compare_swap", [](Connection& c, u64 key, u64 offset, u64 expected, u64 value, double seconds) {
                 Frame f;
                 f.op = static_cast<u32>(Op::compare_swap);
                 f.key = key; f.offset = offset; f.length = 8; f.signal_key = expected; f.signal_value = value;
                 return post(c, f, nullptr, 0, seconds);
             }, "key"_a, "offset"_a, "expected"_a, "value"_a, "seconds"_a)
        .def("wait", [](Connection& c, Engine& e, u64 id, double seconds) {
                 const int outcome = wait_outcome(c.completion(), &e, id, seconds);
                 return outcome == 0 && c.refused(id) ? refused_outcome : outcome;
             }, "engine"_a, "id"_a, "seconds"_a, "0 done, 1 timed out, 2 lost, 3 refused: `refusal` says why.")
        .def("notify", &Connection::notify, "id"_a, "notices"_a, "token"_a, "Posts the token when that operation is done, or the connection lost.")
        .def_prop_ro("done", &Connection::done)
        .def_prop_ro("liveness", [](Connection& c) { return c.liveness; })
        .def("refusal", [](Connection& c, u64 id) { return static_cast<u32>(c.refusal(id)); }, "id"_a)
        .def("old_value", &Connection::old_value, "id"_a)
        .def("close", &Connection::close, "reason"_a, "own"_a = false, nb::call_guard<Unlocked>());

    nb::class_<Sleepers>(m, "Sleepers", "Waits for words that a NIC writes: one waiter sleeps on the completion channel, the others at their futexes.")
        .def(nb::new_([](int fd, bool naps) { return std::make_shared<Sleepers>(fd, naps); }), "fd"_a, "naps"_a)
        .def("rest", [](Sleepers& s, double seconds) {
                 Unlocked unlocked;
                 return static_cast<int>(s.rest(seconds));
             }, "seconds"_a, "Until something came that no waiter attends to: ATTEND; 1 timed out, 2 closed, 3 a signal.")
        .def("armed", &Sleepers::armed, "The completion queues have been armed.")
        .def("wake_all", &Sleepers::wake_all, nb::call_guard<Unlocked>(), "Words may have changed: everybody looks.")
        .def("left", &Sleepers::left, nb::call_guard<Unlocked>(), "A waiter that was sent to attend does not come back.")
        .def("close", &Sleepers::close, nb::call_guard<Unlocked>());
    m.attr("ATTEND") = static_cast<int>(Outcome::attend);

    bind_edges(m);

    m.attr("NO_SIGNAL") = no_signal;
    m.attr("PAGE") = page;
    m.def("copy_kernel", [](u64 nbytes) { return kernel_names[static_cast<size_t>(kernel_for(nbytes))]; }, "nbytes"_a, "What copies so many bytes: memcpy, movsb or streaming.");
    m.def("copy_is_large", &is_large, "nbytes"_a, "Whether its pieces had better be copied as parts of so much.");
    m.def("copy_steps", [] {
        std::vector<std::pair<u64, std::string>> found;
        for (const auto& [from, kernel] : steps()) found.emplace_back(from, kernel_names[static_cast<size_t>(kernel)]);
        return found;
    }, "From how many bytes on, which kernel; below, memcpy.");
    m.def("set_copy_steps", [](const std::vector<std::pair<u64, std::string>>& given) {
        Steps steps;
        for (const auto& [from, name] : given) steps.emplace_back(from, kernel_named(name));
        set_steps(std::move(steps));
    }, "steps"_a, "In this order; what this processor lacks is left out.");
    m.def("copied_by", [](const std::string& kernel) { return copied_by(kernel_named(kernel)); }, "kernel"_a, "How many copies of this process that kernel has made; memcpy is not counted.");
    m.def("time_copies", &time_copies, "seconds"_a, nb::call_guard<Unlocked>(), "For some numbers of bytes the seconds by kernel; nothing if so little time was not enough.");
    m.def("available_bytes", &available_bytes, nb::call_guard<Unlocked>(), "What the machine and the control groups around this process leave.");
    m.def("close_on_fork", &close_on_fork, "fd"_a);
    m.def("forget_fd", &forget_fd, "fd"_a);
    m.def("open_socket", [](int family, int type) { return descriptor(open_socket(family, type), "socket"); }, "family"_a, "type"_a,
          "A new socket that no forked child keeps, whenever it is forked.");
    m.def("close_socket", &close_socket, "fd"_a, "Closes what open_socket or accept_socket gave.");
    m.def("accept_socket", [](int listener) {
        Unlocked unlocked;
        return descriptor(accept_socket(listener), "accept");
    }, "listener"_a, "The next connection, likewise. The listener does not block.");
}
